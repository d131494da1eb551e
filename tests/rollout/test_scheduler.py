"""Bounded concurrency with results in order."""

from __future__ import annotations

import asyncio

import pytest

from ostinato_rollout import Failure, FailureKind, RolloutScheduler, SessionInputError


async def test_results_keep_the_order_of_the_items_and_the_bound():
    """Whatever finishes first, results stand in the order of the items, and never more than the bound run at once."""
    running = peak = 0
    events = [asyncio.Event() for _ in range(6)]

    async def run_one(item):
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        if item % 2 == 0:
            events[item].set()
            await events[item + 1].wait()
        else:
            events[item].set()
        running -= 1
        return item * 10

    assert await RolloutScheduler().run(range(6), run_one, concurrency=3) == [0, 10, 20, 30, 40, 50]
    assert 1 < peak <= 3


async def test_items_are_taken_only_when_a_place_is_free():
    """A generator of items is not run ahead of the work."""
    taken = []

    def items():
        for index in range(5):
            taken.append(index)
            yield index

    async def run_one(item):
        assert len(taken) <= item + 2
        await asyncio.sleep(0)
        return item

    assert await RolloutScheduler().run(items(), run_one, concurrency=1) == [0, 1, 2, 3, 4]


async def test_one_failure_touches_no_other_item(caplog):
    """An item that raises, or cancels itself, becomes a Failure in its place, its traceback logged once."""

    async def run_one(item):
        await asyncio.sleep(0)
        if item == 1:
            raise ValueError("bad item")
        if item == 2:
            raise asyncio.CancelledError
        return item

    results = await RolloutScheduler().run(range(4), run_one, concurrency=4)
    assert (results[0], results[3]) == (0, 3)
    assert results[1] == Failure("item 1", FailureKind.AGENT, "ValueError: bad item")
    assert results[2].kind is FailureKind.CANCELLED
    assert sum("bad item" in (record.exc_text or "") for record in caplog.records) == 1


async def test_cancelling_the_run_cancels_what_is_under_way():
    """A cancellation from outside reaches every item and propagates."""
    begun, cancelled = [], []

    async def run_one(item):
        begun.append(item)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(item)
            raise

    task = asyncio.create_task(RolloutScheduler().run(range(10), run_one, concurrency=3))
    while len(begun) < 3:  # noqa: ASYNC110  (items set no event)
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(cancelled) == [0, 1, 2]


async def test_no_place_at_all_is_refused():
    """A concurrency below one is an error, not a hang."""
    with pytest.raises(SessionInputError, match="concurrency must be at least 1, got 0"):
        await RolloutScheduler().run([1], lambda item: None, concurrency=0)


async def test_an_item_cancelled_by_others_frees_its_place():
    """Cancelling one item's task, even before it began, is a Failure in its place; the rest goes on."""

    outer = asyncio.current_task()

    async def run_one(item):
        if item == 0:
            for task in asyncio.all_tasks():
                if task not in (asyncio.current_task(), run, outer):
                    task.cancel()
        return item

    run = asyncio.create_task(RolloutScheduler().run(range(6), run_one, concurrency=2))
    results = await asyncio.wait_for(run, 5)
    assert results[0] == 0
    assert results[2:] == [2, 3, 4, 5]
    assert results[1].kind is FailureKind.CANCELLED


async def test_an_item_past_its_deadline_is_a_failure_in_its_place(caplog):
    """It is cancelled and recorded as a timeout that says when it began and what else has ended; the others go on."""
    cancelled = []

    async def run_one(item):
        if item == 1:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.append(item)
        return item

    results = await RolloutScheduler().run(range(4), run_one, concurrency=2, item_timeout_s=0.5)
    assert (results[0], *results[2:]) == (0, 2, 3)
    assert (results[1].kind, cancelled) == (FailureKind.TIMEOUT, [1])
    assert "item 1 must end within 0.5 s" in results[1].message
    assert "3 other items ended" in results[1].message
    assert "item 1 must end within 0.5 s" in caplog.text


async def test_a_timeout_of_the_items_own_is_theirs():
    """A TimeoutError that an item raises before the deadline is its failure, in its own words."""

    async def run_one(item):
        raise TimeoutError("my own clock")

    (failure,) = await RolloutScheduler().run([1], run_one, concurrency=1, item_timeout_s=60)
    assert (failure.kind, failure.message) == (FailureKind.TIMEOUT, "TimeoutError: my own clock")


async def test_a_deadline_of_nothing_is_refused():
    """No item could be done in no time."""
    with pytest.raises(SessionInputError, match="item_timeout_s must be positive, got 0"):
        await RolloutScheduler().run([1], lambda item: None, concurrency=1, item_timeout_s=0)
