"""Which advantage estimator there is under which name, and how it gets from a batch to an advantage for each token.

The formulas are in `advantages_outcome` (one reward a trajectory) and `advantages_token` (token by token). Whatever the estimator: segments do
not count twice, failed trajectories are not in the batch, and a trajectory of which no token is trained on neither gets an advantage nor moves
its siblings'. Advantages stand on trained tokens; elsewhere they are 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from ostinato_trainer.algorithms.advantages_outcome import gpg, group_centred, grpo, grpo_passk, opo, rloo
from ostinato_trainer.algorithms.advantages_token import (
    chain_order,
    discounted_sums,
    gae,
    outcome_rewards,
    token_rewards_of,
    whiten,
)
from ostinato_trainer.batch import Batch
from ostinato_trainer.custom_code import load_function
from ostinato_trainer.errors import AlgorithmError, BatchError

__all__ = [
    "AdvantageEstimator",
    "AdvantageOptions",
    "Estimate",
    "advantage_estimator",
    "grpo",
    "needs_baseline",
    "needs_critic",
    "register_advantage_estimator",
    "rloo",
    "with_advantages",
]


class AdvantageOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the estimators read of `algorithm.*`."""

    norm_by_std: bool = True
    """`norm_adv_by_std_in_grpo`: divide by the group's standard deviation; False is Dr. GRPO."""
    gamma: float = 1.0
    """Discount from one trained token to the next, in [0, 1]."""
    lam: float = 1.0
    """Decay of generalized advantage estimation, in [0, 1]."""
    whiten: bool = True
    """`whiten_advantages`: give advantages mean 0 and variance 1 over the trained tokens of the batch, where the estimator does."""

    def __post_init__(self) -> None:
        for name, value in (("gamma", self.gamma), ("lam", self.lam)):
            if not 0 <= value <= 1:
                raise BatchError(f"{name} must lie in [0, 1], got {value}; 1.0 is usual")


@dataclass(frozen=True)
class Estimate:
    """Advantages, and what a critic should learn from them."""

    advantages: Tensor
    """float64 [T], 0 outside the loss mask."""
    returns: Tensor
    """float64 [T], 0 outside the loss mask."""


AdvantageEstimator = Callable[[Batch, AdvantageOptions], Tensor | Estimate]
"""From a batch to the advantage of each token, float64 [T], 0 outside the loss mask; with returns where a critic learns."""


@dataclass(frozen=True)
class _Entry:
    estimate: AdvantageEstimator
    needs_critic: bool
    needs_baseline: bool


_estimators: dict[str, _Entry] = {}


def register_advantage_estimator(
    name: str, *, needs_critic: bool = False, needs_baseline: bool = False
) -> Callable[[AdvantageEstimator], AdvantageEstimator]:
    """Makes an estimator known as `algorithm.adv_estimator=name`.

    Args:
        name: As it is written in the configuration.
        needs_critic: It reads `batch.values`; a critic is then trained beside the policy.
        needs_baseline: It reads `batch.baselines`; a greedy trajectory is then sampled for each prompt.

    Raises:
        AlgorithmError: another estimator has this name.
    """

    def register(estimator: AdvantageEstimator) -> AdvantageEstimator:
        entry = _Entry(estimator, needs_critic, needs_baseline)
        if _estimators.setdefault(name, entry) != entry:
            raise AlgorithmError(
                f"adv_estimator name must be unique, got {name!r} twice; register it under another name"
            )
        return estimator

    return register


def advantage_estimator(name: str) -> AdvantageEstimator:
    """The estimator of that name, or the function that `module:function` or `file.py:function` names.

    Raises:
        AlgorithmError: it does not exist, the message lists those that exist; or its file cannot be imported.
    """
    return _entry(name).estimate


def needs_critic(name: str) -> bool:
    """Whether this estimator reads `batch.values`. Errors as `advantage_estimator`."""
    return _entry(name).needs_critic


def needs_baseline(name: str) -> bool:
    """Whether this estimator reads `batch.baselines`. Errors as `advantage_estimator`."""
    return _entry(name).needs_baseline


def with_advantages(batch: Batch, name: str, options: AdvantageOptions | None = None) -> Batch:
    """The batch with its `advantages` column, and its `returns` where the estimator gives them.

    Raises:
        AlgorithmError: see `advantage_estimator`.
        BatchError: a column that the estimator reads is missing, or it returned something else than one finite number a token.
    """
    estimate = advantage_estimator(name)(batch, options or AdvantageOptions())
    if isinstance(estimate, Tensor):
        return batch.with_columns(advantages=_checked(estimate, batch, name, "advantages"))
    if not isinstance(estimate, Estimate):
        raise BatchError(
            f"{name!r} must return a tensor or an Estimate, got {type(estimate).__name__}; fix the estimator"
        )
    return batch.with_columns(
        advantages=_checked(estimate.advantages, batch, name, "advantages"),
        returns=_checked(estimate.returns, batch, name, "returns"),
    )


@register_advantage_estimator("grpo")
def _grpo_of_batch(batch: Batch, options: AdvantageOptions) -> Tensor:
    return _over_trajectories(batch, lambda rewards, groups: grpo(rewards, groups, norm_by_std=options.norm_by_std))


@register_advantage_estimator("grpo_passk")
def _grpo_passk_of_batch(batch: Batch, options: AdvantageOptions) -> Tensor:
    return _over_trajectories(
        batch, lambda rewards, groups: grpo_passk(rewards, groups, norm_by_std=options.norm_by_std)
    )


@register_advantage_estimator("rloo")
def _rloo_of_batch(batch: Batch, options: AdvantageOptions) -> Tensor:
    return _over_trajectories(batch, rloo)


@register_advantage_estimator("opo")
def _opo_of_batch(batch: Batch, options: AdvantageOptions) -> Tensor:
    lengths = batch.trajectory_loss_tokens[batch.trajectory_loss_tokens > 0]
    return _over_trajectories(batch, lambda rewards, groups: opo(rewards, groups, lengths))


@register_advantage_estimator("gpg")
def _gpg_of_batch(batch: Batch, options: AdvantageOptions) -> Tensor:
    return _over_trajectories(batch, gpg)


@register_advantage_estimator("reinforce_plus_plus_baseline")
def _reinforce_plus_plus_baseline_of_batch(batch: Batch, options: AdvantageOptions) -> Tensor:
    """REINFORCE++ with a group baseline (arXiv:2501.03262): the centred outcome on every trained token, whitened over the batch."""
    advantages = _over_trajectories(batch, group_centred)
    return _on_tokens(batch, batch.loss_mask, whiten(advantages[batch.loss_mask])) if options.whiten else advantages


@register_advantage_estimator("reinforce_plus_plus")
def _reinforce_plus_plus_of_batch(batch: Batch, options: AdvantageOptions) -> Estimate:
    """REINFORCE++ (arXiv:2501.03262): discounted reward to go, whitened over the batch."""
    order = chain_order(batch)
    returns = discounted_sums(token_rewards_of(batch)[order], batch.token_trajectory[order], options.gamma)
    return Estimate(
        advantages=_on_tokens(batch, order, whiten(returns) if options.whiten else returns),
        returns=_on_tokens(batch, order, returns),
    )


@register_advantage_estimator("remax", needs_baseline=True)
def _remax_of_batch(batch: Batch, options: AdvantageOptions) -> Estimate:
    """ReMax (arXiv:2310.10505): reward to go minus the reward of a greedy trajectory for the same prompt."""
    if batch.baselines is None:
        raise BatchError(
            "baselines must be set for remax, got None; give each trajectory the reward of a greedy trajectory for its prompt"
        )
    order = chain_order(batch)
    trajectory = batch.token_trajectory[order]
    returns = discounted_sums(token_rewards_of(batch)[order], trajectory, 1.0)
    return Estimate(
        advantages=_on_tokens(batch, order, returns - batch.baselines[trajectory]),
        returns=_on_tokens(batch, order, returns),
    )


@register_advantage_estimator("gae", needs_critic=True)
def _gae_of_batch(batch: Batch, options: AdvantageOptions) -> Estimate:
    if batch.values is None:
        raise BatchError("values must be set for gae, got None; ask the critic for them")
    order = chain_order(batch)
    values = batch.values[order]
    if not bool(torch.isfinite(values).all()):
        raise BatchError(
            f"values must be finite, got {values[~torch.isfinite(values)][0].item()}; the critic has diverged, lower critic.optim.lr"
        )
    advantages, returns = gae(
        token_rewards_of(batch)[order],
        values,
        batch.token_trajectory[order],
        gamma=options.gamma,
        lam=options.lam,
    )
    return Estimate(
        advantages=_on_tokens(batch, order, whiten(advantages) if options.whiten else advantages),
        returns=_on_tokens(batch, order, returns),
    )


def _entry(name: str) -> _Entry:
    if ":" in name and name not in _estimators:
        estimator = load_function(name, key="algorithm.adv_estimator", error=AlgorithmError)
        registered = (entry for entry in _estimators.values() if entry.estimate is estimator)
        _estimators[name] = next(registered, _Entry(estimator, needs_critic=False, needs_baseline=False))
    if name not in _estimators:
        known = ", ".join(sorted(known for known in _estimators if ":" not in known))
        raise AlgorithmError(
            f"adv_estimator must be one of {known}, got {name!r}; choose one of them, or name your own as file.py:function"
        )
    return _estimators[name]


def _over_trajectories(batch: Batch, estimate: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Applies a group estimator to the trajectories that have trained tokens and spreads the result over those
    tokens."""
    counted = batch.trajectory_loss_tokens > 0
    by_trajectory = torch.zeros(batch.num_trajectories, dtype=torch.float64)
    by_trajectory[counted] = estimate(outcome_rewards(batch)[counted], batch.trajectory_group[counted])
    return torch.where(batch.loss_mask, by_trajectory[batch.token_trajectory], 0.0)


def _on_tokens(batch: Batch, places: Tensor, values: Tensor) -> Tensor:
    """float64 [T]: `values` at `places` (positions or a mask), 0 elsewhere."""
    column = torch.zeros(batch.num_tokens, dtype=torch.float64)
    column[places] = values
    return column


def _checked(column: object, batch: Batch, name: str, what: str) -> Tensor:
    if not isinstance(column, Tensor):
        raise BatchError(f"{what} of {name!r} must be a tensor, got {type(column).__name__}; fix the estimator")
    if column.shape != batch.loss_mask.shape or not bool(torch.isfinite(column[batch.loss_mask]).all()):
        raise BatchError(
            f"{what} of {name!r} must be one finite number a token ({batch.num_tokens}), "
            f"got shape {list(column.shape)} or a number that is not finite; fix the estimator"
        )
    return torch.where(batch.loss_mask, column, 0.0)
