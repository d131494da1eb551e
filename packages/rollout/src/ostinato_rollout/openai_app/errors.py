"""What goes wrong between a client and the app, in OpenAI's error form.

Invariant: every error that a client sees has a message that says what to change, and a status that says whose turn it is
to act: 4xx the client's, 5xx the server's.
"""

from __future__ import annotations

from typing import Any

from ostinato_engines import EngineClosedError, EngineInputError, EngineNotReadyError, UnsupportedError
from ostinato_rollout.errors import (
    BudgetExceededError,
    NoReplicaError,
    ReplicaError,
    RolloutError,
    SessionInputError,
)
from ostinato_tokenization import TokenizationError
from ostinato_tools import ToolError

RETRY_AFTER_S = 2

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "overloaded_error"}


class ServeError(RolloutError, ValueError):
    """The app cannot be served as it was asked to: a bad address, or one that needs an API key."""


class UnknownSessionError(RolloutError, LookupError):
    """There is no session of this name: it was never used, was taken, or has expired."""


class ApiError(RolloutError, RuntimeError):
    """What a client is told.

    Args:
        message: What is wrong and what to change.
        status: Of the HTTP response.
        param: The field of the request that is to blame.
        code: A word that programs can act on.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def headers(self) -> dict[str, str]:
        """What a client should know beside the body."""
        if self.status == 503:
            return {"Retry-After": str(RETRY_AFTER_S)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        message = str(self).encode(errors="backslashreplace").decode()  # what others raised need not be Unicode
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


def as_api_error(error: BaseException) -> ApiError | None:
    """Return what a client is told about `error`; None where it is a fault of ours, whose text is nobody's business."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ReplicaError) and error.__cause__ is not None:
        known = as_api_error(error.__cause__)
        return known or ApiError(f"the engine failed: {error.__cause__}", status=502, code="engine_error")
    if isinstance(error, BudgetExceededError):
        return ApiError(str(error), param="messages", code="context_length_exceeded")
    if isinstance(error, SessionInputError | TokenizationError | ToolError | EngineInputError | UnsupportedError):
        return ApiError(str(error), code="invalid_request")
    if isinstance(error, TimeoutError):
        return ApiError(str(error), status=504, code="timeout")
    if isinstance(error, NoReplicaError | EngineNotReadyError | EngineClosedError):
        return ApiError(str(error), status=503, code="engine_unavailable")
    return ApiError(str(error), status=502, code="engine_error") if isinstance(error, ReplicaError) else None


def shutting_down() -> ApiError:
    """Return what a request hears while the app is closed."""
    return ApiError(
        "the server must be up, got a request while it shuts down; try again later", status=503, code="shutting_down"
    )


def no_model(name: str, served: str) -> ApiError:
    """Return what a request for another model than the one that is served hears."""
    return ApiError(
        f"model must be {served!r}, which is served here, got {name!r:.120}; send that name",
        status=404,
        param="model",
        code="model_not_found",
    )
