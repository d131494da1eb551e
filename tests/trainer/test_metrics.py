"""Metrics: their names, and numbers worked out by hand."""

import pytest
import torch

from ostinato_agent_loop import AgentLoopMetrics, AgentLoopOutput, RewardResult, Trajectory, TrajectoryEnd
from ostinato_rollout import Failure, FailureKind
from ostinato_trainer.batch import Batch
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.metrics.spreads import spread
from ostinato_trainer.metrics.step import batch_metrics, step_metrics, timing_metrics, tool_metrics, turn_metrics
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
    metrics = step_metrics(batch, trajectories)
    assert metrics["num_turns/mean"] == 5.0
    assert metrics["tool_call_counts/max"] == 5.0
    assert metrics["response_length/clip_ratio"] == 0.5
    assert metrics["training/num_failed_trajectories"] == 2.0
    assert metrics["training/num_trajectories"] == 3.0
    assert turn_metrics([], []) == {}


def test_timing():
    """Phases keep their names and are divided by the tokens they are about; the step's seconds give tokens per second and device."""
    counts = {"perf/total_num_tokens": 400.0, "training/num_response_tokens": 300.0}
    metrics = timing_metrics({"gen": 1.5, "update_actor": 0.4, "step": 2.0}, counts, num_devices=2)
    assert metrics == {
        "timing_s/gen": 1.5,
        "timing_s/update_actor": 0.4,
        "timing_s/step": 2.0,
        "timing_per_token_ms/gen": 5.0,
        "timing_per_token_ms/update_actor": 1.0,
        "perf/time_per_step": 2.0,
        "perf/throughput": 100.0,
    }
    assert timing_metrics({"gen": 1.0}, {}) == {"timing_s/gen": 1.0}


def test_throughput_is_training_s_alone():
    """A validation and a checkpoint within a step do not make training look slower."""
    counts = {"perf/total_num_tokens": 400.0}
    metrics = timing_metrics({"testing": 5.0, "save_checkpoint": 1.0, "step": 8.0}, counts)
    assert (metrics["timing_s/step"], metrics["perf/time_per_step"], metrics["perf/throughput"]) == (8.0, 2.0, 200.0)


def test_tools_are_counted_by_call_and_by_failure():
    """Calls a trajectory, and the share that did not end well; of nothing called there is no share."""
    assert tool_metrics([{"ok": 3, "timeout": 1}, {}]) == {"tools/call_frequency": 2.0, "tools/failure_frequency": 0.25}
    assert tool_metrics([{}]) == {"tools/call_frequency": 0.0}
    assert tool_metrics([]) == {}


def test_a_penalty_stands_between_score_and_rewards():
    """With rewards token by token, `critic/rewards` is their sum over a trajectory, `critic/score` what was scored."""
    batch = make_batch()
    penalised = batch.with_columns(token_rewards=torch.where(batch.loss_mask, -0.5, 0.0).double())
    metrics = batch_metrics(penalised, max_prompt_length=2)
    assert (metrics["critic/score/mean"], metrics["critic/rewards/min"], metrics["critic/rewards/max"]) == (
        0.5,
        -1.0,
        -0.5,
    )
    assert metrics["prompt_length/clip_ratio"] == pytest.approx(1 / 3)


def test_responses_without_a_token_are_told_apart():
    """A trajectory that sampled nothing counts as aborted, and in no length of those that did."""
    batch = Batch.from_segments(
        [Segment([1], [2, 3], [1, 1], None, "g", "a", 1.0), Segment([1], [], [], None, "g", "b", 0.0)]
    )
    metrics = batch_metrics(batch)
    assert (metrics["response_length/mean"], metrics["response_length_non_aborted/mean"]) == (1.0, 2.0)
    assert metrics["response/aborted_ratio"] == 0.5


@pytest.mark.parametrize(
    ("overrides", "number"),
    [
        ((), 1),
        (("trainer.nnodes=2", "trainer.n_gpus_per_node=4"), 1),
        (("actor_rollout_ref.actor.strategy=fsdp2", "trainer.n_gpus_per_node=4"), 4),
    ],
)
def test_throughput_counts_the_devices_that_train(overrides: tuple[str, ...], number: int) -> None:
    """One device, however many engines have, without ranks; else one a rank, over which tokens per second are divided."""
    config = load_config([], ["trainer.executor=ray", *overrides])
    assert config.num_training_devices == number
    metrics = timing_metrics({"step": 2.0}, {"perf/total_num_tokens": 80.0}, num_devices=config.num_training_devices)
    assert metrics["perf/throughput"] == 40.0 / number
