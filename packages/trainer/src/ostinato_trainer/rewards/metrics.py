"""What reward functions found out beside the score, as numbers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from ostinato_agent_loop import RewardResult, Trajectory
from ostinato_trainer.metrics.spreads import spread

__all__ = ["numbers_of", "reward_metrics"]


def numbers_of(reward: RewardResult) -> dict[str, float]:
    """What is a finite number in `extra`, by name; true is 1."""
    found = {name: _number(value) for name, value in reward.extra.items()}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def reward_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`reward_extra/<name>/{mean,max,min}` over the trajectories whose reward has that number; failed ones have none."""
    values: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.failure is None and trajectory.reward is not None:
            for name, value in numbers_of(trajectory.reward).items():
                values[name].append(value)
    return {key: value for name, each in values.items() for key, value in spread(f"reward_extra/{name}", each).items()}


def _number(value: object) -> float:
    """NaN for what is no number."""
    if not isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an enormous integer
        return math.nan
