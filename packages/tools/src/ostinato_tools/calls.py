"""The values that pass between a parser, the executor and the agent: a call, and what became of it."""

from collections.abc import Awaitable, Callable, Coroutine
from enum import StrEnum
from typing import Any

import msgspec

from ostinato_tools.errors import ToolConfigError


class ToolCall(msgspec.Struct, frozen=True):
    """A call as the model wrote it. A malformed call is a call with an `error`; it is never executed."""

    name: str
    """Name of the tool; empty where it could not be read."""
    arguments: dict | None
    """Decoded arguments; None where they are malformed."""
    raw_arguments: str
    """The arguments exactly as sampled; for a malformed call, all that was sampled of the call."""
    id: str
    """Distinct within the turn, and within the trajectory if the caller of the parser gives each turn its own prefix. Where
    the format has the model write ids (kimi_k2, mistral), the one that it wrote."""
    error: str | None = None
    """What is wrong, as a text for the model."""


class OutcomeKind(StrEnum):
    """What became of a call."""

    OK = "ok"
    BAD_ARGUMENTS = "bad_arguments"
    UNKNOWN_TOOL = "unknown_tool"
    TOOL_ERROR = "tool_error"
    TIMEOUT = "timeout"
    RATE_LIMITED = "rate_limited"
    INFRASTRUCTURE = "infrastructure"


class ToolOutcome(msgspec.Struct, frozen=True):
    """What became of one call, with the message that the model reads."""

    call: ToolCall
    """The call itself."""
    kind: OutcomeKind
    """Its class."""
    message: dict
    """`{"role": "tool", "content": ..., "tool_call_id": ..., "name": ...}`."""
    reward: float = 0.0
    """Reward that the tool gave to this call; 0.0 unless `kind` is OK."""
    metrics: dict = {}
    """Metrics that the tool gave to this call."""
    seconds: float = 0.0
    """Wall time of the call, waiting for its turn and creation of the instance included."""
    terminate: bool = False
    """The tool says that the trajectory ends here."""


CallObserver = Callable[[ToolCall, Callable[[ToolCall], Awaitable[ToolOutcome]]], Coroutine[Any, Any, ToolOutcome]]
"""Is given a call and what runs it, and awaits that: sees the outcome, or what ended the call without one."""


class CallFailed(Exception):
    """Inside the executor: a call, or one attempt at it, ends here with this class and this text for the model."""

    def __init__(self, kind: OutcomeKind, text: str) -> None:
        super().__init__(kind, text)
        self.kind = kind
        self.text = text


def check_calls(calls: object) -> None:
    """Require that `calls` is a list or tuple of calls.

    Raises:
        ToolConfigError: it is something else, such as one call.
    """
    wrong: object = calls
    if isinstance(calls, list | tuple):
        others = [call for call in calls if not isinstance(call, ToolCall)]
        if not others:
            return
        wrong = others[0]
    raise ToolConfigError(
        f"calls must be a list of ToolCall, got {type(wrong).__name__}; pass the tool_calls of a parsed turn"
    )
