"""What a service has of one connection: its calls under way and its conversations. Knows no socket and no server."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class _Running:
    """A call under way."""

    __slots__ = ("request_id", "task")

    def __init__(self, task: asyncio.Task[None], request_id: str | None) -> None:
        self.task = task
        self.request_id = request_id
        """Of a generation, its conversation."""


class Caller:
    """One connection that has said hello.

    Args:
        identity: Its name on the socket.
        name: For logs.
        remote: Which remote server it is of; empty where that does not say.
        ending: Cancelled generations of all connections that have not ended yet, by conversation.
    """

    def __init__(self, identity: bytes, name: str, remote: bytes, ending: dict[str, set[asyncio.Task[None]]]) -> None:
        self.identity = identity
        self.name = name
        self.remote = remote
        self.has_spoken = True
        """Since the last tick."""
        self.num_silent_ticks = 0
        self.forgotten: dict[int, str] = {}
        """Generations whose prompt is to be sent again, and their conversations."""
        self.conversations: dict[str, None] = {}
        """That the server knows of, the oldest first."""
        self._running: dict[int, _Running] = {}
        self._ending = ending

    @property
    def num_calls(self) -> int:
        """Calls under way."""
        return len(self._running) + len(self.forgotten)

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """Of its calls, the cancelled ones included."""
        return {running.task for running in self._running.values()}

    def is_under_way(self, number: int) -> bool:
        """Whether a call of this number runs."""
        return number in self._running

    def begin(self, number: int, work: Coroutine[Any, Any, None], *, request_id: str | None = None) -> None:
        """Runs a call of a number that is not under way."""
        task = asyncio.ensure_future(work)
        self._running[number] = _Running(task, request_id)
        task.add_done_callback(lambda _: self._end(number))

    def _end(self, number: int) -> None:
        running = self._running.pop(number)
        if running.request_id is None or (ending := self._ending.get(running.request_id)) is None:
            return
        ending.discard(running.task)
        if not ending:
            del self._ending[running.request_id]

    def cancel(self, number: int) -> None:
        """Ends a call that nobody waits for; one that has ended is fine, and one that is ending is not disturbed."""
        self.forgotten.pop(number, None)
        running = self._running.get(number)
        if running is None or running.task.cancelling():
            return
        if running.task.cancel() and running.request_id is not None:
            self._ending.setdefault(running.request_id, set()).add(running.task)

    def cancel_all(self) -> None:
        """Ends all its calls."""
        self.forgotten.clear()
        for number in self._running:
            self.cancel(number)

    async def cancelled_turn(self, request_id: str) -> None:
        """Waits until the cancelled generations of a conversation have ended, whichever connections they came over."""
        if ending := self._ending.get(request_id):
            await asyncio.wait(set(ending))

    def abort_forgotten(self, request_ids: set[str] | None) -> list[int]:
        """Gives up the generations that wait for their prompt: all, or those of these conversations."""
        numbers = [number for number, name in self.forgotten.items() if request_ids is None or name in request_ids]
        for number in numbers:
            del self.forgotten[number]
        return numbers
