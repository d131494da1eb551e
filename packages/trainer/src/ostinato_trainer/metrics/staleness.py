"""How old the data of a step is, in policy versions: `training/off_policy/*`, under the field's names."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato_agent_loop import Trajectory
from ostinato_trainer.loop.group_filter import is_good
from ostinato_trainer.metrics.spreads import spread

__all__ = ["staleness_metrics"]

_PREFIX = "training/off_policy"


def staleness_metrics(trajectories: Sequence[Trajectory], *, policy_version: int) -> dict[str, float]:
    """Over the trajectories that are trained on and whose versions are known; nothing where there are none.

    Args:
        trajectories: Of a step.
        policy_version: The version that is about to be trained: the number of finished steps.

    Returns:
        `trajectory_spans/{mean,max,min}`: versions from the oldest to the newest that sampled a trajectory, 1 where it is of one;
        `trajectory_staleness/*`: how far the newest of them is behind `policy_version`; `trajectory_staleness_worst/*`: the oldest.
    """
    versions = [
        [span.version for segment in trajectory.segments for span in segment.policy_versions]
        for trajectory in trajectories
        if is_good(trajectory)
    ]
    known = [of_one for of_one in versions if of_one]
    return {
        **spread(f"{_PREFIX}/trajectory_spans", [max(of_one) - min(of_one) + 1 for of_one in known]),
        **spread(f"{_PREFIX}/trajectory_staleness", [policy_version - max(of_one) for of_one in known]),
        **spread(f"{_PREFIX}/trajectory_staleness_worst", [policy_version - min(of_one) for of_one in known]),
    }
