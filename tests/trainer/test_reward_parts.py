"""What a reward is made of."""

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato_trainer.config.reward import CombineConfig, OverlongBufferConfig, RewardConfig
from ostinato_trainer.errors import RewardError
from ostinato_trainer.rewards.parts import combined, is_score_alone, overlong_reward

PARTS = {
    "score": 1.0,
    "reward_model": 0.5,
    "tool_rewards": [1.0, -0.5, 1.0],
    "turn_scores": [2.0, 4.0],
    "tool_state_rewards": {"a": 1.0, "b": 3.0},
}


NO_BUFFER = OverlongBufferConfig()


def reward(parts: Any = PARTS, *, num_tokens: int = 1, overlong: Any = NO_BUFFER, **weights: Any) -> Any:
    config = RewardConfig(combine=CombineConfig(**weights), overlong_buffer=overlong)
    return combined(config, parts, num_tokens=num_tokens, max_tokens=10)


def test_the_score_alone_is_the_default() -> None:
    """Without a word about parts the reward is the score, and nothing is recorded beside it."""
    assert is_score_alone(RewardConfig())
    assert not is_score_alone(RewardConfig(combine=CombineConfig(tool_rewards=1.0)))
    assert not is_score_alone(RewardConfig(combine=CombineConfig(score=2.0)))
    assert not is_score_alone(RewardConfig(overlong_buffer=OverlongBufferConfig(enable=True, len=1)))


def test_parts_are_added_with_their_weights_and_recorded_without() -> None:
    """The reward is the weighted sum; each part that has a weight stands under its own name, unweighted."""
    weights = {"tool_rewards": 2.0, "turn_scores": 0.5, "tool_state_rewards": -1.0, "reward_model": 4.0}
    assert reward(**weights) == (
        1.0 + 3.0 + 3.0 - 4.0 + 2.0,
        {"outcome_reward": 1.0, "model_reward": 0.5, "tool_reward": 1.5, "turn_reward": 6.0, "tool_state_reward": 4.0},
    )
    assert reward(score=0.0, turn_scores=1.0, reduction="mean") == (3.0, {"turn_reward": 3.0})


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_nothing_is_worth_nothing(reduction: str) -> None:
    """A trajectory without tool calls has 0 of them, not an undefined mean."""
    assert reward({"score": 1.0, "tool_rewards": []}, tool_rewards=1.0, reduction=reduction)[0] == 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1", 10**400])
def test_a_part_that_is_no_number_is_an_error(value: Any) -> None:
    """A tool that gave NaN, nothing or text fails the trajectory's reward by name; without weight it is not looked at."""
    parts = {**PARTS, "tool_rewards": [1.0, value]}
    with pytest.raises(RewardError, match="tool_rewards must be finite numbers"):
        reward(parts, tool_rewards=1.0)
    assert reward(parts, turn_scores=1.0)[0] == 7.0


def test_a_sum_that_overflows_is_an_error() -> None:
    """Finite parts whose sum is not finite make no reward."""
    for tool_rewards in ([1e308], [10**308] * 20):
        with pytest.raises(RewardError, match="the sum of the reward's parts must be finite"):
            reward({"score": 1e308, "tool_rewards": tool_rewards}, tool_rewards=1.0)


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0.0), (6, 0.0), (7, -0.25), (8, -0.5), (10, -1.0), (12, -1.0)]
)
def test_the_punishment_of_long_answers(num_tokens: int, expected: float) -> None:
    """Within the buffer the punishment falls evenly from 0 to -1; beyond the limit it stays there."""
    assert overlong_reward(num_tokens, 10, OverlongBufferConfig(enable=True, len=4)) == expected
    overlong = OverlongBufferConfig(enable=True, len=4, penalty_factor=2.0)
    assert reward(num_tokens=num_tokens, overlong=overlong) == (
        1.0 + 2 * expected,
        {"outcome_reward": 1.0, "overlong_reward": 2 * expected},
    )


@given(st.integers(0, 300), st.integers(1, 200), st.data())
def test_the_punishment_is_the_published_formula(num_tokens: int, limit: int, data: st.DataObject) -> None:
    """It is equation 13 of arXiv:2503.14476, computed in fractions."""
    buffer = data.draw(st.integers(1, limit))
    if num_tokens <= limit - buffer:
        expected = Fraction(0)
    elif num_tokens <= limit:
        expected = Fraction(limit - buffer - num_tokens, buffer)
    else:
        expected = Fraction(-1)
    found = overlong_reward(num_tokens, limit, OverlongBufferConfig(enable=True, len=buffer))
    assert found == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: CombineConfig(score=0.0), "one weight at least must not be 0"),
        (lambda: CombineConfig(turn_scores=math.nan), "turn_scores must be finite, got nan"),
        (lambda: OverlongBufferConfig(enable=True), "len must be at least 1 while enable is true"),
        (lambda: OverlongBufferConfig(penalty_factor=math.inf), "penalty_factor must be finite"),
    ],
)
def test_nodes_without_sense_are_refused(make: Any, said: str) -> None:
    """Weights that make no reward, and a buffer of no tokens, are refused where they are written."""
    with pytest.raises(ValueError, match=said):
        make()
