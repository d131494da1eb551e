"""The app on a socket.

Invariant: nobody but programs of this machine reaches an app that asks for no key.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn

from ostinato_rollout.openai_app.app import OpenAIApp
from ostinato_rollout.openai_app.errors import ServeError

_BACKLOG = 2048
_GRACE_S = 5
"""Seconds that connections get to take their last bytes."""


@asynccontextmanager
async def serving(app: OpenAIApp, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
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
        config = uvicorn.Config(
            app, lifespan="off", log_config=None, access_log=False, ws="none", timeout_graceful_shutdown=_GRACE_S
        )
        server = _Server(config)
        await app.start()
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await asyncio.wait({task, asyncio.ensure_future(server.ready.wait())}, return_when=asyncio.FIRST_COMPLETED)
            yield _url(listener)
        finally:
            await app.close()
            server.should_exit = True
            await task


class _Server(uvicorn.Server):
    """Uvicorn's server, ended by its context and not by signals, which belong to the program."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


@contextmanager
def _bound(app: OpenAIApp, host: str, port: int) -> Iterator[socket.socket]:
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
        listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ServeError(
            f"host and port must be free to bind here, got {host!r}:{port}: {error}; choose others (port 0 is any)"
        ) from error
    with listener:
        yield listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
