"""`AdamW`: the optimizer that the policy and the critic share: clipping, schedule, and steps that are skipped.

Invariants: a step whose gradient norm is not finite changes neither weights nor moments; the schedule counts every step that was asked for, so
step k always has rate k; and the state is kept by the parameters' names, so it fits the model wherever it is loaded.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from ostinato_trainer.backends.base import OptimizerStats
from ostinato_trainer.backends.schedules import check_schedule, lr_factor
from ostinato_trainer.backends.state import check_shapes
from ostinato_trainer.errors import BackendError

_logger = logging.getLogger(__name__)

_SAMPLE = 2**14
"""Weights of each parameter that are looked at."""
_NOTABLE_SHARE = 0.05
_MOMENT_KEYS = ("step", "exp_avg", "exp_avg_sq")


class AdamWOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """AdamW and its schedule; names follow `actor_rollout_ref.actor` and its `optim`."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    lr_scheduler_type: str = "constant"
    lr_warmup_steps: int = 0
    total_steps: int | None = None
    """Optimizer steps of the whole run; linear and cosine need it."""
    grad_clip: float = 1.0
    """Largest L2 norm of the gradient; infinity never clips."""

    def check(self) -> None:
        """Raises BackendError where a value is out of range."""
        if not 0 <= self.lr < math.inf:
            raise BackendError(f"lr must be finite and at least 0, got {self.lr}; 1e-6 is usual")
        if not self.grad_clip > 0:
            raise BackendError(f"grad_clip must be above 0, got {self.grad_clip}; infinity never clips")
        check_schedule(self.lr_scheduler_type, warmup_steps=self.lr_warmup_steps, total_steps=self.total_steps)


def check_precision(parameters: Mapping[str, Tensor], lr: float, *, dtype: torch.dtype | None = None) -> None:
    """Refuse parameters that keep no small steps, and say where the rate is too low for the others.

    A step of AdamW moves a weight by about the learning rate; less than half the distance to the next number of its type moves nothing.

    Args:
        parameters: What steps are taken of.
        lr: The highest learning rate.
        dtype: The type that steps are taken in, where it is not that of the parameters.

    Raises:
        BackendError: A parameter has fewer than 32 bits.
    """
    small = next((name for name, value in parameters.items() if (dtype or value.dtype).itemsize < 4), None)
    if small is not None:
        raise BackendError(
            f"trained weights must be float32 or float64, got {dtype or parameters[small].dtype} in {small}, which would swallow most steps; "
            "keep them in float32 and compute in actor_rollout_ref.actor.dtype=bfloat16"
        )
    share = _share_out_of_reach(parameters, lr, dtype)
    if lr > 0 and share > _NOTABLE_SHARE:
        _logger.warning(
            "A learning rate of %g is lost in about %.0f%% of the trained weights, whose next number is more than twice as far away: they will "
            "hardly move; raise optim.lr",
            lr,
            100 * share,
        )


def _share_out_of_reach(parameters: Mapping[str, Tensor], lr: float, dtype: torch.dtype | None) -> float:
    """The share of weights, from the first of each parameter, in which a step of `lr` is certainly rounded away."""
    lost = total = 0.0
    for value in parameters.values():
        to_local: Any = getattr(value, "to_local", None)  # of a DTensor
        local = (value if to_local is None else to_local()).detach()
        if not local.numel():
            continue
        bound = 4 * lr / torch.finfo(dtype or value.dtype).eps
        sample = local.flatten()[:_SAMPLE]
        lost += float((sample.abs() > bound).double().mean()) * local.numel()
        total += local.numel()
    return lost / total if total else 0.0


def _whole(value: Tensor) -> Tensor:
    """Over the shards of all ranks, where it is a DTensor."""
    full_tensor: Any = getattr(value, "full_tensor", None)
    return value if full_tensor is None else full_tensor()


def _is_finite(gradient: Tensor) -> bool:
    """On all ranks alike."""
    return not bool(_whole((~torch.isfinite(gradient)).sum(dtype=torch.float32)))


class AdamW:
    """Torch's fused AdamW over named parameters."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], options: AdamWOptions) -> None:
        """
        Args:
            parameters: What is trained, by the names under which its moments are saved; on their device.
            options: See `AdamWOptions`.

        Raises:
            BackendError: an option is out of range, there is nothing to train, or a parameter's type would swallow the steps.
        """
        options.check()
        if not parameters:
            raise BackendError("the model must have a parameter to train, got none; set requires_grad on some")
        check_precision(parameters, options.lr)
        self.options = options
        self.parameters = dict(parameters)
        self.num_steps = 0
        """Steps asked for, skipped ones included; the schedule counts these."""
        self.num_skipped = 0
        self._schedule = check_schedule(
            options.lr_scheduler_type, warmup_steps=options.lr_warmup_steps, total_steps=options.total_steps
        )
        self._optimizer = torch.optim.AdamW(
            list(self.parameters.values()),
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
            fused=True,
        )

    def step(self) -> OptimizerStats:
        """Clips, steps, moves the schedule on and clears the gradients; skips where there is no gradient or its norm is not finite."""
        lr = self.options.lr * self._factor()
        self.num_steps += 1
        gradients = {name: value.grad for name, value in self.parameters.items() if value.grad is not None}
        if not gradients:
            return self._skip(0.0, lr, "no token was trained on")
        norm = _whole(torch.nn.utils.get_total_norm(gradients.values()))
        grad_norm = float(norm)
        if not math.isfinite(grad_norm):
            bad = next((name for name, gradient in gradients.items() if not _is_finite(gradient)), None)
            where = "the sum over all parameters overflows" if bad is None else f"first in {bad}"
            return self._skip(grad_norm, lr, f"gradient norm is {grad_norm}, {where}")
        if grad_norm > self.options.grad_clip:
            torch.nn.utils.clip_grads_with_norm_(list(self.parameters.values()), self.options.grad_clip, norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.clear_gradients()
        return OptimizerStats(grad_norm=grad_norm, lr=lr)

    def clear_gradients(self) -> None:
        """Leaves no gradient behind."""
        self._optimizer.zero_grad(set_to_none=True)

    def moments(self) -> dict[str, Tensor]:
        """The state as `<parameter>.<step | exp_avg | exp_avg_sq>`; nothing before the first step."""
        return {
            f"{name}.{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }

    def check_moments(self, moments: Mapping[str, Tensor], *, source: str | Path) -> None:
        """Raises CheckpointError where `moments`, read from `source`, are not those of these parameters."""
        self.check_moment_shapes({name: tuple(moment.shape) for name, moment in moments.items()}, source=source)

    def check_moment_shapes(self, found: Mapping[str, tuple[int, ...]], *, source: str | Path) -> None:
        """As `check_moments`, by the shapes alone."""
        expected: dict[str, tuple[int, ...]] = {}
        for name in self._stepped(found):
            shape = tuple(self.parameters[name].shape)
            expected |= {f"{name}.step": (), f"{name}.exp_avg": shape, f"{name}.exp_avg_sq": shape}
        check_shapes(source, found, expected)

    def move_moments(self, device: torch.device) -> None:
        """Brings the moments to a device; the next step must find them on that of the parameters."""
        for state in self._optimizer.state.values():
            for key in _MOMENT_KEYS[1:]:
                state[key] = state[key].to(device)

    def _stepped(self, moments: Collection[str]) -> list[str]:
        """Parameters that have moments: one that no loss has depended on yet has none."""
        return [name for name in self.parameters if any(f"{name}.{key}" in moments for key in _MOMENT_KEYS)]

    def load(
        self, moments: Mapping[str, Tensor], *, num_steps: int, num_skipped: int, source: str | Path = "memory"
    ) -> None:
        """Continues from what `moments()` and the counters were; gradients are cleared.

        Raises:
            CheckpointError: the moments are of other parameters; nothing has changed then.
        """
        self.check_moments(moments, source=source)
        state = self._optimizer.state_dict()
        positions = {name: position for position, name in enumerate(self.parameters)}
        state["state"] = {
            positions[name]: {key: moments[f"{name}.{key}"] for key in _MOMENT_KEYS} for name in self._stepped(moments)
        }
        self._optimizer.load_state_dict(state)
        self.clear_gradients()
        self.num_steps, self.num_skipped = num_steps, num_skipped

    def _factor(self) -> float:
        options = self.options
        return lr_factor(
            self._schedule, self.num_steps, warmup_steps=options.lr_warmup_steps, total_steps=options.total_steps
        )

    def _skip(self, grad_norm: float, lr: float, reason: str) -> OptimizerStats:
        self.clear_gradients()
        self.num_skipped += 1
        _logger.warning("Optimizer step %d was skipped: %s; the weights are unchanged", self.num_steps, reason)
        return OptimizerStats(grad_norm=grad_norm, lr=lr, skipped=True, reason=reason)
