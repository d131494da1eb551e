"""Advantages token by token: returns, generalized advantage estimation and whitening, as pure functions in float64.

They see *chains*: the trained tokens of a trajectory in the order in which they were sampled, segment after segment, and nothing else. What
tools wrote in between is neither a step nor a moment: it holds no reward, no value, and costs no discount. A chain ends with the
trajectory's last trained token, where its reward stands.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato_trainer.algorithms.advantages_outcome import is_flat
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import BatchError

__all__ = ["chain_order", "discounted_sums", "gae", "outcome_rewards", "token_rewards_of", "whiten"]

_VARIANCE_FLOOR = 1e-8


def chain_order(batch: Batch) -> Tensor:
    """int64 [S]: places of the trained tokens, trajectory after trajectory, each as it was sampled.

    The segments of a trajectory are one chain in the order in which they stand in the batch.
    """
    places = batch.loss_mask.nonzero().squeeze(1)
    return places[torch.argsort(batch.token_trajectory[places], stable=True)]


def token_rewards_of(batch: Batch) -> Tensor:
    """float64 [T]: the batch's `token_rewards`; without them each trajectory's reward on its last trained token.

    What stands on a token that is not trained on, such as a tool's, counts for the last trained one before it. A trajectory without a
    trained token has no place for a reward.

    Raises:
        BatchError: a token reward stands before the trajectory's first trained token, or is not finite.
    """
    if batch.token_rewards is not None:
        return _credited(batch.token_rewards, batch)
    order = chain_order(batch)
    trajectory = batch.token_trajectory[order]
    is_last = torch.ones_like(trajectory, dtype=torch.bool)
    is_last[:-1] = trajectory[1:] != trajectory[:-1]
    rewards = torch.zeros(batch.num_tokens, dtype=torch.float64)
    return rewards.index_copy(0, order[is_last], batch.rewards[trajectory[is_last]].to(torch.float64))


def outcome_rewards(batch: Batch) -> Tensor:
    """float64 [R]: one reward a trajectory; the sum of its `token_rewards` where there are any. Errors as `token_rewards_of`."""
    if batch.token_rewards is None:
        return batch.rewards.to(torch.float64)
    rewards = _credited(batch.token_rewards, batch)
    return torch.zeros_like(batch.rewards, dtype=torch.float64).index_add(0, batch.token_trajectory, rewards)


def discounted_sums(values: Tensor, trajectory: Tensor, decay: float) -> Tensor:
    """`y_t = x_t + decay y_(t+1)` within each trajectory, y being 0 behind its end.

    Computed by doubling: after k rounds every entry holds the sum over the next 2^k tokens.

    Args:
        values: [S], in chain order.
        trajectory: int64 [S]; equal numbers stand together.
        decay: In [0, 1].

    Returns:
        float64 [S].
    """
    sums, reach, factor = values.to(torch.float64), 1, decay
    longest = int(torch.unique_consecutive(trajectory, return_counts=True)[1].max()) if len(trajectory) else 0
    while reach < longest:
        ahead = torch.where(trajectory[reach:] == trajectory[:-reach], sums[reach:], 0.0)
        sums = torch.cat([sums[:-reach] + factor * ahead, sums[-reach:]])
        reach, factor = 2 * reach, factor * factor
    return sums


def gae(rewards: Tensor, values: Tensor, trajectory: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv:1506.02438) over chains.

    `delta_t = r_t + gamma V_(t+1) - V_t` and `A_t = delta_t + gamma lam A_(t+1)`, where t + 1 is the next trained token of the trajectory,
    whatever stands between; behind the last one both are 0. The critic learns `A_t + V_t`.

    Args:
        rewards: [S], in chain order.
        values: [S]; expectation before each token.
        trajectory: int64 [S].
        gamma: Discount from one trained token to the next.
        lam: Decay of the sum of errors; 1 is the return minus the value.

    Returns:
        Advantages and returns, float64 [S] each.
    """
    values = values.to(torch.float64)
    following = torch.zeros_like(values)
    following[:-1] = torch.where(trajectory[1:] == trajectory[:-1], values[1:], 0.0)
    advantages = discounted_sums(rewards.to(torch.float64) + gamma * following - values, trajectory, gamma * lam)
    return advantages, advantages + values


def whiten(values: Tensor) -> Tensor:
    """`(x - mean) / sqrt(var + 1e-8)` with the sample variance over all entries; exactly 0 where all are equal or there is one only.

    Args:
        values: [S].

    Returns:
        float64 [S].
    """
    values = values.to(torch.float64)
    if not len(values) or bool(is_flat(values.min(), values.max())):
        return torch.zeros_like(values)
    return (values - values.mean()) * torch.rsqrt(values.var() + _VARIANCE_FLOOR)


def _credited(rewards: Tensor, batch: Batch) -> Tensor:
    """float64 [T]: token rewards, those on tokens that are not trained on moved to the last trained token before them."""
    if not bool(torch.isfinite(rewards).all()):
        raise BatchError(
            f"token_rewards must be finite, got {rewards[~torch.isfinite(rewards)][0].item()}; leave failed trajectories out"
        )
    counted = batch.trajectory_loss_tokens[batch.token_trajectory] > 0
    paid = ((rewards != 0) & counted).nonzero().squeeze(1)
    order = torch.argsort(batch.token_trajectory, stable=True)
    place = torch.where(batch.loss_mask[order], torch.arange(len(order)), -1).cummax(0).values
    last_trained = torch.empty_like(order).index_copy(0, order, torch.where(place >= 0, order[place], -1))[paid]
    early = (last_trained < 0) | (batch.token_trajectory[last_trained] != batch.token_trajectory[paid])
    if bool(early.any()):
        first = int(paid[early][0])
        trajectory = batch.trajectory_ids[int(batch.token_trajectory[first])]
        raise BatchError(
            f"trajectory {trajectory!r}: token_rewards must be 0 before the first trained token, got {rewards[first].item()} at token {first}; "
            "put a reward on or behind the token that earned it"
        )
    return torch.zeros(len(order), dtype=torch.float64).index_add(0, last_trained, rewards[paid].to(torch.float64))
