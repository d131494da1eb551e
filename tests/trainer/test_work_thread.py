"""Computing beside the event loop: one call at a time, errors as they are, and an end to every cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import logging
import re
import threading
import time
from pathlib import Path

import pytest

from ostinato_engines.device import host_threads
from ostinato_trainer.errors import BackendError
from ostinato_trainer.loop.work_thread import WorkThread

DEADLINE_S = 20.0
VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="unset")


async def test_calls_run_in_one_thread_beside_the_loop() -> None:
    """All calls run in one thread that is not the loop's, while the loop goes on; they see the caller's context and change none of it."""
    thread, gate = WorkThread(), threading.Event()
    VARIABLE.set("outside")

    def first() -> tuple[int, str]:
        assert gate.wait(DEADLINE_S)
        before = VARIABLE.get()
        VARIABLE.set("inside")
        return threading.get_ident(), before

    running = asyncio.create_task(thread.run(first))
    await asyncio.sleep(0)
    gate.set()  # set by the loop, which the call does not block
    ident, seen = await running
    assert (ident != threading.get_ident(), seen, VARIABLE.get()) == (True, "outside", "outside")
    assert await thread.run(threading.get_ident) == ident
    thread.close()


async def test_errors_come_out_and_the_thread_goes_on() -> None:
    """What a call raises is what its caller gets; even SystemExit and StopIteration, and the next call works."""
    thread = WorkThread()

    def fail(error: BaseException) -> None:
        raise error

    for error, expected in (
        (ValueError("v"), ValueError),
        (SystemExit(3), SystemExit),
        (StopIteration(), RuntimeError),
    ):
        with pytest.raises(expected):
            await thread.run(fail, error)
    assert await thread.run(sum, [1, 2]) == 3
    thread.close()


async def test_two_calls_at_once_are_refused() -> None:
    """A call while another is under way is an error and does not run; so is a call after close."""
    thread, gate = WorkThread(), threading.Event()
    first = asyncio.create_task(thread.run(gate.wait, DEADLINE_S))
    await asyncio.sleep(0)
    ran = []
    with pytest.raises(BackendError, match="must be free"):
        await thread.run(ran.append, 1)
    gate.set()
    assert await first
    thread.close()
    with pytest.raises(BackendError, match="is closed"):
        await thread.run(ran.append, 1)
    assert not ran


async def test_a_cancelled_call_is_interrupted_and_unwinds() -> None:
    """Cancelling the wait interrupts the call as Ctrl-C would; its cleanup has run before the cancellation goes on, and the thread can be
    used again."""
    thread, begun, unwound = WorkThread(), threading.Event(), []

    def endless() -> None:
        try:
            begun.set()
            deadline = time.monotonic() + DEADLINE_S
            while time.monotonic() < deadline:
                time.sleep(0)
        finally:
            unwound.append(True)

    running = asyncio.create_task(thread.run(endless))
    await asyncio.to_thread(begun.wait, DEADLINE_S)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert unwound
    assert await thread.run(sum, [1, 2]) == 3
    thread.close()


async def test_a_call_that_cannot_be_interrupted_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    """A call that hangs in a library holds the cancellation up for the grace only; the log says so, no further call overlaps with it, and once
    it has ended the thread is free again."""
    thread, gate, begun = WorkThread(interrupt_grace_s=0.05), threading.Event(), threading.Event()

    def in_a_library() -> None:
        begun.set()
        gate.wait(DEADLINE_S)

    running = asyncio.create_task(thread.run(in_a_library))
    await asyncio.to_thread(begun.wait, DEADLINE_S)
    running.cancel()
    with caplog.at_level(logging.ERROR), pytest.raises(asyncio.CancelledError):
        await running
    assert "is left behind" in caplog.text
    with pytest.raises(BackendError, match="still computes"):
        await thread.run(sum, [1])
    gate.set()
    deadline = time.monotonic() + DEADLINE_S
    while True:
        assert time.monotonic() < deadline, "the thread was never free again"
        await asyncio.sleep(0.001)
        with contextlib.suppress(BackendError):
            assert await thread.run(sum, [1, 2]) == 3
            break
    thread.close()


@pytest.mark.parametrize("num_spins", [0, 1, 5, 50])
async def test_interrupts_that_come_at_the_very_end_harm_nothing(num_spins: int) -> None:
    """However a cancellation meets the end of a call, the caller is cancelled or has its result, and the thread goes on."""
    thread = WorkThread()
    for _ in range(30):
        running = asyncio.create_task(thread.run(sum, range(num_spins * 100)))
        for _ in range(num_spins % 7):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running], timeout=DEADLINE_S)
        assert running.done()
        assert running.cancelled() or running.result() == sum(range(num_spins * 100))
    assert await thread.run(sum, [1, 2]) == 3
    thread.close()


def openmp() -> ctypes.CDLL:
    """The OpenMP library that torch has loaded; asked past torch, which would set its count when it is asked."""
    maps = Path("/proc/self/maps")
    text = maps.read_text() if maps.exists() else ""
    found = re.search(r"\S*/torch\S*/lib(?:gomp|iomp5|omp)\S*\.so\S*", text)  # other packages bring their own
    if found is None:
        pytest.skip("needs torch with OpenMP, and Linux to find it")
    return ctypes.CDLL(found.group())


@pytest.mark.parametrize("count", [1, 3])
async def test_libraries_get_as_many_host_threads_as_the_caller(count: int) -> None:
    """The number of host threads that the caller has chosen holds in the training thread too, where OpenMP has a count of its own."""
    thread, library = WorkThread(), openmp()
    with host_threads(count):
        assert await thread.run(library.omp_get_max_threads) == count
    thread.close()
