"""A trajectory as the trainer gets it: its segments and its score, or its failure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ostinato_agent_loop.output import AgentLoopOutput
from ostinato_agent_loop.reward import RewardResult
from ostinato_rollout import Failure


class Trajectory(msgspec.Struct, kw_only=True):
    """What became of one run of an agent. With a failure it has no reward, and its group counts without it."""

    group_id: str
    """The row's group; its `n` trajectories share it."""
    trajectory_id: str
    """Unique within the run."""
    row: Mapping
    """The dataset row, as given."""
    segments: list[AgentLoopOutput] = []
    """In order; empty if the agent failed."""
    reward: RewardResult | None = None
    """The score, if there is one."""
    failure: Failure | None = None
    """What went wrong, in the agent or in its reward."""


class RolloutBatch(msgspec.Struct, frozen=True):
    """What `generate_sequences` and `TrajectoryStream.take_batch` return."""

    trajectories: list[Trajectory]
    """`n` for each row, in the order of the rows."""
    metrics: dict[str, float]
    """One flat mapping under the field's metric names; durations in seconds."""
    baselines: dict[str, Trajectory] = {}
    """By group id: the greedy trajectory of each group, where the stream samples one."""

    def __repr__(self) -> str:
        failed = sum(trajectory.failure is not None for trajectory in self.trajectories)
        return f"RolloutBatch({len(self.trajectories)} trajectories, {failed} failed)"
