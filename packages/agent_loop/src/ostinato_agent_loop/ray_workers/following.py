"""What workers elsewhere are told of the replicas: which are in service, and whether turns wait.

Invariant: a view is the whole truth, so that whoever has the last one has missed nothing. Knows no worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, runtime_checkable

import msgspec

from ostinato_agent_loop.errors import AgentConfigError
from ostinato_engines import AsyncServerBase
from ostinato_rollout.ray_cluster import ReplicaEndpoint

logger = logging.getLogger(__name__)


class ReplicaView(msgspec.Struct, frozen=True):
    """How things are."""

    endpoints: tuple[ReplicaEndpoint, ...] = ()
    """Of the replicas in service."""
    draining: tuple[ReplicaEndpoint, ...] = ()
    """Of those that get no new turns, and may end the ones that they have."""
    held: str = ""
    """Why turns wait; empty: they do not."""
    why_none: str = ""
    """What is told to turns that find no replica and need not wait."""


@runtime_checkable
class Reachable(Protocol):
    """A server that other processes reach."""

    endpoint: ReplicaEndpoint | None

    def when_failed(self, call: Callable[..., None]) -> None:
        """Has `call` told of the server and its error when it has failed for good."""


def unreachable(server: AsyncServerBase) -> AgentConfigError:
    """The error for a server that only this process reaches."""
    return AgentConfigError(
        f"replicas must be reachable from workers in other processes, got {type(server).__name__}; use RayReplica"
    )


class ReplicaFollower:
    """Follows a pool, and keeps the view of it.

    Args:
        on_change: Called when there is a new view.
        on_failed: Is told of a replica that knows of its own failure, and of the error.
        tell_all: Tells all workers the view, and has them do something with one replica, where any is given: the name of a method and the endpoint.
    """

    def __init__(
        self,
        on_change: Callable[[], None],
        on_failed: Callable[[AsyncServerBase, Exception], None],
        tell_all: Callable[..., Awaitable[None]],
    ) -> None:
        self._on_change, self._on_failed, self._tell_all = on_change, on_failed, tell_all
        self._known: dict[AsyncServerBase, ReplicaEndpoint] = {}
        self._telling: set[asyncio.Future[None]] = set()
        self.view = ReplicaView()
        """The last one."""

    def _see(self, **changes: object) -> None:
        self.view = msgspec.structs.replace(self.view, **changes)
        self._on_change()

    def add_server(self, server: AsyncServerBase) -> int:
        """A replica is in service."""
        if not isinstance(server, Reachable):
            logger.error("%s", unreachable(server))
            return len(self._known)
        endpoint = server.endpoint
        server.when_failed(self._on_failed)
        if endpoint is not None:  # else it has just been lost, which the pool tells next
            self._known[server] = endpoint
            draining = tuple(one for one in self.view.draining if one != endpoint)
            self._see(endpoints=(*self.view.endpoints, endpoint), draining=draining)
        return len(self._known)

    def remove_server(self, server: AsyncServerBase, *, reason: str = "was removed", take_back: bool = False) -> None:
        """A replica is out of service; with `take_back`, what is inside of it begins again elsewhere."""
        endpoint = self._known.get(server)
        if endpoint is None:
            return
        draining = tuple(one for one in self.view.draining if one != endpoint)
        if take_back:
            del self._known[server]
        else:
            draining = (*draining, endpoint)
        self._see(endpoints=tuple(one for one in self.view.endpoints if one != endpoint), draining=draining)

    def take_back(self, server: AsyncServerBase) -> int:
        """What is inside of a replica begins again; how much that is, the workers know."""
        endpoint = self._known.get(server)
        if endpoint is not None:
            if endpoint in self.view.draining:
                self.remove_server(server, take_back=True)
            else:
                telling = asyncio.ensure_future(self._tell_all("take_back", endpoint))
                self._telling.add(telling)
                telling.add_done_callback(self._telling.discard)
        return 0

    async def left(self, server: AsyncServerBase) -> None:
        """Waits until no worker has a generation inside of a replica; the deadline is the caller's."""
        endpoint = self._known.get(server)
        if self._telling:
            await asyncio.wait(self._telling)
        if endpoint is not None:
            await self._tell_all("left", endpoint)
            if endpoint in self.view.draining:  # nothing is there any more, and the pool may end it without a word
                self.remove_server(server, take_back=True)

    def hold(self, reason: str) -> None:
        """Turns wait."""
        self._see(held=reason)

    def proceed(self, why_none: str = "") -> None:
        """Turns go on."""
        self._see(held="", why_none=why_none)

    async def heard(self) -> None:
        """Waits until all workers have the view."""
        await self._tell_all()

    def refresh_capacities(self) -> None:
        """Workers reach replicas that have started, and then ask what they hold."""
