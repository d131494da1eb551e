"""`Fsdp2Rank`: one rank of a policy that is sharded with `fully_shard`.

Invariants: the numbers are those of `LocalBackend` up to the order of sums; a step whose gradient norm is not finite changes nothing on any rank; and
an error that one rank finds before it computes is raised by all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ostinato_engines import WeightManifest
from ostinato_engines.device import HOST
from ostinato_engines.types import TensorSpec
from ostinato_trainer.backends.base import EntropyMode, LossFn, LossOutput, MicroBatchOutput, OptimizerStats
from ostinato_trainer.backends.fsdp2_critic import Fsdp2Critic
from ostinato_trainer.backends.fsdp2_mesh import ShardMesh
from ostinato_trainer.backends.fsdp2_model import gathered
from ostinato_trainer.backends.fsdp2_options import CURES, Fsdp2Options
from ostinato_trainer.backends.fsdp2_source import ModelSource
from ostinato_trainer.backends.fsdp2_training import ShardedTraining
from ostinato_trainer.backends.lora import LORA_FOLDER
from ostinato_trainer.backends.memory import out_of_memory_named
from ostinato_trainer.backends.model_passes import check_ids, tokens_to_score
from ostinato_trainer.backends.packing import Layout
from ostinato_trainer.backends.ranks.agreement import raise_alike
from ostinato_trainer.backends.ranks.base import RankAddress, RankPlace
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import BackendError

__all__ = ["Fsdp2Factory", "Fsdp2Options", "Fsdp2Rank"]

_BUCKET_BYTES = 64 * 2**20
"""Weights that are handed over at once, where a single tensor is not larger."""


@dataclass(frozen=True)
class Fsdp2Factory:
    """Builds a rank, where it runs; see `RankFactory`."""

    path: str
    """Folder or hub id of the model; its tokenizer files travel into what `save_hf` writes."""
    options: Fsdp2Options
    critic: tuple[str, Fsdp2Options] | None = None
    """Folder or hub id and options of a critic on the same ranks."""

    def __call__(self, address: RankAddress, device: torch.device) -> Fsdp2Rank:
        self.options.check()
        size = self.options.ulysses_sequence_parallel_size
        mesh = ShardMesh(device, sequence_size=size, timeout_s=address.timeout_s)
        rank = Fsdp2Rank(self.path, mesh, self.options)
        if self.critic is not None:
            rank.critic = Fsdp2Critic(self.critic[0], mesh, self.critic[1])
        return rank


class Fsdp2Rank:
    """See `RankBackend` for the methods' contract. Needs an initialized process group.

    Args:
        path: Folder or hub id of the model.
        mesh: Where this rank stands.
        options: See there.

    Raises:
        TrainerError: an option is out of range, or the path holds no model that can be sharded.
    """

    def __init__(self, path: str | Path, mesh: ShardMesh, options: Fsdp2Options) -> None:
        self.options, self._mesh, self._path = options, mesh, path
        self._training = ShardedTraining(ModelSource(path, lora=options.lora), mesh, options, cures=CURES)
        self._model, self._device = self._training.model, mesh.device
        self.critic: Fsdp2Critic | None = None
        """See `RankBackend.critic`."""

    @property
    def policy_version(self) -> int:
        """Optimizer steps that changed the weights."""
        return self._training.num_updates

    @property
    def place(self) -> RankPlace:
        """See `RankBackend.place`."""
        return self._mesh.place

    @property
    def pads_sequences(self) -> bool:
        """See `RankBackend.pads_sequences`."""
        return self._model.lm.layout is Layout.PADDED

    def forward_backward(
        self,
        micro_batches: Sequence[Batch],
        loss_fn: LossFn,
        *,
        temperature: float = 1.0,
        entropy: EntropyMode = EntropyMode.OFF,
    ) -> dict[str, float]:
        """See `RankBackend.forward_backward`.

        Raises:
            OutOfMemoryError: memory ran out.
            BackendError: the loss has no gradient.
            BatchError: a token id lies outside the vocabulary.
        """

        def loss_of(micro_batch: Batch) -> LossOutput:
            on_device = micro_batch.to(self._device, self.options.parameter_dtype)
            wanted = micro_batch.loss_mask
            log_probs, spread = self._model.run(
                lambda: self._model.lm.log_probs(on_device, wanted, temperature=temperature, entropy=entropy)
            )
            if not micro_batch.num_loss_tokens:
                return log_probs.sum() * 0, {}
            return loss_fn(MicroBatchOutput(log_probs, spread), on_device)

        return self._training.accumulate(micro_batches, loss_of)

    @torch.no_grad()
    def log_probs(
        self,
        micro_batches: Sequence[Batch],
        *,
        temperature: float,
        reference: bool = False,
        loss_tokens_only: bool = False,
    ) -> list[Tensor]:
        """See `RankBackend.log_probs`.

        Raises:
            OutOfMemoryError: memory ran out.
            BackendError: no reference is kept.
            BatchError: a token id lies outside the vocabulary.
        """
        model = self._training.reference if reference else self._model
        if model is None:
            raise BackendError(
                "keep_reference must be true for log-probabilities of the reference, got false; set use_kl_loss"
            )
        results = []
        base_only = model.without_adapters() if reference else nullcontext()
        owner = self._training.memory
        with base_only, out_of_memory_named("log-probabilities", CURES.passes, owner=owner, batches=micro_batches):
            for micro_batch in micro_batches:
                check_ids(micro_batch, model.lm.vocab_size)
                wanted = tokens_to_score(micro_batch, loss_tokens_only=loss_tokens_only)
                on_device = micro_batch.to(self._device)
                found, _ = model.run(lambda: model.lm.log_probs(on_device, wanted, temperature=temperature))  # noqa: B023  called at once
                results.append(found.to(HOST, torch.promote_types(self.options.parameter_dtype, torch.float32)))
        return results

    def optimizer_step(self) -> OptimizerStats:
        """See `RankBackend.optimizer_step`."""
        return self._training.step()

    def manifest(self, version: int) -> WeightManifest:
        """See `RankBackend.manifest`. Weights travel in the type that the model computes in."""
        specs = [
            TensorSpec(name, tuple(tensor.shape), str(self._travel_dtype(tensor)).removeprefix("torch."))
            for name, tensor in self._model.tensors().items()
        ]
        manifest, adapters = WeightManifest(version, tuple(specs)), self._model.adapters
        return manifest if adapters is None else adapters.manifest_of(manifest, self._model.fingerprint)

    def weights(self, *, everywhere: bool = False) -> Iterator[list[tuple[str, Tensor]]]:
        """See `RankBackend.weights`."""
        bucket: list[tuple[str, Tensor]] = []
        num_bytes = 0
        tensors = self._model.whole_tensors(dtype=self.options.autocast)
        for tensor in self._model.tensors().values():
            size = tensor.numel() * self._travel_dtype(tensor).itemsize
            if num_bytes and num_bytes + size > _BUCKET_BYTES:
                yield bucket
                bucket, num_bytes = [], 0
            num_bytes += size
            with torch.no_grad():
                named = next(tensors)
            if everywhere or self._mesh.rank == 0:
                bucket.append(named)
            del named
        yield bucket

    def save(self, directory: Path) -> None:
        """See `RankBackend.save`. Each rank writes its slices; with adapters, theirs alone.

        Raises:
            OSError: the directory cannot be written; on all ranks alike.
        """
        self._training.save(directory)

    def load(self, directory: Path) -> None:
        """See `RankBackend.load`. A folder of `LocalBackend` does too.

        Raises:
            CheckpointError: a file is missing, damaged, or of another model; on all ranks alike, and nothing has changed then.
        """
        self._training.load(directory)

    def save_hf(self, directory: Path) -> None:
        """See `RankBackend.save_hf`. The whole model stands in the host memory of rank 0 meanwhile; with adapters their update is merged into it, and
        they lie alone in `lora_adapter` below.

        Raises:
            OSError: the directory cannot be written; on all ranks alike.
        """
        whole: dict[str, Tensor] = {}
        alone: dict[str, Tensor] = {}
        adapters = self._model.adapters
        with torch.no_grad():
            for name, tensor in self._model.whole_tensors():
                if self._mesh.rank == 0:
                    whole[name] = tensor.to(HOST)
            for name, tensor in ({} if adapters is None else adapters.parameters()).items():
                part = gathered(tensor, self._device)
                if self._mesh.rank == 0:
                    alone[name] = part.to(HOST)
        error: Exception | None = None
        if self._mesh.rank == 0:
            try:
                if adapters is not None:
                    adapters.save(directory / LORA_FOLDER, adapters=alone)
                self._model.lm.save_hf(directory, tokenizer_source=self._path, weights=whole)
            except Exception as failure:  # whatever it was, the other ranks must hear of it
                error = OSError(f"the model could not be written to {directory}: {failure}")
        raise_alike(error)

    def _travel_dtype(self, tensor: Tensor) -> torch.dtype:
        return (self.options.autocast or tensor.dtype) if isinstance(tensor, DTensor) else tensor.dtype
