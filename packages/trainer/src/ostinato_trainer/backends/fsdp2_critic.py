"""`Fsdp2Critic`: one rank of a critic that is sharded beside the policy, on the same devices.

Invariant: its numbers are those of `LocalCritic` up to the order of sums; the head and its loss are computed in float32, whatever the backbone is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from ostinato_engines.device import HOST
from ostinato_trainer.backends.base import LossOutput, OptimizerStats
from ostinato_trainer.backends.critic import ValueLossFn
from ostinato_trainer.backends.fsdp2_mesh import ShardMesh
from ostinato_trainer.backends.fsdp2_options import CURES, Fsdp2Options
from ostinato_trainer.backends.fsdp2_source import ModelSource
from ostinato_trainer.backends.fsdp2_training import ShardedTraining
from ostinato_trainer.backends.local import MemoryCures
from ostinato_trainer.backends.memory import out_of_memory_named
from ostinato_trainer.backends.model_passes import check_ids
from ostinato_trainer.backends.packing import Layout
from ostinato_trainer.batch import Batch

_CURES: Final = MemoryCures(
    batches="lower critic.ppo_micro_batch_size_per_gpu or critic.ppo_max_token_len_per_gpu, or data.max_response_length, or write "
    "model.enable_gradient_checkpointing=true or actor.fsdp_config.param_offload=true",
    passes="lower critic.ppo_max_token_len_per_gpu, or data.max_response_length",
    state=CURES.state,
)


class Fsdp2Critic:
    """See `RankCritic` for the methods' contract.

    Args:
        path: Folder or hub id of the model.
        mesh: Where this rank stands.
        options: See there; `keep_reference` and `lora` are not read.

    Raises:
        TrainerError: an option is out of range, or the path holds no model that can be a critic and be sharded.
    """

    def __init__(self, path: str | Path, mesh: ShardMesh, options: Fsdp2Options) -> None:
        self._training = ShardedTraining(ModelSource(path, is_critic=True), mesh, options, cures=_CURES)
        self._device = mesh.device
        self._dtype = torch.promote_types(options.parameter_dtype, torch.float32)

    @property
    def pads_sequences(self) -> bool:
        """See `RankCritic.pads_sequences`."""
        return self._training.model.lm.layout is Layout.PADDED

    @torch.no_grad()
    def values(self, micro_batches: Sequence[Batch]) -> list[Tensor]:
        """See `RankCritic.values`.

        Raises:
            OutOfMemoryError: memory ran out.
            BatchError: a token id lies outside the vocabulary.
        """
        results = []
        with out_of_memory_named("values", _CURES.passes, owner=self._training.memory, batches=micro_batches):
            for micro_batch in micro_batches:
                check_ids(micro_batch, self._training.model.lm.vocab_size)
                results.append(self._values(micro_batch.to(self._device), micro_batch.loss_mask).to(HOST))
        return results

    def forward_backward(self, micro_batches: Sequence[Batch], loss_fn: ValueLossFn) -> dict[str, float]:
        """See `RankCritic.forward_backward`. Errors as `ShardedTraining.accumulate`."""

        def loss_of(micro_batch: Batch) -> LossOutput:
            on_device = micro_batch.to(self._device, self._dtype)
            values = self._values(on_device, micro_batch.loss_mask)
            return loss_fn(values, on_device) if micro_batch.num_loss_tokens else (values.sum() * 0, {})

        return self._training.accumulate(micro_batches, loss_of)

    def optimizer_step(self) -> OptimizerStats:
        """See `RankCritic.optimizer_step`."""
        return self._training.step()

    def save(self, directory: Path) -> None:
        """See `RankCritic.save`. Errors as `ShardedTraining.save`."""
        self._training.save(directory)

    def load(self, directory: Path) -> None:
        """See `RankCritic.load`. Errors as `ShardedTraining.load`."""
        self._training.load(directory)

    def _values(self, batch: Batch, loss_mask: Tensor) -> Tensor:
        """float [T], of a batch on the device; 0 outside the loss mask, which the host has."""
        model = self._training.model
        return model.run(lambda: model.lm.values(batch, loss_mask, self._of_states))

    def _of_states(self, states: Tensor) -> Tensor:
        return self._training.model.model.score(states.to(self._dtype)).squeeze(-1)
