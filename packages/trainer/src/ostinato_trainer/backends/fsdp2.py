"""`Fsdp2Rank`: one rank of a policy that is sharded with `fully_shard`.

Invariants: the numbers are those of `LocalBackend` up to the order of sums; a step whose gradient norm is not finite changes nothing on any rank; and
an error that one rank finds before it computes is raised by all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from ostinato_engines import WeightManifest
from ostinato_engines.device import HOST
from ostinato_engines.types import TensorSpec
from ostinato_trainer.backends.adamw import AdamW
from ostinato_trainer.backends.base import EntropyMode, LossFn, LossOutput, MicroBatchOutput, OptimizerStats
from ostinato_trainer.backends.fsdp2_model import ShardedModel, ShardOptions
from ostinato_trainer.backends.local import LocalBackendOptions, MemoryCures, state_size
from ostinato_trainer.backends.memory import (
    HeldMemory,
    MemoryOwner,
    check_state_fits,
    held_memory,
    out_of_memory_named,
)
from ostinato_trainer.backends.model_passes import accumulate_gradients, check_ids, tokens_to_score
from ostinato_trainer.backends.packing import Layout
from ostinato_trainer.backends.ranks.agreement import raise_alike
from ostinato_trainer.backends.ranks.base import RankAddress, RankPlace
from ostinato_trainer.backends.ranks.state import RankedState, SlicedState, write_counters, write_slices
from ostinato_trainer.backends.sequence_ranks import SEQUENCE_KEY, SequenceRanks
from ostinato_trainer.backends.state import check_frozen, check_shapes
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import BackendError, CheckpointError, OutOfMemoryError

_BUCKET_BYTES = 64 * 2**20
"""Weights that are handed over at once, where a single tensor is not larger."""
_CURES = MemoryCures(
    batches="lower ppo_micro_batch_size_per_gpu or ppo_max_token_len_per_gpu, or data.max_response_length, or write "
    "model.enable_gradient_checkpointing=true or actor.fsdp_config.param_offload=true",
    state="share the model out over more devices (trainer.nnodes, trainer.n_gpus_per_node) or write actor.fsdp_config.param_offload=true",
)


class Fsdp2Options(LocalBackendOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a rank needs to know besides the model; names follow `actor_rollout_ref.actor.fsdp_config`. `device` is the rank's own."""

    param_offload: bool = False
    """Keep weights, gradients and moments in the host's memory and take the step there."""
    optimizer_offload: bool = False
    """Keep the moments in the host's memory between steps."""
    reshard_after_forward: bool = True
    """See `ShardOptions`."""
    gradient_checkpointing: bool = False
    """See `ShardOptions`."""
    ulysses_sequence_parallel_size: int = 1
    """Ranks that share the tokens of a micro-batch; see `SequenceRanks`."""
    collective_timeout_s: float = 600.0
    """How long an exchange among them may take."""

    def check(self) -> None:
        """Raises BackendError where a value is out of range or not done by this backend."""
        if self.lora is not None:
            raise BackendError("lora must be None for sharded training, got options; use strategy=local for adapters")
        if self.use_torch_compile:
            raise BackendError("use_torch_compile must be false for sharded training, got true; use strategy=local")
        if self.ulysses_sequence_parallel_size < 1:
            raise BackendError(
                f"{SEQUENCE_KEY} must be at least 1, got {self.ulysses_sequence_parallel_size}; 1 shares no tokens"
            )
        super().check()


@dataclass(frozen=True)
class Fsdp2Factory:
    """Builds a rank, where it runs; see `RankFactory`."""

    path: str
    """Folder or hub id of the model; its tokenizer files travel into what `save_hf` writes."""
    options: Fsdp2Options

    def __call__(self, address: RankAddress, device: torch.device) -> Fsdp2Rank:
        options = msgspec.structs.replace(self.options, collective_timeout_s=address.timeout_s)
        return Fsdp2Rank(self.path, options, device)


class Fsdp2Rank:
    """See `RankBackend` for the methods' contract. Needs an initialized process group.

    Args:
        path: Folder or hub id of the model.
        options: See `Fsdp2Options`.
        device: What this rank computes on.

    Raises:
        BackendError: an option is out of range, or the path holds no model that can be sharded.
    """

    def __init__(self, path: str | Path, options: Fsdp2Options, device: torch.device) -> None:
        options.check()
        self.options, self._device, self._path = options, device, path
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._mesh = init_device_mesh(device.type, (self._world_size,), mesh_dim_names=("data",))
        self._sequence_ranks = self._joined_sequence_ranks()
        with out_of_memory_named("the model's weights", _CURES.state):
            self._model = self._sharded(self._admit)
            self._reference = None
            if options.keep_reference:
                self._reference = self._sharded()
                self._reference.model.requires_grad_(False)
        self.optimizer = AdamW(self._model.parameters(), options)
        self.memory = MemoryOwner(device, self._held_memory)
        """Whose memory messages speak of."""
        self.policy_version = 0
        """Optimizer steps that changed the weights."""

    def _joined_sequence_ranks(self) -> SequenceRanks | None:
        """The neighbours that share tokens with this rank; all ranks form such groups together."""
        size = self.options.ulysses_sequence_parallel_size
        if self._world_size % size:
            raise BackendError(
                f"{SEQUENCE_KEY} must divide the number of ranks (trainer.nnodes x trainer.n_gpus_per_node), {self._world_size}, got {size}; "
                f"write {SEQUENCE_KEY}=1"
            )
        if size == 1:
            return None
        group, _ = dist.new_subgroups(size, timeout=timedelta(seconds=self.options.collective_timeout_s))
        return SequenceRanks(group)

    def _admit(self, model: nn.Module) -> None:
        """Refuses, on all ranks alike, a model whose slices no device of this size holds."""
        error: Exception | None = None
        try:
            if not self.options.param_offload:
                size = state_size(model, self.options, num_shares=self._world_size)
                check_state_fits(size, self._device, cures=_CURES.state, engine=self.options.engine)
        except OutOfMemoryError as failure:
            error = failure
        raise_alike(error)

    def _held_memory(self) -> HeldMemory:
        return held_memory(
            self._device,
            self._model.parameters().values(),
            optimizer=self._moments().values(),
            reference=() if self._reference is None else self._reference.model.parameters(),
        )

    def _sharded(self, admit: Callable[[nn.Module], None] | None = None) -> ShardedModel:
        options = self.options
        shard_options = ShardOptions(
            parameter_dtype=options.parameter_dtype,
            compute_dtype=options.autocast,
            param_offload=options.param_offload,
            reshard_after_forward=options.reshard_after_forward,
            gradient_checkpointing=options.gradient_checkpointing,
            use_remove_padding=options.use_remove_padding,
        )
        return ShardedModel(
            self._path, self._device, self._mesh, shard_options, sequence_ranks=self._sequence_ranks, admit=admit
        )

    @property
    def place(self) -> RankPlace:
        """See `RankBackend.place`: neighbours that share tokens have the same data, and the first of them reports."""
        size = self.options.ulysses_sequence_parallel_size
        return RankPlace(
            rank=self._rank,
            world_size=self._world_size,
            data_index=self._rank // size,
            data_size=self._world_size // size,
            reports=self._rank % size == 0,
        )

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
        for micro_batch in micro_batches:
            check_ids(micro_batch, self._model.lm.vocab_size)

        def loss_of(micro_batch: Batch) -> LossOutput:
            on_device = micro_batch.to(self._device, self.options.parameter_dtype)
            wanted = on_device.loss_mask
            log_probs, spread = self._model.run(
                lambda: self._model.lm.log_probs(on_device, wanted, temperature=temperature, entropy=entropy)
            )
            if not micro_batch.num_loss_tokens:
                return log_probs.sum() * 0, {}
            return loss_fn(MicroBatchOutput(log_probs, spread), on_device)

        try:
            return accumulate_gradients(
                micro_batches, loss_of, self.optimizer, cures=_CURES.batches, owner=self.memory, passes_for_all=True
            )
        except BaseException:
            self._model.give_up()
            raise

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
        model = self._reference if reference else self._model
        if model is None:
            raise BackendError(
                "keep_reference must be true for log-probabilities of the reference, got false; set use_kl_loss"
            )
        results = []
        with out_of_memory_named("log-probabilities", _CURES.passes, owner=self.memory, batches=micro_batches):
            for micro_batch in micro_batches:
                check_ids(micro_batch, model.lm.vocab_size)
                wanted = tokens_to_score(micro_batch, loss_tokens_only=loss_tokens_only)
                on_device, chosen = micro_batch.to(self._device), wanted.to(self._device)
                found, _ = model.run(lambda: model.lm.log_probs(on_device, chosen, temperature=temperature))  # noqa: B023  called at once
                results.append(found.to(HOST, torch.promote_types(self.options.parameter_dtype, torch.float32)))
        return results

    def optimizer_step(self) -> OptimizerStats:
        """See `RankBackend.optimizer_step`."""
        with out_of_memory_named("an optimizer step", _CURES.state, owner=self.memory):
            self._move_moments(self._parameter_device)
            stats = self.optimizer.step()
        if self.options.optimizer_offload:
            self._move_moments(torch.device(HOST))
        if not stats.skipped:
            self.policy_version += 1
        return stats

    def manifest(self, version: int) -> WeightManifest:
        """See `RankBackend.manifest`. Weights travel in the type that the model computes in."""
        specs = [
            TensorSpec(name, tuple(tensor.shape), str(self._travel_dtype(tensor)).removeprefix("torch."))
            for name, tensor in self._model.tensors().items()
        ]
        return WeightManifest(version, tuple(specs))

    def weights(self) -> Iterator[list[tuple[str, Tensor]]]:
        """See `RankBackend.weights`."""
        bucket: list[tuple[str, Tensor]] = []
        num_bytes = 0
        for name, tensor in self._model.tensors().items():
            size = tensor.numel() * self._travel_dtype(tensor).itemsize
            if num_bytes and num_bytes + size > _BUCKET_BYTES:
                yield bucket
                bucket, num_bytes = [], 0
            num_bytes += size
            with torch.no_grad():
                whole = self._model.whole(tensor, self.options.autocast)
            if self._rank == 0:
                bucket.append((name, whole))
            del whole
        yield bucket

    def save(self, directory: Path) -> None:
        """See `RankBackend.save`. Each rank writes its slices.

        Raises:
            OSError: the directory cannot be written; on all ranks alike.
        """
        error: Exception | None = None
        try:
            write_slices(
                directory, self._rank, self._world_size, self._own(self._model.tensors()), self._own(self._moments())
            )
        except Exception as failure:  # whatever it was, the other ranks must hear of it
            error = OSError(f"rank {self._rank} could not write its part of {directory}: {failure}")
        raise_alike(error)
        if self._rank == 0:
            write_counters(
                directory,
                RankedState(
                    num_ranks=self._world_size,
                    num_steps=self.optimizer.num_steps,
                    num_skipped=self.optimizer.num_skipped,
                    policy_version=self.policy_version,
                    frozen=None if self._reference is None else self._reference.fingerprint,
                ),
            )

    def load(self, directory: Path) -> None:
        """See `RankBackend.load`. A folder of `LocalBackend` does too.

        Raises:
            CheckpointError: a file is missing, damaged, or of another model; on all ranks alike, and nothing has changed then.
        """
        error: Exception | None = None
        weights: dict[str, Tensor] = {}
        moments: dict[str, Tensor] = {}
        num_steps = num_skipped = policy_version = 0
        try:
            with SlicedState(directory) as state:
                counters = state.counters
                num_steps, num_skipped = counters.num_steps, counters.num_skipped
                policy_version = counters.policy_version
                check_frozen(
                    directory, counters.frozen, None if self._reference is None else self._reference.fingerprint
                )
                weights, moments = self._read(directory, state)
        except CheckpointError as failure:
            error = failure
        raise_alike(error)
        self.optimizer.load(moments, num_steps=num_steps, num_skipped=num_skipped, source=directory)
        if self.options.optimizer_offload:
            self._move_moments(torch.device(HOST))
        with torch.no_grad():
            for name, tensor in self._model.tensors().items():
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).copy_(weights[name])
        self.policy_version = policy_version

    def save_hf(self, directory: Path) -> None:
        """See `RankBackend.save_hf`. The whole model stands in the host memory of rank 0 meanwhile."""
        whole: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, tensor in self._model.whole_tensors():
                if self._rank == 0:
                    whole[name] = tensor.to(HOST)
        error: Exception | None = None
        if self._rank == 0:
            try:
                self._model.lm.save_hf(directory, tokenizer_source=self._path, weights=whole)
            except Exception as failure:  # whatever it was, the other ranks must hear of it
                error = OSError(f"the model could not be written to {directory}: {failure}")
        raise_alike(error)

    def _travel_dtype(self, tensor: Tensor) -> torch.dtype:
        return (self.options.autocast or tensor.dtype) if isinstance(tensor, DTensor) else tensor.dtype

    @property
    def _parameter_device(self) -> torch.device:
        return torch.device(HOST) if self.options.param_offload else self._device

    def _moments(self) -> dict[str, Tensor]:
        return self.optimizer.moments()

    def _move_moments(self, device: torch.device) -> None:
        """Brings the moments to where the step is taken, or away from there; counts of steps stay where torch keeps them."""
        if self.options.optimizer_offload:
            self.optimizer.move_moments(device)

    def _own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this rank writes of them: its slices, and on rank 0 what is not cut."""
        slices = {name: tensor.to_local().detach() for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
        rest = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
        return {**slices, **(rest if self._rank == 0 else {})}

    def _read(self, directory: Path, state: SlicedState) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """This rank's slices of the weights, and its moments as the optimizer wants them."""
        tensors, parameters = self._model.tensors(), self.optimizer.parameters
        expected = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        check_shapes(directory, state.shapes("weights"), expected)
        of_moments = state.shapes("optimizer")
        self.optimizer.check_moment_shapes(of_moments, source=directory)
        weights = {name: _slice_like(tensor, state, "weights", name) for name, tensor in tensors.items()}
        moments: dict[str, Tensor] = {}
        for key in of_moments:
            parameter = parameters[key.rpartition(".")[0]]
            if not of_moments[key]:
                moments[key] = state.rows("optimizer", key)
                continue
            local = _slice_like(parameter, state, "optimizer", key)
            assert isinstance(parameter, DTensor)
            moments[key] = DTensor.from_local(
                local.to(self._parameter_device),
                self._mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        return weights, moments


def _slice_like(tensor: Tensor, state: SlicedState, part: str, name: str) -> Tensor:
    """This rank's rows of a tensor that is cut as `tensor` is."""
    if not isinstance(tensor, DTensor):
        return state.rows(part, name)
    rank, num_ranks = tensor.device_mesh.get_local_rank(), tensor.device_mesh.size()
    rows_each = -(-tensor.shape[0] // num_ranks)
    start = min(tensor.shape[0], rank * rows_each)
    return state.rows(part, name, start, min(tensor.shape[0], start + rows_each))
