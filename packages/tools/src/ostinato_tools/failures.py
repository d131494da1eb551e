"""From what a tool raised to the class of its outcome and the one line that the model reads."""

import socket

from ostinato_tools.calls import CallFailed, OutcomeKind
from ostinato_tools.errors import (
    ToolArgumentError,
    ToolFailedError,
    ToolInfrastructureError,
    ToolRateLimitedError,
    ToolTimeoutError,
)

_SPOKEN = {
    ToolArgumentError: OutcomeKind.BAD_ARGUMENTS,
    ToolFailedError: OutcomeKind.TOOL_ERROR,
    ToolTimeoutError: OutcomeKind.TIMEOUT,
    ToolRateLimitedError: OutcomeKind.RATE_LIMITED,
}
"""Errors by which a tool speaks to the model: their text is for it, and nothing is logged."""
_INFRASTRUCTURE = (ToolInfrastructureError, ConnectionError, socket.gaierror)
"""What the tool stands on is broken. Other exceptions may as well come from what the model asked for."""


def spoken_failure(error: Exception) -> CallFailed | None:
    """Return how a call ends whose tool raised `error` in order to be read; None for any other error."""
    for spoken, kind in _SPOKEN.items():
        if isinstance(error, spoken):
            return CallFailed(kind, f"Error: {describe_message(error)}")
    return None


def unspoken_failure(name: str, error: Exception) -> CallFailed:
    """Return how a call of the tool `name` ends that raised `error` for whatever reason."""
    kind = OutcomeKind.INFRASTRUCTURE if isinstance(error, _INFRASTRUCTURE) else OutcomeKind.TOOL_ERROR
    return CallFailed(kind, f"Error: {name} failed: {describe(error)}")


def describe(error: BaseException) -> str:
    """Return class and message of an error, without a traceback; the class alone where the message cannot be had."""
    name = type(error).__name__
    text = describe_message(error)
    return f"{name}: {text}" if text and text != name else name


def describe_message(error: BaseException) -> str:
    """Return the message of an error, or its class where it has none that is text."""
    try:
        text = str(error)
        text.encode()
    except Exception:  # a foreign __str__ may raise, or give what is no text
        return type(error).__name__
    return text or type(error).__name__
