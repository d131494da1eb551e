"""Generations that are inside of a server now, so that they can be waited for, or taken back from a server that is lost.

Invariant: an attempt is listed from before its server is called until it has ended, however it ends. Knows no replica ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from ostinato_engines import AsyncServerBase


class Attempts:
    """The attempts of one client, by server."""

    def __init__(self) -> None:
        self._inside: dict[int, set[asyncio.Timeout]] = {}  # by the identity of a server that somebody calls
        self._left: dict[int, asyncio.Event] = {}

    @contextmanager
    def at(self, server: AsyncServerBase) -> Iterator[asyncio.Timeout]:
        """List an attempt at `server`, and give the scope to call the server in: it expires when the attempt is taken back."""
        key, attempt = id(server), asyncio.timeout(None)
        inside = self._inside.setdefault(key, set())
        inside.add(attempt)
        try:
            yield attempt
        finally:
            inside.discard(attempt)
            if not inside:
                del self._inside[key]
                left = self._left.pop(key, None)
                if left is not None:
                    left.set()

    def num(self, server: AsyncServerBase) -> int:
        """Return how many are inside of `server`."""
        return len(self._inside.get(id(server), ()))

    def take_back(self, server: AsyncServerBase) -> int:
        """Cancel what is inside of `server`, to be begun again; return how many those are."""
        now = asyncio.get_running_loop().time()
        attempts = [attempt for attempt in self._inside.get(id(server), ()) if not attempt.expired()]
        for attempt in attempts:
            attempt.reschedule(now)
        return len(attempts)

    async def left(self, server: AsyncServerBase) -> None:
        """Wait until nothing is inside of `server`; the deadline is the caller's."""
        while self.num(server):
            await self._left.setdefault(id(server), asyncio.Event()).wait()
