"""`LocalCritic`: PPO's critic on one device: values, gradients of a loss on them, and optimizer steps.

Invariants: the value of token t depends on the tokens before it in its own sequence only, so it is known before the token is sampled; layout
and memory are `CausalLM`'s affair, as the policy's are; values and their loss are computed in float32, or float64 for a float64 model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from ostinato_engines.device import HOST, pick_device
from ostinato_trainer.backends.adamw import AdamW
from ostinato_trainer.backends.base import LossOutput, OptimizerStats
from ostinato_trainer.backends.causal_lm import CausalLM
from ostinato_trainer.backends.compiling import resolve_compile
from ostinato_trainer.backends.local import LocalBackendOptions, state_size
from ostinato_trainer.backends.memory import MemoryOwner, check_state_fits, held_memory, out_of_memory_named
from ostinato_trainer.backends.model_passes import accumulate_gradients, check_ids
from ostinato_trainer.backends.packing import Layout
from ostinato_trainer.backends.ranks.state import read_whole
from ostinato_trainer.backends.state import BackendState, ModelState, check_matches
from ostinato_trainer.backends.value_model import ValueModel, load_value_model
from ostinato_trainer.batch import Batch

ValueLossFn = Callable[[Tensor, Batch], LossOutput]
"""From values (float [T], 0 without a gradient outside the loss mask) and a micro-batch to its loss and metrics."""


_BATCH_CURES: Final = (
    "lower critic.ppo_micro_batch_size_per_gpu or critic.ppo_max_token_len_per_gpu, or data.max_response_length"
)
_PASS_CURES: Final = "lower critic.ppo_max_token_len_per_gpu, or data.max_response_length"
_STATE_CURES: Final = "start the critic from a smaller model (critic.model.path), or take an estimator without one (algorithm.adv_estimator=grpo)"


class LocalCritic:
    """AdamW on a `ValueModel`.

    Args:
        model: Moved to the device and trained in place.
        options: As a policy's; `keep_reference` is not read.

    Raises:
        BackendError: an option is out of range, or layers are to be compiled where they cannot be.
        OutOfMemoryError: the device is too small for the model's state.
    """

    def __init__(self, model: ValueModel, options: LocalBackendOptions) -> None:
        options.check()
        self.options = options
        self._device = torch.device(pick_device(options.device))
        size = state_size(model, options)
        check_state_fits(size, self._device, cures=_STATE_CURES, engine=options.engine)
        with out_of_memory_named("the critic's weights", _STATE_CURES):
            self._model = model.to(self._device, options.parameter_dtype)
        self._lm = CausalLM(
            self._model,
            autocast=options.autocast,
            remove_padding=options.use_remove_padding,
            compiled=resolve_compile(options.use_torch_compile, self._device),
        )
        self.optimizer = AdamW(dict(self._model.named_parameters()), options)
        self.memory = MemoryOwner(
            self._device,
            lambda: held_memory(self._device, self._model.parameters(), optimizer=self.optimizer.moments().values()),
        )
        """Whose memory messages speak of; the policy's share counts as all else."""
        self.num_updates = 0
        """Optimizer steps that changed the weights."""

    @classmethod
    def from_pretrained(cls, path: str | Path, options: LocalBackendOptions) -> LocalCritic:
        """A critic from a model folder; see `load_value_model`."""
        options.check()
        return cls(load_value_model(path, dtype=options.parameter_dtype, device=torch.device(HOST)), options)

    @property
    def model(self) -> ValueModel:
        """The model under training."""
        return self._model

    @property
    def pads_sequences(self) -> bool:
        """Whether a micro-batch costs its sequences times its longest; else it costs its tokens alone."""
        return self._lm.layout is Layout.PADDED

    @torch.no_grad()
    def values(self, batch: Batch) -> Tensor:
        """float32 [T] on the CPU: entry t is the value before token t, 0 outside the loss mask. No gradient.

        Raises:
            OutOfMemoryError: memory ran out.
            BatchError: a token id lies outside the vocabulary.
        """
        check_ids(batch, self._lm.vocab_size)
        result = torch.zeros(batch.num_tokens, dtype=self._dtype)
        for chosen in batch.token_chunks(self.options.max_tokens_per_forward, padded=self.pads_sequences):
            part = batch.select(chosen)
            with out_of_memory_named("values", _PASS_CURES, owner=self.memory, batches=[part]):
                result[batch.token_positions(chosen)] = self._values(part.to(self._device), part.loss_mask).to(result)
        return result

    def forward_backward(self, micro_batches: Sequence[Batch], loss_fn: ValueLossFn) -> dict[str, float]:
        """Accumulates the gradients of the summed losses and returns the merged metrics. After an error no gradient is left behind.

        Raises:
            OutOfMemoryError: memory ran out.
            BackendError: the loss has no gradient.
            BatchError: a token id lies outside the vocabulary.
        """

        def loss_of(micro_batch: Batch) -> LossOutput:
            check_ids(micro_batch, self._lm.vocab_size)
            on_device = micro_batch.to(self._device, self._dtype)
            return loss_fn(self._values(on_device, micro_batch.loss_mask), on_device)

        return accumulate_gradients(micro_batches, loss_of, self.optimizer, cures=_BATCH_CURES, owner=self.memory)

    def optimizer_step(self) -> OptimizerStats:
        """Clips, steps, advances the schedule and clears the gradients; skips where the gradient norm is not finite."""
        with out_of_memory_named("an optimizer step of the critic", _STATE_CURES, owner=self.memory):
            stats = self.optimizer.step()
        if not stats.skipped:
            self.num_updates += 1
        return stats

    def save(self, directory: str | Path) -> None:
        """Writes weights, moments and schedule, so that `load` continues exactly here.

        Raises:
            OSError: the directory cannot be written.
        """
        self._state().save(directory)

    def snapshot(self) -> ModelState:
        """The state of now in memory of the host, three times the weights, to be written while training goes on."""
        return self._state().copied()

    def load(self, directory: str | Path) -> None:
        """Reads what `save` wrote.

        Raises:
            CheckpointError: a file is missing, damaged, or of another model; nothing has changed then.
        """
        weights, moments, state = read_whole(Path(directory))
        tensors = self._lm.named_tensors()
        check_matches(directory, weights, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        self.optimizer.load(moments, num_steps=state.num_steps, num_skipped=state.num_skipped, source=directory)
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(weights[name])
        self.num_updates = state.policy_version

    def _state(self) -> ModelState:
        optimizer = self.optimizer
        counters = BackendState(
            num_steps=optimizer.num_steps, num_skipped=optimizer.num_skipped, policy_version=self.num_updates
        )
        return ModelState(self._lm.named_tensors(), optimizer.moments(), counters)

    @property
    def _dtype(self) -> torch.dtype:
        """What values are computed in."""
        return torch.promote_types(self._lm.dtype, torch.float32)

    def _values(self, batch: Batch, loss_mask: Tensor) -> Tensor:
        """float [T], of a batch on the device; 0 outside the loss mask, which the host has."""
        return self._lm.values(batch, loss_mask, self._of_states)

    def _of_states(self, states: Tensor) -> Tensor:
        head = self._model.score
        return functional.linear(states.to(self._dtype), head.weight, head.bias).squeeze(-1)
