"""Work that does not end when it is cancelled."""

from __future__ import annotations

import asyncio
import logging

import pytest

from ostinato_rollout import (
    NUM_CANCELLATIONS,
    FailureKind,
    OnFailure,
    Overtime,
    RequestTimeoutError,
    RolloutScheduler,
    StreamOptions,
)


class Deaf:
    """Work that swallows so many cancellations."""

    def __init__(self, num_swallowed: int) -> None:
        self.num_swallowed, self.num_heard = num_swallowed, 0
        self.let_go = asyncio.Event()
        self.began, self.ended = asyncio.Event(), asyncio.Event()

    async def __call__(self, result=None):
        self.began.set()
        try:
            while not self.let_go.is_set():
                try:
                    await self.let_go.wait()
                except asyncio.CancelledError:
                    self.num_heard += 1
                    if self.num_heard > self.num_swallowed:
                        raise
            return result
        finally:
            self.ended.set()


@pytest.fixture
async def deaf():
    """Makes deaf work, and lets all of it go when the test ends, also when it fails."""
    made = []

    def make(num_swallowed):
        made.append(Deaf(num_swallowed))
        return made[-1]

    yield make
    for work in made:
        work.let_go.set()


@pytest.mark.parametrize("num_swallowed", [0, 1, 2, 3, 100])
async def test_work_is_cancelled_so_often_and_then_left_to_itself(num_swallowed, deaf, caplog):
    """Whatever work swallows, its deadline holds; it is cancelled up to three times, and what goes on then is watched to its end."""
    overtime, work = Overtime(0.02), deaf(num_swallowed)
    with pytest.raises(RequestTimeoutError, match="deaf work must end within"):
        await overtime.within(asyncio.timeout(0.02), work, "deaf work", lambda: "deaf work must end within its time")
    is_left = num_swallowed >= NUM_CANCELLATIONS
    assert work.num_heard == min(num_swallowed + 1, NUM_CANCELLATIONS)
    assert (overtime.num_leftovers, work.ended.is_set()) == (int(is_left), not is_left)
    assert ("is left to itself" in caplog.text) is is_left
    work.let_go.set()
    await work.ended.wait()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert overtime.num_leftovers == 0
    assert ("which was left to itself, ended" in caplog.text) is is_left


@pytest.mark.parametrize("num_swallowed", [0, 1, 100])
async def test_a_cancellation_from_outside_is_raised_whatever_the_work_swallows(num_swallowed, deaf):
    """Who cancels the wait gets the cancellation back, within the same bound; cancelling it again shortens that."""
    for num_cancellations in (1, 2):
        overtime, work = Overtime(0.02 if num_cancellations == 1 else 60.0), deaf(num_swallowed)
        waiting = asyncio.create_task(overtime.within(asyncio.timeout(60), work, "deaf work", lambda: "overdue"))
        await work.began.wait()
        for _ in range(1 if num_cancellations == 1 else NUM_CANCELLATIONS + 1):
            waiting.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert overtime.num_leftovers == int(num_swallowed >= NUM_CANCELLATIONS)
        work.let_go.set()
        await work.ended.wait()


async def test_a_result_that_comes_after_the_deadline_is_not_taken():
    """Work that answers its cancellation with a result is late all the same."""

    async def late():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "better late than never"

    with pytest.raises(RequestTimeoutError):
        await Overtime(5.0).within(asyncio.timeout(0.01), late, "late work", lambda: "overdue")


async def test_what_work_raises_while_it_is_cancelled_is_logged(caplog):
    """A deadline stays a deadline where tidying up fails; the log has the traceback of that."""

    async def clumsy():
        try:
            await asyncio.Event().wait()
        finally:
            raise LookupError("lost the broom")

    with caplog.at_level(logging.ERROR), pytest.raises(RequestTimeoutError):
        await Overtime(5.0).within(asyncio.timeout(0.01), clumsy, "clumsy work", lambda: "overdue")
    assert "lost the broom" in caplog.text


async def test_errors_of_the_work_are_its_own():
    """TimeoutError and CancelledError that work raises by itself are no deadline and no cancellation from outside."""

    async def raising(error):
        raise error

    for error in (TimeoutError("mine"), LookupError("mine"), asyncio.CancelledError("mine")):
        with pytest.raises(type(error), match="mine"):
            await Overtime(5.0).within(asyncio.timeout(5), lambda error=error: raising(error), "work", str)
    assert asyncio.current_task().cancelling() == 0


@pytest.mark.parametrize("num_swallowed", [1, 100])
async def test_a_stream_goes_on_past_deaf_runs_and_verdicts(num_swallowed):
    """A run or a verdict that swallows its cancellation has failed on its own group; the stream ends all the same."""
    deaf = Deaf(num_swallowed)
    options = StreamOptions(cancel_grace_s=0.02, close_timeout_s=5.0, on_failure=OnFailure.DROP)

    async def run_one(run):
        return await deaf() if run.prompt == "deaf run" else run.prompt

    async def keep_group(group):
        return await deaf(True) if group.prompt == "deaf verdict" else True

    prompts = ["deaf run", "deaf verdict", "fine"]
    async with RolloutScheduler().stream(
        prompts, run_one, n=1, concurrency=3, item_timeout_s=0.5, options=options, keep_group=keep_group
    ) as stream:
        groups = await stream.take(3)
        assert [group.prompt for group in groups] == ["fine"]
        assert [drop.failure.kind for drop in stream.dropped] == [FailureKind.TIMEOUT] * 2
        assert (stream.counts().num_open, stream.counts().fates["failed"]) == (0, 2)
    deaf.let_go.set()
    await asyncio.sleep(0)
