"""Operations on a whole pool come one after the other, and tidy up before whoever cancelled them goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any, TypeVar

from ostinato_rollout.conversation import num_cancellations
from ostinato_rollout.errors import SessionStateError

T = TypeVar("T")


class Exclusive:
    """The operations of one pool."""

    def __init__(self) -> None:
        self._order = asyncio.Lock()
        self.lock = asyncio.Lock()
        """Held by one that changes all replicas, and by whoever else must not be disturbed by such a one."""
        self._tasks: dict[asyncio.Task[Any], None] = {}  # in the order in which they were begun
        self._is_closed = False

    async def run(self, purpose: str, work: Callable[[], Awaitable[T]], *, changes_all: bool = True) -> T:
        """Run `work` when the operation before it has ended.

        It is cancelled once, with its caller, who then waits until it has ended; a caller who is cancelled again leaves it to that.

        Args:
            purpose: Completes `the pool must be running to ...`.
            work: What to do.
            changes_all: Replicas that come back wait until it has ended; they need not where it is about one of the others.

        Raises:
            SessionStateError: The pool is shut down, or was meanwhile.
        """
        if self._is_closed:
            raise SessionStateError(f"the pool must be running to {purpose}, got one that is shut down; make a new one")

        async def run() -> T:
            async with self._order, self.lock if changes_all else nullcontext():
                return await work()

        task = asyncio.get_running_loop().create_task(run())
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and not num_cancellations():
                raise SessionStateError(
                    f"the pool must not be shut down while replicas have to {purpose}, got a shutdown; await that first"
                ) from None
            await _ended(task)
            raise

    def close(self) -> list[asyncio.Task[Any]]:
        """Begin nothing any more; return what is under way."""
        self._is_closed = True
        return list(self._tasks)


async def _ended(task: asyncio.Task[Any]) -> None:
    """Cancel a task, and wait for what it tidies up."""
    if not task.done():
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled():
        task.exception()
