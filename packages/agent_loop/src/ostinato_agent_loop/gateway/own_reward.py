"""The reward that a program gives its own trajectory.

Invariants: it is finite, given once, and only where the settings ask for it. A trajectory whose program was asked for one and
gave none has failed; it has no reward of 0. Knows no process and no model.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ostinato_agent_loop.errors import RewardResultError
from ostinato_agent_loop.reward import RewardResult
from ostinato_rollout.openai_app import ApiError, decoded, schema_error

PATH = "/rl/set_reward"
"""Below OPENAI_BASE_URL."""
_MAX_EXTRA = 64


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    reward: float
    extra: dict[str, float | bool | str] = {}


class OwnReward:
    """Takes what a program posts to `PATH`: `{"reward": 1.0}`, and with `extra` what else it has measured, by name.

    Args:
        is_wanted: Whether the program is to give a reward.
    """

    def __init__(self, *, is_wanted: bool) -> None:
        self.is_wanted = is_wanted
        self.result: RewardResult | None = None
        """What was given."""
        self._refusal = ""  # why the last one was not taken; a program need not look at its answer

    def take(self, body: bytes) -> Mapping:
        """Take a reward. The same one again, as from a client that tries again, changes nothing.

        Raises:
            ApiError: It is no finite number, another one was given before, or nobody asked for it.
        """
        try:
            self.result = self._read(body)
        except ApiError as error:
            self._refusal = str(error)
            raise
        return {"reward": self.result.score}

    def _read(self, body: bytes) -> RewardResult:
        if not self.is_wanted:
            raise ApiError(
                "agent.gateway.own_reward must be true for a program that gives its own reward, got false; set it, or leave"
                " the reward to the run",
                status=409,
                code="reward_not_wanted",
            )
        try:
            given = msgspec.convert(decoded(body), _Body)
            result = RewardResult(given.reward, given.extra)
        except msgspec.ValidationError as error:
            raise schema_error(error) from None
        except RewardResultError as error:
            raise ApiError(str(error), param="reward") from None
        if len(given.extra) > _MAX_EXTRA:
            raise ApiError(
                f"extra must hold at most {_MAX_EXTRA} values, got {len(given.extra)}; leave some out", param="extra"
            )
        if self.result is not None and self.result != result:
            raise ApiError(
                f"the reward must be given once, got {result.score!r} after {self.result.score!r}; give the last word only",
                status=409,
                code="reward_given",
            )
        return result

    def missing(self) -> RewardResultError | None:
        """Return why the trajectory has no reward, if it should have one."""
        if not self.is_wanted or self.result is not None:
            return None
        got = f"one that was refused ({self._refusal})" if self._refusal else "none"
        return RewardResultError(
            f"the agent's program must give its reward before it ends (agent.gateway.own_reward), got {got}; POST"
            f' {{"reward": NUMBER}} to OPENAI_BASE_URL{PATH} with the key, also where it gives up'
        )
