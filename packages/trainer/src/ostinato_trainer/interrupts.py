"""Ctrl-C, and SIGTERM, for a program that both waits and computes in one event loop.

`asyncio.run` cancels its main task, which takes effect at the next `await`; a forward pass or a checkpoint has none. Here the main task is
interrupted on the spot while it computes, and cancelled while it waits; either way it unwinds, so that what it holds is released. What does not
unwind in time is said, with the stacks of all threads, and the process ends without it.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

from ostinato_trainer.errors import StalledError

__all__ = ["TERMINATED", "run_interruptibly", "terminated_as_interrupted"]

logger = logging.getLogger(__name__)

TERMINATED: Final = 128 + signal.SIGTERM
"""Exit status after SIGTERM, as shells have it."""
_UNWINDING_S: Final = 180.0
"""Longest that a program may take to unwind after a signal."""


def run_interruptibly(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` in a new event loop; a second Ctrl-C does not wait for the first one's unwinding.

    Raises:
        KeyboardInterrupt: Ctrl-C came, and `main` has unwound.
        SystemExit: SIGTERM came, to which the program has no answer of its own, and `main` has unwound; the status is 143.
    """
    failures: list[BaseException] = []
    try:
        with _bounded_unwinding() as signalled:
            ended_by = asyncio.run(_interrupted(main, failures, signalled))
    except KeyboardInterrupt as interrupt:
        # It struck another task than that of `main`, which was unwound after that, and may know better: it is the watchdog's, for example.
        if failures and failures[0] is not interrupt:
            raise failures[0] from None
        raise
    if ended_by == signal.SIGTERM:
        raise SystemExit(TERMINATED)
    if ended_by is not None:
        raise KeyboardInterrupt


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Within the block, which computes without an event loop, SIGTERM interrupts as Ctrl-C does, so that what it holds is released.

    Raises:
        SystemExit: SIGTERM came, to which the program has no answer of its own, and the block has unwound; the status is 143.
    """
    on_main = threading.current_thread() is threading.main_thread()
    if not on_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    came = False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except BaseException as error:
        if not came or not _tells_of_interrupt(error):
            raise
        raise SystemExit(TERMINATED) from error
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _bounded_unwinding() -> Iterator[Callable[[int], None]]:
    """Within the block, what it gives is told of a signal, also from its handler; the process ends if the block has not soon after that."""
    told: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # which a handler may fill whatever it has interrupted
    has_ended = threading.Event()

    def end() -> None:
        number = told.get()
        if number is None or has_ended.wait(_UNWINDING_S):
            return
        sys.stderr.write(  # logging's locks may be what is waited for
            f"what {signal.Signals(number).name} has interrupted must end within {_UNWINDING_S:g} s, but it has not; the process ends without it, "
            "and this is where its threads are:\n"
        )
        sys.stderr.flush()
        faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
        os._exit(128 + number)

    threading.Thread(target=end, name="end after a signal", daemon=True).start()
    try:
        yield told.put
    finally:
        has_ended.set()
        told.put(None)


async def _interrupted(
    main: Coroutine[Any, Any, None], failures: list[BaseException], signalled: Callable[[int], None]
) -> int | None:
    """The signal that ended `main`, if one did, of which `signalled` is told at once; what else ended it is raised, and put into `failures`."""
    if threading.current_thread() is not threading.main_thread():
        await main
        return None
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    received: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        signalled(number)
        if len(received) > 1 or asyncio.current_task(loop) is task:
            raise KeyboardInterrupt
        task.cancel()
        loop.call_soon_threadsafe(lambda: None)  # wakes a loop that waits for nothing but time

    before = {signal.SIGINT: signal.signal(signal.SIGINT, interrupt)}
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        before[signal.SIGTERM] = signal.signal(signal.SIGTERM, interrupt)
    try:
        await main
    except BaseException as error:
        if not received or not _tells_of_interrupt(error):
            failures.append(error)
            raise
        if isinstance(error, Exception):
            logger.warning("What the interrupt came in the middle of has raised %s: %s", type(error).__name__, error)
        return received[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return None


def _tells_of_interrupt(error: BaseException) -> bool:
    """Whether it is the interrupt, or what a lock, or a library that was interrupted in the middle of something, has raised in its place.

    The watchdog interrupts by the same signal; its error says so itself.
    """
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, StalledError):
        if isinstance(seen, KeyboardInterrupt | asyncio.CancelledError):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
