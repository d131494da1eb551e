"""Foreign code within its deadline, also such that does not end when it is cancelled."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from ostinato_rollout.diagnostics import log_dump
from ostinato_rollout.errors import RequestTimeoutError

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

NUM_CANCELLATIONS: Final = 3
"""How often work is cancelled before it is left to itself."""


class Overtime:
    """Runs work in tasks of its own, so that whoever waits for it goes on at a time that the work has no say in.

    Args:
        grace_s: Seconds that cancelled work gets to tidy up before it is cancelled again, or left to itself.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._leftovers: set[asyncio.Task[Any]] = set()

    @property
    def num_leftovers(self) -> int:
        """Work that was left to itself and has not ended."""
        return len(self._leftovers)

    async def within(
        self, deadline: asyncio.Timeout, call: Callable[[], Awaitable[Value]], where: str, overdue: Callable[[], str]
    ) -> Value:
        """Await `call()` within a deadline that was not entered before. What comes after the deadline is not taken.

        Args:
            deadline: Whoever knows better may move it meanwhile.
            call: Begins the work.
            where: Names it, in logs and errors.
            overdue: Returns what to say when the deadline has passed.

        Raises:
            RequestTimeoutError: The deadline has passed; the work has ended, or was left to itself.
            CancelledError: The task was cancelled, and so was the work. Or the work cancelled itself.
            BaseException: What the work raised.
        """
        task: asyncio.Task[Value] | None = None
        try:
            async with deadline:
                task = asyncio.create_task(_begun(call), name=where)  # by which it is found if it never suspends
                await asyncio.wait((task,))
        except TimeoutError as error:
            message = overdue()
            log_dump(message)
            await self._end(task, where)
            raise RequestTimeoutError(message) from error
        except asyncio.CancelledError:
            await self._end(task, where)
            raise
        return task.result()

    async def _end(self, task: asyncio.Task[Any] | None, where: str) -> None:
        """Cancel work, and wait for what it tidies up, but not for ever. A cancellation is raised after that."""
        cancellation: asyncio.CancelledError | None = None
        for _ in range(NUM_CANCELLATIONS):
            if task is None or task.done():
                break
            task.cancel()
            try:
                await asyncio.wait((task,), timeout=self._grace_s)
            except asyncio.CancelledError as error:
                cancellation = error
        if task is not None:
            if task.done():
                _log_end(task, where)
            else:
                self._leave(task, where)
        if cancellation is not None:
            raise cancellation

    def _leave(self, task: asyncio.Task[Any], where: str) -> None:
        logger.error("%s goes on though it was cancelled %d times; it is left to itself", where, NUM_CANCELLATIONS)
        began = time.monotonic()

        def ended(task: asyncio.Task[Any]) -> None:
            self._leftovers.discard(task)
            logger.warning("%s, which was left to itself, ended %.1f s later", where, time.monotonic() - began)
            _log_end(task, where)

        self._leftovers.add(task)
        task.add_done_callback(ended)


async def _begun(call: Callable[[], Awaitable[Value]]) -> Value:
    return await call()


def _log_end(task: asyncio.Task[Any], where: str) -> None:
    """Log what cancelled work raised of its own; nobody else is told."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        logger.error("%s failed when it was cancelled", where, exc_info=error)
