"""What a reward function is: a row and a finished trajectory in, one finite score out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from ostinato_agent_loop.errors import RewardResultError
from ostinato_agent_loop.output import AgentLoopOutput


class RewardResult(msgspec.Struct, frozen=True):
    """The score of one trajectory, and what else the reward function found out."""

    score: float
    """The reward; finite."""
    extra: dict = {}
    """Named values for metrics and for people; keys may differ from row to row."""

    def __post_init__(self) -> None:
        if isinstance(self.score, bool) or not isinstance(self.score, int | float) or not math.isfinite(self.score):
            raise RewardResultError(
                f"score must be a finite number, got {self.score!r}; raise an error where there is no score"
            )
        if not isinstance(self.extra, dict):
            raise RewardResultError(
                f"extra must be a dict of named values, got {self.extra!r:.80}; leave it out for none"
            )


class RewardFn(Protocol):
    """Called once for each trajectory, as soon as it ends. Raising records a failure, which is no score of 0."""

    async def __call__(self, row: Mapping, outputs: Sequence[AgentLoopOutput]) -> RewardResult:
        """Return the score of the trajectory whose segments are `outputs`."""
        ...
