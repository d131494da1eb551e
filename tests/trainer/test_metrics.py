"""Metrics: their names, and numbers worked out by hand."""

import math

import pytest
import torch

from ostinato_agent_loop import AgentLoopMetrics, AgentLoopOutput, RewardResult, Trajectory, TrajectoryEnd
from ostinato_rollout import Failure, FailureKind
from ostinato_trainer.batch import Batch
from ostinato_trainer.metrics import (
    ValidationSample,
    batch_metrics,
    log_prob_gap,
    sample_metrics,
    spread,
    step_metrics,
    timing_metrics,
    turn_metrics,
    validation_metrics,
)
from ostinato_trainer.segments import Segment


def make_batch():
    return Batch.from_segments(
        [
            Segment([1, 1], [2, 3], [1, 1], [-1.0, -2.0], "g", "a", 1.0),
            Segment([1], [2, 3, 4, 5], [1, 0, 0, 1], None, "g", "b", 0.0),
            Segment([1], [2], [1], [-1.0], "h", "c", 0.5),
        ]
    )


def test_spread():
    """Mean, largest, smallest; nothing of nothing."""
    assert spread("x", [1.0, 2.0, 6.0]) == {"x/mean": 3.0, "x/max": 6.0, "x/min": 1.0}
    assert spread("x", []) == {}


def test_batch_metrics_by_hand():
    """Scores count trajectories, advantages trained tokens only, lengths segments."""
    batch = make_batch()
    advantages = torch.where(batch.loss_mask, batch.token_ids.double(), 99.0)
    metrics = batch_metrics(batch.with_columns(advantages=advantages))
    assert metrics["critic/score/mean"] == metrics["critic/rewards/mean"] == 0.5
    assert (metrics["critic/score/max"], metrics["critic/score/min"]) == (1.0, 0.0)
    assert metrics["critic/advantages/mean"] == metrics["critic/returns/mean"] == (2 + 3 + 2 + 5 + 2) / 5
    assert metrics["critic/advantages/max"] == 5.0
    assert metrics["response_length/mean"] == pytest.approx(7 / 3)
    assert (metrics["prompt_length/max"], metrics["prompt_length/min"]) == (2.0, 1.0)
    assert metrics["perf/total_num_tokens"] == 11.0
    assert metrics["training/num_loss_tokens"] == 5.0
    assert metrics["training/frac_equal_reward_groups"] == 0.5
    assert all(type(value) is float for value in metrics.values())


def test_the_gap_by_hand():
    """Differences of probabilities and log-probabilities, and both KL estimates, on compared tokens only."""
    rollout = torch.tensor([math.log(0.5), math.log(0.2), float("nan"), -7.0])
    trainer = torch.tensor([math.log(0.4), math.log(0.3), -3.0, float("nan")])
    metrics = log_prob_gap(rollout, trainer, torch.tensor([True, True, True, False]))
    d = [math.log(0.4 / 0.5), math.log(0.3 / 0.2)]
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.1, abs=1e-6)
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.1, abs=1e-6)
    assert metrics["training/rollout_log_probs_diff_max"] == pytest.approx(d[1], abs=1e-6)
    assert metrics["rollout_corr/kl"] == pytest.approx(-(d[0] + d[1]) / 2, abs=1e-6)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(sum(math.exp(x) - x - 1 for x in d) / 2, abs=1e-6)
    assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)


def test_the_gap_at_the_edges():
    """Equal policies have no gap; nothing to compare gives no metric; a world apart stays finite."""
    same = torch.tensor([-1.0, -2.0])
    mask = torch.ones(2, dtype=torch.bool)
    assert log_prob_gap(same, same, mask)["rollout_corr/k3_kl"] == 0.0
    assert log_prob_gap(torch.full((2,), float("nan")), same, mask) == {}
    assert "training/rollout_actor_probs_pearson_corr" not in log_prob_gap(same[:1], same[:1], mask[:1])
    apart = log_prob_gap(torch.tensor([-1000.0, -1.0]), torch.tensor([-0.1, -1.0]), mask)
    assert all(math.isfinite(value) for value in apart.values())


def output(end=TrajectoryEnd.NO_TOOL_CALL, turns=2, calls=1):
    return AgentLoopOutput(
        prompt_ids=[1], response_ids=[2], response_mask=[1], num_turns=turns, stop_reason=end,
        metrics=AgentLoopMetrics(num_tool_calls=calls),
    )  # fmt: skip


def trajectory(name, *outputs, group="g", score=None, row=None, extra=None):
    return Trajectory(
        group_id=group,
        trajectory_id=name,
        row=row or {},
        segments=list(outputs),
        reward=None if score is None else RewardResult(score, extra or {}),
        failure=Failure("tool", FailureKind.TOOL, "broke") if score is None else None,
    )


def test_step_metrics_count_failures_beside_the_means():
    """A failed trajectory is counted, and enters neither turns nor the share of cut responses."""
    trajectories = [
        trajectory("a", output(turns=4, calls=3), score=1.0),
        trajectory("b", output(), output(TrajectoryEnd.RESPONSE_LENGTH, turns=6, calls=5), score=0.0),
        trajectory("c", output(TrajectoryEnd.RESPONSE_LENGTH, turns=50)),
        trajectory("d"),
    ]
    batch = make_batch()
    metrics = step_metrics(batch.with_columns(old_log_probs=torch.full((11,), -1.0)), trajectories)
    assert metrics["num_turns/mean"] == 5.0
    assert metrics["tool_call_counts/max"] == 5.0
    assert metrics["response_length/clip_ratio"] == 0.5
    assert metrics["training/num_failed_trajectories"] == 2.0
    assert metrics["training/num_trajectories"] == 3.0
    assert metrics["training/rollout_log_probs_diff_max"] == 1.0
    assert "training/rollout_log_probs_diff_max" not in step_metrics(batch, [])
    assert turn_metrics([], []) == {}


def test_timing():
    """Phases keep their names; the step's seconds give tokens per second and device."""
    metrics = timing_metrics({"gen": 1.5, "step": 2.0}, num_tokens=400, num_devices=2)
    assert metrics == {
        "timing_s/gen": 1.5,
        "timing_s/step": 2.0,
        "perf/time_per_step": 2.0,
        "perf/throughput": 100.0,
    }
    assert timing_metrics({"gen": 1.0}, num_tokens=1) == {"timing_s/gen": 1.0}


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
    assert metrics["val-core/math/acc/best@2"] == 1.0
    assert metrics["val-core/math/acc/std@2"] == 0.25
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
