"""Advantages: how much better a trajectory was than what was to be expected, as pure functions in float64.

Group estimators see one reward a trajectory: segments do not count twice, failed trajectories are not in the batch,
and a trajectory of which no token is trained on neither gets an advantage nor moves its siblings'. The advantage then
goes to every trained token of all segments of the trajectory; elsewhere it is 0.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import AlgorithmError, BatchError

_EPSILON = 1e-6
_FLAT = 4 * 2.0**-23
"""Rewards of a group that differ by no more than this, relative to the largest, are equal: a few roundings in
float32."""

_NEEDS_CRITIC = ("gae",)


class AdvantageOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the estimators read of `algorithm.*`."""

    norm_by_std: bool = True
    """`algorithm.norm_adv_by_std_in_grpo`: divide by the group's standard deviation; False is Dr. GRPO."""


AdvantageEstimator = Callable[[Batch, AdvantageOptions], Tensor]
"""From a batch to the advantage of each token, float64 [T], 0 outside the loss mask."""

_estimators: dict[str, AdvantageEstimator] = {}


def register_advantage_estimator(name: str) -> Callable[[AdvantageEstimator], AdvantageEstimator]:
    """Makes an estimator known as `algorithm.adv_estimator=name`.

    Raises:
        AlgorithmError: another estimator has this name.
    """

    def register(estimator: AdvantageEstimator) -> AdvantageEstimator:
        if _estimators.setdefault(name, estimator) is not estimator:
            raise AlgorithmError(
                f"adv_estimator name must be unique, got {name!r} twice; register it under another name"
            )
        return estimator

    return register


def advantage_estimator(name: str) -> AdvantageEstimator:
    """The estimator of that name.

    Raises:
        AlgorithmError: it does not exist or needs a part that this version does not have; the message lists those
            that exist.
    """
    if name in _estimators:
        return _estimators[name]
    known = ", ".join(sorted(_estimators))
    if name in _NEEDS_CRITIC:
        raise AlgorithmError(
            f"adv_estimator must be one of {known}, got {name!r}: it needs a critic, which this version does not have; "
            "use grpo or rloo"
        )
    raise AlgorithmError(f"adv_estimator must be one of {known}, got {name!r}; choose one of them or register your own")


def with_advantages(batch: Batch, name: str, options: AdvantageOptions | None = None) -> Batch:
    """The batch with its `advantages` column.

    Raises:
        AlgorithmError: see `advantage_estimator`.
        BatchError: the estimator returned something else than one finite number a token.
    """
    advantages = advantage_estimator(name)(batch, options or AdvantageOptions())
    if advantages.shape != batch.loss_mask.shape or not bool(torch.isfinite(advantages[batch.loss_mask]).all()):
        raise BatchError(
            f"advantages of {name!r} must be one finite number a token ({batch.num_tokens}), "
            f"got shape {list(advantages.shape)} or a number that is not finite; fix the estimator"
        )
    return batch.with_columns(advantages=torch.where(batch.loss_mask, advantages, 0.0))


def grpo(rewards: Tensor, group_index: Tensor, *, norm_by_std: bool = True) -> Tensor:
    """Group-relative advantage (DeepSeekMath, arXiv:2402.03300): `(r - mean) / (std + 1e-6)` with the sample standard
    deviation.

    Without the division it is Dr. GRPO (arXiv:2503.20783). A group whose rewards are all equal gets exactly 0. A
    group of one has no
    baseline: mean 0 and deviation 1 are taken, as elsewhere in the field, so its advantage is its reward.

    Args:
        rewards: [R], one a trajectory.
        group_index: int64 [R].
        norm_by_std: Divide by the deviation.

    Returns:
        float64 [R].
    """
    rewards, groups, counts, flat = _grouped(rewards, group_index)
    centred = rewards - torch.where(counts > 1, _sum_by_group(rewards, groups) / counts, 0.0)
    if norm_by_std:
        variance = _sum_by_group(centred.square(), groups) / (counts - 1).clamp(min=1)
        centred = centred / (torch.where(counts > 1, variance, 1.0).sqrt() + _EPSILON)
    return torch.where(flat, 0.0, centred)


def rloo(rewards: Tensor, group_index: Tensor) -> Tensor:
    """Leave-one-out advantage (arXiv:2402.14740): the reward minus the mean reward of the other trajectories of the
    group.

    A group whose rewards are all equal gets exactly 0; a group of one has no baseline, so its advantage is its reward.

    Args:
        rewards: [R], one a trajectory.
        group_index: int64 [R].

    Returns:
        float64 [R].
    """
    rewards, groups, counts, flat = _grouped(rewards, group_index)
    others = (_sum_by_group(rewards, groups) - rewards) / (counts - 1).clamp(min=1)
    return torch.where(flat, 0.0, rewards - torch.where(counts > 1, others, 0.0))


@register_advantage_estimator("grpo")
def _grpo_of_batch(batch: Batch, options: AdvantageOptions) -> Tensor:
    return _over_trajectories(batch, lambda rewards, groups: grpo(rewards, groups, norm_by_std=options.norm_by_std))


@register_advantage_estimator("rloo")
def _rloo_of_batch(batch: Batch, options: AdvantageOptions) -> Tensor:
    return _over_trajectories(batch, rloo)


def _over_trajectories(batch: Batch, estimate: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Applies a group estimator to the trajectories that have trained tokens and spreads the result over those
    tokens."""
    counted = batch.trajectory_loss_tokens > 0
    by_trajectory = torch.zeros(batch.num_trajectories, dtype=torch.float64)
    by_trajectory[counted] = estimate(batch.rewards[counted], batch.trajectory_group[counted])
    return torch.where(batch.loss_mask, by_trajectory[batch.token_trajectory], 0.0)


def _grouped(rewards: Tensor, group_index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rewards in float64, dense group numbers, and for each trajectory its group's size and whether that group of
    several is flat."""
    if rewards.ndim != 1 or rewards.shape != group_index.shape:
        raise BatchError(
            f"rewards and group_index must be vectors of one length, "
            f"got {list(rewards.shape)} and {list(group_index.shape)}; give one entry a trajectory"
        )
    if not bool(torch.isfinite(rewards).all()):
        raise BatchError(
            f"rewards must be finite, got {rewards[~torch.isfinite(rewards)][0].item()}; leave failed trajectories out"
        )
    rewards = rewards.to(torch.float64)
    names, groups = torch.unique(group_index, return_inverse=True)
    counts = torch.bincount(groups, minlength=len(names))[groups]
    blank = rewards.new_zeros(len(names))
    lowest = blank.scatter_reduce(0, groups, rewards, "amin", include_self=False)
    highest = blank.scatter_reduce(0, groups, rewards, "amax", include_self=False)
    flat = highest - lowest <= _FLAT * torch.maximum(highest.abs(), lowest.abs())
    return rewards, groups, counts, flat[groups] & (counts > 1)


def _sum_by_group(values: Tensor, groups: Tensor) -> Tensor:
    """For each trajectory the sum over its group."""
    return values.new_zeros(int(groups.max()) + 1 if len(groups) else 0).index_add(0, groups, values)[groups]
