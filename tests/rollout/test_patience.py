"""Deadlines that hold whatever the other side does, and that a standing event loop does not use up."""

from __future__ import annotations

import asyncio
import time

import pytest

from ostinato_rollout.patience import DeadlinePassedError, done_within, result_within, to_its_end


async def test_an_answer_that_came_while_the_loop_stood_still_is_in_time():
    """A loop that computed for longer than the deadline still sees the answer that waits for it."""
    answered = asyncio.Event()
    waiting = asyncio.ensure_future(answered.wait())

    def stand_still():
        time.sleep(0.3)  # as a trainer that computes on the event loop
        asyncio.get_running_loop().call_later(0.001, answered.set)

    asyncio.get_running_loop().call_soon(stand_still)
    assert await done_within(waiting, 0.2)


async def test_work_that_ignores_its_cancellation_keeps_nobody(monkeypatch, let_go):
    """After the deadline and a moment of grace it is left to itself."""
    monkeypatch.setattr("ostinato_rollout.patience.GRACE_S", 0.01)

    async def stubborn():
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue

    with pytest.raises(DeadlinePassedError):
        await result_within(stubborn(), 0.01)
    let_go.set()


async def test_work_is_told_apart_from_its_deadline():
    """A TimeoutError of the work's own is not the deadline's, and a result comes as it is."""

    async def own():
        raise TimeoutError("a socket's")

    async def four():
        return 4

    with pytest.raises(TimeoutError, match="a socket's") as caught:
        await result_within(own(), 5)
    assert not isinstance(caught.value, DeadlinePassedError)
    assert await result_within(four(), 5) == 4


async def test_what_tidies_up_is_waited_for_by_who_is_cancelled():
    """The caller's cancellation reaches the caller, after the work has ended."""
    begun, may_end, ended = asyncio.Event(), asyncio.Event(), []

    async def tidy():
        begun.set()
        await may_end.wait()
        ended.append(True)

    caller = asyncio.create_task(to_its_end(tidy()))
    await begun.wait()
    caller.cancel()
    await asyncio.sleep(0)
    assert not caller.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended == [True]
