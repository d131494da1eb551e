"""Sandboxed Python as a tool: state, limits told in words, lost interpreters, the pool, and a channel that cannot be misused."""

import asyncio
import contextlib
import gc
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from textwrap import dedent

import pytest

from ostinato_tools import (
    OutcomeKind,
    ToolConfigError,
    ToolExecutor,
    ToolInfrastructureError,
    ToolOutcome,
    ToolRegistry,
    TrajectoryTools,
    load_tools,
)
from ostinato_tools.sandbox import (
    CodeResult,
    Enforcement,
    ProcessBackend,
    PythonTool,
    RunEnd,
    SandboxConfig,
    describe,
    enforcement,
    shut_down,
)
from ostinato_tools.sandbox.inside.cgroups import find_places
from ostinato_tools.sandbox.inside.facts import PROTECTIONS
from ostinato_tools.testing import make_call

pytestmark = pytest.mark.usefixtures("own_python")

LINUX = sys.platform == "linux"
CONFIG = {"wall_s": 5, "output_bytes": 4096, "warm_workers": 0, "memory_mb": 256}

Run = Callable[[str], Awaitable[ToolOutcome]]


def executor(*, timeout_s: float = 60, **config: object) -> ToolExecutor:
    registry = ToolRegistry()
    registry.add_class(PythonTool, config={"type": "native", **CONFIG, **config})
    return ToolExecutor(registry, max_response_length=None, timeout_s=timeout_s)


@contextlib.asynccontextmanager
async def opened(*, timeout_s: float = 60, **config: object) -> AsyncIterator[TrajectoryTools]:
    async with executor(timeout_s=timeout_s, **config).open(secrets.token_hex(4)) as tools:
        yield tools
    assert tools.release_failures == []


async def call(tools: TrajectoryTools, code: str) -> ToolOutcome:
    (outcome,) = await tools.run([make_call("python", {"code": dedent(code).strip("\n")})])
    return outcome


@pytest.fixture
async def run() -> AsyncIterator[Run]:
    async with opened() as tools:
        yield lambda code: call(tools, code)


def text_of(outcome: ToolOutcome) -> str:
    return outcome.message["content"]


def workers() -> set[int]:
    """Process ids of all workers of this module, their wardens included."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(sys.executable.encode()):
                found.add(int(entry.name))
    return found


# What the model reads.


async def test_state_lives_across_calls(run: Run) -> None:
    """Variables, imports, definitions and files are there in the next call."""
    await run("import math\nx = 2\ndef f(y): return x * y\nopen('note', 'w').write('hello')")
    assert text_of(await run("f(math.floor(3.7)), open('note').read()")) == "(6, 'hello')"


@pytest.mark.parametrize("without", [[], ["namespaces", "cgroup"]])
async def test_a_private_folder_for_temporary_files_keeps_no_code_out(
    without: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code finds its scratch folder also where only this user can enter the folder for temporary files."""
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(private))
    async with opened(without=without) as tools:
        outcome = await call(tools, "open('note', 'w').write('hello')")
    assert (outcome.kind, text_of(outcome)) == (OutcomeKind.OK, "5")
    assert not list(private.iterdir())


RESULTS = [
    ("1 + 1", "2"),
    ("print('a'); 'b'", "a\n'b'"),
    ("print('a', end='')", "a"),
    ("x = 3", "(no output)"),
    ("None", "(no output)"),
    ("", "(no output)"),
    ("# nothing", "(no output)"),
    ("1;", "1"),
    ("for i in range(2): print(i)", "0\n1"),
    ("import sys; print('e', file=sys.stderr)", "e"),
    ("print('ü\\n🎵')", "ü\n🎵"),
    ("'\\ud800'", "'\\ud800'"),
    ("print('\\ud800')", "\\ud800"),
    ("import sys; sys.stdout.buffer.write(b'\\xff\\n') and None", "\ufffd"),
    ("__name__", "'__main__'"),
    ("from __future__ import annotations\nf: undefined = 1\nf", "1"),
    ("import asyncio\nasyncio.run(asyncio.sleep(0, 'slept'))", "'slept'"),
    (
        "import dataclasses, pickle\n@dataclasses.dataclass\nclass P: x: int\npickle.loads(pickle.dumps(P(3)))",
        "P(x=3)",
    ),
    ("class R:\n def __repr__(self): return 'x' * 3\nR()", "xxx"),
]


async def test_result_is_output_and_value(run: Run) -> None:
    """The text is what was printed, then the value of a last expression, as a Python prompt would show it."""
    for code, text in RESULTS:
        outcome = await run(code)
        assert (outcome.kind, text_of(outcome)) == (OutcomeKind.OK, text), code


async def test_the_value_before_is_at_hand(run: Run) -> None:
    """As at a prompt, `_` is the value of the last expression."""
    await run("6 * 7")
    assert text_of(await run("_ + 1")) == "43"


async def test_an_exception_is_told_with_the_lines_of_the_code(run: Run) -> None:
    """The traceback names the code's own lines and none of the interpreter's around it."""
    await run("def f(x):\n    return 1 / x")
    outcome = await run("import json\nprint('before')\njson.loads('{', object_hook=f) if 0 else f(0)")
    assert (outcome.kind, outcome.metrics) == (OutcomeKind.OK, {"code_error": 1.0})
    text = text_of(outcome)
    assert text.startswith("before\nTraceback (most recent call last):\n")
    assert "return 1 / x" in text
    assert text.endswith("ZeroDivisionError: division by zero")
    assert "runner" not in text
    assert "/" not in text.replace("1 / x", "")


RAISED = [
    ("1 +", "SyntaxError"),
    ("return 1", "SyntaxError"),
    ("\0", "null bytes"),
    ("(" * 300, "SyntaxError"),
    ("raise SystemExit(3)", "SystemExit: 3"),
    ("exit()", "SystemExit"),
    ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ("raise GeneratorExit", "GeneratorExit"),
    ("input()", "EOFError"),
    ("class E(Exception):\n def __str__(self): raise SystemExit\nraise E", "E"),
    ("class R:\n def __repr__(self): raise SystemExit(4)\nR()", "SystemExit: 4"),
    ("class R:\n def __repr__(self): return 3\nR()", "TypeError"),
    ("def f(): f()\nf()", "RecursionError"),
    ("raise ExceptionGroup('many', [ValueError(i) for i in range(1000)])", "ExceptionGroup"),
    ("e = None\nfor i in range(5000):\n n = ValueError(i); n.__cause__ = e; e = n\nraise e", "ValueError"),
    ("import no_such_module", "ModuleNotFoundError"),
]


async def test_whatever_code_raises_is_its_result(run: Run) -> None:
    """Every exception, also one that ends interpreters or cannot be shown, is text, and the next call finds its variables."""
    await run("kept = 'kept'")
    for code, expected in RAISED:
        outcome = await run(code)
        assert (outcome.kind, outcome.metrics) == (OutcomeKind.OK, {"code_error": 1.0}), code
        assert expected in text_of(outcome), code
        assert text_of(await run("kept")) == "'kept'", code


@pytest.mark.parametrize("arguments", [{}, {"code": 3}, {"code": "x" * 1_000_001}, {"code": "'\ud800'"}])
async def test_what_is_no_code_is_a_bad_argument(arguments: dict) -> None:
    """Code that is missing, no text, too long or no Unicode is answered without an interpreter."""
    async with opened() as tools:
        (outcome,) = await tools.run([make_call("python", arguments)])
    assert outcome.kind is OutcomeKind.BAD_ARGUMENTS


async def test_hashes_are_the_same_in_every_interpreter() -> None:
    """Code that prints a set of text prints the same in every trajectory, so that a run can be repeated."""
    texts = set()
    for _ in range(2):
        async with opened() as tools:
            texts.add(text_of(await call(tools, "hash('spam'), {'a', 'b', 'c', 'd', 'e'}")))
    assert len(texts) == 1


async def test_programs_can_be_started(run: Run) -> None:
    """Python itself can be started as a program, and what it prints is the call's output."""
    outcome = await run("import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(6 * 7)']).returncode")
    if "ModuleNotFoundError" in text_of(outcome):
        pytest.skip("Python's library is not readable by the worker's user here")
    assert text_of(outcome) == "42\n0"


# Time, and interpreters that are lost.


async def test_time_is_up_and_variables_stay() -> None:
    """Code that does not end is interrupted in time; what it had done is kept."""
    async with opened(wall_s=1) as tools:
        outcome = await call(tools, "n = 1\nprint('begun')\nwhile True:\n    try: pass\n    except Exception: pass")
        assert outcome.kind is OutcomeKind.TIMEOUT
        assert "variables are kept" in text_of(outcome)
        assert "begun" in text_of(outcome)
        assert text_of(await call(tools, "n")) == "1"


STUCK = [
    "import time\nwhile True:\n    try: time.sleep(9)\n    except BaseException: pass",
    "import signal; signal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass",
    "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
    "print('begun'); 10 ** 10 ** 10",
    "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E",
    "import signal\nfor s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
    "import os, signal\nif os.fork(): os.waitpid(-1, 0)\nelse: os.kill(os.getpid(), 19)",
    "import os; os.kill(os.getpid(), 19)\nwhile True:\n    try: signal\n    except BaseException: pass",
]


async def test_code_that_cannot_be_interrupted_loses_its_interpreter() -> None:
    """Deaf, stopped or stuck, it is ended from outside, which is told as a loss unless an interruption was enough."""

    async def wait_for(code: str) -> None:
        async with opened(wall_s=1) as tools:
            await call(tools, "n = 1")
            outcome = await call(tools, code)
            assert outcome.kind is OutcomeKind.TIMEOUT, code
            after = text_of(await call(tools, "n"))
            if "lost" in text_of(outcome):
                assert "NameError" in after, code
            else:
                assert "variables are kept" in text_of(outcome), code
                assert after == "1", code

    await asyncio.gather(*(wait_for(code) for code in STUCK))


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import os; os._exit(3)", "exit status 3"),
        ("import os; print('begun', flush=True); os._exit(0)", "exit status 0"),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
        ("import os; os.abort()", "SIG"),
        ("import sys\nsys.setrecursionlimit(10**9)\ndef f(_=0): return max([1], key=f)\nf()", "SIGSEGV"),
        ("import os; os.execv('/bin/true', ['true'])", ""),
        ("import os; os.closerange(3, 256)", "interpreter"),
        (
            "import os\nfor fd in range(256):\n    try: os.write(fd, b'garbage' * 99)\n    except OSError: pass",
            "connection",
        ),
        (
            "import os, struct\nfor fd in range(3, 4096):\n    try: os.write(fd, struct.pack('>I', 2**31) + b'[' * 99)\n    except OSError: pass",
            "connection",
        ),
        (
            "import os, struct\nfor fd in range(3, 4096):\n    try: os.write(fd, struct.pack('>I', 60000) + b'[' * 60000)\n    except OSError: pass",
            "connection",
        ),
    ],
)
async def test_a_lost_interpreter_is_told_and_replaced(run: Run, code: str, told: str) -> None:
    """An interpreter that ends, crashes or leaves its connection is a tool error that says so; the next call works."""
    await run("n = 1")
    outcome = await run(code)
    if outcome.metrics.get("code_error"):
        pytest.skip(f"not possible here: {text_of(outcome)}")
    assert outcome.kind is OutcomeKind.TOOL_ERROR
    assert "Variables and files of earlier calls are lost" in text_of(outcome)
    assert told in text_of(outcome)
    assert "NameError" in text_of(await run("n"))
    assert text_of(await run("1 + 1")) == "2"


async def test_interpreters_are_not_replaced_without_end() -> None:
    """A trajectory that loses one interpreter after the other gets no more."""
    async with opened(max_restarts=2) as tools:
        outcomes = [await call(tools, "import os; os._exit(0)") for _ in range(4)]
    assert {outcome.kind for outcome in outcomes} == {OutcomeKind.TOOL_ERROR}
    assert ["gets no other one" in text_of(outcome) for outcome in outcomes] == [False, False, False, True]


@pytest.mark.skipif(not LINUX, reason="reads /proc")
async def test_a_killed_warden_takes_its_sandbox_along() -> None:
    """Where the watching process is killed from outside, which is no fault of the code's, nothing lives on."""
    async with opened() as tools:
        await call(tools, "n = 1")
        wardens = {pid for pid in workers() if parent_of(pid) == os.getpid()}
        waiting = asyncio.ensure_future(call(tools, "import time; time.sleep(60)"))
        await asyncio.sleep(0)
        for pid in wardens:
            os.kill(pid, signal.SIGKILL)
        outcome = await waiting
        assert outcome.kind is OutcomeKind.INFRASTRUCTURE
        assert text_of(await call(tools, "1 + 1")) == "2"
    assert workers() == set()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


# The interpreter's own people: what code does to the runner harms nobody but itself.


MISCHIEF = [
    "import sys; sys.stdout = sys.stderr = None",
    "import sys; sys.stdout.close()",
    "import sys\nclass W:\n    def write(self, text): raise RuntimeError\nsys.stdout = W()",
    "import sys; del sys.stdout, sys.stderr, sys.stdin",
    "import os; os.close(0)",
    "import builtins\nfor name in ('print', 'repr', 'len', 'isinstance', 'type', 'exec', 'eval'): delattr(builtins, name)",
    "import json, os, signal\njson.dumps = os.write = signal.setitimer = signal.signal = None",
    "import sys; sys.settrace(lambda *a: 1 / 0)",
    "import sys; sys.excepthook = sys.displayhook = None",
    "import sys; sys.modules.clear()",
    "import sys, gc; gc.disable(); sys.setswitchinterval(100)",
    "globals().clear()",
    "del __builtins__",
    "import sys; sys.setrecursionlimit(60)",
    "import signal; signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)",
    "import signal; signal.raise_signal(signal.SIGALRM)",
    "import os; os.umask(0o777)",
    "import os; os.mkdir('inner'); os.chdir('inner'); os.rmdir('../inner')",
    "import os, shutil; shutil.rmtree(os.getcwd(), ignore_errors=True)",
    "import os\nfor path, mode in (('.', 0), ('.', 0o111)): os.chmod(path, mode)",
    "import os\nos.fork()\nprint('twice')",
    "import os\nif os.fork() == 0: raise SystemExit",
    "import threading, time\nthreading.Thread(target=lambda: [time.sleep(0.001) for _ in iter(int, 1)], daemon=True).start()",
    "import threading\ndef spin():\n    while True: pass\nthreading.Thread(target=spin).start()",
    "import atexit, os; atexit.register(os.abort)",
    "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))",
    "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))",
    "import gc\nfor o in gc.get_objects():\n    if type(o).__name__ == 'Runner': vars(o).clear()",
    "import gc, socket\nfor o in gc.get_objects():\n    if isinstance(o, socket.socket): o.setblocking(False)",
]


async def test_mischief_harms_only_itself() -> None:
    """Whatever code does to its interpreter, this call and the next have an answer, and everything is gone afterwards."""

    async def suffer(code: str) -> None:
        async with opened(wall_s=10) as tools:
            first = await call(tools, code)
            assert first.kind in (OutcomeKind.OK, OutcomeKind.TOOL_ERROR, OutcomeKind.TIMEOUT), code
            for _ in range(2):
                after = await call(tools, "print(40 + 2)")
                assert after.kind in (OutcomeKind.OK, OutcomeKind.TOOL_ERROR), code

    await asyncio.gather(*(suffer(code) for code in MISCHIEF))
    if LINUX:
        assert workers() == set()


async def test_an_answer_cannot_be_given_before_the_question(run: Run) -> None:
    """Code that finds its connection and answers for the runner is found out at the next call, which has another number."""
    code = """
        import gc, json, socket, sys
        connection = next(o for o in gc.get_objects() if isinstance(o, socket.socket) and o.fileno() > 2)
        frame = sys._getframe()
        while 'request' not in frame.f_locals: frame = frame.f_back
        body = json.dumps(dict(id=frame.f_locals['request']['id'], value='forged', error=None, name=None, timed_out=False, dropped=0)).encode()
        connection.sendall(len(body).to_bytes(4, 'big') + body)"""
    assert text_of(await run(code)) == "forged"  # its own answer is its own affair
    outcome = await run("1 + 1")
    assert outcome.kind is OutcomeKind.TOOL_ERROR
    assert "connection" in text_of(outcome)
    assert text_of(await run("1 + 1")) == "2"


@pytest.mark.parametrize(
    "fields",
    [
        "dropped=-5",
        "dropped=2**70",
        "dropped='1'",
        "value=3",
        "value='\\ud800'",
        "extra=1",
        "timed_out='yes'",
        "id=None",
    ],
)
async def test_a_forged_answer_has_the_right_form_or_ends_the_worker(run: Run, fields: str) -> None:
    """An answer with other fields or types is no answer; one of the right form is text like any other."""
    code = f"""
        import gc, json, socket, sys
        connection = next(o for o in gc.get_objects() if isinstance(o, socket.socket) and o.fileno() > 2)
        frame = sys._getframe()
        while 'request' not in frame.f_locals: frame = frame.f_back
        answer = dict(id=frame.f_locals['request']['id'], value='forged', error=None, name=None, timed_out=False, dropped=0) | dict({fields})
        body = json.dumps(answer).encode()
        connection.sendall(len(body).to_bytes(4, 'big') + body)"""
    outcome = await run(code)
    assert outcome.kind in (OutcomeKind.OK, OutcomeKind.TOOL_ERROR)
    assert outcome.kind is OutcomeKind.TOOL_ERROR or text_of(outcome) == "forged"


# Cancelling, releasing, shutting down.


@pytest.mark.skipif(not LINUX, reason="reads /proc")
async def test_a_cancelled_call_ends_its_interpreter() -> None:
    """The executor's deadline cuts the call off; the code does not go on, and the loss is there at the next call."""
    async with opened(timeout_s=0.5, wall_s=60) as tools:
        await call(tools, "n = 1")
        outcome = await call(tools, "import time; time.sleep(60)")
        assert outcome.kind is OutcomeKind.TIMEOUT
        after = await call(tools, "n")
        assert "NameError" in text_of(after)
        assert "lost" in text_of(after)
        assert "lost" not in text_of(await call(tools, "1"))
    assert workers() == set()


@pytest.mark.skipif(not LINUX, reason="reads /proc")
async def test_a_cancelled_trajectory_leaves_nothing() -> None:
    """A trajectory that is cancelled in mid-call ends its interpreter."""

    async def trajectory() -> None:
        async with opened(wall_s=60) as tools:
            begun.set()
            await call(tools, "import time; time.sleep(60)")

    begun = asyncio.Event()
    task = asyncio.create_task(trajectory())
    await begun.wait()
    while not workers():  # noqa: ASYNC110 - another process is waited for
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert workers() == set()


@pytest.mark.skipif(not LINUX, reason="reads /proc")
@pytest.mark.parametrize("end", ["pass", "raise SystemExit(1)", "os._exit(0)", "os.kill(os.getpid(), 9)", "os.abort()"])
def test_no_worker_outlives_the_program(end: str, own_python: str) -> None:
    """However the program ends, its workers end with it, those in use and those kept warm."""
    code = f"""
import asyncio, os, sys
sys.executable = {sys.executable!r}
from ostinato_tools.sandbox import ProcessBackend, SandboxConfig
async def main():
    session = await ProcessBackend(SandboxConfig(warm_workers=2)).start()
    print("ready", flush=True)
    asyncio.ensure_future(session.run("import time; time.sleep(60)"))
    await asyncio.sleep(0.1)
    {end}
asyncio.run(main())
"""
    before = workers()
    done = subprocess.run([own_python, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "ready\n"
    for _ in range(1000):
        if workers() <= before:
            break
        os.sched_yield()
        subprocess.run(["sleep", "0.01"], check=True)
    assert workers() <= before


def test_a_fork_of_the_program_has_no_workers() -> None:
    """A child that the program forks neither ends its workers nor keeps them alive."""

    async def main() -> None:
        async with opened(warm_workers=1) as tools:
            await call(tools, "n = 1")
            pid = os.fork()
            if pid == 0:
                shut_down()
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0  # noqa: ASYNC222 - the child ends at once
            assert text_of(await call(tools, "n")) == "1"

    asyncio.run(main())


def descriptors() -> set[tuple[str, str]]:
    """Open file descriptors of this process, each with what it is of: those of others may be closed at any time."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


@pytest.mark.skipif(not LINUX, reason="reads /proc")
async def test_descriptors_and_folders_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After some trajectories, good and bad, this process has the descriptors that it had, and no folder is left."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with opened() as tools:
        await call(tools, "1")
    gc.collect()
    before = descriptors()
    for code in (
        "1",
        "import os; os._exit(0)",
        "open('f', 'w').write('x')",
        "import os; os.mkdir('d'); os.chmod('d', 0)",
    ):
        async with opened(without=("namespaces",)) as tools:
            await call(tools, code)
    gc.collect()
    assert descriptors() <= before
    assert list(tmp_path.iterdir()) == []


# The pool.


async def test_a_worker_is_kept_warm_and_never_used_twice() -> None:
    """Workers wait ready for the next trajectory, and each trajectory has a new one."""
    backend = ProcessBackend(SandboxConfig(warm_workers=1))
    try:
        pids = set()
        for _ in range(3):
            session = await backend.start()
            assert (await session.run("'seen' in globals()")).value == "False"
            pids.add(
                (await session.run("seen = 1\nopen('/proc/self/stat').read() if 0 else id(seen)")).value and id(session)
            )
            await session.close()
        assert len(pids) >= 1
    finally:
        backend.close()


async def test_trajectories_beyond_the_limit_wait_for_their_turn() -> None:
    """No more workers than allowed run at one time; the one that must wait gets its worker when another ends."""
    backend = ProcessBackend(SandboxConfig(max_workers=2, warm_workers=2))
    try:
        first, second = await backend.start(), await backend.start()
        third = asyncio.create_task(backend.start())
        assert (await first.run("import time; time.sleep(0.2); 1")).value == "1"
        assert not third.done()
        await first.close()
        assert (await (await third).run("1 + 1")).value == "2"
        await second.close()
    finally:
        backend.close()


async def test_waiting_for_a_turn_has_an_end() -> None:
    """A trajectory whose turn does not come is told so, as trouble of the infrastructure."""
    backend = ProcessBackend(SandboxConfig(max_workers=1, warm_workers=0, start_s=3))
    try:
        session = await backend.start()
        with pytest.raises(ToolInfrastructureError, match="1 of at most 1 in use; raise max_workers"):
            await backend.start()
        await session.close()
        await (await backend.start()).close()
    finally:
        backend.close()


async def test_a_spare_that_died_is_passed_over() -> None:
    """A warm worker that somebody killed meanwhile does not become a trajectory's failure."""
    backend = ProcessBackend(SandboxConfig(warm_workers=2))
    try:
        await (await backend.start()).close()
        for spare in backend._spares:
            spare._process.kill()
        session = await backend.start()
        assert (await session.run("1 + 1")).value == "2"
        await session.close()
    finally:
        backend.close()


async def test_a_closed_backend_starts_nothing() -> None:
    """After shutting down, a session that was open is useless and no new one begins."""
    backend = ProcessBackend(SandboxConfig(warm_workers=0))
    session = await backend.start()
    backend.close()
    with pytest.raises(ToolInfrastructureError):
        await session.run("1")
    with pytest.raises(ToolInfrastructureError, match="shut down"):
        await backend.start()
    await session.close()


async def test_modules_are_imported_beforehand() -> None:
    """What `preload` names is imported before the first call, inside of the sandbox."""
    async with opened(preload=("fractions",)) as tools:
        assert text_of(await call(tools, "import sys; 'fractions' in sys.modules")) == "True"
    async with executor(preload=("no_such_module",)).open("t") as tools:
        outcome = await call(tools, "1")
    assert outcome.kind is OutcomeKind.INFRASTRUCTURE
    assert "no_such_module" in text_of(outcome)


# Configuration and report.


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"wal_s": 1}, r"keys of wall_s, .*got \['wal_s'\]"),
        ({"wall_s": 0}, "wall_s must be a positive"),
        ({"wall_s": float("nan")}, "wall_s must be a positive"),
        ({"wall_s": "5"}, "right type"),
        ({"memory_mb": 1}, "memory_mb must be from 64"),
        ({"processes": 0}, "processes must be from 1"),
        ({"cpu_s": True}, "right type"),
        ({"require": ["networks"]}, "require must name some of wall_time, .*networks"),
        ({"without": ["seccomps"]}, "without must name some of namespaces, .*seccomps"),
        ({"backend": "no.such.Backend"}, "backend must be 'process' or"),
    ],
)
def test_a_wrong_configuration_is_refused(config: dict, message: str) -> None:
    """Unknown keys, values out of range and unknown names are refused when the tool is loaded."""
    with pytest.raises(ToolConfigError, match=message):
        ToolRegistry().add_class(PythonTool, config=config)


def test_the_schema_must_have_code() -> None:
    """A schema of the author's own is kept whole, and refused where it has no `code`."""
    schema = {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(ToolConfigError, match="must have a property 'code'"):
        PythonTool({}, schema)
    schema["function"]["parameters"]["properties"]["code"] = {"type": "string", "maxLength": 9}  # type: ignore[index]
    assert PythonTool({}, schema).get_openai_tool_schema() is schema


async def test_it_is_loaded_from_a_file(tmp_path: Path) -> None:
    """The class path and the limits stand in the tool configuration as those of any tool."""
    path = tmp_path / "tools.yaml"
    path.write_text(
        "tools:\n- class_name: ostinato_tools.sandbox.PythonTool\n  config: {type: native, cpu_s: 5, memory_mb: 256, warm_workers: 0}\n"
    )
    async with ToolExecutor(load_tools(path)).open("t") as tools:
        assert text_of(await call(tools, "1 + 1")) == "2"


def test_the_report_names_every_protection() -> None:
    """Each protection is reported once, as enforced by something or as not enforced for a reason."""
    report = enforcement({"warm_workers": 0})
    assert [entry.name for entry in report] == list(PROTECTIONS)
    assert all(entry.detail for entry in report)
    lines = describe(report).splitlines()
    assert len(lines) == len(PROTECTIONS)
    assert all((": " in line) and ("enforced" in line) for line in lines)


def test_what_is_left_out_is_reported_as_not_enforced() -> None:
    """Without all mechanisms the report says so, protection by protection, and why."""
    without = ["namespaces", "drop_root", "seccomp", "landlock", "cgroup"]
    report = {entry.name: entry for entry in enforcement({"without": without, "warm_workers": 0})}
    for name in ("files", "network", "other_processes", "system_calls", "memory_total", "disk_total", "no_leftovers"):
        assert not report[name].enforced, name
    if LINUX:
        assert "left out by configuration" in report["network"].detail


def test_what_is_required_is_enforced_or_nothing_starts() -> None:
    """A required protection that is in force changes nothing; one that is not is refused when the tool is loaded."""
    ToolRegistry().add_class(PythonTool, config={"require": ["wall_time", "environment"], "warm_workers": 0})
    config = {"require": ["network"], "without": ["namespaces", "seccomp"], "warm_workers": 0}
    with pytest.raises(ToolConfigError, match="require must name what can be enforced here, got 'network'"):
        ToolRegistry().add_class(PythonTool, config=config)


async def test_the_report_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The first worker's report is in the log, as a warning where something is missing, and not again."""
    backend = ProcessBackend(SandboxConfig(warm_workers=0, without=("cgroup",)))
    with caplog.at_level(logging.INFO, "ostinato_tools"):
        for _ in range(2):
            await (await backend.start()).close()
    backend.close()
    records = [record for record in caplog.records if "sandboxed Python on this machine" in record.message]
    assert [record.levelname for record in records] == ["WARNING"]
    assert "memory_total      NOT enforced" in records[0].message


def test_control_groups_are_found_in_either_version(tmp_path: Path) -> None:
    """The group's own folder comes from the mounts, whatever is mounted of them; in version 2 the one beside it comes next."""
    for folder in ("memory/job", "pids", "unified/user/session"):
        (tmp_path / folder).mkdir(parents=True)
    mounts = "".join(
        f"3{number} 29 0:2{number} {root} {tmp_path}/{folder} rw,relatime shared:9 - {kind} {kind} rw,{options}\n"
        for number, (root, folder, kind, options) in enumerate(
            [
                ("/", "memory", "cgroup", "memory"),
                ("/docker/a1", "pids", "cgroup", "pids"),
                ("/", "unified", "cgroup2", "x"),
            ]
        )
    )
    both = "4:memory:/job\n3:pids:/docker/a1\n0::/user/session\n"
    assert find_places(both, "22 1 254:0 / / rw - ext4 /dev/vda rw\n" + mounts) == {
        "memory": (1, [f"{tmp_path}/memory/job"]),
        "pids": (1, [f"{tmp_path}/pids"]),
    }
    second = [f"{tmp_path}/unified/user/session", f"{tmp_path}/unified/user"]
    assert find_places("0::/user/session\n", mounts.splitlines()[2]) == {"memory": (2, second), "pids": (2, second)}
    assert find_places("0::/\n", mounts.splitlines()[2])["memory"] == (2, [f"{tmp_path}/unified"])
    assert find_places("0::/elsewhere\n", mounts.splitlines()[2])["memory"] == (2, [f"{tmp_path}/unified"])
    assert find_places("", "") == {}


# Another backend.


class EchoSession:
    """Runs nothing: says what it was asked to run."""

    async def run(self, code: str) -> CodeResult:
        return CodeResult(end=RunEnd.FINISHED, output=code)

    async def close(self) -> None:
        pass


class EchoBackend:
    """Makes sessions that run nothing."""

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config

    async def start(self) -> EchoSession:
        return EchoSession()

    def enforcement(self) -> tuple[Enforcement, ...]:
        return (Enforcement("virtual_machine", True, "for the test"),)

    def close(self) -> None:
        pass


async def test_another_backend_is_plugged_in_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class named in the configuration takes the place of processes, and `require` asks its own report."""
    module = type(sys)("ostinato_test_backends")
    module.EchoBackend = EchoBackend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    config = {"backend": "ostinato_test_backends.EchoBackend", "require": ["virtual_machine"]}
    async with opened(**config) as tools:
        assert text_of(await call(tools, "spam")) == "spam"
    with pytest.raises(ToolConfigError, match="the backend does not know it"):
        ToolRegistry().add_class(PythonTool, config={**config, "require": ["moon"]})


DOCUMENT = Path(__file__).parents[2] / "packages" / "tools" / "SANDBOX.md"


@pytest.mark.skipif(not DOCUMENT.is_file(), reason="the document is not beside the tests")
async def test_documented_backend_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of a container backend, with this interpreter in the container's place, keeps state, tells time and loss."""
    first, example = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    exec(first, {})
    module = type(sys)("ostinato_test_containers")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(example, module.__dict__)
    backend = module.ContainerBackend  # type: ignore[attr-defined]
    backend.start_command = (sys.executable, *backend.start_command[backend.start_command.index("python") + 1 :])
    backend.end_command = (sys.executable, "-c", "", "{name}")
    async with opened(backend="ostinato_test_containers.ContainerBackend", wall_s=1, require=["network"]) as tools:
        await call(tools, "x = 20")
        assert text_of(await call(tools, "print(x + 1)")) == "21"
        assert "ZeroDivisionError" in text_of(await call(tools, "1 / 0"))
        assert (await call(tools, "while True: pass")).kind is OutcomeKind.TIMEOUT
        assert "NameError" in text_of(await call(tools, "x"))
        assert (await call(tools, "import os; os._exit(0)")).kind is OutcomeKind.TOOL_ERROR
