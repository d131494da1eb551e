"""The components of a run, as the training loop sees them, and what can watch a run.

Protocols, so that each may be replaced by a class of the user's own; `assembly` builds ours from a configuration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ostinato_agent_loop import RolloutBatch, RolloutManager
from ostinato_rollout import ServerPool
from ostinato_trainer.algorithms.kl_control import KLController
from ostinato_trainer.backends.base import LossOutput, OptimizerStats, TrainingBackend
from ostinato_trainer.batch import Batch


class Sampling(Protocol):
    """Gives each step its trajectories; `sampling` has ours."""

    @property
    def epoch(self) -> int:
        """Epoch of the rows that were drawn last, from 0."""
        ...

    async def next_step(self, step: int) -> RolloutBatch:
        """The trajectories of a step's groups, failed ones in their places, and what sampling them cost."""
        ...

    async def aclose(self) -> None:
        """End what is under way."""
        ...

    def state_dict(self) -> dict:
        """Where it stands; plain values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` stood; before the first step only."""
        ...


class Critic(Protocol):
    """PPO's value function under training; `LocalCritic`, or a class of the user's own in its place."""

    @property
    def pads_sequences(self) -> bool:
        """Whether a micro-batch costs its sequences times its longest; else it costs its tokens alone."""
        ...

    def values(self, batch: Batch) -> Tensor:
        """float32 [T] on the CPU: entry t is the value before token t, 0 outside the loss mask. No gradient."""
        ...

    def forward_backward(
        self, micro_batches: Sequence[Batch], loss_fn: Callable[[Tensor, Batch], LossOutput]
    ) -> dict[str, float]:
        """Accumulates the gradients of the summed losses of values and returns the merged metrics. After an error no gradient is left
        behind."""
        ...

    def optimizer_step(self) -> OptimizerStats:
        """Clips, steps, advances the schedule and clears the gradients; skips where the gradient norm is not finite."""
        ...

    def save(self, directory: Path) -> None:
        """Writes weights, moments and schedule, so that `load` continues exactly here."""
        ...

    def load(self, directory: Path) -> None:
        """Reads what `save` wrote; a damaged or foreign directory is refused and leaves the critic as it was."""
        ...


class CheckpointWriter(Protocol):
    """Writes the state of a step, whole or not at all; perhaps while the next steps run."""

    async def save(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the state after `step`, whose metrics these are, and see to it that it is written."""
        ...

    def check(self) -> None:
        """Raise what writing has failed with since it was last asked; never waits."""
        ...

    async def finish(self) -> None:
        """Wait until everything is written, and raise what that has failed with."""
        ...


@dataclass
class TrainerParts:
    """The components of a run; `assembly` builds them from a configuration."""

    sampling: Sampling
    val_rows: Sequence[Mapping]
    manager: RolloutManager
    pool: ServerPool
    backend: TrainingBackend
    checkpoints: CheckpointWriter
    callbacks: Sequence[object] = ()
    """Each with some of the methods of `TrainerCallback`."""
    critic: Critic | None = None
    """Where the advantage estimator needs values."""
    kl_controller: KLController | None = None
    """Where the divergence is taken off the reward."""


@dataclass
class Stopwatch:
    """Seconds by phase, under the field's names `timing_s/...`."""

    phase: Callable[[str], AbstractContextManager[Any]] = nullcontext
    """Is entered with each phase; a watchdog's."""
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time of the block to `phase`."""
        begin = time.perf_counter()
        try:
            with self.phase(phase):
                yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin
