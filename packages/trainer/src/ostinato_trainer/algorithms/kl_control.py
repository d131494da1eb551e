"""The divergence from the reference policy in the reward: how it is taken off, and the weight with which, fixed or steered towards a target.

What a controller has learned is one coefficient, which a resumed run takes up again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ostinato_trainer.algorithms.advantages_token import token_rewards_of
from ostinato_trainer.algorithms.kl import KLKind, kl_estimate
from ostinato_trainer.batch import Batch
from ostinato_trainer.config.algorithm import KLControlConfig
from ostinato_trainer.errors import BatchError, CheckpointError

__all__ = ["KLController", "with_kl_in_reward"]

_MAX_ERROR = 0.2


class KLController:
    """The coefficient beta in `reward - beta KL`.

    Adaptive (Ziegler et al., arXiv:1909.08593): `beta <- beta (1 + clip(KL / target - 1, -0.2, 0.2) min(n / horizon, 1))` after a step with n
    trajectories. Without the bound a step of many trajectories would set it to 0, where it would stay.

    Args:
        config: `algorithm.kl_ctrl`.
    """

    def __init__(self, config: KLControlConfig) -> None:
        self._config = config
        self.coef = config.kl_coef
        """The coefficient of the next step."""

    def update(self, kl: float, num_trajectories: int) -> None:
        """Move the coefficient after a step.

        Args:
            kl: Mean over the step's trajectories of their mean divergence a token.
            num_trajectories: How many there were.

        Raises:
            BatchError: `kl` is not a number.
        """
        if self._config.type == "fixed":
            return
        if kl != kl:
            raise BatchError(f"kl must be a number, got {kl}; look at the reference's log-probabilities")
        error = min(max(kl / self._config.target_kl - 1.0, -_MAX_ERROR), _MAX_ERROR)
        self.coef *= 1.0 + error * min(num_trajectories / self._config.horizon, 1.0)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the coefficient of `state_dict`.

        A fixed coefficient stays the configuration's, which may have been changed on purpose.

        Raises:
            CheckpointError: the state has no such number.
        """
        coef = state.get("coef")
        if not isinstance(coef, int | float) or not 0 <= coef < float("inf"):
            raise CheckpointError(
                f"state of the KL controller must hold a coefficient, got {dict(state)}; is it another's?"
            )
        if self._config.type == "adaptive":
            self.coef = float(coef)


def with_kl_in_reward(batch: Batch, kind: KLKind | str, coef: float) -> tuple[Batch, float]:
    """The batch with `token_rewards` from which `coef` times the divergence of each trained token is taken off.

    Args:
        batch: With `old_log_probs` and `ref_log_probs`.
        kind: See `kl_estimate`.
        coef: Weight of the divergence.

    Returns:
        The batch, and the divergence: the mean over trajectories of their mean a token; 0 where nothing is trained on.

    Raises:
        BatchError: a column is missing, or the divergence of a trained token is not finite.
    """
    if batch.old_log_probs is None or batch.ref_log_probs is None:
        missing = "old_log_probs" if batch.old_log_probs is None else "ref_log_probs"
        raise BatchError(f"{missing} must be set where the divergence is in the reward, got None; compute them first")
    policy, reference = batch.old_log_probs.to(torch.float64), batch.ref_log_probs.to(torch.float64)
    divergence = torch.where(batch.loss_mask, kl_estimate(policy, reference, kind), 0.0)
    if not bool(torch.isfinite(divergence).all()):
        raise BatchError(
            f"divergence from the reference must be finite, got {divergence[~torch.isfinite(divergence)][0].item()}; "
            "policy or reference gives log-probabilities that are not: lower the learning rate, or go back to an earlier checkpoint"
        )
    counted = batch.trajectory_loss_tokens > 0
    sums = torch.zeros_like(batch.rewards).index_add(0, batch.token_trajectory, divergence)
    means = sums[counted] / batch.trajectory_loss_tokens[counted]
    return batch.with_columns(token_rewards=token_rewards_of(batch) - coef * divergence), float(means.mean()) if len(
        means
    ) else 0.0
