"""Addresses of trajectories: one server on loopback for all of an event loop, as long as there are any.

Invariant: behind an address are the conversations of one trajectory only; it cannot be guessed, and nobody is answered
without its key. Knows no program.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from weakref import WeakKeyDictionary

import msgspec
from starlette.types import Receive, Scope, Send

from ostinato_rollout.openai_app import ApiError, AppLimits, OpenAIApp, error_response, serving


class GatewayAddress(msgspec.Struct, frozen=True):
    """Where a trajectory's program finds the model."""

    base_url: str
    """What OpenAI's clients take as `base_url`; it ends in /v1."""
    api_key: str
    """Opens this trajectory's conversations, and no other's."""


class _Router:
    """The app in front of those of the trajectories: the first part of a path says whose it is."""

    def __init__(self) -> None:
        self.limits = AppLimits()
        self.apps: dict[str, OpenAIApp] = {}

    @property
    def needs_key(self) -> bool:
        return True  # each app behind it does

    async def start(self) -> None:
        """Apps are started by whoever opens their address."""

    async def close(self) -> None:
        """Apps are closed by whoever opened their address."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name, _, rest = scope["path"].removeprefix("/").partition("/")
        app = self.apps.get(name)
        if app is None:
            error = ApiError(
                "the address must be that of a trajectory under way, got another; take it from OPENAI_BASE_URL",
                status=404,
                code="trajectory_not_found",
            )
            await error_response(error)(scope, receive, send)
            return
        path = f"/{rest}"
        await app({**scope, "path": path, "raw_path": path.encode(), "root_path": ""}, receive, send)


class _Shared:
    """The server of one event loop: started for the first address, ended after the last."""

    def __init__(self) -> None:
        self._router = _Router()
        self._changing = asyncio.Lock()
        self._ending: asyncio.Task[None] | None = None
        self._stack: AsyncExitStack | None = None
        self._url = ""

    async def add(self, name: str, app: OpenAIApp) -> str:
        """Let `app` be reached under `name`; return its URL."""
        async with self._changing:
            if self._stack is None:
                stack = AsyncExitStack()
                self._url = await stack.enter_async_context(serving(self._router))
                self._stack = stack
            self._router.apps[name] = app
        return f"{self._url}/{name}/v1"

    async def remove(self, name: str) -> None:
        """Let nobody reach the app of this name any more; the last one ends the server, also if the caller is cancelled."""
        del self._router.apps[name]
        if not self._router.apps and self._ending is None:
            self._ending = asyncio.create_task(self._end_if_unused())
        if self._ending is not None:
            await asyncio.shield(self._ending)

    async def _end_if_unused(self) -> None:
        try:
            async with self._changing:
                stack = self._stack
                if stack is not None and not self._router.apps:
                    self._stack = None
                    await stack.aclose()
        finally:
            self._ending = None


_SERVERS: WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared] = WeakKeyDictionary()


@asynccontextmanager
async def open_address(app: OpenAIApp, api_key: str) -> AsyncIterator[GatewayAddress]:
    """Let `app` be reached by programs of this machine while the context lasts; at its end, what is under way is cancelled.

    Args:
        app: The app of one trajectory, which asks for `api_key`.
        api_key: Is told to whom the address is told.
    """
    shared = _SERVERS.setdefault(asyncio.get_running_loop(), _Shared())
    name = secrets.token_urlsafe(16)
    base_url = await shared.add(name, app)
    try:
        yield GatewayAddress(base_url, api_key)
    finally:
        try:
            await app.close()
        finally:
            await shared.remove(name)
