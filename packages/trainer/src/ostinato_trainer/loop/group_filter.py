"""Which groups a step may learn from, and when there have been too many that it may not.

Invariant: a group that reaches the trainer has as many trajectories without a failure as a baseline needs, and with
`algorithm.filter_groups` they differ in what they got. What is dropped is counted under one reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from ostinato_agent_loop import Trajectory, TrajectoryGroup
from ostinato_rollout import GroupFate, StreamCounts
from ostinato_trainer.errors import AlgorithmError, TrainerError, TrainingInterrupted

__all__ = ["DropCounts", "DropLimits", "GroupFilter", "is_good"]

_TOO_FEW = "too few trajectories without a failure"
_ALIKE = "all alike in the metric of filter_groups"
_SCORE_NAMES = ("score", "seq_reward")
_SAME = 1e-9
"""Values that differ by less are alike: sums of the same parts in another order."""


def is_good(trajectory: Trajectory) -> bool:
    """Whether a trajectory can be learned from: it has a reward and no failure."""
    return trajectory.failure is None and trajectory.reward is not None


class GroupFilter:
    """Says whether a group is trained on; `AgentLoopManager.stream` asks it.

    Args:
        min_group_size: Trajectories that must be good.
        metric: Which value of a trajectory's reward must differ within a group (DAPO's dynamic sampling, arXiv:2503.14476);
            None: it need not.
    """

    def __init__(self, *, min_group_size: int, metric: str | None = None) -> None:
        self._min_group_size, self._metric = min_group_size, metric
        self.last_failure = ""
        """What failed in the group that was dropped last for failures."""
        self.error: TrainerError | None = None
        """Why no group can be judged."""

    def __call__(self, group: TrajectoryGroup) -> bool | str:
        """True, or the reason for dropping it."""
        failures = [
            one.failure for one in (*group.trajectories, group.baseline) if one is not None and one.failure is not None
        ]
        good = [trajectory for trajectory in group.trajectories if is_good(trajectory)]
        if len(good) < self._min_group_size or (group.baseline is not None and not is_good(group.baseline)):
            self.last_failure = (
                f"{failures[0].where}: {failures[0].message}" if failures else "a trajectory got no reward"
            )
            return _TOO_FEW
        if self._metric is None:
            return True
        values = [self._value(trajectory) for trajectory in good]
        return _ALIKE if math.isclose(min(values), max(values), rel_tol=_SAME, abs_tol=_SAME) else True

    def _value(self, trajectory: Trajectory) -> float:
        reward = trajectory.reward
        assert reward is not None
        if self._metric in _SCORE_NAMES:
            return float(reward.score)
        try:
            value = float(reward.extra[str(self._metric)])
            if not math.isfinite(value):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            known = ", ".join(["score", *sorted(reward.extra)])
            self.error = AlgorithmError(
                f"algorithm.filter_groups.metric must name a finite number that the reward function gives, got {self._metric}; it gives {known}"
            )
            raise self.error from None
        return value


class DropCounts(msgspec.Struct, frozen=True):
    """What became of the groups that were not given out, since a stream began."""

    drawn: int = 0
    failed: int = 0
    filtered: int = 0
    stale: int = 0
    reruns: int = 0

    @classmethod
    def of(cls, counts: StreamCounts) -> DropCounts:
        """Read from a stream's counts; a group with too few good trajectories counts as failed."""
        too_few = counts.filtered.get(_TOO_FEW, 0)
        return cls(
            drawn=counts.num_drawn,
            failed=counts.fates[GroupFate.FAILED] + too_few,
            filtered=counts.fates[GroupFate.FILTERED] - too_few,
            stale=counts.fates[GroupFate.STALE],
            reruns=counts.num_reruns,
        )

    def since(self, earlier: DropCounts) -> DropCounts:
        """What came on top of `earlier`."""
        return DropCounts(
            *(
                now - then
                for now, then in zip(msgspec.structs.astuple(self), msgspec.structs.astuple(earlier), strict=True)
            )
        )

    def metrics(self, batch_size: int) -> Mapping[str, float]:
        """For a step's record."""
        return {
            "training/num_gen_batches": self.drawn / batch_size,
            "training/num_dropped_groups/failed": float(self.failed),
            "training/num_dropped_groups/filtered": float(self.filtered),
            "training/num_dropped_groups/stale": float(self.stale),
            "training/num_reruns": float(self.reruns),
        }


class DropLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How many groups may be dropped between two steps before the run ends with an error: so many for each step that is sampled meanwhile."""

    batch_size: int
    max_failed_batches: int
    max_num_gen_batches: int
    """0: no limit."""

    def check(self, dropped: DropCounts, last_failure: str, *, num_steps: int = 1) -> None:
        """Raise TrainingInterrupted where too many groups were dropped.

        Args:
            dropped: Since a step got its groups last.
            last_failure: Where a group failed last, and why.
            num_steps: Steps whose groups are under way; more than one where sampling goes ahead.
        """
        each = "" if num_steps == 1 else f" for each of {num_steps} steps that are sampled at once"
        kinds = f"{dropped.failed} failed, {dropped.filtered} filtered, {dropped.stale} stale"
        if dropped.failed > self.max_failed_batches * self.batch_size * num_steps:
            raise TrainingInterrupted(
                f"a step must find {self.batch_size} good groups while at most trainer.max_failed_batches="
                f"{self.max_failed_batches} batches of groups fail{each}, got {kinds}; the last one failed in"
                f" {last_failure or 'an unknown place'}; mend the cause, or raise the limit"
            )
        if self.max_num_gen_batches and dropped.filtered > (self.max_num_gen_batches - 1) * self.batch_size * num_steps:
            raise TrainingInterrupted(
                f"a step must find {self.batch_size} groups that differ in algorithm.filter_groups.metric within max_num_gen_batches="
                f"{self.max_num_gen_batches} batches of prompts{each}, got {kinds}; take easier or harder prompts, or raise the limit"
            )
