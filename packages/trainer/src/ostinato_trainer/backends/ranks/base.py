"""`RankBackend`: what one rank of a training backend holds.

Invariants: every method is collective, so all ranks are asked the same calls in the same order with the same number of micro-batches; losses
are sums with weights already set, so gradients are summed over data ranks and never averaged; and what a method returns on the ranks
that report is, put together, what a backend on one device would have returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import torch
from torch import Tensor

from ostinato_trainer.backends.base import EntropyMode, LossFn, LossOutput, OptimizerStats
from ostinato_trainer.batch import Batch

if TYPE_CHECKING:
    from ostinato_engines import WeightManifest


class RankAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank stands and where the ranks meet: what a process needs to join, before there is a backend."""

    rank: int
    world_size: int
    store_host: str
    """Where the store that the ranks meet at listens; it is held open by whoever runs them."""
    store_port: int
    device: str = "cpu"
    """`cpu`, or `cuda:N` as this process counts its devices."""
    timeout_s: float = 600.0
    """How long a collective may wait for the others before it fails."""
    interface: str | None = None
    """Network interface of the ranks' own traffic on the CPU; chosen by the system where None."""


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's part in the layout, known once its backend stands."""

    rank: int
    world_size: int
    data_index: int = 0
    """Which share of the data it gets; ranks of one tensor- or pipeline-parallel group have the same."""
    data_size: int = 1
    """How many shares there are."""
    reports: bool = True
    """Its results are the ones that are read: true of exactly one rank of each `data_index`."""


class RankCritic(Protocol):
    """One rank's share of PPO's critic, beside that of the policy; see `ostinato_trainer.loop.parts.Critic` for what the methods mean together.
    Micro-batches without a trained token are as legal as in `RankBackend`."""

    @property
    def pads_sequences(self) -> bool:
        """As `Critic.pads_sequences`."""
        ...

    def values(self, micro_batches: Sequence[Batch]) -> list[Tensor]:
        """For each micro-batch float [T] on the CPU, as `Critic.values`. No gradient."""
        ...

    def forward_backward(
        self, micro_batches: Sequence[Batch], loss_fn: Callable[[Tensor, Batch], LossOutput]
    ) -> dict[str, float]:
        """As `RankBackend.forward_backward`, of a loss of values."""
        ...

    def optimizer_step(self) -> OptimizerStats:
        """As `RankBackend.optimizer_step`."""
        ...

    def save(self, directory: Path) -> None:
        """As `RankBackend.save`."""
        ...

    def load(self, directory: Path) -> None:
        """As `RankBackend.load`."""
        ...


class RankBackend(Protocol):
    """One rank's share of a policy under training; see `TrainingBackend` for what the methods mean together.

    A micro-batch without a trained token is legal everywhere: in `forward_backward` it costs a pass that takes part in the collectives, is
    not shown to the loss, and adds nothing.
    """

    @property
    def policy_version(self) -> int:
        """Optimizer steps that changed the weights."""
        ...

    @property
    def critic(self) -> RankCritic | None:
        """This rank's share of the critic, where ranks have one."""
        ...

    @property
    def place(self) -> RankPlace:
        """Where it stands; constant."""
        ...

    @property
    def pads_sequences(self) -> bool:
        """As `TrainingBackend.pads_sequences`."""
        ...

    def forward_backward(
        self,
        micro_batches: Sequence[Batch],
        loss_fn: LossFn,
        *,
        temperature: float = 1.0,
        entropy: EntropyMode = EntropyMode.OFF,
    ) -> dict[str, float]:
        """Accumulates this rank's share of the gradients and returns the metrics of its own micro-batches, merged. Gradients may be reduced
        here or in `optimizer_step`. After an error no gradient is left behind."""
        ...

    def log_probs(
        self,
        micro_batches: Sequence[Batch],
        *,
        temperature: float,
        reference: bool = False,
        loss_tokens_only: bool = False,
    ) -> list[Tensor]:
        """For each micro-batch float [T] on the CPU, as `TrainingBackend.log_probs`. No gradient."""
        ...

    def optimizer_step(self) -> OptimizerStats:
        """Clips by the norm over all ranks, steps and clears, or skips, on all ranks alike; the result is equal on all."""
        ...

    def manifest(self, version: int) -> WeightManifest:
        """Names, shapes and types of what `weights` yields, in its order; equal on all ranks. Names are Hugging Face's."""
        ...

    def weights(self, *, everywhere: bool = False) -> Iterator[list[tuple[str, Tensor]]]:
        """The whole tensors in the order of the manifest, a few at a time: gathered when they are asked for, so that no rank ever holds the
        model twice. Every rank yields the same number of lists; they are empty except on rank 0, or the same on all with `everywhere`."""
        ...

    def save(self, directory: Path) -> None:
        """Writes this rank's files of weights, moments and counters into a directory that all ranks share and that exists."""
        ...

    def load(self, directory: Path) -> None:
        """Reads what the ranks of a group wrote, however many they were; refused on all ranks alike, and nothing has changed then."""
        ...

    def save_hf(self, directory: Path) -> None:
        """An ordinary Hugging Face model folder, tokenizer files included; rank 0 writes."""
        ...


RankFactory = Callable[[RankAddress, torch.device], RankBackend]
"""Builds a rank's backend in its own process, after `torch.distributed` is initialized. It travels there: a module-level function or a frozen
dataclass with `__call__`, whose fields can be pickled."""
