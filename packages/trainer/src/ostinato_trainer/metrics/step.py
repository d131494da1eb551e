"""From batches and trajectories to numbers under the field's metric names: pure functions, float64 inside, plain
floats outside.

A metric that has nothing to say (no trained token, no validation sample) is absent, never NaN or an invented 0.
Failed trajectories are in no mean; they are counted beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ostinato_agent_loop import Trajectory, TrajectoryEnd
from ostinato_trainer.batch import Batch
from ostinato_trainer.metrics.spreads import spread
from ostinato_trainer.rewards.metrics import reward_metrics

__all__ = ["batch_metrics", "step_metrics", "timing_metrics", "tool_metrics", "turn_metrics"]

_LENGTH_ENDS = (TrajectoryEnd.RESPONSE_LENGTH, TrajectoryEnd.TURN_LENGTH, TrajectoryEnd.TOOL_RESPONSE_LENGTH)
_OK = "ok"
_ALL_TOKENS = "perf/total_num_tokens"
_RESPONSE_TOKENS = "training/num_response_tokens"
_BESIDE_TRAINING = ("testing", "save_checkpoint")
_TOKENS_OF_PHASE = {
    "gen": _RESPONSE_TOKENS,
    **dict.fromkeys(("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor"), _ALL_TOKENS),
}


def batch_metrics(batch: Batch, *, max_prompt_length: int | None = None) -> dict[str, float]:
    """What the batch alone says: `critic/{score,rewards,advantages,returns,values}`, `prompt_length`,
    `response_length`, `perf/total_num_tokens`, ...

    Scores and rewards count trajectories, advantages, returns and values trained tokens, lengths segments. Rewards are
    scores less what a KL penalty takes. Without a critic, returns are the advantages.

    Args:
        batch: What was trained on.
        max_prompt_length: With it there is `prompt_length/clip_ratio`, the share of segments with a prompt that long.
    """
    metrics = {**spread("critic/score", batch.rewards), **spread("critic/rewards", _rewards(batch))}
    if batch.advantages is not None:
        returns = batch.advantages if batch.returns is None else batch.returns
        metrics |= spread("critic/advantages", batch.advantages[batch.loss_mask])
        metrics |= spread("critic/returns", returns[batch.loss_mask])
    if batch.values is not None:
        metrics |= spread("critic/values", batch.values[batch.loss_mask])
    metrics |= spread("prompt_length", batch.prompt_lengths)
    if max_prompt_length is not None:
        metrics["prompt_length/clip_ratio"] = float((batch.prompt_lengths >= max_prompt_length).double().mean())
    metrics |= spread("response_length", batch.response_lengths)
    some = batch.response_lengths > 0
    metrics |= spread("response_length_non_aborted", batch.response_lengths[some])
    metrics["response/aborted_ratio"] = float((~some).double().mean())
    metrics[_ALL_TOKENS] = float(batch.num_tokens)
    metrics[_RESPONSE_TOKENS] = float(batch.response_lengths.sum())
    metrics["training/num_loss_tokens"] = float(batch.num_loss_tokens)
    metrics["training/frac_equal_reward_groups"] = _share_of_flat_groups(batch)
    return metrics


def turn_metrics(num_turns: Sequence[int], num_tool_calls: Sequence[int]) -> dict[str, float]:
    """`num_turns/*` and `tool_call_counts/*`, one entry a trajectory."""
    return {**spread("num_turns", num_turns), **spread("tool_call_counts", num_tool_calls)}


def tool_metrics(outcomes: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """`tools/call_frequency`, calls a trajectory, and `tools/failure_frequency`, the share of calls that did not end
    well; the latter is absent where nothing was called.

    Args:
        outcomes: Counts of calls by outcome, one mapping a trajectory.
    """
    if not outcomes:
        return {}
    num_calls = sum(sum(each.values()) for each in outcomes)
    metrics = {"tools/call_frequency": num_calls / len(outcomes)}
    if num_calls:
        metrics["tools/failure_frequency"] = 1.0 - sum(each.get(_OK, 0) for each in outcomes) / num_calls
    return metrics


def step_metrics(
    batch: Batch, trajectories: Sequence[Trajectory], *, max_prompt_length: int | None = None
) -> dict[str, float]:
    """All that a step's batch and trajectories say: `batch_metrics`, turns, tools, cut responses, failures, and
    what rewards say beside the score.

    Args:
        batch: What was trained on.
        trajectories: All of the step, failed ones included.
        max_prompt_length: See `batch_metrics`.
    """
    ends = [
        trajectory.segments[-1] for trajectory in trajectories if trajectory.failure is None and trajectory.segments
    ]
    metrics = batch_metrics(batch, max_prompt_length=max_prompt_length)
    metrics |= turn_metrics([end.num_turns for end in ends], [end.metrics.num_tool_calls for end in ends])
    metrics |= tool_metrics([end.metrics.tool_outcomes for end in ends])
    if ends:
        metrics["response_length/clip_ratio"] = sum(end.stop_reason in _LENGTH_ENDS for end in ends) / len(ends)
    metrics["training/num_trajectories"] = float(batch.num_trajectories)
    metrics["training/num_failed_trajectories"] = float(
        sum(trajectory.failure is not None for trajectory in trajectories)
    )
    return metrics | reward_metrics(trajectories)


def timing_metrics(
    seconds: Mapping[str, float], metrics: Mapping[str, float], *, num_devices: int = 1
) -> dict[str, float]:
    """`timing_s/<phase>`, `timing_per_token_ms/<phase>`, and from the phase `step`, less the validation and the checkpoint in it,
    `perf/time_per_step` and `perf/throughput` (tokens per second and device).

    Args:
        seconds: By phase.
        metrics: Of the step's batch, whose tokens the times are divided by: sampling by those of the responses, what
            follows it by all.
        num_devices: That trained.
    """
    named = {f"timing_s/{phase}": value for phase, value in seconds.items()}
    for phase, count in _TOKENS_OF_PHASE.items():
        if phase in seconds and metrics.get(count):
            named[f"timing_per_token_ms/{phase}"] = 1000.0 * seconds[phase] / metrics[count]
    training_s = seconds.get("step", 0.0) - sum(seconds.get(phase, 0.0) for phase in _BESIDE_TRAINING)
    if training_s > 0 and _ALL_TOKENS in metrics:
        named["perf/time_per_step"] = training_s
        named["perf/throughput"] = metrics[_ALL_TOKENS] / training_s / num_devices
    return named


def _rewards(batch: Batch) -> Tensor:
    """float64 [R]: what each trajectory earns over all its tokens."""
    if batch.token_rewards is None:
        return batch.rewards
    return torch.zeros_like(batch.rewards).index_add(0, batch.token_trajectory, batch.token_rewards.to(batch.rewards))


def _share_of_flat_groups(batch: Batch) -> float:
    """Share of the groups whose trajectories all have the same reward: they teach nothing."""
    blank = batch.rewards.new_zeros(batch.num_groups)
    lowest = blank.scatter_reduce(0, batch.trajectory_group, batch.rewards, "amin", include_self=False)
    highest = blank.scatter_reduce(0, batch.trajectory_group, batch.rewards, "amax", include_self=False)
    return float((lowest == highest).double().mean())
