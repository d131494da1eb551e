"""The app on a socket.

Invariants: nobody but programs of this machine reaches an app that asks for no key; a connection on which nothing moves
is closed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

import h11
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ostinato_rollout.openai_app.delivery import error_response
from ostinato_rollout.openai_app.errors import ApiError, ServeError
from ostinato_rollout.openai_app.limits import AppLimits

_BACKLOG = 2048
_MAX_BYTES_AHEAD = 1 << 16
"""What is read of the requests that a client sends while another one is answered."""
_MAX_HEAD_BYTES = 1 << 14
_GRACE_S = 5
"""Seconds that connections get to take their last bytes."""


class Served(Protocol):
    """An ASGI application that can be put on a socket: an OpenAIApp, or something in front of several."""

    limits: AppLimits

    @property
    def needs_key(self) -> bool:
        """Whether nobody gets an answer without a key."""
        ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        ...

    async def start(self) -> None:
        """Begin."""
        ...

    async def close(self) -> None:
        """End what is under way."""
        ...


@asynccontextmanager
async def serving(app: Served, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve `app` while the context lasts; gives the URL that clients take as base (without `/v1`).

    At its end what is under way is cancelled, and sessions are closed.

    Args:
        app: What is served.
        host: A name or address of this machine.
        port: 0 for any that is free.

    Raises:
        ServeError: The address cannot be bound, or can be reached from outside while the app asks for no key.
    """
    with _bound(app, host, port) as listener:
        server = _Server(app)
        await app.start()
        task = asyncio.create_task(server.serve(sockets=[listener]))
        ready = asyncio.create_task(server.ready.wait())
        try:
            await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            yield _url(listener)
        finally:
            ready.cancel()
            await app.close()
            server.should_exit = True
            await task


class _Server(uvicorn.Server):
    """Uvicorn's server, ended by its context and not by signals, which belong to the program."""

    def __init__(self, app: Served) -> None:
        protocol = type("_AppProtocol", (_WatchedProtocol,), {"patience_s": app.limits.idle_connection_s})
        options = {
            "h11_max_incomplete_event_size": _MAX_HEAD_BYTES,
            "lifespan": "off",
            "log_config": None,
            "access_log": False,
            "ws": "none",
            "http": protocol,
        }
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=_GRACE_S, **options))
        self.ready = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


class _WatchedProtocol(H11Protocol):
    """A connection that is closed when its client neither completes a request nor takes what it was sent.

    It reads on while a request is answered, because only so it notices that the client leaves, and answers what is no
    HTTP in the form of all errors.
    """

    patience_s: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._num_unsent = 0
        self._watch = self.loop.call_later(self.patience_s, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._watch.cancel()
        self._watch = self.loop.call_later(self.patience_s, self._look)
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) <= _MAX_BYTES_AHEAD:
            self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = error_response(
                ApiError(
                    f"the request must be HTTP/1.1 with headers of at most {_MAX_HEAD_BYTES} bytes, got something else;"
                    " correct it"
                )
            )
            for event in (
                h11.Response(status_code=400, headers=[*answer.raw_headers, (b"connection", b"close")]),
                h11.Data(data=bytes(answer.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event))
        self.transport.close()  # where a response has begun, there is no place for another one

    def _look(self) -> None:
        before, self._num_unsent = self._num_unsent, self.transport.get_write_buffer_size()
        is_asked = self.cycle is not None and not self.cycle.response_complete
        if before and self._num_unsent >= before:
            self.transport.abort()
        elif not is_asked and not self._num_unsent:
            self.transport.close()
        self._watch = self.loop.call_later(self.patience_s, self._look)


def _bound(app: Served, host: str, port: int) -> socket.socket:
    """Bind, and refuse what must not be reached from outside."""
    try:
        if not 0 <= port <= 0xFFFF:
            raise OverflowError("port must be 0 to 65535")
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        if not app.needs_key and not ipaddress.ip_address(address[0]).is_loopback:
            raise ServeError(
                f"host must be a loopback address where no key is asked for, got {host!r}; set an API key, or use 127.0.0.1"
            )
        return _listening(family, address)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ServeError(
            f"host and port must be free to bind here, got {host!r}:{port}: {error}; choose others (port 0 is any)"
        ) from error


def _listening(family: int, address: tuple) -> socket.socket:
    """Return a socket that listens; it says that it is TCP, because asyncio sends without delay on such sockets only."""
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
