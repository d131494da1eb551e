"""The weight of the divergence that is taken off the rewards: fixed, or steered towards a target.

Knows numbers only. What it has learned is one coefficient, which a resumed run takes up again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ostinato_trainer.config_algorithm import KLControlConfig
from ostinato_trainer.errors import BatchError, CheckpointError

__all__ = ["KLController"]

_MAX_ERROR = 0.2


class KLController:
    """The coefficient beta in `reward - beta KL`.

    Adaptive (Ziegler et al., arXiv:1909.08593): `beta <- beta (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon)` after a step with n
    trajectories.

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
        self.coef *= max(0.0, 1.0 + error * num_trajectories / self._config.horizon)

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
