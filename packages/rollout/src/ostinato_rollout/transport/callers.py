"""Who is connected to a service, from the hello to the goodbye or to what stands for it.

Invariant: a caller that is gone has nothing left here, neither requests nor conversations: the server releases those that nobody
else has gone on with. Knows no socket.
"""

import asyncio
import logging
from collections.abc import Iterator

from ostinato_engines import AsyncServerBase
from ostinato_rollout.transport.caller import Caller
from ostinato_rollout.transport.prompts import KeptPrompts
from ostinato_rollout.transport.stats import ServiceStats

logger = logging.getLogger(__name__)

_END_S = 10.0
"""How long calls that were cancelled, and releases, are waited for."""
_MAX_CONVERSATIONS = 100_000


class Callers:
    """The connections of one service.

    Args:
        server: Whose conversations they have.
        prompts: Kept of these, by connection and conversation.
        stats: Counts those that vanish, and conversations that the server fails to release.
    """

    def __init__(self, server: AsyncServerBase, prompts: KeptPrompts[tuple[bytes, str]], stats: ServiceStats) -> None:
        self._server, self._prompts, self._stats = server, prompts, stats
        self._by_identity: dict[bytes, Caller] = {}
        self._ending: dict[str, set[asyncio.Task[None]]] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._by_identity)

    def __iter__(self) -> Iterator[Caller]:
        """Those who are there now, whoever comes or goes meanwhile."""
        return iter(list(self._by_identity.values()))

    def get(self, identity: bytes) -> Caller | None:
        """Who has said hello under a name on the socket."""
        return self._by_identity.get(identity)

    def enter(self, identity: bytes, name: str, remote: bytes) -> None:
        """Somebody has said hello; see `Caller` for the arguments."""
        for caller in self:
            if remote and caller.remote == remote:
                # It has given that connection up; its conversations must not meet their own last turns here.
                self.part_from_vanished(caller)
        self._by_identity[identity] = Caller(identity, name, remote, self._ending)

    def part_from(self, caller: Caller) -> None:
        """Ends what a caller has under way, and its conversations."""
        del self._by_identity[caller.identity]
        caller.cancel_all()
        self._release_later(caller, list(caller.conversations), caller.tasks)

    def part_from_vanished(self, caller: Caller) -> None:
        """The same, of one that has not said goodbye."""
        self._stats.num_vanished += 1
        logger.warning("%s is gone without a goodbye; its requests end", caller.name)
        self.part_from(caller)

    async def answered(self) -> None:
        """Waits until the calls under way have ended, for a while."""
        tasks = set[asyncio.Task[None]]().union(*(caller.tasks for caller in self))
        if tasks:
            await asyncio.wait(tasks, timeout=_END_S)

    async def left(self) -> None:
        """Waits until nothing is being released any more, for a while."""
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=_END_S)

    # Conversations

    def open(self, caller: Caller, request_id: str) -> None:
        """A conversation of a caller has a turn; of too many, the oldest one is released."""
        caller.conversations[request_id] = None
        if len(caller.conversations) > _MAX_CONVERSATIONS:
            self._release_later(caller, [next(iter(caller.conversations))], set())

    def forget(self, caller: Caller, request_id: str) -> None:
        """A conversation of a caller is over."""
        caller.conversations.pop(request_id, None)
        self._prompts.forget((caller.identity, request_id))

    async def over(self, caller: Caller, request_id: str) -> None:
        """A conversation of a caller is over: returns once no cancelled turn of it is left, for the server to free what that had.

        Whoever is cancelled meanwhile leaves it to be released here.
        """
        self.forget(caller, request_id)
        try:
            await caller.cancelled_turn(request_id)
        except asyncio.CancelledError:
            self._release_later(caller, [request_id], set(self._ending.get(request_id, ())))
            raise

    def _release_later(self, caller: Caller, request_ids: list[str], after: set[asyncio.Task[None]]) -> None:
        """Ends conversations that nobody is there to end."""
        for request_id in request_ids:
            self.forget(caller, request_id)
        task = asyncio.ensure_future(self._release(request_ids, after))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _release(self, request_ids: list[str], after: set[asyncio.Task[None]]) -> None:
        if after:
            await asyncio.wait(after, timeout=_END_S)
        for request_id in request_ids:
            # Another caller may have gone on with it.
            if any(request_id in caller.conversations for caller in self):
                continue
            try:
                async with asyncio.timeout(_END_S):
                    await self._server.release(request_id)
            # Nobody is there to be told.
            except Exception as error:
                self._stats.num_release_failures += 1
                logger.warning("request %r could not be released: %s: %s", request_id, type(error).__name__, error)
