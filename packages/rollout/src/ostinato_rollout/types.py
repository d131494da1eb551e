"""The small values that a session takes and gives."""

from __future__ import annotations

import msgspec

from ostinato_engines import StopReason
from ostinato_rollout.errors import BudgetExceededError, SessionInputError
from ostinato_tools import ToolCall


class SessionBudget(msgspec.Struct, frozen=True):
    """How many tokens a conversation may use.

    The response is everything after the first prompt: what the policy samples and what tools and users add between.
    It is bounded over all segments together. A later segment holds the rebuilt conversation as its prompt; those tokens
    are not response, but no segment may grow beyond `max_prompt_tokens + max_response_tokens`, nor beyond `max_model_len`.
    """

    max_prompt_tokens: int
    """Longest first prompt, in tokens, generation prompt included."""
    max_response_tokens: int
    """Longest response, in tokens, over the whole trajectory."""
    max_model_len: int | None = None
    """Longest context that the model serves, in tokens; None: the sum of the two above decides."""
    max_turn_tokens: int | None = None
    """Most tokens sampled in one turn; None: as many as there is room for."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise SessionInputError(f"{name} must be a positive number of tokens, got {value!r}; raise it")

    @property
    def max_context_tokens(self) -> int:
        """Longest segment, in tokens."""
        total = self.max_prompt_tokens + self.max_response_tokens
        return total if self.max_model_len is None else min(total, self.max_model_len)

    def turn_limit(self, room: int, max_tokens: int | None) -> int:
        """Return how many tokens a turn may have where `room` are left and `max_tokens` were asked for."""
        return min(bound for bound in (room, max_tokens, self.max_turn_tokens) if bound is not None)

    def check_prompt(self, length: int) -> None:
        """Raise BudgetExceededError if a first prompt of so many tokens is too long."""
        for name in ("max_prompt_tokens", "max_model_len"):
            bound = getattr(self, name)
            if bound is not None and length > bound:
                raise BudgetExceededError(
                    f"the prompt must hold at most {name} ({bound}) tokens, got {length}; shorten it or raise {name}",
                    limit=name,
                    needed=length,
                    room=bound,
                )

    def exceeded(self, needed: int, room: int, limit: str) -> BudgetExceededError:
        """Return the error for messages of `needed` tokens where `limit` leaves room for `room`."""
        return BudgetExceededError(
            f"the messages must need fewer tokens than there is room for ({room} under {limit}), got {needed};"
            f" shorten them or raise {limit}",
            limit=limit,
            needed=needed,
            room=room,
        )


class Reply(msgspec.Struct, frozen=True):
    """One turn of the policy, parsed."""

    message: dict
    """The assistant message in OpenAI form, as the session's history holds it."""
    reasoning: str | None
    """What the model thought aloud before its answer, if the parser found any."""
    tool_calls: tuple[ToolCall, ...]
    """The calls in the order written; a malformed one carries its `error`."""
    errors: tuple[str, ...]
    """What could not be read as a call at all, in words that can be shown to the model."""
    stop_reason: StopReason
    """Why the generation ended."""
    num_tokens: int = 0
    """Tokens sampled in this turn; 0 means that nothing was generated and nothing was recorded."""
    text: str = ""
    """The whole turn as it was sampled, without the token that ended it."""


class SessionMetrics(msgspec.Struct):
    """What one conversation cost; grows as it goes."""

    admission_s: float = 0.0
    """Seconds spent waiting for a place on a replica, before the first turn."""
    generate_s: float = 0.0
    """Seconds spent waiting for generations."""
    num_generations: int = 0
    """Turns for which a replica was asked."""
    num_sampled_tokens: int = 0
    """Tokens sampled by the policy."""
    num_cached_tokens: int = 0
    """Prompt tokens that replicas did not have to compute again, where they say so."""
    num_preempted: int = 0
    """How often the engine put a generation of this session aside, where it says so."""
    num_mismatches: int = 0
    """Segments whose recorded tokens differ from a fresh render, found by the sanity check at the end."""
    mismatch_reports: list[str] = []
    """One readable report for each of them."""
