"""Functions in processes of their own: what they answer, and what becomes of those that hang, die or leave something behind."""

import asyncio
import math
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ostinato_trainer.errors import RewardError
from ostinato_trainer.rewards.scoring_processes import ScoringProcesses

FUNCTIONS = """
import os, signal, subprocess, sys, time

def echo(value): return value
def pid(value): return os.getpid()
def fail(value): raise ValueError(f"no {value}")
def leave(value): sys.exit(3)
def die(value): os._exit(7)
def chatter(value):
    print("to standard output"); os.write(1, b"more"); sys.stdin.read()
    return value
def hang(value):
    print("hanging", file=open(value, "w"), flush=True)
    while True: pass
def hang_with_child(value):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(value + ".new", "w") as file: file.write(str(child.pid))
    os.rename(value + ".new", value)
    time.sleep(600)
def fill(value): return len(bytearray(2**33))
def repeat(value): return "x" * value
def odd(value): return object()
def fork(value):
    if os.fork() == 0: return "child"
    os.wait()
    return "parent"
loops = []
async def later(value):
    import asyncio
    await asyncio.sleep(0)
    loops.append(asyncio.get_running_loop())
    return [value, all(loop is loops[0] for loop in loops)]
def some(value):
    while value == "hang": pass
    return value
"""


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[Any]:
    """Makes pools of processes that call one of the functions above, and closes them."""
    file = tmp_path / "own.py"
    file.write_text(FUNCTIONS)
    pools: list[ScoringProcesses] = []

    def make(function: str, num_processes: int = 1, timeout_s: float = 60.0, **more: Any) -> ScoringProcesses:
        pool = ScoringProcesses(
            function,
            module="own",
            file=str(file),
            function=function,
            num_processes=num_processes,
            timeout_s=timeout_s,
            **more,
        )
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        await pool.aclose()
        assert pool.num_alive == 0


async def until(condition: Any) -> None:
    """Wait until `condition()` holds, within the test's own deadline."""
    while not condition():  # noqa: ASYNC110  (other processes set no events)
        await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_plain_answers_come_back(processes: Any) -> None:
    """What a function returns arrives as it was, numbers, text of any length, lists and mappings, and a NumPy number as a number."""
    numpy = pytest.importorskip("numpy")
    pool = processes("echo")
    for value in (1, 0.5, "text", None, True, [1, {"a": "ü"}], {"score": 1.0, "pred": "x" * 100_000}):
        assert await pool.call({"value": value}) == value
    assert math.isnan(await pool.call({"value": math.nan}))
    assert await pool.call({"value": {"score": numpy.float32(0.5), "acc": numpy.bool_(True)}}) == {
        "score": 0.5,
        "acc": True,
    }


async def test_processes_serve_again_and_are_no_more_than_allowed(processes: Any) -> None:
    """Many calls share the processes that there may be, and one call after another needs one."""
    pool = processes("pid", 2)
    assert len({await pool.call({"value": 0}) for _ in range(3)}) == 1
    pids = await asyncio.gather(*(pool.call({"value": 0}) for _ in range(8)))
    assert len(set(pids)) <= 2
    assert os.getpid() not in pids
    assert pool.num_alive <= 2


async def test_errors_come_back_and_end_nothing(processes: Any) -> None:
    """What a function raises is an error with its name and traceback, and the same process goes on."""
    pool = processes("fail")
    for _ in range(2):
        with pytest.raises(RewardError, match="fail must return a score, got ValueError: no 3") as caught:
            await pool.call({"value": 3})
        assert "own.py" in caught.value.__notes__[0]
    with pytest.raises(RewardError, match="SystemExit: 3"):
        await processes("leave").call({"value": 0})
    assert pool.num_alive == 1


async def test_a_process_that_dies_is_replaced(processes: Any) -> None:
    """A function that ends its process is an error that says with which status; so it is each time."""
    pool = processes("die")
    for _ in range(2):
        with pytest.raises(
            RewardError, match="the process of die must live until it answers, got its end with status 7"
        ):
            await pool.call({"value": 0})


async def test_a_process_that_died_while_idle_is_replaced(processes: Any) -> None:
    """A process that was killed between two calls is replaced; a call that came before its end was known says so, the next goes well."""
    pool = processes("pid")
    first = await pool.call({"value": 0})
    os.kill(first, signal.SIGKILL)
    await until(lambda: not is_alive(first))
    answers = [answer async for answer in _answers(pool, 2)]
    assert answers[-1] != first


async def _answers(pool: ScoringProcesses, number: int) -> AsyncIterator[Any]:
    for _ in range(number):
        try:
            yield await pool.call({"value": 0})
        except RewardError:  # the loop may not have heard of its end yet; the next call has
            continue


async def test_printing_and_reading_do_no_harm(processes: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """What a function prints goes to standard error, and what it reads is empty."""
    assert await processes("chatter").call({"value": 5}) == 5
    assert "to standard output" in capfd.readouterr().err


async def test_async_functions_are_awaited_there(processes: Any) -> None:
    """A coroutine function runs on a loop of its process, the same each time: connections that it keeps stay good."""
    pool = processes("later")
    assert [await pool.call({"value": number}) for number in (5, 6)] == [[5, True], [6, True]]


async def test_a_call_that_is_late_costs_itself_alone(processes: Any) -> None:
    """A function that hangs is killed at the deadline; calls that waited for its process meanwhile are not late for that."""
    pool = processes("some", timeout_s=2.0)
    calls = [asyncio.create_task(pool.call({"value": value})) for value in ("hang", 1, 2)]
    with pytest.raises(RewardError, match=r"some must answer within reward.timeout_s=2 s, got no answer"):
        await calls[0]
    assert [await call for call in calls[1:]] == [1, 2]


async def test_the_start_of_a_process_makes_no_call_late(tmp_path: Path) -> None:
    """A module that takes longer to import than a call may take is waited for."""
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(2.2)\ndef f(value): return value\n")
    pool = ScoringProcesses(
        "f", module="slow", file=str(tmp_path / "slow.py"), function="f", num_processes=1, timeout_s=2.0
    )
    try:
        assert await pool.call({"value": 5}) == 5
    finally:
        await pool.aclose()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
async def test_a_fork_does_not_answer_twice(processes: Any) -> None:
    """A function that forks and returns twice has one answer, its own."""
    pool = processes("fork")
    for _ in range(2):
        assert await pool.call({"value": 0}) == "parent"


async def test_a_call_that_is_cancelled_kills_its_process(processes: Any, tmp_path: Path) -> None:
    """A function that computes without end is killed when its deadline passes, and the place is free for the next call."""
    pool = processes("hang")
    for number in range(2):
        started = tmp_path / f"started{number}"
        call = asyncio.create_task(pool.call({"value": str(started)}))
        await until(started.exists)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert pool.num_alive == 0


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
async def test_what_a_function_started_goes_with_it(processes: Any, tmp_path: Path) -> None:
    """Killing a process kills those that the function has started."""
    pool, started = processes("hang_with_child"), tmp_path / "started"
    call = asyncio.create_task(pool.call({"value": str(started)}))
    await until(started.exists)
    child = int(started.read_text())
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: not is_alive(child))


async def test_waiting_calls_are_cancelled_alone(processes: Any, tmp_path: Path) -> None:
    """Cancelling a call that waits for a process harms neither the process nor the call that has it."""
    pool, started = processes("hang"), tmp_path / "started"
    running = asyncio.create_task(pool.call({"value": str(started)}))
    await until(started.exists)
    waiting = asyncio.create_task(pool.call({"value": "x"}))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert pool.num_alive == 1
    assert not running.done()
    await pool.aclose()
    with pytest.raises(RewardError, match="must live until it answers"):
        await running


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is kept by Linux")
async def test_memory_is_limited(processes: Any) -> None:
    """A function that wants more memory than it may have gets a MemoryError, which is an error here."""
    with pytest.raises(RewardError, match="MemoryError"):
        await processes("fill", max_memory_bytes=2**30).call({"value": 0})


async def test_what_cannot_travel_is_said(processes: Any) -> None:
    """Arguments that cannot be pickled and answers that are no plain data, or too much, are errors that say so."""
    with pytest.raises(RewardError, match=r"arguments of echo must be picklable.*reward.executor=thread"):
        await processes("echo").call({"value": lambda: 1})
    with pytest.raises(RewardError, match="must be numbers, text, lists and mappings, got a object"):
        await processes("odd").call({"value": 0})
    pool = processes("repeat")
    with pytest.raises(RewardError, match="got 16777230 bytes of JSON, more than 16777216"):
        await pool.call({"value": 2**24})
    assert await pool.call({"value": 3}) == "xxx"
    with pytest.raises(RewardError, match="the process of missing must return a score, got AttributeError"):
        await processes("missing").call({"value": 0})


async def test_a_closed_pool_takes_no_call(processes: Any) -> None:
    """After closing there are no processes and no new ones; closing twice is fine."""
    pool = processes("pid")
    pid = await pool.call({"value": 0})
    await pool.aclose()
    await pool.aclose()
    assert not is_alive(pid) or sys.platform != "linux"
    with pytest.raises(RewardError, match="before the run ends"):
        await pool.call({"value": 0})


async def test_a_start_that_outlasts_a_deadline_serves_the_next_call(tmp_path: Path) -> None:
    """A function whose import takes longer than a call may is imported once, and answers as soon as it is there."""
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\n"
        "here = pathlib.Path(__file__).parent\n"
        "with (here / 'imports').open('a') as file: file.write('x')\n"
        "while not (here / 'go_on').exists(): time.sleep(0.01)\n"
        "def f(value): return value\n"
    )
    pool = ScoringProcesses(
        "f", module="slow", file=str(tmp_path / "slow.py"), function="f", num_processes=1, timeout_s=60.0
    )
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await pool.call({"value": 5})
        assert pool.num_alive <= 1
    (tmp_path / "go_on").touch()
    assert await pool.call({"value": 5}) == 5
    assert (tmp_path / "imports").read_text() == "x"
    await pool.aclose()
    assert pool.num_alive == 0


async def test_a_pool_that_closes_while_a_process_starts_leaves_none(processes: Any) -> None:
    """Closing at any moment of a call's beginning leaves no process, and the call is an error."""
    for number in range(5):
        pool = processes("pid")
        call = asyncio.create_task(pool.call({"value": 0}))
        for _ in range(number):
            await asyncio.sleep(0)
        await pool.aclose()
        with pytest.raises(RewardError):
            await call
        assert pool.num_alive == 0


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
async def test_processes_end_with_their_parent(tmp_path: Path) -> None:
    """A program that is killed while a score computes leaves no process behind."""
    (tmp_path / "own.py").write_text(FUNCTIONS)
    pid_file = tmp_path / "pid"
    (tmp_path / "program.py").write_text(
        "import asyncio\n"
        "from ostinato_trainer.rewards.scoring_processes import ScoringProcesses\n"
        f"own = {str(tmp_path / 'own.py')!r}\n"
        "async def main():\n"
        "    pool = ScoringProcesses('hang', module='own', file=own, function='hang_with_child',\n"
        "        num_processes=1, timeout_s=60.0)\n"
        f"    await pool.call({{'value': {str(pid_file)!r}}})\n"
        "asyncio.run(main())\n"
    )
    program = await asyncio.create_subprocess_exec(sys.executable, str(tmp_path / "program.py"))
    await until(pid_file.exists)
    scorer = int(Path(f"/proc/{pid_file.read_text()}/stat").read_text().rpartition(")")[2].split()[1])
    assert is_alive(scorer)
    program.kill()
    await program.wait()
    await until(lambda: not is_alive(scorer))
