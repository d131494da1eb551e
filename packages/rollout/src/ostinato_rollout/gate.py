"""Whether turns may go to replicas now. While the gate is closed they wait before it, in the deadline that each brings along."""

from __future__ import annotations

import asyncio


class Gate:
    """Open at first."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self.reason = ""
        """Why it is closed; empty: it is open."""
        self.num_closings = 0
        """How often it was closed: whoever passed meanwhile may meet what it was closed for."""

    @property
    def is_open(self) -> bool:
        """Whether nobody has to wait."""
        return self._open.is_set()

    def close(self, reason: str) -> None:
        """Let everybody wait who comes from now on."""
        self.reason = reason
        self.num_closings += 1
        self._open.clear()

    def open(self) -> None:
        """Let everybody go on."""
        self.reason = ""
        self._open.set()

    async def passed(self) -> None:
        """Wait until it is open; whoever goes on without another await finds it so."""
        while not self._open.is_set():
            await self._open.wait()
