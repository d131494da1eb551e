"""Whatever hangs, the watchdog says what and since when, and ends the run: waits, blocked event loops, threads in a library."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from ostinato_rollout import Overtime, RolloutScheduler
from ostinato_trainer.config.sampling import WatchdogConfig
from ostinato_trainer.errors import StalledError
from ostinato_trainer.heartbeat import beat
from ostinato_trainer.interrupts import run_interruptibly
from ostinato_trainer.loop.watchdog import Standstill, Watchdog
from ostinato_trainer.loop.work_thread import WorkThread

pytestmark = pytest.mark.usefixtures("usual_handlers")

LONG_S = 60.0
FAIL = WatchdogConfig(warn_after_s=None, fail_after_s=0.2)
WARN = WatchdogConfig(warn_after_s=0.05, fail_after_s=None)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log, warnings and worse."""
    with caplog.at_level(logging.WARNING):
        yield caplog


async def test_a_wait_without_end_becomes_an_error_with_its_phase(log: pytest.LogCaptureFixture) -> None:
    """A wait in which nothing happens is cancelled; the error names the phases, the limit and since when, and the log has the stacks."""
    watchdog, unwound = Watchdog(FAIL), []

    async def wait() -> None:
        async with watchdog.watching():
            with watchdog.phase("step"), watchdog.phase("ref"):
                try:
                    await asyncio.sleep(LONG_S)
                finally:
                    unwound.append(True)

    with pytest.raises(StalledError, match=r"fail_after_s=0\.2 s.*since \d\d:\d\d:\d\d, in ref in step; ") as caught:
        await wait()
    assert unwound
    assert "stood still" not in str(caught.value)
    assert "thread MainThread" in log.text
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_a_blocked_event_loop_is_noticed_and_interrupted() -> None:
    """Code that blocks the event loop is interrupted as by Ctrl-C, and the error says that the loop stood still."""
    watchdog = Watchdog(WatchdogConfig(warn_after_s=None, fail_after_s=0.8))

    async def block() -> None:
        async with watchdog.watching():
            with watchdog.phase("callback Mine.on_step_end"):
                time.sleep(LONG_S)  # noqa: ASYNC251 (it is what must not be done)

    with pytest.raises(StalledError, match=r"in callback Mine\.on_step_end; the event loop has stood still for"):
        await block()


def test_a_trajectory_that_blocks_the_event_loop_is_named() -> None:
    """An agent that goes on without suspending is named in the error, with its trajectory and the line that it is in."""
    watchdog = Watchdog(WatchdogConfig(warn_after_s=None, fail_after_s=0.8))

    async def agent_without_end() -> None:
        end = time.monotonic() + LONG_S
        while time.monotonic() < end:
            pass

    async def sample() -> None:
        async with watchdog.watching():
            with watchdog.phase("gen"):
                what = "trajectory 7, agent mine"
                await Overtime(1.0).within(asyncio.timeout(LONG_S), agent_without_end, what, lambda: "overdue")

    with pytest.raises(
        StalledError, match=r"stood still for [\d.]+ s in trajectory 7, agent mine at .*:\d+, in agent_without_end"
    ):
        run_interruptibly(sample())


def test_its_own_interrupt_is_not_taken_for_somebody_s() -> None:
    """A blocked event loop is interrupted by the signal of Ctrl-C; the run ends with the watchdog's error all the same."""

    async def block() -> None:
        async with Watchdog(WatchdogConfig(warn_after_s=None, fail_after_s=0.8)).watching():
            time.sleep(LONG_S)  # noqa: ASYNC251 (it is what must not be done)

    with pytest.raises(StalledError, match="the event loop has stood still for"):
        run_interruptibly(block())


async def test_a_call_in_the_training_thread_that_blocks_ends_the_run(log: pytest.LogCaptureFixture) -> None:
    """A backend that computes without end in its thread does not keep the run: it is interrupted, or left behind, and the stack says
    where it is."""
    gate = threading.Event()

    def stuck_in_a_library() -> None:
        gate.wait(LONG_S)

    watchdog, thread = Watchdog(FAIL), WorkThread(interrupt_grace_s=0.1)

    async def compute() -> None:
        async with watchdog.watching():
            with watchdog.phase("update_actor"):
                await thread.run(stuck_in_a_library)

    with pytest.raises(StalledError, match="in update_actor"):
        await compute()
    assert "in stuck_in_a_library" in log.text
    assert "is left behind" in log.text
    gate.set()
    thread.close()


async def test_it_warns_first_and_with_what_is_waited_for(log: pytest.LogCaptureFixture) -> None:
    """Warnings come again after twice as long; in the phase of sampling they say which trajectory has been under way for how long."""
    watchdog, gate = Watchdog(WARN), asyncio.Event()

    async def wait(item: int) -> int:
        await gate.wait()
        return item

    async with watchdog.watching():
        with watchdog.phase("gen"):
            running = asyncio.create_task(RolloutScheduler().run([7], wait, concurrency=1))
            while len(log.records) < 2:  # noqa: ASYNC110 (a thread logs)
                await asyncio.sleep(0.01)
            gate.set()
            assert await running == [7]
    first = log.records[0].getMessage()
    assert "in gen; it waits for: " in first
    assert "item 0 under way for" in first
    assert "scheduler: 0 items done" in first


async def test_progress_is_no_standstill(log: pytest.LogCaptureFixture) -> None:
    """Phases that change, and trajectories that end while one samples, count as progress however long the whole takes."""
    watchdog = Watchdog(WatchdogConfig(warn_after_s=None, fail_after_s=1.0))

    async def soon(item: int) -> int:
        await asyncio.sleep(0.05)
        return item

    async with watchdog.watching():
        for _ in range(10):
            with watchdog.phase("adv"):
                await asyncio.sleep(0.05)
        with watchdog.phase("gen"):
            await RolloutScheduler().run(range(30), soon, concurrency=1)
    assert not log.records


def test_time_in_which_nobody_looked_is_no_standstill() -> None:
    """Seconds without progress add up from look to look; a process that was stopped for hours has not stood still for them."""
    standstill = Standstill(longest_look_s=4.0)
    assert [standstill.look(now, ("a",)) for now in (10.0, 11.0, 12.5)] == [0.0, 1.0, 2.5]
    assert standstill.look(5 * 3600.0, ("a",)) == 6.5
    assert standstill.look(5 * 3600.0 + 1, ("a",)) == 7.5
    assert [standstill.look(20000.0, ("b",)), standstill.look(20001.0, ("b",))] == [0.0, 1.0]


def test_each_pass_through_a_model_is_progress() -> None:
    """In a phase that computes, a heartbeat is progress, however long the phase lasts."""
    watchdog = Watchdog(WARN)
    with watchdog.phase("update_actor"):
        before = watchdog.progress()
        assert watchdog.progress() == before
        beat()
        assert watchdog.progress() != before


async def test_a_run_that_computes_is_not_said_to_wait_for_trajectories(log: pytest.LogCaptureFixture) -> None:
    """While the policy is trained, what is sampled ahead is not what the run waits for."""
    watchdog, gate = Watchdog(WARN), asyncio.Event()

    async def wait(item: int) -> int:
        await gate.wait()
        return item

    async with watchdog.watching():
        with watchdog.phase("update_actor"):
            running = asyncio.create_task(RolloutScheduler().run([7], wait, concurrency=1))
            while not log.records:  # noqa: ASYNC110 (a thread logs)
                await asyncio.sleep(0.01)
            gate.set()
            assert await running == [7]
    said = log.records[0].getMessage().splitlines()[0]
    assert "in update_actor; " in said
    assert "item 0" not in said


async def test_a_phase_that_ends_late_takes_its_own_name_away(log: pytest.LogCaptureFixture) -> None:
    """A phase in a thread that was left behind may end at any time: what the run is in then is still told right."""
    watchdog = Watchdog(WARN)
    late = watchdog.phase("ref")
    with watchdog.phase("step"):
        late.__enter__()
    with watchdog.phase("testing"):
        late.__exit__(None, None, None)
        async with watchdog.watching():
            while not log.records:  # noqa: ASYNC110 (a thread logs)
                await asyncio.sleep(0.01)
    assert "in testing; " in log.records[0].getMessage()


async def test_cancellations_and_errors_of_others_go_through() -> None:
    """A cancellation that is not the watchdog's, and any other error, come out as they are; without limits nothing is ever said."""
    quiet = WatchdogConfig(warn_after_s=None, fail_after_s=None)
    for error in (asyncio.CancelledError, KeyboardInterrupt, ValueError):
        with pytest.raises(error):
            async with Watchdog(quiet).watching():
                raise error
    async with Watchdog(quiet).watching():
        await asyncio.sleep(0.05)


async def test_another_error_on_the_way_out_does_not_hide_it() -> None:
    """What is raised because of the watchdog's cancellation is the cause of its error; a run that ends all the same has failed too, and
    its task can wait again."""

    async def wait(error: Exception | None) -> None:
        async with Watchdog(FAIL).watching():
            try:
                await asyncio.sleep(LONG_S)
            except asyncio.CancelledError:
                if error is not None:
                    raise error from None

    broken = ValueError("broken")
    with pytest.raises(StalledError) as caught:
        await wait(broken)
    assert caught.value.__cause__ is broken
    with pytest.raises(StalledError):
        await wait(None)
    await asyncio.sleep(0)


async def test_one_thing_after_the_other_is_watched() -> None:
    """A watchdog that has ended one thing watches the next one as if nothing had been."""
    watchdog = Watchdog(FAIL)

    async def wait(seconds: float) -> None:
        async with watchdog.watching():
            await asyncio.sleep(seconds)

    for _ in range(2):
        with pytest.raises(StalledError):
            await wait(LONG_S)
        await wait(0)


async def test_its_thread_ends_with_the_run() -> None:
    """However often runs are watched, no thread stays."""
    for _ in range(5):
        with contextlib.suppress(ValueError):
            async with Watchdog(FAIL).watching():
                raise ValueError("over")
    deadline = time.monotonic() + LONG_S
    while any(thread.name == "watchdog" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


STUBBORN = """
import asyncio, signal, time
from ostinato_trainer.config.sampling import WatchdogConfig
from ostinato_trainer.loop.watchdog import Watchdog

async def main():
    watchdog = Watchdog(WatchdogConfig(warn_after_s=None, fail_after_s=0.8), graces_s=(0.1, 0.3))
    async with watchdog.watching():
        with watchdog.phase("all_reduce"):
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            time.sleep(60)

asyncio.run(main())
"""


def test_a_process_that_cannot_be_interrupted_ends() -> None:
    """Where the main thread is stuck in a library that no interrupt reaches, the process ends with a status, after it has said why."""
    done = subprocess.run([sys.executable, "-c", STUBBORN], capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == 70
    assert "in all_reduce; the event loop has stood still" in done.stderr
    assert "the process ends with status 70" in done.stderr
