"""Functions in processes of their own: really elsewhere, killed when late, and no failure of theirs hurts this process."""

import asyncio
import contextlib
import enum
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ostinato_tools import OutcomeKind, ToolDefinitionError, ToolExecutor, ToolRegistry, function_tool, load_tools
from ostinato_tools.processes import MAX_PROCESSES, stop_idle_processes
from ostinato_tools.testing import make_call, make_schema

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of Unix")


class Fruit(enum.Enum):
    """A value from this module."""

    APPLE = "apple"


@function_tool(schema=make_schema("act", {"how": {"type": "string"}, "path": {"type": "string"}}), process=True)
def act(how: str, path: str) -> object:
    """Do what is said."""
    if how == "pid":
        return str(os.getpid())
    if how == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(path).write_text(str(child.pid))
        how = "spin"
    if how == "spin":
        if path:
            Path(path + ".pid").write_text(str(os.getpid()))
        while True:
            time.sleep(0.01)
    if how == "die":
        os._exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        raise SystemExit(5)
    if how == "raise":
        raise KeyError("missing")
    if how == "odd":
        raise OddError("one", "two")
    if how == "lambda":
        return lambda: None
    if how == "mute":
        raise MuteError
    if how == "unreadable":
        return Unreadable()
    if how == "garbage":
        for number in range(3, 4096):
            with contextlib.suppress(OSError):
                os.write(number, bytes([255]) * 64)
    if how == "forged":
        for item in gc.get_objects():
            if isinstance(item, Connection):
                item.send(["an answer before the answer"])
    if how == "fork":
        child = os.fork()
        if child:
            os.waitpid(child, 0)
        return "parent" if child else "child"
    if how == "write":
        print("a line on standard output")
        return "written"
    return {"how": how, "reward": 1}, 0.5, {"fruit": Fruit.APPLE}


class MuteError(Exception):
    """Neither travels nor says what it is."""

    def __str__(self) -> str:
        raise ValueError("no text")

    def __reduce__(self) -> str:
        raise ValueError("no pickle")


class Unreadable:
    """Can be written, but not read again."""

    def __reduce__(self) -> tuple:
        return (int, ("no number",))


class OddError(Exception):
    """Cannot be unpickled, because it takes two arguments and keeps one."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)


def call(how: str, path: Path | str = "") -> object:
    """A call of `act`."""
    return make_call("act", {"how": how, "path": str(path)})


async def outcomes_of(*calls, timeout_s: float = 60) -> list:
    """The outcomes of calls of `act`, one after the other."""
    async with ToolExecutor(ToolRegistry([act]), timeout_s=timeout_s).open("t") as tools:
        return [(await tools.run([item]))[0] for item in calls]


def is_running(pid: int) -> bool:
    """Whether a process still does something; one that only waits to be collected does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return not Path("/proc/self").exists()
    return False


async def until(condition) -> None:
    """Wait until something is the case; the test's own deadline ends a wait in vain."""
    while not condition():  # noqa: ASYNC110 - what is waited for happens outside this process
        await asyncio.sleep(0.01)


async def test_a_function_runs_elsewhere_and_a_process_serves_again() -> None:
    """Calls run in other processes, fewer than there are calls, and results come back whole, values of the tool's own classes among them."""
    *pids, third = await outcomes_of(*[call("pid")] * (MAX_PROCESSES + 1), call("plain"))
    assert str(os.getpid()) not in {item.message["content"] for item in pids}
    assert len({item.message["content"] for item in pids}) <= MAX_PROCESSES
    assert third.message["content"] == '{"how": "plain", "reward": 1}'
    assert (third.reward, third.metrics) == (0.5, {"fruit": Fruit.APPLE})
    assert act("pid", "") == str(os.getpid())


async def test_what_goes_wrong_elsewhere_is_the_outcome_of_its_call(caplog: pytest.LogCaptureFixture) -> None:
    """Errors come back as themselves or as their text, the end of the process is infrastructure, and later calls work."""
    outcomes = await outcomes_of(*(call(how) for how in ("raise", "odd", "exit", "lambda", "die", "kill", "write")))
    assert [item.kind for item in outcomes] == ["tool_error"] * 4 + ["infrastructure"] * 2 + ["ok"]
    texts = [item.message["content"] for item in outcomes]
    assert "KeyError: 'missing'" in texts[0]
    assert "OddError: one" in texts[1]
    assert "code 5" in texts[2]
    assert "picklable" in texts[3]
    assert "code 3" in texts[4]
    assert "code -9" in texts[5]
    assert 'raise KeyError("missing")' in caplog.text


@pytest.mark.parametrize("how", ["garbage", "forged", "unreadable", "mute"])
async def test_an_answer_that_cannot_be_read_harms_no_other_call(how: str) -> None:
    """What is no answer is a failure of the call that gave it, and the next calls get their own answers."""
    bad, *others = await outcomes_of(call(how), *[call("plain")] * (MAX_PROCESSES + 1))
    assert bad.kind is OutcomeKind.TOOL_ERROR
    assert ("MuteError" if how == "mute" else "readable") in bad.message["content"]
    assert {item.message["content"] for item in others} == {'{"how": "plain", "reward": 1}'}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes of Unix")
async def test_a_fork_of_a_function_does_not_answer() -> None:
    """Where a function forks, the call has one answer, and so have the next ones."""
    outcomes = await outcomes_of(call("fork"), *[call("plain")] * (MAX_PROCESSES + 1))
    assert [item.message["content"] for item in outcomes] == [
        "parent",
        *['{"how": "plain", "reward": 1}'] * (MAX_PROCESSES + 1),
    ]


async def test_a_late_call_is_killed(tmp_path: Path) -> None:
    """At the deadline the process ends; the next call has a new one."""
    path = tmp_path / "spin.pid"
    for timeout_s in (0.5, 4, 32):  # until the process has had the time to begin
        (late,) = await outcomes_of(call("spin", tmp_path / "spin"), timeout_s=timeout_s)
        assert late.kind is OutcomeKind.TIMEOUT
        if path.exists() and path.read_text():
            break
    pid = int(path.read_text())
    await until(lambda: not is_running(pid))
    (again,) = await outcomes_of(call("pid"))
    assert again.kind is OutcomeKind.OK
    assert again.message["content"] != str(pid)


async def test_a_cancelled_call_is_killed_with_what_it_started(tmp_path: Path) -> None:
    """Cancelling the trajectory ends the process that computes for it, and the processes which that one started."""
    trajectory = asyncio.ensure_future(outcomes_of(call("child", tmp_path / "child")))
    paths = (tmp_path / "child", tmp_path / "child.pid")
    await until(lambda: all(path.exists() and path.read_text() for path in paths))
    pids = [int(path.read_text()) for path in paths]
    assert all(is_running(pid) for pid in pids)
    trajectory.cancel()
    with pytest.raises(asyncio.CancelledError):
        await trajectory
    await until(lambda: not any(is_running(pid) for pid in pids))


async def test_more_calls_than_processes() -> None:
    """Calls beyond the number of processes wait, and all are answered."""
    async with ToolExecutor(ToolRegistry([act])).open("t") as tools:
        outcomes = await tools.run([call("pid")] * (3 * MAX_PROCESSES + 1))
    assert {item.kind for item in outcomes} == {OutcomeKind.OK}
    assert len({item.message["content"] for item in outcomes}) <= MAX_PROCESSES


async def test_closing_an_executor_ends_idle_processes() -> None:
    """No process is left when the executor is closed, and one is started anew when another executor needs it."""
    async with ToolExecutor(ToolRegistry([act])) as executor, executor.open("t") as tools:
        (outcome,) = await tools.run([call("pid")])
    pid = int(outcome.message["content"])
    await until(lambda: not is_running(pid))
    (again,) = await outcomes_of(call("pid"))
    assert again.kind is OutcomeKind.OK
    assert int(again.message["content"]) != pid
    stop_idle_processes()


async def test_tools_of_a_file_run_in_processes(tmp_path: Path) -> None:
    """A Python file that is no importable module serves as well, with enums from it as arguments."""
    pytest.importorskip("transformers", reason="extra transformers is not installed")
    path = tmp_path / "my tools.py"
    path.write_text(
        textwrap.dedent(
            '''
            import enum
            import os
            from ostinato_tools import function_tool

            class Size(enum.Enum):
                SMALL = "small"

            @function_tool(process=True)
            def measure(size: Size) -> str:
                """Measure.

                Args:
                    size: How big.
                """
                return f"{size!r} {os.getppid()}"
            '''
        )
    )
    async with ToolExecutor(load_tools(None, path)).open("t") as tools:
        (outcome,) = await tools.run([make_call("measure", {"size": "small"})])
    assert outcome.message["content"] == f"<Size.SMALL: 'small'> {os.getpid()}"


def test_what_a_new_process_does_not_find_is_infrastructure() -> None:
    """A function of a script that is no file cannot be found elsewhere: the call says so and how to cure it."""
    code = textwrap.dedent(
        """
        import asyncio
        from ostinato_tools import ToolExecutor, ToolRegistry, function_tool
        from ostinato_tools.testing import make_call, make_schema

        @function_tool(schema=make_schema("f"), process=True)
        def f() -> str:
            return "done"

        async def main() -> None:
            async with ToolExecutor(ToolRegistry([f]), max_response_length=None).open("t") as tools:
                (outcome,) = await tools.run([make_call("f")])
            print(outcome.kind.value, outcome.message["content"])

        asyncio.run(main())
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("infrastructure")
    assert "put it in a file" in done.stdout


def test_processes_end_with_their_parent(tmp_path: Path) -> None:
    """Even if this process is killed, the one that computes for it ends."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import asyncio, os, time
            from ostinato_tools import ToolExecutor, ToolRegistry, function_tool
            from ostinato_tools.testing import make_call, make_schema

            @function_tool(schema=make_schema("spin"), process=True)
            def spin() -> str:
                open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
                while True:
                    pass

            async def main() -> None:
                async with ToolExecutor(ToolRegistry([spin])).open("t") as tools:
                    await tools.run([make_call("spin")])

            if __name__ == "__main__":
                asyncio.run(main())
            """
        )
    )
    parent = subprocess.Popen([sys.executable, str(script)])
    path = tmp_path / "pid"
    while not (path.exists() and path.read_text()):
        assert parent.poll() is None
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    pid = int(path.read_text())
    while is_running(pid):
        time.sleep(0.01)


def test_a_script_must_be_guarded(tmp_path: Path) -> None:
    """A script that would run itself again in the new process gets an error that names the cure, and is not run twice."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import asyncio
            from ostinato_tools import ToolExecutor, ToolRegistry, function_tool
            from ostinato_tools.testing import make_call, make_schema

            @function_tool(schema=make_schema("f"), process=True)
            def f() -> str:
                return "done"

            async def main() -> None:
                async with ToolExecutor(ToolRegistry([f]), max_response_length=None).open("t") as tools:
                    (outcome,) = await tools.run([make_call("f")])
                print(outcome.message["content"])

            asyncio.run(main())
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True)
    (line,) = done.stdout.splitlines()
    assert "code 1" in line
    assert "__name__ == '__main__'" in line
    assert "__name__ == '__main__'" in done.stderr


def test_what_cannot_run_in_a_process() -> None:
    """Asynchronous functions, lambdas and inner functions are refused at decoration with the cure."""

    def inner() -> str:
        return ""

    async def asynchronous() -> str:
        return ""

    for function in (inner, asynchronous, lambda: ""):
        with pytest.raises(ToolDefinitionError, match="; write"):
            function_tool("f", process=True)(function)
