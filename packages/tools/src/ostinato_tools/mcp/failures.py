"""What went wrong between us and a server, and whose fault that is.

The server's own error about a call is for the model to read (`tool_error`, `bad_arguments`); a server that cannot be
reached, refuses us, or answers with what is no answer is `infrastructure`, and nobody's mistake in the conversation.
"""

import mcp_types as types
from mcp import MCPError
from pydantic import ValidationError

from ostinato_tools.errors import (
    ToolArgumentError,
    ToolError,
    ToolFailedError,
    ToolInfrastructureError,
    ToolRateLimitedError,
    ToolTimeoutError,
)
from ostinato_tools.mcp.http import HttpNotes
from ostinato_tools.mcp.secrets import Redactor

_BROKEN_STATUS = frozenset({401, 402, 403, 404, 405, 407, 408, 410, 421, 425})
_PROTOCOL_CODES = frozenset({types.PARSE_ERROR, types.INVALID_REQUEST, types.METHOD_NOT_FOUND, types.CONNECTION_CLOSED})
_SESSION_GONE = 404
_MAX_LENGTH = 500


class ConnectionLost(Exception):
    """The session ended, or was never there."""

    def __init__(self, reason: str, *, may_have_run: bool, permanent: bool = False, session_gone: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.may_have_run = may_have_run
        """The server may have begun the call, so that repeating it may do it twice."""
        self.permanent = permanent
        """Trying again is pointless."""
        self.session_gone = session_gone
        """The session is lost, not only this one request."""


class Refused(Exception):
    """The server cannot serve this, and trying again changes nothing."""


def tool_error(error: Exception, notes: HttpNotes, redact: Redactor) -> ToolError | ConnectionLost | Refused:
    """Class what a call raised.

    Args:
        error: As the session raised it.
        notes: What happened on the network below.
        redact: Masks secrets in what we say.

    Returns:
        The error to raise instead.
    """
    if isinstance(error, ConnectionLost | Refused | ToolError):
        return error
    known = notes.describe()
    if notes.failure is not None:
        return ConnectionLost(redact(known), may_have_run=notes.reached, session_gone=False)
    if notes.refusal is not None:
        return ToolFailedError(f"{known}; ask for less") if notes.too_large else Refused(known)
    status = notes.status
    if status == _SESSION_GONE and isinstance(error, MCPError) and error.code == types.INVALID_REQUEST:
        return ConnectionLost("the server has forgotten the session", may_have_run=False)
    text = redact(describe_error(error))
    if status == 429:
        return ToolRateLimitedError(f"the server had too many calls (HTTP 429): {text}")
    unexplained = isinstance(error, MCPError) and error.code == types.INTERNAL_ERROR
    if status is not None and (status >= 500 or status < 400 or status in _BROKEN_STATUS or unexplained):
        return Refused(redact(f"{known}: {text}"))
    if isinstance(error, MCPError):
        if error.code == types.CONNECTION_CLOSED:  # over HTTP that of one request
            return ConnectionLost(text, may_have_run=True, session_gone=False)
        if error.code == types.REQUEST_TIMEOUT:
            return ToolTimeoutError(text)
        if error.code == types.INVALID_PARAMS:
            return ToolArgumentError(text)
        return Refused(text) if error.code in _PROTOCOL_CODES else ToolFailedError(text)
    if isinstance(error, ValidationError):
        return Refused("the server's answer is no result of a tool call")
    if isinstance(error, RuntimeError):  # the result does not keep the promise of the tool's own output schema
        return ToolFailedError(redact(_one_line(str(error))))
    return ToolInfrastructureError(text)


def root_cause(error: BaseException) -> BaseException:
    """Return the first error inside of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def describe_error(error: BaseException) -> str:
    """Return an error in one line: of a group the first cause, of a server's error its message."""
    error = root_cause(error)
    if isinstance(error, MCPError):
        text = error.message
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    elif isinstance(error, Refused):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}"
    return _one_line(text)


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}..."
