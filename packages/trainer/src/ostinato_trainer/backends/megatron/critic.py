"""`MegatronCritic`: one rank of a critic that is split as the policy beside it is.

Invariant: its numbers are those of `LocalCritic` up to the order of sums. The head is on the last stage, whole on each tensor rank; it and its loss
are computed in float32, whatever the layers are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from ostinato_trainer.backends.base import LossOutput, OptimizerStats
from ostinato_trainer.backends.critic import ValueLossFn
from ostinato_trainer.backends.megatron import core
from ostinato_trainer.backends.megatron.options import MegatronOptions
from ostinato_trainer.backends.megatron.pretrained import PretrainedTensors, model_config, rotary_frequencies
from ostinato_trainer.backends.megatron.shape import DecoderShape
from ostinato_trainer.backends.megatron.training import CURES, MegatronTraining, ModelSource
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import BackendError
from ostinato_trainer.home_paths import home_path

_PATH_KEY: Final = "critic.model.path"
_CURES: Final = msgspec.structs.replace(
    CURES,
    batches="lower critic.ppo_micro_batch_size_per_gpu or critic.ppo_max_token_len_per_gpu, or data.max_response_length, write "
    "model.enable_gradient_checkpointing=true, or split the model over more ranks",
    passes="lower critic.ppo_max_token_len_per_gpu, or data.max_response_length",
)


class MegatronCritic:
    """See `RankCritic` for the methods' contract.

    Args:
        path: Folder or hub id of the model; a scalar head that it brings is kept, otherwise one begins at zero.
        options: See there; `keep_reference` is not read.
        groups: Where this rank stands.
        device: Of this rank.

    Raises:
        BackendError: the model is not mapped, it or the ranks do not divide, or its weights cannot be read.
        OutOfMemoryError: the device is too small for the model's state.
    """

    def __init__(
        self, path: str | Path, options: MegatronOptions, groups: core.RankGroups, device: torch.device
    ) -> None:
        options.check()
        folder = home_path(path, _PATH_KEY, BackendError)
        path = folder if folder.is_dir() else path
        config, pretrained = model_config(path, key=_PATH_KEY), PretrainedTensors(path, key=_PATH_KEY)
        shape = DecoderShape.from_config(config.to_dict(), key=_PATH_KEY)
        shape = shape.with_value_head(pretrained.value_head(shape.hidden_size))
        options.layout.check(shape, dist.get_world_size(), of="the critic")
        source = ModelSource(pretrained, shape, rotary_frequencies(config))
        options = msgspec.structs.replace(options, keep_reference=False)
        self._training = MegatronTraining(source, options, groups, device, cures=_CURES)

    @property
    def pads_sequences(self) -> bool:
        """Sequences are packed."""
        return False

    def values(self, micro_batches: Sequence[Batch]) -> list[Tensor]:
        """See `RankCritic.values`; the last stage answers, the others with nothing. Errors as `MegatronTraining.answers`."""
        return self._training.answers("values", self._training.model, micro_batches, self._values)

    def forward_backward(self, micro_batches: Sequence[Batch], loss_fn: ValueLossFn) -> dict[str, float]:
        """See `RankCritic.forward_backward`. Errors as `MegatronTraining.accumulate`."""

        def loss_of(states: Tensor, batch: Batch) -> LossOutput:
            return loss_fn(self._values(states, batch), batch)

        return self._training.accumulate(micro_batches, loss_of)

    def optimizer_step(self) -> OptimizerStats:
        """See `RankCritic.optimizer_step`."""
        return self._training.step()

    def save(self, directory: Path) -> None:
        """See `RankCritic.save`. Errors as `MegatronTraining.save`."""
        self._training.save(directory, version=self._training.optimizer.num_updates)

    def load(self, directory: Path) -> None:
        """See `RankCritic.load`. Errors as `MegatronTraining.load`."""
        self._training.load(directory)

    def _values(self, states: Tensor, batch: Batch) -> Tensor:
        """float32 [T]: the value before each trained token, 0 without a gradient elsewhere."""
        tokens = batch.loss_mask.nonzero().squeeze(-1)
        values = core.values_of(self._training.model, states.squeeze(1).index_select(0, tokens - 1))
        return values.new_zeros(batch.num_tokens).index_copy(0, tokens, values)
