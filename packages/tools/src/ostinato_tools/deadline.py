"""Running foreign coroutines under a deadline that holds even if they ignore cancellation."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

GRACE_S = 1.0
"""Seconds that a cancelled coroutine gets to clean up before it is left to itself."""

_logger = logging.getLogger(__name__)


class DeadlineExceeded(Exception):
    """The coroutine was still running at its deadline and was cancelled."""


class ToolGone(Exception):
    """The coroutine cancelled itself or tried to end the process."""


async def run_bounded(
    coroutine: Coroutine[Any, Any, Any], timeout_s: float, what: str, running: set[asyncio.Task]
) -> Any:
    """Await `coroutine` in a task of its own for at most `timeout_s` seconds.

    Args:
        coroutine: Foreign code.
        timeout_s: Seconds.
        what: What is run, for the log.
        running: Holds the task while it runs, so that its owner can cancel it.

    Raises:
        DeadlineExceeded: it did not end in time; it has been cancelled.
        ToolGone: it ended as cancelled without having been cancelled here, or raised SystemExit.
        asyncio.CancelledError: the caller was cancelled; so was the coroutine, and it has had its grace.
        Exception: what the coroutine raised.
    """
    task = asyncio.ensure_future(_contain(coroutine))
    running.add(task)
    task.add_done_callback(running.discard)
    try:
        await asyncio.wait((task,), timeout=timeout_s)
    except asyncio.CancelledError:
        await stop({task}, what)
        raise
    if not task.done():
        await stop({task}, what)
        raise DeadlineExceeded
    if task.cancelled():
        raise ToolGone("it was cancelled from within")
    return task.result()


async def stop(tasks: set[asyncio.Task], what: str) -> None:
    """Cancel tasks and wait for their end for `GRACE_S` seconds; those that go on are logged and left to themselves."""
    for task in tasks:
        task.cancel()
        task.add_done_callback(_retrieve)
    _, stubborn = await asyncio.wait(tasks, timeout=GRACE_S)
    if stubborn:
        _logger.warning("%s ignored its cancellation for %s s and was left running", what, GRACE_S)


async def _contain(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await coroutine
    except SystemExit as error:  # in a task it would end the event loop and with it every other trajectory
        raise ToolGone(f"it tried to end the process with code {error.code!r}") from error


def _retrieve(task: asyncio.Task) -> None:
    if not task.cancelled():
        task.exception()  # marks it as seen: nobody waits for this task any more
