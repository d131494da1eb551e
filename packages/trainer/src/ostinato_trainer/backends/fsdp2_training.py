"""`ShardedTraining`: a sharded model under training: its gradients, its optimizer, and the state of both on disk.

It is what a policy and a critic have in common, and knows neither. Invariants: a step whose gradient norm is not finite changes nothing on any
rank; any number of ranks reads what any other, or one device, wrote; and all ranks read before any changes, and refuse alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ostinato_engines.device import HOST
from ostinato_trainer.backends.adamw import AdamW
from ostinato_trainer.backends.base import LossOutput, OptimizerStats
from ostinato_trainer.backends.compiling import resolve_compile
from ostinato_trainer.backends.fsdp2_mesh import ShardMesh
from ostinato_trainer.backends.fsdp2_model import ShardedModel, ShardOptions
from ostinato_trainer.backends.fsdp2_options import Fsdp2Options
from ostinato_trainer.backends.fsdp2_source import ModelSource
from ostinato_trainer.backends.local import MemoryCures, state_size
from ostinato_trainer.backends.memory import HeldMemory, MemoryOwner, check_state_fits, held_memory, out_of_memory_named
from ostinato_trainer.backends.model_passes import accumulate_gradients, check_ids
from ostinato_trainer.backends.ranks.agreement import raise_alike
from ostinato_trainer.backends.ranks.state import RankedState, SlicedState, write_counters, write_slices
from ostinato_trainer.backends.state import check_frozen, check_shapes
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import BackendError, CheckpointError, OutOfMemoryError


class ShardedTraining:
    """One rank's part. Making one, and every method, is collective.

    Args:
        source: Of the model.
        mesh: Where this rank stands.
        options: See there; `keep_reference` makes one.
        cures: What to change where memory does not suffice.

    Raises:
        TrainerError: an option is out of range, or the model cannot be loaded or cut up; on all ranks alike.
    """

    def __init__(self, source: ModelSource, mesh: ShardMesh, options: Fsdp2Options, *, cures: MemoryCures) -> None:
        options.check()
        self.options, self.mesh, self._cures = options, mesh, cures
        self._compiled = self._resolve_compile()
        with out_of_memory_named("the model's weights", cures.state):
            self.model = self._sharded(source, admit=self._admit)
            self.reference = None
            """The model as it was at the start, where one is kept."""
            if options.keep_reference:
                has_adapters = source.lora is not None
                self.reference = self.model if has_adapters else self._sharded(source)
                if not has_adapters:
                    self.reference.model.requires_grad_(False)
        self.optimizer = AdamW(self.model.parameters(), options)
        self.num_updates = 0
        """Optimizer steps that changed the weights."""
        self.memory = MemoryOwner(mesh.device, self._held_memory)
        """Whose memory messages speak of."""

    def accumulate(self, micro_batches: Sequence[Batch], loss_of: Callable[[Batch], LossOutput]) -> dict[str, float]:
        """This rank's share of the gradients; see `accumulate_gradients`.

        Raises:
            OutOfMemoryError: memory ran out.
            BackendError: the loss has no gradient.
            BatchError: a token id lies outside the vocabulary.
        """
        for micro_batch in micro_batches:
            check_ids(micro_batch, self.model.lm.vocab_size)
        try:
            return accumulate_gradients(
                micro_batches,
                loss_of,
                self.optimizer,
                cures=self._cures.batches,
                owner=self.memory,
                passes_for_all=True,
            )
        except BaseException:
            self.model.give_up()
            raise

    def step(self) -> OptimizerStats:
        """Clips by the norm over all ranks, steps and clears, or skips."""
        with out_of_memory_named("an optimizer step", self._cures.state, owner=self.memory):
            self._move_moments(self._parameter_device)
            stats = self.optimizer.step()
        self._move_moments(torch.device(HOST))
        if not stats.skipped:
            self.num_updates += 1
        return stats

    def save(self, directory: Path) -> None:
        """Writes this rank's slices into a directory that exists.

        Raises:
            OSError: the directory cannot be written; on all ranks alike.
        """
        rank, num_ranks = self.mesh.rank, self.mesh.num_ranks
        error: Exception | None = None
        try:
            weights, moments = self._own(self.model.trained_tensors()), self._own(self.optimizer.moments())
            write_slices(directory, rank, num_ranks, weights, moments)
        except Exception as failure:  # whatever it was, the other ranks must hear of it
            error = OSError(f"rank {rank} could not write its part of {directory}: {failure}")
        raise_alike(error)
        if rank == 0:
            counters = RankedState(
                num_ranks=num_ranks,
                num_steps=self.optimizer.num_steps,
                num_skipped=self.optimizer.num_skipped,
                policy_version=self.num_updates,
                frozen=self._frozen,
            )
            try:
                write_counters(directory, counters)
            except OSError as failure:
                error = failure
        raise_alike(error)

    def load(self, directory: Path) -> None:
        """Reads what ranks or one device wrote.

        Raises:
            CheckpointError: a file is missing, damaged, or of another model; on all ranks alike, and nothing has changed then.
        """
        error: Exception | None = None
        weights: dict[str, Tensor] = {}
        moments: dict[str, Tensor] = {}
        num_steps = num_skipped = num_updates = 0
        try:
            with SlicedState(directory) as state:
                counters = state.counters
                num_steps, num_skipped = counters.num_steps, counters.num_skipped
                num_updates = counters.policy_version
                check_frozen(directory, counters.frozen, self._frozen)
                weights, moments = self._read(directory, state)
        except CheckpointError as failure:
            error = failure
        raise_alike(error)
        self.optimizer.load(moments, num_steps=num_steps, num_skipped=num_skipped, source=directory)
        self._move_moments(torch.device(HOST))
        with torch.no_grad():
            for name, tensor in self.model.trained_tensors().items():
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).copy_(weights[name])
        self.num_updates = num_updates

    @property
    def _frozen(self) -> str | None:
        """Fingerprint of the weights that must stay, where adapters or a reference rest on them."""
        rests = self.reference is not None or self.model.adapters is not None
        return self.model.fingerprint if rests else None

    @property
    def _parameter_device(self) -> torch.device:
        return torch.device(HOST) if self.options.param_offload else self.mesh.device

    def _sharded(self, source: ModelSource, *, admit: Callable[[nn.Module], None] | None = None) -> ShardedModel:
        options = self.options
        shard_options = ShardOptions(
            parameter_dtype=options.parameter_dtype,
            compute_dtype=options.autocast,
            param_offload=options.param_offload,
            reshard_after_forward=options.reshard_after_forward,
            gradient_checkpointing=options.gradient_checkpointing,
            use_remove_padding=options.use_remove_padding,
            compiled=self._compiled,
        )
        return ShardedModel(source, self.mesh, shard_options, admit=admit)

    def _resolve_compile(self) -> bool:
        """Whether layers are compiled; what is wrong with that on one rank is wrong on all."""
        compiled, error = False, None
        try:
            compiled = resolve_compile(self.options.use_torch_compile, self.mesh.device)
        except BackendError as failure:
            error = failure
        raise_alike(error)
        return compiled

    def _admit(self, model: nn.Module) -> None:
        """Refuses, on all ranks alike, a model whose slices no device of this size holds."""
        error: Exception | None = None
        try:
            if not self.options.param_offload:
                size = state_size(model, self.options, num_shares=self.mesh.num_ranks)
                size = msgspec.structs.replace(size, moments_stay=not self.options.optimizer_offload)
                check_state_fits(size, self.mesh.device, cures=self._cures.state, engine=self.options.engine)
        except OutOfMemoryError as failure:
            error = failure
        raise_alike(error)

    def _held_memory(self) -> HeldMemory:
        kept = None if self.reference is self.model else self.reference
        return held_memory(
            self.mesh.device,
            self.model.model.parameters(),
            optimizer=self.optimizer.moments().values(),
            reference=() if kept is None else kept.model.parameters(),
        )

    def _move_moments(self, device: torch.device) -> None:
        """Brings the moments to where the step is taken, or away from there; counts of steps stay where torch keeps them."""
        if self.options.optimizer_offload:
            self.optimizer.move_moments(device)

    def _own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this rank writes of them: its slices, and on rank 0 what is not cut."""
        slices = {name: tensor.to_local().detach() for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
        rest = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
        return {**slices, **(rest if self.mesh.rank == 0 else {})}

    def _read(self, directory: Path, state: SlicedState) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """This rank's slices of the weights, and its moments as the optimizer wants them."""
        tensors, parameters = self.model.trained_tensors(), self.optimizer.parameters
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
                self.mesh.slices,
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
