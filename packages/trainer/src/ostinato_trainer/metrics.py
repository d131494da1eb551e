"""From batches and trajectories to numbers under the field's metric names: pure functions, float64 inside, plain
floats outside.

A metric that has nothing to say (no trained token, no validation sample) is absent, never NaN or an invented 0.
Failed trajectories are in no mean; they are counted beside it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from ostinato_agent_loop import Trajectory, TrajectoryEnd
from ostinato_trainer.batch import Batch

_LENGTH_ENDS = (TrajectoryEnd.RESPONSE_LENGTH, TrajectoryEnd.TURN_LENGTH, TrajectoryEnd.TOOL_RESPONSE_LENGTH)
_MAX_LOG_RATIO = 20.0


class ValidationSample(msgspec.Struct, frozen=True):
    """One answer to one validation prompt."""

    data_source: str
    prompt_id: str
    """Samples of one prompt share it."""
    values: Mapping[str, float]
    """What the reward function found, by name: `score`, `acc`, ... Empty where the trajectory failed."""
    failed: bool = False


def spread(name: str, values: Tensor | Sequence[float]) -> dict[str, float]:
    """`name/mean`, `name/max` and `name/min`; nothing where there are no values."""
    values = torch.as_tensor(values, dtype=torch.float64)
    if not values.numel():
        return {}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def batch_metrics(batch: Batch) -> dict[str, float]:
    """What the batch alone says: `critic/{score,rewards,advantages,returns}`, `prompt_length`, `response_length`,
    `perf/total_num_tokens`.

    Scores count trajectories, advantages and returns trained tokens, lengths segments. Without a critic, returns are
    the advantages.
    """
    metrics = {**spread("critic/score", batch.rewards), **spread("critic/rewards", batch.rewards)}
    if batch.advantages is not None:
        trained = batch.advantages[batch.loss_mask]
        metrics |= {**spread("critic/advantages", trained), **spread("critic/returns", trained)}
    metrics |= spread("prompt_length", batch.prompt_lengths)
    metrics |= spread("response_length", batch.response_lengths)
    metrics["perf/total_num_tokens"] = float(batch.num_tokens)
    metrics["training/num_loss_tokens"] = float(batch.num_loss_tokens)
    metrics["training/frac_equal_reward_groups"] = _share_of_flat_groups(batch)
    return metrics


def log_prob_gap(rollout_log_probs: Tensor, log_probs: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the engine's log-probabilities are from the trainer's on the tokens that the engine sampled.

    Where both compute the same policy, every difference is an error: of precision, of sampling parameters, of stale
    weights.

    Args:
        rollout_log_probs: float [T], NaN where the engine reported none.
        log_probs: float [T], the trainer's, of the same policy.
        mask: bool [T].

    Returns:
        `training/rollout_probs_diff_{mean,max,std}` of |p_rollout - p_trainer|;
        `training/rollout_log_probs_diff_{mean,max}`; `training/rollout_actor_probs_pearson_corr`, absent where a side
        is constant; and KL(rollout || trainer) estimated by `rollout_corr/kl` (k1, may be negative) and
        `rollout_corr/k3_kl`. Nothing where no token can be compared.
    """
    known = mask & ~rollout_log_probs.isnan()
    rollout, trainer = rollout_log_probs[known].double(), log_probs[known].double()
    if not rollout.numel():
        return {}
    differences = (rollout.exp() - trainer.exp()).abs()
    log_ratio = (trainer - rollout).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    metrics = {
        "training/rollout_probs_diff_mean": float(differences.mean()),
        "training/rollout_probs_diff_max": float(differences.max()),
        "training/rollout_probs_diff_std": float(differences.std(correction=0)),
        "training/rollout_log_probs_diff_mean": float((rollout - trainer).abs().mean()),
        "training/rollout_log_probs_diff_max": float((rollout - trainer).abs().max()),
        "rollout_corr/kl": float(-log_ratio.mean()),
        "rollout_corr/k3_kl": float((log_ratio.expm1() - log_ratio).mean()),
    }
    centred, other = rollout.exp() - rollout.exp().mean(), trainer.exp() - trainer.exp().mean()
    scale = float(centred.square().sum().sqrt() * other.square().sum().sqrt())
    if scale > 0:
        metrics["training/rollout_actor_probs_pearson_corr"] = float((centred * other).sum()) / scale
    return metrics


def turn_metrics(num_turns: Sequence[int], num_tool_calls: Sequence[int]) -> dict[str, float]:
    """`num_turns/*` and `tool_call_counts/*`, one entry a trajectory."""
    return {**spread("num_turns", num_turns), **spread("tool_call_counts", num_tool_calls)}


def step_metrics(batch: Batch, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """All that a step's batch and trajectories say: `batch_metrics`, turns, cut responses, failures, and the gap to
    the engine.

    Args:
        batch: What was trained on; with `old_log_probs` of the policy that sampled, the gap is measured.
        trajectories: All of the step, failed ones included.
    """
    ends = [
        trajectory.segments[-1] for trajectory in trajectories if trajectory.failure is None and trajectory.segments
    ]
    metrics = batch_metrics(batch)
    metrics |= turn_metrics([end.num_turns for end in ends], [end.metrics.num_tool_calls for end in ends])
    if ends:
        metrics["response_length/clip_ratio"] = sum(end.stop_reason in _LENGTH_ENDS for end in ends) / len(ends)
    metrics["training/num_trajectories"] = float(batch.num_trajectories)
    metrics["training/num_failed_trajectories"] = float(
        sum(trajectory.failure is not None for trajectory in trajectories)
    )
    if batch.old_log_probs is not None:
        metrics |= log_prob_gap(batch.rollout_log_probs, batch.old_log_probs, batch.loss_mask)
    return metrics


def timing_metrics(seconds: Mapping[str, float], *, num_tokens: int, num_devices: int = 1) -> dict[str, float]:
    """`timing_s/<phase>`, and from the phase `step` `perf/time_per_step` and `perf/throughput` (tokens per second and
    device)."""
    metrics = {f"timing_s/{phase}": value for phase, value in seconds.items()}
    if seconds.get("step", 0.0) > 0:
        metrics["perf/time_per_step"] = seconds["step"]
        metrics["perf/throughput"] = num_tokens / seconds["step"] / num_devices
    return metrics


def validation_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The metrics of `sample_metrics` from a validation rollout; a row without `data_source` counts under `unknown`."""
    return sample_metrics(_sample_of(trajectory) for trajectory in trajectories)


def sample_metrics(samples: Iterable[ValidationSample]) -> dict[str, float]:
    """Validation by data source: `val-core/<source>/<core>/mean@N`, the rest under `val-aux/<source>/...`.

    The core value is `acc` where there is one, else `score`. N is the number of samples of a prompt, the largest
    where they differ; the mean is over prompts of the mean over a prompt's samples. For N above 1 `best@N` and
    `std@N` are added. Failed samples are in none of them; `val-aux/<source>/num_failed` counts them.
    """
    by_source: dict[str, dict[str, list[ValidationSample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        by_source[sample.data_source][sample.prompt_id].append(sample)
    metrics: dict[str, float] = {}
    for source, prompts in by_source.items():
        number = max(len(group) for group in prompts.values())
        names = dict.fromkeys(name for group in prompts.values() for sample in group for name in sample.values)
        core = "acc" if "acc" in names else "score"
        for name in names:
            prefix = f"val-core/{source}/{name}" if name == core else f"val-aux/{source}/{name}"
            metrics |= _over_prompts(prefix, number, _values_by_prompt(prompts.values(), name))
        metrics[f"val-aux/{source}/num_failed"] = float(
            sum(sample.failed for group in prompts.values() for sample in group)
        )
    return metrics


def _values_by_prompt(groups: Iterable[Sequence[ValidationSample]], name: str) -> list[np.ndarray]:
    values = (
        np.array([sample.values[name] for sample in group if name in sample.values], dtype=np.float64)
        for group in groups
    )
    return [of_prompt for of_prompt in values if of_prompt.size]


def _over_prompts(prefix: str, number: int, values: Sequence[np.ndarray]) -> dict[str, float]:
    metrics = {f"{prefix}/mean@{number}": float(np.mean([of_prompt.mean() for of_prompt in values]))}
    if number > 1:
        metrics[f"{prefix}/best@{number}"] = float(np.mean([of_prompt.max() for of_prompt in values]))
        metrics[f"{prefix}/std@{number}"] = float(np.mean([of_prompt.std() for of_prompt in values]))
    return metrics


def _sample_of(trajectory: Trajectory) -> ValidationSample:
    source = str(trajectory.row.get("data_source") or "unknown")
    if trajectory.failure is not None or trajectory.reward is None:
        return ValidationSample(source, trajectory.group_id, {}, failed=True)
    found = {name: float(value) for name, value in trajectory.reward.extra.items() if _is_number(value)}
    return ValidationSample(source, trajectory.group_id, {**found, "score": trajectory.reward.score})


def _is_number(value: object) -> bool:
    return isinstance(value, bool | int | float | np.number) and math.isfinite(value)


def _share_of_flat_groups(batch: Batch) -> float:
    """Share of the groups whose trajectories all have the same reward: they teach nothing."""
    blank = batch.rewards.new_zeros(batch.num_groups)
    lowest = blank.scatter_reduce(0, batch.trajectory_group, batch.rewards, "amin", include_self=False)
    highest = blank.scatter_reduce(0, batch.trajectory_group, batch.rewards, "amax", include_self=False)
    return float((lowest == highest).double().mean())
