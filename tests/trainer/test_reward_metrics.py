"""Numbers beside the score, over trajectories whose rewards have different keys."""

import math
from typing import Any

import numpy as np
import pytest

from ostinato_agent_loop import RewardResult, Trajectory
from ostinato_rollout import Failure, FailureKind
from ostinato_trainer.metrics.validation import validation_metrics
from ostinato_trainer.rewards.metrics import numbers_of, reward_metrics


def trajectory(reward: RewardResult | None, number: int, failure: Failure | None = None) -> Trajectory:
    return Trajectory(
        group_id=f"g{number}", trajectory_id=f"g{number}/0", row={"data_source": "s"}, reward=reward, failure=failure
    )


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (True, 1.0),
        (3, 3.0),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (math.nan, None),
        (math.inf, None),
        (10**400, None),
        ("1", None),
        (None, None),
        ([1.0], None),
        (1j, None),
        (np.complex64(1), None),
        (np.array([1.0]), None),
    ],
)
def test_numbers_are_what_is_finite(value: Any, number: float | None) -> None:
    """A flag or a finite number is a number, of NumPy too; everything else is for people."""
    assert numbers_of(RewardResult(score=0.0, extra={"x": value})) == ({} if number is None else {"x": number})


EXTRAS: list[dict[str, Any]] = [{"acc": 1}, {"acc": 0, "pred": "x", "steps": 4}, {}]


@pytest.mark.parametrize("first", range(3))
def test_keys_may_differ_whichever_comes_first(first: int) -> None:
    """A key that some rewards lack is averaged over those that have it, in training and in validation, whatever comes first."""
    extras = EXTRAS[first:] + EXTRAS[:first]
    trajectories = [trajectory(RewardResult(score=0.5, extra=extra), number) for number, extra in enumerate(extras)]
    trajectories.append(trajectory(None, 3, Failure(where="r", kind=FailureKind.REWARD, message="m")))
    assert reward_metrics(trajectories) == {
        "reward_extra/acc/mean": 0.5,
        "reward_extra/acc/max": 1.0,
        "reward_extra/acc/min": 0.0,
        "reward_extra/steps/mean": 4.0,
        "reward_extra/steps/max": 4.0,
        "reward_extra/steps/min": 4.0,
    }
    validation = validation_metrics(trajectories)
    assert validation["val-core/s/acc/mean@1"] == 0.5
    assert validation["val-aux/s/score/mean@1"] == 0.5
    assert validation["val-aux/s/num_failed"] == 1.0


def test_no_reward_is_no_metric() -> None:
    """Where every trajectory failed there is nothing to average."""
    assert reward_metrics([trajectory(None, 0)]) == {}
