"""Ctrl-C for a program that both waits and computes in one event loop.

`asyncio.run` cancels its main task, which takes effect at the next `await`; a forward pass or a checkpoint has none. Here the main task is
interrupted on the spot while it computes, and cancelled while it waits; either way it unwinds, so that what it holds is released.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from types import FrameType
from typing import Any

__all__ = ["run_interruptibly"]


def run_interruptibly(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` in a new event loop; a second Ctrl-C does not wait for the first one's unwinding.

    Raises:
        KeyboardInterrupt: Ctrl-C came, and `main` has unwound.
    """
    if asyncio.run(_interrupted(main)):
        raise KeyboardInterrupt


async def _interrupted(main: Coroutine[Any, Any, None]) -> bool:
    """Whether Ctrl-C ended `main`."""
    if threading.current_thread() is not threading.main_thread():
        await main
        return False
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    num_interrupts = 0

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        nonlocal num_interrupts
        num_interrupts += 1
        if num_interrupts > 1 or asyncio.current_task(loop) is task:
            raise KeyboardInterrupt
        task.cancel()
        loop.call_soon_threadsafe(lambda: None)  # wakes a loop that waits for nothing but time

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        await main
    except (KeyboardInterrupt, asyncio.CancelledError):
        if not num_interrupts:
            raise
        return True
    finally:
        signal.signal(signal.SIGINT, before)
    return False
