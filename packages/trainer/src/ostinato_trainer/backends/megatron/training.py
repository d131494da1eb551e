"""`MegatronTraining`: one rank's part of a model under training with Megatron-core, whatever stands on its last layer.

Invariants: ranks of one share of the data get the same micro-batches and do the same; gradients of a step are summed over data ranks once, in `step`;
and weights, moments and names are those of the Hugging Face model, whatever the layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn

from ostinato_engines.device import HOST
from ostinato_trainer.backends.base import LossOutput, OptimizerStats
from ostinato_trainer.backends.local import MemoryCures
from ostinato_trainer.backends.megatron import core, files
from ostinato_trainer.backends.megatron.mapping import Block
from ostinato_trainer.backends.megatron.optimizer import MASTER, STATE_KEYS, ShardedOptimizer
from ostinato_trainer.backends.megatron.options import MegatronOptions
from ostinato_trainer.backends.megatron.pretrained import PretrainedTensors
from ostinato_trainer.backends.megatron.shape import DecoderShape
from ostinato_trainer.backends.megatron.tensors import ModelTensors
from ostinato_trainer.backends.memory import (
    HeldMemory,
    MemoryOwner,
    StateSize,
    check_state_fits,
    held_memory,
    out_of_memory_named,
)
from ostinato_trainer.backends.model_passes import check_ids, merge_metrics
from ostinato_trainer.backends.ranks.agreement import raise_alike
from ostinato_trainer.backends.state import BackendState, check_frozen
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import BackendError, BatchError, CheckpointError, OutOfMemoryError

CURES: Final = MemoryCures(
    batches="lower ppo_micro_batch_size_per_gpu or ppo_max_token_len_per_gpu, or data.max_response_length, write "
    "model.enable_gradient_checkpointing=true, or split the model over more ranks",
    passes="lower ppo_max_token_len_per_gpu, or data.max_response_length",
    state="split the model over more ranks (actor.megatron.tensor_model_parallel_size, pipeline_model_parallel_size) or give it more devices "
    "(trainer.nnodes, trainer.n_gpus_per_node)",
)


@dataclass(frozen=True)
class ModelSource:
    """A model as its folder has it."""

    pretrained: PretrainedTensors
    shape: DecoderShape
    frequencies: Tensor
    """float [head_dim / 2], of the rotary positions."""


class MegatronTraining:
    """A part of a model, its optimizer and its checkpoints.

    Args:
        source: The model.
        options: See `MegatronOptions`.
        groups: Where this rank stands.
        device: Of this rank.
        cures: What to change where memory does not suffice.

    Raises:
        BackendError: the weights cannot be read.
        OutOfMemoryError: the device is too small for the model's state; on all ranks alike.
    """

    def __init__(
        self,
        source: ModelSource,
        options: MegatronOptions,
        groups: core.RankGroups,
        device: torch.device,
        *,
        cures: MemoryCures = CURES,
    ) -> None:
        self.options, self._groups, self._device, self._cures = options, groups, device, cures
        self.shape = source.shape
        """Of the whole model."""
        self.tensors = ModelTensors(source.shape, options.layout, groups, device)
        """Of the model."""
        self._check_memory()
        self.reference: nn.Module | None = None
        """The model as it is at construction, where it is kept."""
        with out_of_memory_named("the model's weights", cures.state):
            self.model = self._loaded(source)
            """This rank's part."""
            if options.keep_reference:
                self.reference = self._loaded(source).requires_grad_(False)
            names = {part.parameter: part.names[0] for block in self.tensors.own_blocks for part in block.parts}
            self.optimizer = ShardedOptimizer(self.model, options, groups, names)
        if options.parameter_dtype is not torch.float32:
            self._set_exact_weights(source.pretrained)
        self.memory = MemoryOwner(device, self._held_memory)
        """Whose memory messages speak of."""

    def accumulate(
        self, micro_batches: Sequence[Batch], loss_of: Callable[[Tensor, Batch], LossOutput]
    ) -> dict[str, float]:
        """Adds up the gradients of the losses of micro-batches and returns their merged metrics, on the last stage. A micro-batch without a trained
        token costs nothing: nothing waits for it, because data ranks meet in `step` only. After an error no gradient is left behind.

        Args:
            micro_batches: On the host.
            loss_of: From what the last stage hands out (float [T, 1, hidden]) and the micro-batch on the device, its columns in float32.

        Raises:
            OutOfMemoryError: memory ran out.
            BackendError: the loss has no gradient.
            BatchError: a token id lies outside the vocabulary, or positions are given.
        """
        trained = [each for each in micro_batches if each.num_loss_tokens]
        if not trained:
            return {}

        def step(stage: nn.Module, micro_batch: Batch) -> tuple[Tensor, Callable[[Tensor], Any]]:
            on_device = micro_batch.to(self._device, torch.float32)

            def loss_and_metrics(states: Tensor) -> tuple[Tensor, Tensor, Any]:
                loss, metrics = loss_of(states, on_device)
                if not loss.requires_grad:
                    raise BackendError(
                        "loss must depend on the log-probabilities or values, got a constant; do not detach them in the loss"
                    )
                kept = {name: value.detach() if isinstance(value, Tensor) else value for name, value in metrics.items()}
                return loss, torch.ones((), dtype=torch.int, device=self._device), kept

            return core.states_of(stage, on_device), loss_and_metrics

        totals: dict[str, Any] = {}
        try:
            for each in trained:
                self._check(each)
            with out_of_memory_named("an update", self._cures.batches, owner=self.memory, batches=trained):
                for metrics in core.run_schedule(self.optimizer.model, trained, step, forward_only=False):
                    merge_metrics(totals, metrics)
        except BaseException:
            self.optimizer.clear_gradients()
            raise
        self.optimizer.mark_gradient()
        return {name: float(value) for name, value in totals.items()}

    def answers(
        self, what: str, model: nn.Module, micro_batches: Sequence[Batch], answer_of: Callable[[Tensor, Batch], Tensor]
    ) -> list[Tensor]:
        """What a model says of micro-batches, on the host; on the last stage, elsewhere nothing. No gradient.

        Args:
            what: Is asked for, for messages.
            model: `model` or `reference`.
            micro_batches: On the host.
            answer_of: As `loss_of` of `accumulate`, columns being as they are.

        Raises:
            OutOfMemoryError: memory ran out.
            BatchError: a token id lies outside the vocabulary, or positions are given.
        """
        if not micro_batches:
            return []
        for each in micro_batches:
            self._check(each)

        def step(stage: nn.Module, micro_batch: Batch) -> tuple[Tensor, Callable[..., Tensor]]:
            on_device = micro_batch.to(self._device)

            def answer(states: Tensor, non_loss_data: bool = True) -> Tensor:
                return answer_of(states, on_device).to(HOST)

            return core.states_of(stage, on_device), answer

        with torch.no_grad(), out_of_memory_named(what, self._cures.passes, owner=self.memory, batches=micro_batches):
            return core.run_schedule(model, micro_batches, step, forward_only=True)

    def step(self) -> OptimizerStats:
        """See `ShardedOptimizer.step`."""
        with out_of_memory_named("an optimizer step", self._cures.state, owner=self.memory):
            return self.optimizer.step()

    def save(self, directory: Path, *, version: int, frozen: str | None = None) -> None:
        """See `RankBackend.save` and `ostinato_trainer.backends.megatron.files`; each stage writes its own layers.

        Args:
            directory: Exists.
            version: Optimizer steps that changed the weights.
            frozen: Fingerprint of what the run needs and never changes.

        Raises:
            OSError: the directory cannot be written; on all ranks alike.
        """
        keys = STATE_KEYS if self.optimizer.num_updates else STATE_KEYS[:1]
        error: Exception | None = None
        for block in self.tensors.own_blocks:
            state = {key: self._on_host(block, key) for key in keys}
            if self.tensors.speaks_for_stage and error is None:
                try:
                    files.write_block(directory, block, state)
                except (OSError, SafetensorError) as failure:
                    error = OSError(f"{block.name} could not be written to {directory}: {failure}")
        raise_alike(error)
        if dist.get_rank() == 0:
            optimizer = self.optimizer
            counters = BackendState(
                num_steps=optimizer.num_steps, num_skipped=optimizer.num_skipped, policy_version=version, frozen=frozen
            )
            try:
                files.write_counters(directory, counters)
            except OSError as failure:
                error = failure
        raise_alike(error)

    def load(self, directory: Path, *, frozen: str | None = None) -> int:
        """See `RankBackend.load`; returns the version that was saved. Any layout reads what any other wrote; the reference stays the model that the
        rank was made with, which must be the one of that run.

        Args:
            directory: Of `save`.
            frozen: As there, of this run.

        Raises:
            CheckpointError: a file is missing, damaged, or of another model; nothing has changed then, on any rank.
        """
        error: Exception | None = None
        try:
            counters = files.read_counters(directory)
            check_frozen(directory, counters.frozen, frozen)
            for block in self.tensors.blocks:
                files.check_block(directory, block, has_moments=_num_updates(counters) > 0)
        except (CheckpointError, OSError) as failure:
            error = failure
        raise_alike(error)
        counters = files.read_counters(directory)
        num_updates = _num_updates(counters)
        for block in self.tensors.own_blocks:
            for part in block.parts:
                source = self.tensors.blocks[0] if part.alias else block  # an alias is a copy of the embedding
                whole = files.read_block(directory, source, part.names, has_moments=num_updates > 0)
                state = {key: self.tensors.own_share(part, tensors) for key, tensors in whole.items()}
                self.optimizer.set_state(part.parameter, state, num_updates)
        self.optimizer.set_counters(num_steps=counters.num_steps, num_skipped=counters.num_skipped)
        return counters.policy_version

    def _check_memory(self) -> None:
        """Refuses, on all ranks alike, a share of the model that no device of this size holds."""
        options, groups = self.options, self._groups
        size = sum(math.prod(shape) for block in self.tensors.own_blocks for _, shape in block.tensors)
        size //= options.layout.tensor_model_parallel_size
        num_sharded = 2 if options.parameter_dtype == torch.float32 else 3  # moments; and float32 weights beside others
        state = StateSize(
            parameters=size * options.parameter_dtype.itemsize * (2 if options.keep_reference else 1),
            gradients=4 * size,
            moments=4 * size * num_sharded // groups.data_size,
        )
        error: Exception | None = None
        try:
            check_state_fits(state, self._device, cures=self._cures.state, engine=options.engine)
        except OutOfMemoryError as failure:
            error = failure
        raise_alike(error)

    def _held_memory(self) -> HeldMemory:
        return held_memory(
            self._device,
            self.model.parameters(),
            optimizer=self.optimizer.state_tensors(),
            reference=() if self.reference is None else self.reference.parameters(),
        )

    def _on_host(self, block: Block, key: str) -> list[tuple[str, Tensor]]:
        """The whole tensors of one of `STATE_KEYS` of a block, on the rank that speaks for the stage; nothing elsewhere."""
        shares = {part: self.optimizer.state_of(part.parameter, key) for part in block.parts if not part.alias}
        if self._groups.data_rank != 0:
            return []
        return [(name, tensor.to(HOST)) for name, tensor in self.tensors.gathered(block, shares.__getitem__)]

    def _loaded(self, source: ModelSource) -> Any:
        """This rank's part of the model with its weights."""
        model = core.build_model(
            self.shape,
            self.options.layout,
            self._groups,
            dtype=self.options.parameter_dtype,
            device=self._device,
            frequencies=source.frequencies,
            recompute=self.options.enable_gradient_checkpointing,
        )
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for block in self.tensors.own_blocks:
                whole = source.pretrained.of_block(block)
                for part in block.parts:
                    parameters.pop(part.parameter).copy_(self.tensors.own_share(part, whole))
        assert not parameters, f"unmapped parameters: {sorted(parameters)}"
        return model

    def _set_exact_weights(self, pretrained: PretrainedTensors) -> None:
        """Gives the optimizer the weights as the folder has them. Rounded to 16 bits they would all lie on that type's grid, where steps shorter
        than half its spacing change nothing that is computed."""
        for block in self.tensors.own_blocks:
            whole = pretrained.of_block(block)
            for part in block.parts:
                self.optimizer.set_state(part.parameter, {MASTER: self.tensors.own_share(part, whole)}, 0)

    def _check(self, batch: Batch) -> None:
        """Raises BatchError where a batch is none for this model."""
        check_ids(batch, self.shape.vocab_size)
        if batch.position_ids is not None:
            raise BatchError(
                "position_ids must be absent to be trained on with Megatron, where positions count from 0 in every sequence, got some; "
                "use actor_rollout_ref.actor.strategy=fsdp2 or local"
            )


def _num_updates(counters: BackendState) -> int:
    return counters.num_steps - counters.num_skipped
