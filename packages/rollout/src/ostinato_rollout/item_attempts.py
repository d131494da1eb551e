"""One piece of work within its deadline: its result, or its failure as data. And the end of many, however it is waited for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Set
from typing import Any, TypeVar

from ostinato_rollout.diagnostics import ago, log_dump
from ostinato_rollout.errors import RequestTimeoutError
from ostinato_rollout.failure import Failure, FailureKind
from ostinato_rollout.overtime import Overtime

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


class Progress:
    """Counts items that have ended; what a deadline has to say about the others."""

    def __init__(self) -> None:
        self.num_done = 0
        self.last_end = time.monotonic()

    def end(self) -> None:
        """Note that an item has ended."""
        self.num_done += 1
        self.last_end = time.monotonic()


async def attempt(
    call: Callable[[], Awaitable[Value]],
    what: str,
    *,
    timeout_s: float | None,
    progress: Progress,
    overtime: Overtime,
) -> Value | Failure:
    """Await `call()`; if it raises or takes too long, log why, once, and return the Failure.

    Args:
        call: The work.
        what: Names it, in logs and failures.
        timeout_s: Longest time that it may take; a longer one is cancelled. None: it has deadlines of its own.
        progress: Of the items that it belongs to.
        overtime: Ends it when it has taken too long.

    Raises:
        CancelledError: The task was cancelled from outside; one that `call` raises of its own is a failure.
    """
    try:
        return await _within(timeout_s, call, what, progress, overtime)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return Failure.from_error(error, what, kind=FailureKind.CANCELLED)
    except Exception as error:
        logger.exception("%s failed", what)
        return Failure.from_error(error, what)


async def _within(
    timeout_s: float | None, call: Callable[[], Awaitable[Value]], what: str, progress: Progress, overtime: Overtime
) -> Value:
    """Await `call()`, within a deadline if there is one."""
    if timeout_s is None:
        return await call()
    began = time.monotonic()

    def overdue() -> str:
        return (
            f"{what} must end within {timeout_s:g} s, got no result; it began {ago(began)}, last progress: {progress.num_done}"
            f" other items ended, the last one {ago(progress.last_end)}; raise the limit or find what hangs"
        )

    return await overtime.within(asyncio.timeout(timeout_s), call, what, overdue)


async def all_ended(ending: Callable[[], Set[asyncio.Task[Any]]], *, timeout_s: float) -> None:
    """Wait until `ending()`, the tasks that were cancelled and have not ended, is empty; a cancellation is raised after that.

    Raises:
        RequestTimeoutError: Some did not end in time; they are left to themselves.
        CancelledError: The wait was cancelled meanwhile.
    """
    loop = asyncio.get_running_loop()
    began, deadline = time.monotonic(), loop.time() + timeout_s
    cancellation: asyncio.CancelledError | None = None
    while tasks := ending():
        try:
            await asyncio.wait(tasks, timeout=max(0.0, deadline - loop.time()))
        except asyncio.CancelledError as error:
            cancellation = error
        if loop.time() >= deadline and (tasks := ending()):
            message = (
                f"{len(tasks)} cancelled runs must end within {timeout_s:g} s, got no end; they were cancelled {ago(began)};"
                " find what holds them, or raise close_timeout_s"
            )
            log_dump(message)
            raise RequestTimeoutError(message)
    if cancellation is not None:
        raise cancellation
