"""Ways out of the sandbox, each tried from the inside; what this machine does not enforce is skipped with its reason.

Every attack is tried twice: behind everything, and without namespaces and control groups, where rlimits, the user, Landlock
and the system call filter must do alone.
"""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from ostinato_tools import OutcomeKind, ToolExecutor, ToolOutcome, ToolRegistry, TrajectoryTools
from ostinato_tools.sandbox import PythonTool, enforcement
from ostinato_tools.testing import make_call

pytestmark = pytest.mark.usefixtures("own_python")

LINUX = sys.platform == "linux"
LIMITS = {
    "wall_s": 5,
    "memory_mb": 128,
    "disk_mb": 8,
    "file_mb": 2,
    "processes": 8,
    "output_bytes": 4096,
    "warm_workers": 0,
    "site_packages": False,
}
LAYERS = {"everything": (), "no_namespaces": ("namespaces", "cgroup")}

Run = Callable[[str], Awaitable[ToolOutcome]]


@pytest.fixture(params=LAYERS)
def config(request: pytest.FixtureRequest) -> dict:
    return {**LIMITS, "without": LAYERS[request.param]}


@pytest.fixture
def needs(config: dict) -> Callable[..., None]:
    """Skip where a protection is not in force; what is in force is then tried for real."""

    def check(*names: str) -> None:
        for entry in enforcement(config):
            if entry.name in names and not entry.enforced:
                pytest.skip(f"{entry.name} is not enforced here: {entry.detail}")

    return check


@contextlib.asynccontextmanager
async def opened(config: dict) -> AsyncIterator[TrajectoryTools]:
    registry = ToolRegistry()
    registry.add_class(PythonTool, config=config)
    async with ToolExecutor(registry, max_response_length=None).open(secrets.token_hex(4)) as tools:
        yield tools
    assert tools.release_failures == []


async def call(tools: TrajectoryTools, code: str) -> ToolOutcome:
    (outcome,) = await tools.run([make_call("python", {"code": code})])
    return outcome


@pytest.fixture
async def run(config: dict) -> AsyncIterator[Run]:
    async with opened(config) as tools:
        yield lambda code: call(tools, code)


def text_of(outcome: ToolOutcome) -> str:
    return outcome.message["content"]


async def refused(run: Run, code: str, *errors: str) -> str:
    """Run code that must fail with one of these errors, and give its text."""
    outcome = await run(code)
    assert outcome.kind is OutcomeKind.OK
    assert outcome.metrics["code_error"] == 1.0, text_of(outcome)
    assert any(error in text_of(outcome) for error in errors), text_of(outcome)
    return text_of(outcome)


def commands() -> dict[int, bytes]:
    """Process ids of this machine with their command lines."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                found[int(entry.name)] = (entry / "cmdline").read_bytes()
    return found


def workers() -> set[int]:
    return {pid for pid, command in commands().items() if command.startswith(sys.executable.encode())}


# Processes, memory, output and files without end.


async def test_a_fork_bomb_goes_off_within_its_limit(run: Run, needs) -> None:
    """Processes that fork without end stop at the limit, and the interpreter that they came from goes on."""
    needs("processes")
    code = """
        import os, time
        started = 0
        try:
            for _ in range(1000):
                if os.fork() == 0:
                    while True:
                        try: os.fork()
                        except OSError: time.sleep(0.01)
                started += 1
        except BlockingIOError:
            pass
        started"""
    outcome = await run(dedent(code))
    assert outcome.kind is OutcomeKind.OK, text_of(outcome)
    assert int(text_of(outcome)) < LIMITS["processes"]


@pytest.mark.skipif(not LINUX, reason="reads /proc")
async def test_a_fork_bomb_is_gone_after_release(config: dict, needs) -> None:
    """However fast they fork, none of them is left when the trajectory is over."""
    needs("no_leftovers")
    async with opened({**config, "wall_s": 1}) as tools:
        await call(
            tools,
            "import os\nfor _ in range(3):\n    os.fork()\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        )
    assert workers() == set()


async def test_threads_without_end_stop_at_the_limit(run: Run, needs) -> None:
    """Threads count as processes do."""
    needs("processes")
    code = (
        "import threading\nfor _ in range(1000): threading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    await refused(run, code, "can't start new thread")


async def test_a_memory_bomb_is_a_memory_error(run: Run, needs) -> None:
    """One process that takes more than it may gets a MemoryError and keeps its variables."""
    needs("memory")
    await run("kept = 1")
    await refused(run, "held = []\nwhile True: held.append(bytearray(1 << 20))", "MemoryError")
    assert text_of(await run("held = None; kept")) == "1"


async def test_memory_of_many_processes_is_limited_together(run: Run, needs) -> None:
    """Processes that each stay within their limit may not go beyond it together."""
    needs("memory_total")
    code = """
        import os, time
        children = []
        for _ in range(6):
            if (pid := os.fork()) == 0:
                held = bytearray(90 << 20)
                for at in range(0, len(held), 4096): held[at] = 1
                time.sleep(1)
                os._exit(0)
            children.append(pid)
        sum(os.waitpid(pid, 0)[1] == 0 for pid in children)"""
    outcome = await run(dedent(code))
    if outcome.kind is OutcomeKind.OK:
        assert int(text_of(outcome)) <= 1
    else:
        assert "ran out of memory" in text_of(outcome)


async def test_memory_beside_the_address_space_is_refused(run: Run, needs) -> None:
    """Memory that no limit of a process counts, in nameless files or System V segments, cannot be had."""
    needs("system_calls")
    await refused(run, "import os; os.memfd_create('hidden')", "PermissionError", "AttributeError")
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nlibc.shmget(0, 1 << 20, 0o1600), ctypes.get_errno()"
    )
    assert text_of(await run(code)) == "(-1, 1)"


async def test_endless_printing_is_cut(run: Run) -> None:
    """What is printed beyond the limit is dropped where it arises, and said to be; the interpreter goes on."""
    outcome = await run("for _ in range(200_000): print('spam')")
    assert outcome.kind is OutcomeKind.OK
    assert text_of(outcome).startswith("spam\nspam")
    assert text_of(outcome).endswith("995904 bytes more)")
    assert text_of(await run("1 + 1")) == "2"


@pytest.mark.parametrize("descriptor", [1, 2])
async def test_endless_writing_past_python_ends_the_interpreter(run: Run, descriptor: int) -> None:
    """Bytes written straight to a descriptor are limited by the parent, which does not wait for the end of time."""
    outcome = await run(f"import os\nwhile True: os.write({descriptor}, b'x' * 65536)")
    assert outcome.kind is OutcomeKind.TOOL_ERROR
    assert "wrote far more than is allowed" in text_of(outcome)
    assert len(text_of(outcome)) < 3 * LIMITS["output_bytes"]


async def test_endless_output_of_a_program_is_cut(run: Run) -> None:
    """So is what a program prints that the code starts."""
    outcome = await run("import subprocess, sys; subprocess.run(['yes'])")
    if "No such file" in text_of(outcome) or "ModuleNotFoundError" in text_of(outcome):
        pytest.skip("there is no program `yes`, or no module subprocess")
    assert outcome.kind is OutcomeKind.TOOL_ERROR


async def test_a_huge_value_and_a_huge_error_are_cut(run: Run) -> None:
    """A value's text and an exception's text are limited as printed text is."""
    for code in ("'x' * 10_000_000", "raise ValueError('x' * 10_000_000)", "raise type('X' * 10**6, (Exception,), {})"):
        outcome = await run(code)
        assert outcome.kind is OutcomeKind.OK
        assert "...(truncated)..." in text_of(outcome)
        assert len(text_of(outcome)) < 2 * LIMITS["output_bytes"]


async def test_a_huge_file_is_an_error(run: Run, needs) -> None:
    """A file cannot grow beyond its limit, nor be made large with a hole."""
    needs("file_size")
    await refused(run, "f = open('f', 'wb')\nwhile True: f.write(b'x' * (1 << 20))", "File too large", "No space")
    await refused(run, "import os; os.truncate('f', 1 << 40)", "File too large", "Errno 27")


async def test_many_files_are_limited_together(run: Run, needs) -> None:
    """Many files that are each small enough fill the scratch folder and no other disk; so do files without content."""
    needs("disk_total")
    await refused(run, "for i in range(100): open(str(i), 'wb').write(b'x' * (1 << 20))", "No space left")
    await refused(run, "for i in range(10**6): open(f'e{i}', 'wb').close()", "No space left", "Disk quota")


async def test_open_files_are_limited(run: Run, needs) -> None:
    """Descriptors run out before the system's do."""
    needs("open_files")
    await refused(run, "import os\nfds = []\nwhile True: fds.append(os.dup(0))", "Too many open files")


async def test_limits_cannot_be_raised(run: Run) -> None:
    """The limits are hard ones."""
    code = "import resource\nfor n in ('CPU', 'FSIZE', 'NOFILE'):\n    limit = getattr(resource, 'RLIMIT_' + n)\n"
    code += "    hard = resource.getrlimit(limit)[1]\n    resource.setrlimit(limit, (hard + 9, hard + 9))"
    await refused(run, code, "not allowed to raise", "Operation not permitted")


@pytest.mark.slow
async def test_processor_time_is_limited(config: dict, needs) -> None:
    """Code that hides from its alarm still runs out of processor time."""
    needs("cpu_time")
    async with opened({**config, "cpu_s": 1, "wall_s": 30}) as tools:
        code = "import signal\nfor s in (signal.SIGALRM, signal.SIGXCPU): signal.signal(s, signal.SIG_IGN)\nwhile True: pass"
        outcome = await call(tools, code)
    assert outcome.kind is OutcomeKind.TOOL_ERROR
    assert "processor time" in text_of(outcome)


# What belongs to the parent.


async def test_environment_is_not_inherited(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret in the parent's environment is in no environment that the code can see."""
    monkeypatch.setenv("OSTINATO_TEST_SECRET", secret := secrets.token_hex(8))
    code = """
        import os, glob
        seen = [str(dict(os.environ))]
        for path in glob.glob('/proc/[0-9]*/environ') + ['/proc/self/environ']:
            try: seen.append(open(path, errors='replace').read())
            except OSError: pass
        print(seen)"""
    outcome = await run(dedent(code))
    assert outcome.kind is OutcomeKind.OK
    if "ModuleNotFoundError" not in text_of(outcome):
        assert "HOME" in text_of(outcome)
    assert secret not in text_of(outcome)


async def test_files_of_the_parent_cannot_be_read(run: Run, needs, tmp_path: Path) -> None:
    """Neither a private file of the parent's nor one that everybody may read, wherever it lies, nor a listing of it."""
    needs("files")
    for mode in (0o600, 0o644):
        secret = tmp_path / f"secret{mode}"
        secret.write_text("treasure")
        secret.chmod(mode)
        await refused(run, f"open({str(secret)!r}).read()", "FileNotFoundError", "PermissionError")
    await refused(run, f"import os; os.listdir({str(tmp_path)!r})", "FileNotFoundError", "PermissionError")
    await refused(run, f"import os; os.listdir({str(Path.home())!r} + '/.ssh')", "FileNotFoundError", "PermissionError")
    await refused(run, "open('/etc/shadow').read()", "FileNotFoundError", "PermissionError")
    here = Path(__file__)
    await refused(run, f"open({str(here)!r}).read()", "FileNotFoundError", "PermissionError")


async def test_parent_cannot_be_looked_into(run: Run, needs) -> None:
    """The parent's entries under /proc are out of sight or closed."""
    needs("files", "other_processes")
    for name in ("environ", "mem", "maps", "cwd/x", "root/etc/passwd", "fd/0", "cmdline"):
        await refused(
            run,
            f"open('/proc/{os.getpid()}/{name}', 'rb').read(1)",
            "FileNotFoundError",
            "PermissionError",
            "NotADirectory",
        )


async def test_descriptors_are_not_inherited(run: Run, tmp_path: Path) -> None:
    """Beside the three standard ones there is only the sandbox's own connection, whatever the parent holds open."""
    with (tmp_path / "held").open("w") as held:
        os.set_inheritable(held.fileno(), True)
        code = "import os\nn = 0\nfor fd in range(256):\n    try: os.fstat(fd); n += 1\n    except OSError: pass\nn"
        assert text_of(await run(code)) == "4"


async def test_library_cannot_be_poisoned(run: Run, needs) -> None:
    """What the code might leave in Python's own folders would run in the parent; it cannot write there."""
    needs("files")
    code = "import os\nfolder = os.path.dirname(os.__file__)\n"
    await refused(
        run, code + "open(folder + '/site-packages/evil.pth', 'w')", "OSError", "PermissionError", "FileNotFound"
    )
    await refused(run, code + "open(folder + '/os.py', 'a')", "OSError", "PermissionError")
    await refused(run, code + "os.chmod(folder + '/os.py', 0o777)", "OSError", "PermissionError")


async def test_files_of_the_parent_cannot_be_changed(run: Run, needs, tmp_path: Path) -> None:
    """Neither their content, nor their modes, times or names, where the parent's user could."""
    needs("files")
    target = tmp_path / "target"
    target.write_text("treasure")
    target.chmod(0o600)
    before = target.stat()
    for attempt in (
        "os.chmod(path, 0o777)",
        "os.utime(path, (1, 1))",
        "os.setxattr(path, 'user.x', b'x')",
        "os.chown(path, os.getuid(), os.getgid())",
        "os.truncate(path, 0)",
        "os.rename(path, path + '2')",
        "os.unlink(path)",
        "os.link(path, 'mine')",
        "open(path, 'w')",
    ):
        await refused(
            run, f"import os; path = {str(target)!r}; {attempt}", "FileNotFoundError", "PermissionError", "OSError"
        )
    after = target.stat()
    assert (after.st_mode, after.st_mtime, after.st_ctime, after.st_size) == (
        before.st_mode,
        before.st_mtime,
        before.st_ctime,
        before.st_size,
    )


@pytest.mark.skipif(not LINUX, reason="/proc and /sys are Linux's")
async def test_kernel_settings_cannot_be_written(run: Run) -> None:
    """The usual ways to run a program as root through the kernel's own settings are closed."""
    paths = (
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/modprobe",
        "/sys/kernel/uevent_helper",
        "/proc/sysrq-trigger",
    )
    for path in (*paths, "/sys/fs/cgroup/release_agent", "/dev/mem", "/dev/kmsg", "/proc/self/uid_map"):
        await refused(run, f"open({path!r}, 'w').write('x')", "FileNotFoundError", "PermissionError", "OSError")


async def test_devices_cannot_be_made(run: Run) -> None:
    """No device file leads to a disk or to memory."""
    code = "import os, stat; os.mknod('disk', 0o666 | stat.S_IFBLK, os.makedev(254, 0)); open('disk', 'rb').read(512)"
    await refused(run, code, "PermissionError", "Operation not permitted")
    await refused(run, "open('/dev/vda', 'rb')", "FileNotFoundError", "PermissionError")


async def test_scratch_folder_is_removed_whatever_is_in_it(config: dict, tmp_path: Path, monkeypatch) -> None:
    """Links to the parent's files, closed folders and depth beyond any path do not keep the scratch folder or take more away."""
    folder = Path(tempfile.mkdtemp())  # pytest's own is closed to the worker's user
    folder.chmod(0o755)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    (precious := tmp_path / "precious").mkdir()
    (precious / "file").write_text("kept")
    code = f"""
        import os
        os.symlink({str(precious)!r}, 'link')
        os.mkdir('closed'); os.symlink({str(precious / "file")!r}, 'closed/link'); open('closed/f', 'w').close()
        try: os.chmod('closed', 0)
        except PermissionError: pass
        os.mkfifo('fifo')
        top = os.open('.', os.O_RDONLY)
        for _ in range(400):
            os.mkdir('d' * 200); os.chdir('d' * 200)
        os.fchdir(top)
        try: os.chmod('.', 0)
        except PermissionError: pass
        try: os.rename('.', '../moved')
        except OSError: pass
        print('filled')"""
    async with opened(config) as tools:
        assert text_of(await call(tools, dedent(code))) == "filled"
    folder.rmdir()
    assert (precious / "file").read_text() == "kept"


# Networks.


@contextlib.contextmanager
def listening(
    kind: int = socket.SOCK_STREAM, family: int = socket.AF_INET, address: object = ("127.0.0.1", 0)
) -> Iterator:
    """A server that writes down whether anything ever came."""
    with socket.socket(family, kind) as server:
        server.bind(address)  # type: ignore[arg-type]
        if kind == socket.SOCK_STREAM:
            server.listen()
        server.setblocking(False)
        yield server
        with pytest.raises(BlockingIOError):
            server.recv(1) if kind == socket.SOCK_DGRAM else server.accept()


async def test_tcp_to_the_host_is_refused(run: Run, needs) -> None:
    """A server on the host's loopback is never reached."""
    needs("network")
    with listening() as server:
        code = f"import socket; socket.create_connection({server.getsockname()!r}, 2)"
        await refused(run, code, "PermissionError", "OSError", "LookupError", "ModuleNotFoundError")
        code = f"import _socket; s = _socket.socket(_socket.AF_INET); s.connect({server.getsockname()!r})"
        await refused(run, code, "PermissionError", "OSError")


async def test_udp_to_the_host_is_refused(run: Run, needs) -> None:
    """Nor does a datagram arrive."""
    needs("network")
    with listening(socket.SOCK_DGRAM) as server:
        code = f"import _socket; _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM).sendto(b'x', {server.getsockname()!r})"
        await refused(run, code, "PermissionError", "OSError")


@pytest.mark.parametrize(
    "abstract", [False, pytest.param(True, marks=pytest.mark.skipif(not LINUX, reason="Linux only"))]
)
async def test_unix_sockets_of_the_host_are_refused(run: Run, needs, tmp_path: Path, abstract: bool) -> None:
    """A socket in the file system or in the abstract namespace, which is how daemons are spoken to, is not reached."""
    needs("network")
    address = f"\0{secrets.token_hex(8)}" if abstract else os.path.relpath(tmp_path / "s")
    with listening(family=socket.AF_UNIX, address=address):
        where = address if abstract else str(tmp_path / "s")
        code = f"import _socket; _socket.socket(_socket.AF_UNIX).connect({where!r})"
        await refused(run, code, "PermissionError", "OSError")


async def test_datagrams_from_a_pair_of_sockets_go_nowhere(run: Run, needs, tmp_path: Path) -> None:
    """A pair of datagram sockets, which needs no connection, cannot be turned towards a daemon's socket."""
    needs("network", "system_calls")
    with listening(socket.SOCK_DGRAM, socket.AF_UNIX, os.path.relpath(tmp_path / "s")):
        code = "import _socket; pair = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_DGRAM)"
        await refused(run, code, "PermissionError")
        code = f"""
            import _socket
            one = _socket.socketpair()[0]
            for attempt in (lambda: one.connect({str(tmp_path / "s")!r}), lambda: one.bind('mine')):
                try: attempt()
                except PermissionError: print('refused')
            one.sendto(b'x', {str(tmp_path / "s")!r})"""
        outcome = await run(dedent(code))
        assert text_of(outcome).startswith("refused\nrefused\nTraceback")


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the other door of this machine")
async def test_calls_of_another_machine_end_the_interpreter(run: Run, needs) -> None:
    """The numbers of 32-bit programs, by which a filter that reads numbers alone could be passed, are deadly."""
    needs("system_calls")
    code = """
        import ctypes
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        page = libc.mmap(None, 4096, 7, 0x22, -1, 0)
        words = bytes.fromhex('53 b8 67010000 bb 02000000 b9 01000000 31d2 cd80 5b c3')  # socket(2, 1, 0) by int 0x80
        ctypes.memmove(page, words, len(words))
        ctypes.CFUNCTYPE(ctypes.c_int)(page)()"""
    outcome = await run(dedent(code))
    assert outcome.kind is OutcomeKind.TOOL_ERROR
    assert "SIG" in text_of(outcome)
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nlibc.syscall(0x40000029, 2, 1, 0), ctypes.get_errno()"
    )
    assert text_of(await run(code)) == "(-1, 38)"


@pytest.mark.skipif(not LINUX, reason="families of Linux")
async def test_other_families_are_refused(run: Run, needs) -> None:
    """Neither raw packets nor netlink, nor the virtual machine's socket to its host, which no network namespace holds back."""
    needs("system_calls")
    code = "import _socket\nresults = set()\nfor family in range(50):\n"
    code += "    try: _socket.socket(family, 3 if family != 40 else 1); results.add(family)\n    except OSError: pass\nresults"
    assert text_of(await run(code)) == "set()"


@pytest.mark.skipif(not LINUX, reason="a system call of Linux")
async def test_io_uring_is_refused(run: Run, needs) -> None:
    """The ring that could make sockets past the filter cannot be made."""
    needs("system_calls")
    code = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nlibc.syscall(425, 8, ctypes.create_string_buffer(120)), ctypes.get_errno()"
    assert text_of(await run(code)) == "(-1, 1)"


async def test_name_lookup_is_refused(run: Run, needs) -> None:
    """Not even a name can be looked up, so nothing leaves by way of one."""
    needs("network")
    code = "import _socket; _socket.getaddrinfo('example.org', 80)"
    await refused(run, code, "gaierror", "LookupError")


# Other processes.


@pytest.fixture
def victim() -> Iterator[subprocess.Popen]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        assert process.poll() is None
        process.kill()


async def test_signals_reach_no_other_process(run: Run, needs, victim: subprocess.Popen) -> None:
    """Neither the parent nor any other process gets a signal, aimed or spread."""
    needs("other_processes")
    for target in {victim.pid, os.getpid(), os.getppid()} - {1}:  # 1 is in a namespace its first process
        await refused(run, f"import os; os.kill({target}, 9)", "ProcessLookupError", "PermissionError")
        await refused(run, f"import os; os.killpg({target}, 9)", "ProcessLookupError", "PermissionError")
    await run("import os; os.kill(-1, 9)")


async def test_descriptors_send_no_signals_to_others(victim: subprocess.Popen) -> None:
    """Where the filter alone holds signals back, no other process becomes the owner of a descriptor that would kill it."""
    config = {**LIMITS, "without": ("namespaces", "cgroup", "drop_root", "landlock")}
    report = {entry.name: entry for entry in enforcement(config)}
    if not report["system_calls"].enforced:
        pytest.skip(f"system_calls is not enforced here: {report['system_calls'].detail}")
    code = f"""
        import fcntl, os, signal, struct
        read, write = os.pipe()
        fcntl.fcntl(read, 10, signal.SIGKILL)  # F_SETSIG
        ways = [
            lambda pid: fcntl.fcntl(read, fcntl.F_SETOWN, pid),
            lambda pid: fcntl.fcntl(read, 15, struct.pack("ii", 1, pid)),  # F_SETOWN_EX
            lambda pid: fcntl.ioctl(read, 0x8901, struct.pack("i", pid)),  # FIOSETOWN
        ]
        for way in ways:
            for pid in ({victim.pid}, os.getppid(), -os.getppid()):
                try:
                    way(pid)
                    print("owned by", pid)
                except OSError:
                    pass
        fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC)
        os.write(write, b"x")
    """
    async with opened(config) as tools:
        outcome = await call(tools, dedent(code))
        assert text_of(outcome) == "1"
        assert text_of(await call(tools, "'alive'")) == "'alive'"
    assert victim.poll() is None


async def test_other_processes_cannot_be_slowed_or_limited(run: Run, needs, victim: subprocess.Popen) -> None:
    """Without a signal, too, nothing can be done to a process of the parent's: no priority, no processor, no limit."""
    needs("other_processes", "system_calls")
    for target in (victim.pid, os.getpid()):
        for attempt in (
            f"os.setpriority(os.PRIO_PROCESS, {target}, 19)",
            f"os.sched_setaffinity({target}, [0])",
            f"os.sched_setscheduler({target}, os.SCHED_IDLE, os.sched_param(0))",
            f"__import__('resource').prlimit({target}, 7, (9, 9))",
        ):
            await refused(run, f"import os; {attempt}", "ProcessLookupError", "PermissionError")
    before = os.getpriority(os.PRIO_PROCESS, 0)
    await run(f"import os; os.setpriority(os.PRIO_USER, {os.getuid()}, 19)")
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.mark.skipif(not LINUX, reason="system calls of Linux")
async def test_other_processes_cannot_be_traced(run: Run, needs, victim: subprocess.Popen) -> None:
    """Their memory can neither be attached to, nor read, nor written, and their descriptors cannot be taken."""
    needs("other_processes")
    code = f"""
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        buffer = ctypes.create_string_buffer(64)
        [libc.ptrace(16, {victim.pid}, 0, 0), libc.ptrace(0x4206, {victim.pid}, 0, 0),
         libc.process_vm_readv({victim.pid}, buffer, 1, buffer, 1, 0),
         libc.syscall(434, {victim.pid}, 0)]"""
    assert text_of(await run(dedent(code))) == "[-1, -1, -1, -1]"


@pytest.mark.skipif(not LINUX, reason="reads /proc")
async def test_daemons_do_not_outlive_the_trajectory(config: dict, needs) -> None:
    """A process of another session, twice forked, deaf to signals and to the death of its parent, is gone after release."""
    needs("no_leftovers")
    code = """
        import ctypes, os, signal, time
        read, write = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.setpgid(0, 0)
                for number in range(1, 65):
                    try: signal.signal(number, signal.SIG_IGN)
                    except (OSError, ValueError): pass
                ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
                os.write(write, b'x')
                while True: time.sleep(1)
            os._exit(0)
        os.read(read, 1)"""
    async with opened(config) as tools:
        outcome = await call(tools, dedent(code))
        assert text_of(outcome) == "b'x'"
        assert len(workers()) == 3
    assert workers() == set()


async def test_trajectories_do_not_see_each_other(config: dict, needs) -> None:
    """One trajectory's files cannot be found from another, and its processes cannot be signalled."""
    needs("files", "other_processes")
    async with opened(config) as first, opened(config) as second:
        await call(first, f"open({(name := secrets.token_hex(8))!r}, 'w').write('mine')")
        place = text_of(await call(first, "import os; os.getcwd()")).strip("'")
        pid = text_of(await call(first, "os.getpid()"))
        outcome = await call(
            second, f"import os; os.path.exists({place + '/' + name!r}) and open({place + '/' + name!r}).read()"
        )
        assert "mine" not in text_of(outcome)
        await call(second, f"import os\nif os.getpid() != {pid}: os.kill({pid}, 9)")
        assert text_of(await call(first, "1 + 1")) == "2"


# More rights.


async def test_root_cannot_be_taken_back(run: Run, needs) -> None:
    """No way of setting an id leads back to root, and there is no capability to do it with."""
    needs("privileges")
    for setter in ("setuid(0)", "seteuid(0)", "setreuid(0, 0)", "setgid(0)", "setgroups([0])"):
        await refused(
            run, f"import os; os.{setter}", "PermissionError", "Errno 22"
        )  # 22: no such user in this namespace
    if LINUX:
        code = "[line.split()[1] for line in open('/proc/self/status') if line.startswith(('CapPrm', 'CapEff', 'CapBnd', 'NoNewPrivs'))]"
        text = text_of(await run(code))
        assert "FileNotFoundError" in text or text.endswith("'1']")
        assert "FileNotFoundError" in text or set(text.replace("'1']", "")) <= set("[]', 0")


async def test_set_user_id_programs_give_nothing(run: Run, needs) -> None:
    """Neither the system's nor one's own set-user-id programs run with more rights."""
    needs("privileges")
    code = """
        import os, shutil, subprocess
        shutil.copy('/usr/bin/id', 'id'); os.chmod('id', 0o6755)
        [subprocess.run([program, '-u'], capture_output=True, text=True).stdout.strip() for program in ('./id', 'id')]"""
    outcome = await run(dedent(code))
    if outcome.metrics["code_error"] == 0.0:
        assert "'0'" not in text_of(outcome)


@pytest.mark.skipif(not LINUX, reason="system calls of Linux")
async def test_namespaces_and_mounts_are_refused(run: Run, needs) -> None:
    """New user namespaces, in which one is root again, and mounts, roots and keys are refused."""
    needs("system_calls")
    code = """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        [libc.unshare(0x10000000), libc.unshare(0x20000), libc.mount(b'none', b'.', b'tmpfs', 0, None), libc.umount2(b'/proc', 2),
         libc.chroot(b'.'), libc.setns(0, 0), libc.syscall(428, -1, b'/', 1), libc.syscall(248 if ctypes.sizeof(ctypes.c_void_p) else 0, 0),
         libc.personality(0x40000), libc.prctl(1, 0, 0, 0, 0), libc.prctl(4, 1, 0, 0, 0)]"""
    assert set(text_of(await run(dedent(code)))) <= set("[-1, ]")
    code = "import os\nflags = 0x10000000 | 17\nctypes.CDLL(None).syscall(56 if os.uname().machine == 'x86_64' else 220, flags, 0, 0, 0, 0)"
    assert text_of(await run(code)) == "-1"


@pytest.mark.skipif(not LINUX, reason="a filter of Linux")
async def test_the_filter_cannot_be_taken_off(run: Run, needs) -> None:
    """A filter of the code's own that allows everything changes nothing."""
    needs("system_calls")
    code = """
        import ctypes, struct, _socket
        libc = ctypes.CDLL(None, use_errno=True)
        line = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0x7fff0000))
        program = ctypes.create_string_buffer(struct.pack('HxxxxxxP', 1, ctypes.addressof(line)))
        libc.prctl(22, 2, program, 0, 0)
        _socket.socket()"""
    await refused(run, dedent(code), "PermissionError")
