"""Which groups are trained on: enough good trajectories, and with a metric values that differ."""

from __future__ import annotations

import pytest

from ostinato_agent_loop import RewardResult, Trajectory, TrajectoryGroup
from ostinato_rollout import Failure, FailureKind
from ostinato_trainer.errors import AlgorithmError, TrainingInterrupted
from ostinato_trainer.loop.group_filter import DropCounts, DropLimits, GroupFilter

FAILURE = Failure("a tool", FailureKind.TOOL, "no answer")


def group(*scores: float | None, baseline: float | None = None, **extra: object) -> TrajectoryGroup:
    """A group of trajectories with these scores; None failed."""
    trajectories = [
        Trajectory(
            group_id="g",
            trajectory_id=str(number),
            row={},
            reward=None if score is None else RewardResult(score, dict(extra)),
            failure=FAILURE if score is None else None,
        )
        for number, score in enumerate(scores)
    ]
    greedy = (
        None if baseline is None else Trajectory(group_id="g", trajectory_id="b", row={}, reward=RewardResult(baseline))
    )
    return TrajectoryGroup(0, "g", {}, trajectories, None, baseline=greedy)


@pytest.mark.parametrize(
    ("scores", "is_kept"),
    [
        ((1.0, 0.0), True),
        ((0.3, 0.1 + 0.2), False),
        ((1e6, 1e6 + 1e-4), False),
        ((1e-12, 0.0), False),
        ((0.0, -0.0), False),
        ((0.81,) * 5, False),
        ((0.0, 1e-6), True),
        ((1.0, None, 1.0), False),
        ((1.0, None, 0.0), True),
    ],
)
def test_groups_that_differ_are_kept(scores: tuple[float | None, ...], is_kept: bool) -> None:
    """Values that differ by rounding only are alike, and failed trajectories do not count."""
    verdict = GroupFilter(min_group_size=2, metric="score")(group(*scores))
    assert verdict is True if is_kept else verdict == "all alike in the metric of filter_groups"


def test_too_few_good_trajectories_are_a_failure() -> None:
    """A group with too few of them is dropped for that, whatever its values, and what failed is remembered; one without a metric is kept."""
    judge = GroupFilter(min_group_size=2)
    assert judge(group(1.0, 1.0)) is True
    assert judge(group(1.0, None)) == "too few trajectories without a failure"
    assert judge.last_failure == "a tool: no answer"
    assert GroupFilter(min_group_size=1)(group(1.0, None)) is True


def test_a_group_needs_its_baseline() -> None:
    """A greedy trajectory without a reward drops its group."""
    judge = GroupFilter(min_group_size=1)
    assert judge(group(1.0, baseline=0.5)) is True
    lacking = TrajectoryGroup(0, "g", {}, group(1.0).trajectories, None, baseline=group(None).trajectories[0])
    assert judge(lacking) == "too few trajectories without a failure"


@pytest.mark.parametrize("value", [None, "many", float("nan"), [1]])
def test_a_metric_that_is_no_number_is_an_error(value: object) -> None:
    """Absent, a text, not finite or a list: the error lists what there is, and stays."""
    judge = GroupFilter(min_group_size=1, metric="acc")
    extra = {} if value is None else {"acc": value}
    with pytest.raises(
        AlgorithmError, match="must name a finite number that the reward function gives, got acc; it gives score"
    ):
        judge(group(1.0, 0.0, **extra))
    assert judge.error is not None


def test_limits_count_each_kind_on_its_own() -> None:
    """Failures and filtered groups have limits of their own, stale ones none; 0 batches of prompts is no limit."""
    limits = DropLimits(batch_size=4, max_failed_batches=1, max_num_gen_batches=3)
    limits.check(DropCounts(failed=4, filtered=8, stale=100), "")
    with pytest.raises(
        TrainingInterrupted, match="got 5 failed, 0 filtered, 0 stale; the last one failed in here: why"
    ):
        limits.check(DropCounts(failed=5), "here: why")
    with pytest.raises(TrainingInterrupted, match="max_num_gen_batches=3 batches of prompts, got 0 failed, 9 filtered"):
        limits.check(DropCounts(filtered=9), "")
    DropLimits(batch_size=4, max_failed_batches=1, max_num_gen_batches=0).check(DropCounts(filtered=10**6), "")


def test_limits_are_those_of_each_step_under_way() -> None:
    """Where several steps are sampled at once, each of them may drop as many groups as one alone."""
    limits = DropLimits(batch_size=4, max_failed_batches=1, max_num_gen_batches=3)
    limits.check(DropCounts(failed=12, filtered=24), "", num_steps=3)
    with pytest.raises(TrainingInterrupted, match=r"batches of groups fail for each of 3 steps .* got 13 failed"):
        limits.check(DropCounts(failed=13), "", num_steps=3)
    with pytest.raises(TrainingInterrupted, match=r"batches of prompts for each of 3 steps .* 25 filtered"):
        limits.check(DropCounts(filtered=25), "", num_steps=3)
