"""`ShardedOptimizer`: `AdamW`'s contract over Megatron's distributed optimizer.

Invariants: all ranks do the same, skips included; a step whose gradient norm is not finite changes nothing; the schedule counts every step that was
asked for; and the state can be read and set tensor by tensor, whichever data rank holds which share of it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ostinato_trainer.backends.adamw import AdamWOptions, check_precision
from ostinato_trainer.backends.base import OptimizerStats
from ostinato_trainer.backends.megatron import core
from ostinato_trainer.backends.schedules import check_schedule, lr_factor

_logger = logging.getLogger(__name__)

MASTER = "weights"
"""Names the float32 weights among the tensors of the state."""
STATE_KEYS = (MASTER, "exp_avg", "exp_avg_sq")
_MOMENTS = STATE_KEYS[1:]


class ShardedOptimizer:
    """AdamW, its float32 weights and moments split over the data ranks.

    Args:
        model: This rank's part, its weights set.
        options: See `AdamWOptions`.
        groups: Of this rank.
        names: What messages call the parameters, by Megatron's names.
    """

    def __init__(self, model: Any, options: AdamWOptions, groups: core.RankGroups, names: Mapping[str, str]) -> None:
        options.check()
        self.options, self._groups, self._names = options, groups, names
        self._schedule = check_schedule(
            options.lr_scheduler_type, warmup_steps=options.lr_warmup_steps, total_steps=options.total_steps
        )
        self.model = core.wrap_model(model)
        """The model that gradients are taken of; they add up in it."""
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        """This rank's parameters, by Megatron's names."""
        check_precision(self.parameters, options.lr, dtype=torch.float32)
        self._optimizer = core.make_optimizer(self.model, options)
        self.num_steps = 0
        """Steps asked for, skipped ones included; the schedule counts these."""
        self.num_skipped = 0
        self._has_gradient = False

    def mark_gradient(self) -> None:
        """A loss has been differentiated since the last step."""
        self._has_gradient = True

    def clear_gradients(self) -> None:
        """Leaves no gradient behind."""
        self.model.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._has_gradient = False

    @torch.no_grad()
    def step(self) -> OptimizerStats:
        """Sums gradients over data ranks, clips, steps, moves the schedule on and clears; skips where no rank has a gradient or its norm is not
        finite."""
        options = self.options
        factor = lr_factor(
            self._schedule, self.num_steps, warmup_steps=options.lr_warmup_steps, total_steps=options.total_steps
        )
        lr = options.lr * factor
        self.num_steps += 1
        if not self._any_rank_has_gradient():
            return self._skip(0.0, lr, "no token was trained on")
        core.reduce_gradients(self.model)
        self._optimizer.prepare_grads()
        grad_norm = float(self._optimizer.get_grad_norm())
        if not math.isfinite(grad_norm):
            bad = self._first_not_finite()
            where = "the sum over all parameters overflows" if bad is None else f"first in {bad}"
            return self._skip(grad_norm, lr, f"gradient norm is {grad_norm}, {where}")
        if grad_norm > options.grad_clip:
            scale = options.grad_clip / (grad_norm + 1e-6)
            for parameter in self._optimizer.get_parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step_with_ready_grads()
        self.clear_gradients()
        return OptimizerStats(grad_norm=grad_norm, lr=lr)

    @property
    def num_updates(self) -> int:
        """Steps that changed the weights."""
        return self.num_steps - self.num_skipped

    @torch.no_grad()
    def state_of(self, parameter: str, key: str) -> Tensor:
        """One of `STATE_KEYS` of a parameter, float32 of its shape; zeros for moments before the first update. All data ranks call it."""
        value = self.parameters[parameter]
        whole = torch.zeros(value.numel(), dtype=torch.float32, device=value.device)
        held = self._held(value)
        if held is not None:
            main, start, end = held
            source = main if key == MASTER else self._optimizer.optimizer.state.get(main, {}).get(key)
            if source is not None:
                whole[start:end] = source
        if self._groups.data_size > 1:
            dist.all_reduce(whole, group=self._groups.data_group)
        return whole.view_as(value)

    @torch.no_grad()
    def set_state(self, parameter: str, state: Mapping[str, Tensor], num_updates: int) -> None:
        """Sets a parameter, and the share of its state that this rank holds.

        Args:
            parameter: Its name.
            state: Tensors of its shape by `STATE_KEYS`; moments are not read where there was no update yet.
            num_updates: Steps that made the moments.
        """
        value = self.parameters[parameter]
        value.copy_(state[MASTER])
        held = self._held(value)
        if held is None:
            return
        main, start, end = held
        main.copy_(state[MASTER].flatten()[start:end])
        if not num_updates:
            self._optimizer.optimizer.state.pop(main, None)
            return
        moments = {key: state[key].flatten()[start:end].to(main, copy=True) for key in _MOMENTS}
        self._optimizer.optimizer.state[main] = {"step": torch.tensor(float(num_updates)), **moments}

    def state_tensors(self) -> Iterator[Tensor]:
        """What this rank holds of the float32 weights and the moments."""
        for group in self._optimizer.param_groups:
            yield from group["params"]
        for state in self._optimizer.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def set_counters(self, *, num_steps: int, num_skipped: int) -> None:
        """Continues the schedule; gradients are cleared."""
        self.num_steps, self.num_skipped = num_steps, num_skipped
        self.clear_gradients()

    def _held(self, value: nn.Parameter) -> tuple[Tensor, int, int] | None:
        """This rank's float32 share of a parameter, flat, and the range of elements that it is; None where it holds none of it."""
        place = self._optimizer.model_param_group_index_map.get(value)
        if place is None:
            return None
        group, order = place
        held = self._optimizer._get_model_param_range_map(value)["param"]
        return self._optimizer.optimizer.param_groups[group]["params"][order], held.start, held.end

    def _any_rank_has_gradient(self) -> bool:
        flag = torch.tensor([float(self._has_gradient)], device=next(iter(self.parameters.values())).device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def _first_not_finite(self) -> str | None:
        """The first parameter, by rank and then in the model's order, whose gradient is not finite."""
        found: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, next(self._not_finite(), None))
        return next((name for name in found if name is not None), None)

    def _not_finite(self) -> Iterator[str]:
        for name, value in self.parameters.items():
            held = self._held(value)
            if held is not None and held[0].grad is not None and not bool(torch.isfinite(held[0].grad).all()):
                yield self._names[name]

    def _skip(self, grad_norm: float, lr: float, reason: str) -> OptimizerStats:
        self.clear_gradients()
        self.num_skipped += 1
        _logger.warning("Optimizer step %d was skipped: %s; the weights are unchanged", self.num_steps, reason)
        return OptimizerStats(grad_norm=grad_norm, lr=lr, skipped=True, reason=reason)
