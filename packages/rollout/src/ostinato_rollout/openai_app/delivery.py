"""A response whose body is still being sampled: awaited, watched, and sent.

Invariant: the work ends with the response. A client that goes away, or that does not read, cancels what it asked for.
Knows HTTP and no tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ostinato_rollout.openai_app.errors import ApiError, as_api_error
from ostinato_rollout.openai_app.limits import AppLimits

logger = logging.getLogger(__name__)

T = TypeVar("T")

_READ_TO_REFUSE, _REFUSE_S = 8, 2.0
"""A body up to so many times too long is read for so long and dropped: a client that is not read to the end sees no answer."""
_EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return `content` as JSON."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    """Return an error in OpenAI's form."""
    return json_response(error.body(), error.status, error.headers)


def told(error: BaseException) -> ApiError:
    """Return what a client is told about `error`; a fault of ours is logged and told without its text."""
    if isinstance(error, asyncio.CancelledError):
        return ApiError("the session must not end before its requests, got an end meanwhile", status=410, code="ended")
    known = as_api_error(error)
    if known is None:
        logger.error("a chat request failed", exc_info=error)
    return known or ApiError("the server has a fault; its log says more", status=500, code="internal_error")


def header(request: Request, name: str) -> str | None:
    """Return a header that a request may bear once.

    Raises:
        ApiError: It came several times, and each one may say something else.
    """
    values = request.headers.getlist(name)
    if len(values) > 1:
        raise ApiError(f"{name} must be sent once, got {len(values)}; remove all but one", param=name)
    return values[0] if values else None


async def read_body(request: Request, limits: AppLimits) -> bytes:
    """Read a body of JSON.

    Raises:
        ApiError: 413 where it is too long, 415 where it is of another kind, 408 where it comes too slowly, 400 where its
            kind is said twice.
        ClientDisconnect: The client went away.
    """
    kind = (header(request, "Content-Type") or "").partition(";")[0].strip().lower()
    encoding = (header(request, "Content-Encoding") or "identity").lower()
    if kind != "application/json" or encoding != "identity":
        raise ApiError(
            f"Content-Type must be application/json, uncompressed, got {kind!r:.80}; send that header", status=415
        )
    body, num_bytes = bytearray(), 0
    length = request.headers.get("content-length", "")
    bound = limits.max_body_bytes * _READ_TO_REFUSE
    too_long = length.isdecimal() and int(length[:20]) > bound
    try:
        async with asyncio.timeout(limits.body_timeout_s) as deadline:
            async for part in request.stream():
                if num_bytes <= limits.max_body_bytes < num_bytes + len(part):
                    deadline.reschedule(asyncio.get_running_loop().time() + min(limits.body_timeout_s, _REFUSE_S))
                num_bytes += len(part)
                if num_bytes <= limits.max_body_bytes:
                    body += part
                if too_long or num_bytes > bound:
                    break
    except TimeoutError:
        if num_bytes <= limits.max_body_bytes:
            raise ApiError(
                f"the body must arrive within {limits.body_timeout_s:g} s, got {num_bytes} bytes; send it faster",
                status=408,
            ) from None
    if too_long or num_bytes > limits.max_body_bytes:
        raise ApiError(f"the body must hold at most {limits.max_body_bytes} bytes, got more; send less", status=413)
    return bytes(body)


class TurnResponse(Response, Generic[T]):
    """The response to a request whose `work` has yet to be done.

    Args:
        work: What is awaited; cancelled when the client goes away.
        whole: The body, made from what `work` returns.
        events: The events of a stream instead; None for no stream. A stream whose work takes longer than
            `limits.keepalive_s` begins without it, and tells of a failure in its last event.
        limits: How long a client may leave things unread.
    """

    def __init__(
        self,
        work: Callable[[], Awaitable[T]],
        *,
        whole: Callable[[T], Any],
        events: Callable[[T], Iterable[Any]] | None,
        limits: AppLimits,
    ) -> None:
        self._work, self._whole, self._events, self._limits = work, whole, events, limits
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        working = asyncio.ensure_future(self._work())
        gone = asyncio.ensure_future(_disconnected(receive))
        tasks = {working, gone}
        try:
            wait_s = None if self._events is None else self._limits.keepalive_s
            await asyncio.wait(tasks, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if self._events is None or (working.done() and _error_of(working) is not None):
                if working.done():
                    await self._respond(working)(scope, receive, send)
            else:
                await self._stream(self._events, working, gone, send)
        except _UnreadError:
            logger.info("a client left a stream unread for %g s", self._limits.send_timeout_s)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            _error_of(working)  # nobody is left to be told, and asyncio must not miss it

    def _respond(self, working: asyncio.Future[T]) -> Response:
        error = _error_of(working)
        if error is None:
            try:
                return json_response(self._whole(working.result()))
            except Exception as failed:  # the last place where it can be told
                error = failed
        return error_response(told(error))

    async def _stream(
        self, events: Callable[[T], Iterable[Any]], working: asyncio.Future[T], gone: asyncio.Future[None], send: Send
    ) -> None:
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
        while not working.done():
            if gone.done():
                return
            await self._send_text(send, b": sampling\n\n")
            await asyncio.wait({working, gone}, timeout=self._limits.keepalive_s, return_when=asyncio.FIRST_COMPLETED)
        error = _error_of(working)
        for event in events(working.result()) if error is None else [told(error).body()]:
            name = f"event: {event['type']}\n".encode() if "type" in event else b""
            await self._send_text(send, name + b"data: " + msgspec.json.encode(event) + b"\n\n")
        await self._send_text(send, b"data: [DONE]\n\n")
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_text(self, send: Send, text: bytes) -> None:
        await self._send(send, {"type": "http.response.body", "body": text, "more_body": True})

    async def _send(self, send: Send, message: Message) -> None:
        try:
            async with asyncio.timeout(self._limits.send_timeout_s):
                await send(message)
        except TimeoutError:
            raise _UnreadError from None


class _UnreadError(Exception):
    """The client does not read."""


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _error_of(working: asyncio.Future) -> BaseException | None:
    """Return how the work failed; being cancelled is an error here."""
    return asyncio.CancelledError() if working.cancelled() else working.exception()
