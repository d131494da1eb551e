"""The HTTP client under streamable HTTP: every request fails for itself, and answers are bounded.

The SDK closes the whole session when one request meets a network failure, and reports an HTTP status without its number.
Here a failed request becomes an answer with an error status, and what really happened is noted for the call that sent it.
"""

from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

import httpx2

from ostinato_tools.mcp.config import HttpServer

CONNECT_TIMEOUT_S = 30.0
READ_TIMEOUT_S = 3600.0
"""Seconds without a byte of an answer; long, because a call has its own deadline, and some calls take long."""
_SESSION_HEADER = "mcp-session-id"
_FAILED = 502
_NO_TERMINATION = 405
"""What the SDK takes as `a session need not be ended`: nothing is to be said about one whose server is gone."""


class HttpNotes:
    """What happened to the HTTP requests of one call."""

    def __init__(self) -> None:
        self.status: int | None = None
        """The last status that was no success."""
        self.failure: str | None = None
        """The last network failure."""
        self.refusal: str | None = None
        """Why an answer was not accepted."""
        self.too_large = False
        """It was not accepted for its size."""
        self.has_session = False
        """The server gave a session's id."""
        self.reached = False
        """A request may have reached the server."""

    def describe(self) -> str:
        """Return what happened, or an empty text."""
        if self.failure is not None or self.refusal is not None:
            return self.failure or self.refusal or ""
        if self.status in (401, 403):
            return f"it refused the credentials with HTTP {self.status}"
        return "" if self.status is None else f"it answered with HTTP {self.status}"


NOTES: ContextVar[HttpNotes | None] = ContextVar("ostinato_mcp_http_notes", default=None)
"""The notes of the call that the present code works for."""


def make_http_client(spec: HttpServer, max_message_bytes: int) -> httpx2.AsyncClient:
    """Return a client with the server's headers; redirects are left to the SDK, which stays within the origin."""
    return _Client(
        max_message_bytes,
        headers={"Accept-Encoding": "identity", **spec.headers},
        timeout=httpx2.Timeout(CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S),
        limits=httpx2.Limits(max_connections=None),  # how many calls run at once is decided elsewhere
    )


class _Client(httpx2.AsyncClient):
    def __init__(self, max_message_bytes: int, **options: Any) -> None:
        super().__init__(**options)
        self._max_message_bytes = max_message_bytes

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        notes = NOTES.get() or HttpNotes()
        try:
            response = await super().send(request, **options)
        except (httpx2.TransportError, httpx2.InvalidURL, UnicodeError) as error:
            notes.failure = _network_failure(error)
            notes.reached |= not isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout)
            return httpx2.Response(_NO_TERMINATION if request.method == "DELETE" else _FAILED, request=request)
        notes.reached = True
        notes.has_session |= _SESSION_HEADER in response.headers
        notes.status = response.status_code if response.status_code >= 300 else None
        encoding = response.headers.get("content-encoding", "identity")
        if encoding != "identity":
            await response.aclose()
            notes.refusal = f"it answered in the encoding {encoding[:40]!r}, which was not asked for"
            return httpx2.Response(_FAILED, request=request)
        streamed = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _BoundedStream(response.stream, self._max_message_bytes, notes, by_line=streamed)
        return response


class _BoundedStream(httpx2.AsyncByteStream):
    """A body whose reading ends in `StreamError`, which the SDK takes as the failure of one request."""

    def __init__(self, stream: httpx2.AsyncByteStream, limit: int, notes: HttpNotes, *, by_line: bool) -> None:
        self._stream = stream
        self._limit = limit
        self._notes = notes
        self._by_line = by_line
        """A stream of events may go on for ever, but a message is one line of it."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        try:
            async for chunk in self._stream:
                num_bytes += len(chunk)
                if num_bytes > self._limit:
                    self._notes.too_large = True
                    self._notes.refusal = f"its answer is larger than {self._limit} bytes"
                    raise httpx2.StreamError(self._notes.refusal)
                if self._by_line and b"\n" in chunk:
                    num_bytes = len(chunk) - chunk.rindex(b"\n") - 1
                yield chunk
        except httpx2.TransportError as error:
            self._notes.failure = _network_failure(error)
            raise httpx2.StreamError(self._notes.failure) from error

    async def aclose(self) -> None:
        await self._stream.aclose()


def _network_failure(error: Exception) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
