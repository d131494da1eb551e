"""`LearningWatch`: says of a run that it teaches nothing, which its numbers alone show only to whoever knows where to look."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

logger = logging.getLogger(__name__)

PATIENCE: Final = 5
"""Steps without a gradient in a row after which it is said: one alone is common where batches are small."""


class LearningWatch:
    """Looks at the metrics of steps in their order, and says each thing once a run."""

    def __init__(self) -> None:
        self._said_tokens = self._said_gradient = False
        self._num_still = 0

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn where no token was trained on, or where no gradient has come of `PATIENCE` steps.

        Args:
            step: Its number.
            metrics: What it measured. Steps that do not train the policy, as in `trainer.critic_warmup`, say nothing about it.
        """
        if "actor/num_empty_mini_batches" not in metrics:
            return
        if not metrics["training/num_loss_tokens"] and not self._said_tokens:
            self._said_tokens = True
            logger.warning(
                "step %d: no token is trained on, so nothing is learned: agents returned none that was sampled (response_mask), or "
                "algorithm.rollout_correction rejected all",
                step,
            )
        self._num_still = self._num_still + 1 if metrics.get("actor/grad_norm") == 0.0 else 0
        if self._num_still == PATIENCE and not self._said_gradient:
            self._said_gradient = True
            logger.warning(
                "steps %d to %d had no gradient, so nothing is learned: trajectories of one prompt are rewarded alike (the last scores lie between "
                "%.4g and %.4g); see what the reward function gives, take rows that are sometimes solved, or a larger actor_rollout_ref.rollout.n",
                step - PATIENCE + 1,
                step,
                metrics["critic/score/min"],
                metrics["critic/score/max"],
            )
