"""What a reward is made of: the weighted sum of parts, and the punishment of answers that are nearly too long.

Pure arithmetic. The parts are recorded under names of their own, unweighted, so that a curve shows which of them rose.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Final

from ostinato_trainer.config.reward import CombineConfig, OverlongBufferConfig, RewardConfig
from ostinato_trainer.errors import RewardError

__all__ = ["PART_NAMES", "combined", "is_score_alone", "overlong_reward"]

PART_NAMES: Final = {
    "score": "outcome_reward",
    "reward_model": "model_reward",
    "tool_rewards": "tool_reward",
    "turn_scores": "turn_reward",
    "tool_state_rewards": "tool_state_reward",
}
"""Weight in `reward.combine` -> name under which the part is recorded."""

_OVERLONG: Final = "overlong_reward"


def is_score_alone(config: RewardConfig) -> bool:
    """Whether the reward is the score as it is."""
    return config.combine == CombineConfig(reduction=config.combine.reduction) and not config.overlong_buffer.enable


def combined(
    config: RewardConfig, parts: Mapping[str, Any], *, num_tokens: int, max_tokens: int | None
) -> tuple[float, dict[str, float]]:
    """The reward, and its parts by name.

    Args:
        config: the node `reward`.
        parts: for each weight that is not 0 a number, several, or several by name.
        num_tokens: length of the response.
        max_tokens: `data.max_response_length`; read where too long answers are punished.

    Raises:
        RewardError: a part is no finite number.
    """
    named: dict[str, float] = {}
    total = 0.0
    for weight_name, part_name in PART_NAMES.items():
        weight = getattr(config.combine, weight_name)
        if weight:
            named[part_name] = _reduced(parts[weight_name], config.combine.reduction, weight_name)
            total += weight * named[part_name]
    if config.overlong_buffer.enable:
        assert max_tokens is not None
        named[_OVERLONG] = overlong_reward(num_tokens, max_tokens, config.overlong_buffer)
        total += named[_OVERLONG]
    if not math.isfinite(total):
        raise RewardError(f"the sum of the reward's parts must be finite, got {total} of {named}; lower the weights")
    return total, named


def overlong_reward(num_tokens: int, max_tokens: int, config: OverlongBufferConfig) -> float:
    """The soft punishment of DAPO (arXiv:2503.14476, equation 13), times `penalty_factor`.

    With L the length, M the most there may be and C the buffer: 0 up to M - C, (M - C - L) / C up to M, and -1 beyond.

    Returns:
        From 0 down to `-penalty_factor`.
    """
    exceeding = min(num_tokens, max_tokens) - (max_tokens - config.len)
    return -exceeding / config.len * config.penalty_factor if exceeding > 0 else 0.0


def _reduced(part: Any, reduction: str, name: str) -> float:
    values: Collection[Any] = (
        part.values() if isinstance(part, Mapping) else part if isinstance(part, list | tuple) else (part,)
    )
    for value in values:
        try:
            is_finite = math.isfinite(value)
        except (TypeError, OverflowError):
            is_finite = False
        if not is_finite:
            raise RewardError(
                f"{name} must be finite numbers to be part of a reward, got {value!r:.80}; mend the tool or the agent that gave it"
            )
    total = sum(map(float, values))  # floats: a sum beyond them is infinite, which is refused above
    return total / len(values) if reduction == "mean" and values else total
