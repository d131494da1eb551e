"""Running foreign coroutines under a deadline that holds even if they ignore cancellation.

What is guaranteed: the caller of `run_bounded` goes on at the deadline, or at most `GRACE_S` later where the coroutine
does not end when it is cancelled. What is not: a coroutine that blocks the event loop's thread (`time.sleep` in an
`async def`) holds everything up until it lets go, and one that ignores its cancellation runs on, unheard.
"""

import asyncio
import functools
import logging
from collections.abc import Coroutine
from typing import Any

GRACE_S = 1.0
"""Seconds that a cancelled coroutine gets to clean up before it is left to itself."""

_logger = logging.getLogger(__name__)


class DeadlineExceeded(Exception):
    """The coroutine was still running at its deadline and was cancelled."""

    def __init__(self, task: asyncio.Task) -> None:
        super().__init__()
        self.task = task
        """The coroutine's task; not done where it ignored its cancellation."""


class ToolGone(Exception):
    """The coroutine cancelled itself, tried to end the process, or raised what is no Exception."""


class Deadlines:
    """Deadlines that all lie equally far ahead, so that one timer serves them all.

    They expire in the order in which they were set, and most are lifted long before. A timer of its own for each would
    cost more than everything else around a short call.
    """

    def __init__(self, timeout_s: float, loop: asyncio.AbstractEventLoop) -> None:
        """Set nothing yet.

        Args:
            timeout_s: Seconds from setting a deadline to its expiry.
            loop: The loop whose clock counts.
        """
        self.timeout_s = timeout_s
        self.loop = loop
        self._pending: dict[asyncio.Future, float] = {}
        self._armed = False

    def set(self, waiter: asyncio.Future) -> None:
        """Resolve `waiter` after `timeout_s`, unless the deadline is lifted before."""
        at = self.loop.time() + self.timeout_s
        self._pending[waiter] = at
        if not self._armed:
            self._armed = True
            self.loop.call_at(at, self._expire)

    def lift(self, waiter: asyncio.Future) -> None:
        """Forget the deadline of `waiter`."""
        self._pending.pop(waiter, None)

    def _expire(self) -> None:
        self._armed = False
        # What the loop's own clock resolution lets fire early is due as well.
        now = self.loop.time() + 1e-6
        due = []
        for waiter, at in self._pending.items():
            if at > now:
                self._armed = True
                self.loop.call_at(at, self._expire)
                break
            due.append(waiter)
        for waiter in due:
            del self._pending[waiter]
            _wake(waiter)


async def run_bounded(
    coroutine: Coroutine[Any, Any, Any], deadlines: Deadlines, what: str, running: dict[asyncio.Task, asyncio.Future]
) -> Any:
    """Await `coroutine` in a task of its own until its deadline.

    Args:
        coroutine: Foreign code.
        deadlines: How long it may take.
        what: What is run, for the log.
        running: Holds the task while it runs, so that its owner can `stop` it.

    Raises:
        DeadlineExceeded: it did not end in time; it has been cancelled.
        ToolGone: it ended as cancelled without having been cancelled here, or raised what is no Exception.
        asyncio.CancelledError: the caller was cancelled; so was the coroutine, and it has had its grace.
        Exception: what the coroutine raised.
    """
    waiter = deadlines.loop.create_future()
    task = deadlines.loop.create_task(_contain(coroutine, waiter))
    running[task] = waiter
    deadlines.set(waiter)
    try:
        await waiter
    except asyncio.CancelledError:
        task.add_done_callback(functools.partial(_forget, running))  # it may outlive this call
        await stop({task: waiter}, what)
        if task.done():
            coroutine.close()  # it may have been cancelled before its first step
        raise
    finally:
        deadlines.lift(waiter)
    if not task.done():
        await stop({task: waiter}, what)
        running.pop(task, None)
        raise DeadlineExceeded(task)
    running.pop(task, None)
    if task.cancelled():
        coroutine.close()  # it may have been cancelled before its first step
        raise ToolGone("it was cancelled from within")
    try:
        return task.result()
    except (Exception, KeyboardInterrupt):  # the second is the user's: it has ended the loop as well
        raise
    except BaseException as error:  # GeneratorExit and the like mean something to whoever awaits: not from a tool
        raise ToolGone(f"it raised {type(error).__name__}, which is no Exception") from error


async def stop(running: dict[asyncio.Task, asyncio.Future], what: str) -> None:
    """Cancel tasks and wait for their end for `GRACE_S` seconds; those that go on are logged and left to themselves.

    Args:
        running: Task to the future that its caller waits for; the callers go on.
        what: What is stopped, for the log.
    """
    for task in running:
        task.cancel()
        task.add_done_callback(_retrieve)
    _, stubborn = await asyncio.wait(running, timeout=GRACE_S)
    for waiter in running.values():
        _wake(waiter)  # a task that was cancelled before its first step has woken nobody
    if stubborn:
        _logger.warning("%s ignored its cancellation for %s s and was left running", what, GRACE_S)


async def _contain(coroutine: Coroutine[Any, Any, Any], waiter: asyncio.Future) -> Any:
    # Waking the caller from here rather than from a callback of the task spares each call a turn of the loop. The task is
    # done when the caller runs: between the two lines there is nothing to wait for.
    try:
        return await coroutine
    except SystemExit as error:  # in a task it would end the event loop and with it every other trajectory
        raise ToolGone(f"it tried to end the process with code {error.code!r}") from error
    finally:
        _wake(waiter)


def _forget(running: dict[asyncio.Task, asyncio.Future], task: asyncio.Task) -> None:
    running.pop(task, None)


def _wake(waiter: asyncio.Future) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _retrieve(task: asyncio.Task) -> None:
    if not task.cancelled():
        task.exception()  # marks it as seen: nobody waits for this task any more
