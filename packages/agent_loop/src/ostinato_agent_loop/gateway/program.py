"""A program of the user's own, from its start to the end of everything that it started.

Invariants: it is gone, with the processes of its group, when `run_program` has returned, raised or been cancelled; what it
writes is read to the end and kept within a bound; it sees no variable of this process that it was not given. Knows no model.
It is no sandbox: the program runs with the rights of whoever trains.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from ostinato_agent_loop.config import GatewayConfig
from ostinato_agent_loop.errors import AgentConfigError, AgentProgramError

_PASSED = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH")
_MAX_OUTPUT_BYTES = 1 << 20
_MAX_ERROR_BYTES = 1 << 14
_SHOWN_CHARACTERS = 2000
_PART_BYTES, _MAX_PARTS = 1 << 16, 32
"""Bytes that are read at once, and parts that are read after the end: more than a pipe holds."""


class ProgramResult(msgspec.Struct, frozen=True):
    """How a program ended."""

    status: int
    """Its exit status; -N where signal N ended it."""
    stdout: str
    """The last mebibyte of what it wrote."""
    stderr: str
    """The last 16 KiB of what it complained about."""

    def check(self) -> None:
        """Raise AgentProgramError unless it ended with status 0."""
        if self.status == 0:
            return
        how = f"status {self.status}" if self.status > 0 else f"signal {_signal_name(-self.status)}"
        last = self.stderr.strip()[-_SHOWN_CHARACTERS:] or "it wrote nothing to stderr"
        raise AgentProgramError(f"the agent's program must end with status 0, got {how}; its last lines: {last}")


def check_command(gateway: GatewayConfig) -> None:
    """See that `command` can be started where it will be.

    Raises:
        AgentConfigError: Program or folder are not there, or a path would be looked for in an empty folder.
    """
    if gateway.cwd is not None and not Path(gateway.cwd).is_dir():
        raise AgentConfigError(f"agent.gateway.cwd must be a folder, got {gateway.cwd!r}; make it, or correct the path")
    for part in gateway.command if gateway.cwd is None else ():
        if os.sep in part and not os.path.isabs(part) and os.path.exists(part):
            raise AgentConfigError(
                f"agent.gateway.command must name files by whole paths while cwd is null, got {part!r}, which is not in the empty"
                f" folder that the program runs in; write {os.path.abspath(part)!r} (in a YAML file ${{config_dir}}/... is"
                " beside it), or set agent.gateway.cwd"
            )
    program = gateway.command[0]
    if os.sep in program:
        found = shutil.which(Path(gateway.cwd or os.sep, program))
    else:
        found = shutil.which(program, path=gateway.env.get("PATH"))
    if found is None:
        raise AgentConfigError(
            f"agent.gateway.command must begin with a program that can be started, got {program!r}, which is no executable file"
            f"{'' if os.sep in program else ' in PATH'}; correct the path, or install it"
        )


async def run_program(
    command: Sequence[str],
    *,
    stdin: bytes,
    env: Mapping[str, str],
    pass_env: Sequence[str] = (),
    cwd: str | Path | None = None,
) -> ProgramResult:
    """Run a program to its end. Cancelling kills it and all processes of its group.

    Args:
        command: Program and arguments; no shell reads them.
        stdin: What it may read.
        env: Variables that it gets.
        pass_env: Variables of this process that it gets beside the usual ones (PATH, HOME, the locale, ...).
        cwd: Where it runs; None: in an empty folder, removed afterwards.

    Raises:
        AgentProgramError: It cannot be started.
    """
    given = {name: os.environ[name] for name in (*_PASSED, *pass_env) if name in os.environ}
    with ExitStack() as stack:
        if cwd is None:
            folder = tempfile.TemporaryDirectory(prefix="ostinato-agent-", ignore_cleanup_errors=True)
            cwd = stack.enter_context(folder)
        source = stack.enter_context(tempfile.TemporaryFile())
        source.write(stdin)
        source.seek(0)
        # Pipes of our own: asyncio's wait for a program would else last until all that it started have closed theirs.
        stdout = stack.enter_context(_Output.piped(_MAX_OUTPUT_BYTES))
        stderr = stack.enter_context(_Output.piped(_MAX_ERROR_BYTES))
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=source,
                stdout=stdout.write_end,
                stderr=stderr.write_end,
                env={**given, **env},
                cwd=cwd,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise AgentProgramError(
                f"the agent's program must start, got {error} for {list(command)!r:.200}; check agent.gateway.command and cwd"
            ) from error
        try:
            await process.wait()
        finally:
            _kill_group(process.pid)
            await asyncio.shield(asyncio.create_task(process.wait()))
        assert process.returncode is not None
        return ProgramResult(process.returncode, stdout.text(), stderr.text())


class _Output:
    """The end of what a program writes to a pipe."""

    def __init__(self, read_end: int, write_end: int, bound: int) -> None:
        self.write_end = write_end
        """File descriptor that the program gets."""
        self._read_end, self._bound, self._kept = read_end, bound, bytearray()
        self._loop = asyncio.get_running_loop()

    @classmethod
    @contextmanager
    def piped(cls, bound: int) -> Iterator[_Output]:
        """Make a pipe and read it; what is beyond the last `bound` bytes is forgotten."""
        read_end, write_end = os.pipe()
        output = cls(read_end, write_end, bound)
        try:
            os.set_blocking(read_end, False)
            output._loop.add_reader(read_end, output._read)
            yield output
        finally:
            output._loop.remove_reader(read_end)
            os.close(read_end)
            os.close(write_end)

    def text(self) -> str:
        """Return what was kept of all that the program wrote before it ended. Processes of another session that hold the pipe
        are not waited for."""
        for _ in range(_MAX_PARTS):
            if not self._read():
                break
        return self._kept.decode(errors="replace")

    def _read(self) -> bool:
        """Read a part, if there is one."""
        try:
            part = os.read(self._read_end, _PART_BYTES)
        except BlockingIOError:
            return False
        self._kept += part
        del self._kept[: -self._bound]
        return bool(part)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
