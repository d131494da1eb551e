"""Threads of one's own for functions that block: they end when they are closed, after what they are at."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from ostinato_tools.threads import DaemonThreads

LONG_S = 60.0


def own(before: set[threading.Thread]) -> list[threading.Thread]:
    """Threads that were started since."""
    return [thread for thread in threading.enumerate() if thread not in before]


async def test_closed_threads_end_after_their_calls() -> None:
    """Threads that wait end at once, one that is in a call after it, and what is asked afterwards is refused."""
    before, gate, threads = set(threading.enumerate()), threading.Event(), DaemonThreads(max_threads=3)
    begun = threading.Event()

    def wait() -> str:
        begun.set()
        gate.wait(LONG_S)
        return "late"

    functions: list[Callable[[], str]] = [wait, lambda: "a", lambda: "b"]
    running = [asyncio.create_task(threads.run(function)) for function in functions]
    assert await running[1] == "a"
    await asyncio.to_thread(begun.wait, LONG_S)
    threads.close()
    with pytest.raises(RuntimeError, match="threads must be open"):
        await threads.run(wait)
    gate.set()
    assert [await each for each in running] == ["late", "a", "b"]
    for thread in own(before):
        if thread.name.startswith("ostinato-tool-"):
            await asyncio.to_thread(thread.join, LONG_S)
            assert not thread.is_alive()


async def test_closing_threads_that_never_started_does_nothing() -> None:
    """Threads that nobody has needed can be closed, and again."""
    threads = DaemonThreads()
    threads.close()
    threads.close()
