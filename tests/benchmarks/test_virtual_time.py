"""The event loop whose clock jumps."""

from __future__ import annotations

import asyncio

import pytest
from benchmarks.virtual_time import NothingLeftError, run_in_virtual_time


def test_sleeps_end_in_order_at_their_time():
    """Hours pass at once, and whoever sleeps wakes at the time that it asked for, in the order of those times."""

    async def program():
        loop, woken = asyncio.get_running_loop(), []

        async def sleep(seconds):
            await asyncio.sleep(seconds)
            woken.append((seconds, loop.time()))

        await asyncio.gather(*map(sleep, (7200.0, 0.5, 86_400.5, 3.0, 0.0)))
        return woken

    assert run_in_virtual_time(program()) == [(at, at) for at in (0.0, 0.5, 3.0, 7200.0, 86_400.5)]


def test_deadlines_are_kept_in_virtual_time():
    """A deadline ends what takes longer and leaves alone what does not."""

    async def program():
        async with asyncio.timeout(10):
            await asyncio.sleep(9.9)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                await asyncio.sleep(10.1)
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(program()) == pytest.approx(19.9)


def test_a_wait_for_what_never_comes_is_an_error():
    """A program that forgot to wake somebody ends, instead of hanging."""

    async def program():
        await asyncio.sleep(5)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(NothingLeftError, match="got only waits at 5 s"):
        run_in_virtual_time(program())
