"""Deadlines: one timer for many calls, none of them forgotten and none kept."""

import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_tools.deadline import DeadlineExceeded, Deadlines, ToolGone, run_bounded, stop


class FakeLoop:
    """The two things that deadlines ask of a loop, with a clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, object]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, at: float, callback) -> None:
        self.timers.append((at, callback))

    def advance(self, seconds: float) -> None:
        """Move the clock, running timers when they are due."""
        end = self.now + seconds
        while due := [timer for timer in self.timers if timer[0] <= end]:
            timer = min(due, key=lambda item: item[0])
            self.timers.remove(timer)
            self.now = max(self.now, timer[0])
            timer[1]()  # type: ignore[operator]
        self.now = end


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0.01, 8)), max_size=30))
def test_each_deadline_expires_at_its_time_unless_lifted(calls: list[tuple[float, float]]) -> None:
    """Whatever begins and ends when: exactly the calls that last longer than five seconds expire, at five, with one timer at most."""
    fake, events = FakeLoop(), []
    loop = asyncio.new_event_loop()
    deadlines = Deadlines(5.0, fake)  # type: ignore[arg-type]
    now, running = 0.0, []
    for pause, lasts in calls:
        events.append((now := now + pause, lasts))
    ends = sorted((begin + lasts, index) for index, (begin, lasts) in enumerate(events))
    waiters = {}
    for at, kind, index in sorted(
        [(begin, 0, index) for index, (begin, _) in enumerate(events)] + [(end, 1, index) for end, index in ends]
    ):
        fake.advance(at - fake.now)
        if kind == 0:
            waiters[index] = loop.create_future()
            deadlines.set(waiters[index])
            running.append(index)
        else:
            if abs(events[index][1] - 5) > 1e-3:
                assert waiters[index].done() == (events[index][1] > 5)
            deadlines.lift(waiters[index])
        assert len(fake.timers) <= 1
    fake.advance(20)
    assert fake.timers == []
    assert deadlines._pending == {}
    loop.close()


@settings(deadline=None, max_examples=25)
@given(st.lists(st.sampled_from([0, 0.001, 0.05]), min_size=1, max_size=30))
def test_calls_of_any_length_end_as_they_should(lengths: list[float]) -> None:
    """Calls at the same time under one deadline: the short ones give their results, the long ones are cancelled."""

    async def main() -> None:
        deadlines, running, cancelled = Deadlines(0.02, asyncio.get_running_loop()), {}, []

        async def work(index: int, seconds: float) -> int:
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                cancelled.append(index)
                raise
            return index

        results = await asyncio.gather(
            *(run_bounded(work(index, length), deadlines, "work", running) for index, length in enumerate(lengths)),
            return_exceptions=True,
        )
        for index, (length, result) in enumerate(zip(lengths, results, strict=True)):
            if length == 0.05:
                assert isinstance(result, DeadlineExceeded)
                assert result.task.done()
            else:
                assert result == index or isinstance(result, DeadlineExceeded)  # on a busy machine
        assert set(cancelled) >= {index for index, length in enumerate(lengths) if length == 0.05}
        assert running == {}
        assert deadlines._pending == {}

    asyncio.run(main())


async def test_a_call_that_is_stopped_before_its_first_step_ends() -> None:
    """Its caller goes on at once rather than at the deadline, and the coroutine that never ran is closed."""
    deadlines, running = Deadlines(600, asyncio.get_running_loop()), {}
    ran = []

    async def work() -> None:
        ran.append(True)

    call = asyncio.ensure_future(run_bounded(work(), deadlines, "work", running))
    while not running:  # noqa: ASYNC110 - the very step in which the call begins is wanted
        await asyncio.sleep(0)
    await stop(dict(running), "work")
    with pytest.raises(ToolGone):
        await call
    assert ran == []
    assert running == {}


async def test_a_cancelled_caller_waits_for_the_cleaning_up() -> None:
    """Cancelling the caller cancels the coroutine, and its `finally` is over when the caller ends."""
    deadlines, running, events = Deadlines(600, asyncio.get_running_loop()), {}, []

    async def work() -> None:
        try:
            events.append("begun")
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            events.append("cleaned")

    call = asyncio.ensure_future(run_bounded(work(), deadlines, "work", running))
    while not events:  # noqa: ASYNC110 - as above
        await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert events == ["begun", "cleaned"]
    await asyncio.sleep(0)
    assert running == {}


async def test_a_stubborn_coroutine_is_left_with_its_task(
    monkeypatch: pytest.MonkeyPatch, let_go: asyncio.Event
) -> None:
    """A coroutine that ignores its cancellation is given up after its grace; the error knows the task that still runs."""
    monkeypatch.setattr("ostinato_tools.deadline.GRACE_S", 0.001)

    async def stubborn() -> str:
        while not let_go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await let_go.wait()
        return "late"

    deadlines = Deadlines(0.001, asyncio.get_running_loop())
    with pytest.raises(DeadlineExceeded) as caught:
        await run_bounded(stubborn(), deadlines, "stubborn", {})
    assert not caught.value.task.done()
    let_go.set()
    assert await caught.value.task == "late"
