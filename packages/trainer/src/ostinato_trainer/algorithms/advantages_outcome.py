"""Advantages out of one reward a trajectory: how it did beside the others of its group. Pure functions in float64.

Every function takes `rewards` [R] and `group_index` int64 [R] and returns float64 [R]. Two rules hold for all of them. A group of one has
no baseline: 0 is taken, as elsewhere in the field, so that its advantage is built on its plain reward. A group whose rewards are all equal
gets exactly 0: rounding residue is never taken for a difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato_trainer.errors import BatchError

__all__ = ["gpg", "group_centred", "grpo", "grpo_passk", "is_flat", "opo", "rloo"]

_EPSILON = 1e-6
_FLAT = 4 * 2.0**-23
"""Numbers that differ by no more than this, relative to the largest, are equal: a few roundings in float32."""


def grpo(rewards: Tensor, group_index: Tensor, *, norm_by_std: bool = True) -> Tensor:
    """Group-relative advantage (DeepSeekMath, arXiv:2402.03300): `(r - mean) / (std + 1e-6)` with the sample standard
    deviation.

    Without the division it is Dr. GRPO (arXiv:2503.20783). For a group of one mean 0 and deviation 1 are taken, so its
    advantage is its reward.

    Args:
        rewards: [R], one a trajectory.
        group_index: int64 [R].
        norm_by_std: Divide by the deviation.

    Raises:
        BatchError: the two disagree in shape, or a reward is not finite. So do the functions below.
    """
    groups = _grouped(rewards, group_index)
    centred = groups.centred()
    return groups.unless_flat(centred / (groups.deviation(centred) + _EPSILON) if norm_by_std else centred)


def group_centred(rewards: Tensor, group_index: Tensor) -> Tensor:
    """The reward minus the group's mean: what REINFORCE++-baseline (arXiv:2501.03262) whitens over the batch."""
    groups = _grouped(rewards, group_index)
    return groups.unless_flat(groups.centred())


def rloo(rewards: Tensor, group_index: Tensor) -> Tensor:
    """Leave-one-out advantage (arXiv:2402.14740): the reward minus the mean reward of the other trajectories of the
    group."""
    groups = _grouped(rewards, group_index)
    others = (groups.sum(groups.rewards) - groups.rewards) / (groups.counts - 1).clamp(min=1)
    return groups.unless_flat(groups.rewards - torch.where(groups.counts > 1, others, 0.0))


def opo(rewards: Tensor, group_index: Tensor, lengths: Tensor) -> Tensor:
    """Optimal baseline under length-proportional gradient norms (OPO, arXiv:2505.23585): `r - sum(l r) / sum(l)`.

    Args:
        rewards: [R], one a trajectory.
        group_index: int64 [R].
        lengths: int64 [R]; trained tokens of each trajectory, at least 1.
    """
    groups = _grouped(rewards, group_index)
    weights = lengths.to(torch.float64)
    baseline = groups.sum(weights * groups.rewards) / groups.sum(weights)
    return groups.unless_flat(groups.rewards - torch.where(groups.counts > 1, baseline, 0.0))


def gpg(rewards: Tensor, group_index: Tensor) -> Tensor:
    """Group policy gradient (arXiv:2504.02546): `alpha (r - mean)` with `alpha = R / (trajectories whose reward is not 0)`.

    The paper's alpha makes up for groups that teach nothing; counting rewards that are not 0 over the whole batch is how the field's
    implementations estimate it.
    """
    groups = _grouped(rewards, group_index)
    alpha = len(rewards) / max(1, int(groups.rewards.count_nonzero()))
    return groups.unless_flat(alpha * groups.centred())


def grpo_passk(rewards: Tensor, group_index: Tensor, *, norm_by_std: bool = True) -> Tensor:
    """Pass@k advantage (arXiv:2503.19595): the best of a group gets its lead over the second best, the others 0.

    Args:
        rewards: [R], one a trajectory.
        group_index: int64 [R].
        norm_by_std: Divide the lead by the group's sample standard deviation + 1e-6.

    Returns:
        float64 [R]; a group of one gets 0, as it has no second.
    """
    groups = _grouped(rewards, group_index)
    by_reward = torch.argsort(groups.rewards, descending=True, stable=True)
    ranked = by_reward[torch.argsort(groups.index[by_reward], stable=True)]
    is_first = torch.ones_like(ranked, dtype=torch.bool)
    is_first[1:] = groups.index[ranked[1:]] != groups.index[ranked[:-1]]
    best = ranked[is_first & (groups.counts[ranked] > 1)]
    second = ranked[1:][is_first[:-1] & ~is_first[1:]]
    lead = groups.rewards[best] - groups.rewards[second]
    if norm_by_std:
        lead = lead / (groups.deviation(groups.centred())[best] + _EPSILON)
    return groups.unless_flat(torch.zeros_like(groups.rewards).index_copy(0, best, lead))


def is_flat(lowest: Tensor, highest: Tensor) -> Tensor:
    """bool: whether numbers between these two are all equal but for rounding."""
    return highest - lowest <= _FLAT * torch.maximum(highest.abs(), lowest.abs())


@dataclass(frozen=True)
class _Groups:
    rewards: Tensor
    """float64 [R]."""
    index: Tensor
    """int64 [R], dense group numbers."""
    counts: Tensor
    """int64 [R]: size of the group of each trajectory."""
    flat: Tensor
    """bool [R]: it belongs to a group of several, all equal."""

    def sum(self, values: Tensor) -> Tensor:
        """For each trajectory the sum over its group."""
        size = int(self.index.max()) + 1 if len(self.index) else 0
        return values.new_zeros(size).index_add(0, self.index, values)[self.index]

    def centred(self) -> Tensor:
        """Rewards minus the group's mean, which is 0 for a group of one."""
        return self.rewards - torch.where(self.counts > 1, self.sum(self.rewards) / self.counts, 0.0)

    def deviation(self, centred: Tensor) -> Tensor:
        """For each trajectory the sample standard deviation of its group, 1 for a group of one."""
        variance = self.sum(centred.square()) / (self.counts - 1).clamp(min=1)
        return torch.where(self.counts > 1, variance, 1.0).sqrt()

    def unless_flat(self, advantages: Tensor) -> Tensor:
        return torch.where(self.flat, 0.0, advantages)


def _grouped(rewards: Tensor, group_index: Tensor) -> _Groups:
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
    names, index = torch.unique(group_index, return_inverse=True)
    counts = torch.bincount(index, minlength=len(names))[index]
    blank = rewards.new_zeros(len(names))
    lowest = blank.scatter_reduce(0, index, rewards, "amin", include_self=False)
    highest = blank.scatter_reduce(0, index, rewards, "amax", include_self=False)
    return _Groups(rewards, index, counts, flat=is_flat(lowest, highest)[index] & (counts > 1))
