"""Validation: what n samples of each prompt say, by hand and against drawing."""

import itertools

import pytest

from ostinato_agent_loop import AgentLoopOutput, RewardResult, Trajectory, TrajectoryEnd
from ostinato_rollout import Failure, FailureKind
from ostinato_trainer.metrics.validation import ValidationSample, pass_at_k, sample_metrics, validation_metrics


def trajectory(name, group="g", score=None, row=None, extra=None, turns=2):
    output = AgentLoopOutput(
        prompt_ids=[1], response_ids=[2], response_mask=[1], num_turns=turns, stop_reason=TrajectoryEnd.STOP
    )
    return Trajectory(
        group_id=group,
        trajectory_id=name,
        row=row or {},
        segments=[] if score is None else [output],
        reward=None if score is None else RewardResult(score, extra or {}),
        failure=Failure("tool", FailureKind.TOOL, "broke") if score is None else None,
    )


@pytest.mark.parametrize(
    ("num_samples", "num_right", "k"), [(5, 0, 2), (5, 2, 1), (5, 2, 3), (5, 5, 5), (6, 1, 6), (4, 3, 2)]
)
def test_pass_at_k_is_the_share_of_all_draws(num_samples, num_right, k):
    """The estimator equals the share of the k-subsets of the samples that hold a right one."""
    draws = list(itertools.combinations([place < num_right for place in range(num_samples)], k))
    assert pass_at_k(num_samples, num_right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_best_worst_majority_and_pass():
    """Over the samples of a prompt: the best, the worst, the commonest answer's value, and pass@k for powers of two and n."""
    rights = {"p": [("7", 1), ("8", 0), ("8", 0), ("7", 1), ("8", 0), ("9", 0)], "q": [("1", 1)] * 6}
    samples = [
        ValidationSample("math", prompt, {"acc": float(acc), "score": float(acc)}, answer=answer)
        for prompt, group in rights.items()
        for answer, acc in group
    ]
    metrics = sample_metrics(samples)
    core = "val-core/math/acc"
    assert (metrics[f"{core}/mean@6"], metrics[f"{core}/best@6/mean"]) == (pytest.approx(2 / 3), 1.0)
    assert metrics["val-aux/math/acc/worst@6/mean"] == 0.5
    assert metrics[f"{core}/maj@6/mean"] == 0.5
    passes = {name: value for name, value in metrics.items() if "pass@" in name}
    assert set(passes) == {f"{core}/pass@{k}" for k in (1, 2, 4, 6)}
    assert passes[f"{core}/pass@1"] == pytest.approx(2 / 3)
    assert passes[f"{core}/pass@2"] == pytest.approx((1 - 6 / 15 + 1) / 2)


def test_a_prompt_with_too_few_samples_is_left_out_of_a_pass():
    """Where samples failed, pass@k speaks of the prompts that have k left; a core value that is no truth value has none."""
    samples = [
        ValidationSample("s", "p", {"acc": 1.0}),
        ValidationSample("s", "p", {}, failed=True),
        ValidationSample("s", "q", {"acc": 0.0}),
        ValidationSample("s", "q", {"acc": 1.0}),
    ]
    metrics = sample_metrics(samples)
    assert (metrics["val-core/s/acc/pass@1"], metrics["val-core/s/acc/pass@2"]) == (0.75, 1.0)
    assert not [name for name in sample_metrics([ValidationSample("s", "p", {"score": 0.3})] * 2) if "pass@" in name]


def test_turns_of_a_validation_are_told():
    """Numbers of turns are those of the trajectories that did not fail."""
    metrics = validation_metrics(
        [trajectory("a", score=1.0, turns=4), trajectory("b", score=1.0, turns=2), trajectory("c")]
    )
    assert (metrics["val-aux/num_turns/mean"], metrics["val-aux/num_turns/max"]) == (3.0, 4.0)


def test_validation_is_the_mean_over_prompts_of_the_mean_over_samples():
    """Prompts weigh the same however many samples failed; acc is the core value, the score stands beside it."""
    samples = [
        ValidationSample("math", "p", {"acc": 1.0, "score": 0.9}),
        ValidationSample("math", "p", {"acc": 0.0, "score": 0.1}),
        ValidationSample("math", "q", {"acc": 1.0, "score": 0.9}),
        ValidationSample("math", "q", {}, failed=True),
        ValidationSample("code", "r", {"score": 0.3}),
    ]
    metrics = sample_metrics(samples)
    assert metrics["val-core/math/acc/mean@2"] == 0.75
    assert metrics["val-core/math/acc/best@2/mean"] == 1.0
    assert metrics["val-aux/math/acc/std@2"] == 0.25
    assert metrics["val-aux/math/score/mean@2"] == pytest.approx(0.7)
    assert metrics["val-core/code/score/mean@1"] == 0.3
    assert (metrics["val-aux/math/num_failed"], metrics["val-aux/code/num_failed"]) == (1.0, 0.0)
    assert sample_metrics([]) == {}


def test_a_source_of_which_everything_failed_has_no_mean():
    """No success and no invented zero: only the count of failures."""
    assert sample_metrics([ValidationSample("x", "p", {}, failed=True)]) == {"val-aux/x/num_failed": 1.0}


def test_validation_reads_trajectories():
    """The row names the source; ragged extras are read where they are numbers; text and NaN are left out."""
    trajectories = [
        trajectory("a", group="p", score=1.0, row={"data_source": "s"}, extra={"acc": True, "pred": "7"}),
        trajectory("b", group="q", score=0.0, row={"data_source": "s"}, extra={"acc": 0, "loss": float("nan")}),
        trajectory("c", group="r", row={"data_source": "s"}),
        trajectory("d", group="t", score=0.25),
    ]
    metrics = validation_metrics(trajectories)
    assert metrics["val-core/s/acc/mean@1"] == 0.5
    assert metrics["val-aux/s/score/mean@1"] == 0.5
    assert metrics["val-aux/s/num_failed"] == 1.0
    assert metrics["val-core/unknown/score/mean@1"] == 0.25
    assert not [name for name in metrics if "pred" in name or "loss" in name]
