"""The process of a stdio server: messages as lines over its pipes, and an end that leaves no process behind.

Unlike the SDK's own transport it bounds what a server may print: a message that is too large fails its own call only, lines
that are no messages are counted and ignored up to a limit, and what the server writes to stderr is kept for messages.
"""

import asyncio
import atexit
import logging
import os
import re
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import anyio.lowlevel
import mcp_types as types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage

from ostinato_tools.mcp.config import StdioServer
from ostinato_tools.mcp.lines import LineSplitter, Oversized
from ostinato_tools.mcp.secrets import Redactor

CHUNK_BYTES = 65_536
EXIT_GRACE_S = 1.0
"""Seconds that a server gets to end after its input was closed, and again after SIGTERM, before it is killed."""
MAX_STRAY_LINES = 1000
"""Lines on stdout that are no messages, without a message between them, after which the server is given up."""
STDERR_BYTES = 2048
"""How much of the end of stderr is kept."""
_SHOWN = 160
"""Characters of foreign text in a message; cut after secrets were masked, so that no half of one is left."""
_POLL_S = 0.01
_REQUEST_ID = re.compile(rb'"id"\s*:\s*(?:(\d{1,18})|"((?:[^"\\]){1,200})")')

_logger = logging.getLogger(__name__)
_live: set[tuple[int, int]] = set()
"""(process id of ours, process group of a server) of every server that runs."""

MessageSend = MemoryObjectSendStream[SessionMessage | Exception]


class StdioReport:
    """What is known about a server's process besides its messages, for messages of ours."""

    def __init__(self, name: str, redact: Redactor) -> None:
        self._name = name
        self._redact = redact
        self._stderr: deque[bytes] = deque()
        self._stderr_bytes = 0
        self.num_stray_lines = 0
        self.num_stray_in_a_row = 0
        self.first_stray_line = ""
        self.end: str | None = None
        """How the process or its output ended; None while it goes on, and where we ended it."""
        self.ended_by_us = False

    def note_stderr(self, chunk: bytes) -> None:
        """Keep the newest of what it wrote to stderr."""
        self._stderr.append(chunk)
        self._stderr_bytes += len(chunk)
        while self._stderr_bytes - len(self._stderr[0]) >= STDERR_BYTES:
            self._stderr_bytes -= len(self._stderr.popleft())

    def note_stray_line(self, line: bytes) -> None:
        """Count a line on stdout that is no message."""
        self.num_stray_lines += 1
        self.num_stray_in_a_row += 1
        if self.num_stray_lines == 1:
            self.first_stray_line = self._redact(line[:STDERR_BYTES].decode(errors="replace"))[:_SHOWN]
            text = "MCP server %s printed a line that is no message: %r; further ones are counted only"
            _logger.warning(text, self._name, self.first_stray_line)

    def describe(self) -> str:
        """Return the end, what was not understood, and the last words on stderr, in one line."""
        parts = [] if self.end is None else [self.end]
        if self.num_stray_lines:
            parts.append(
                f"{self.num_stray_lines} lines on stdout are no messages, the first {self.first_stray_line!r:.120}"
            )
        # masked before it is cut, so that no half of a secret is left standing
        stderr = self._redact(b"".join(self._stderr).decode(errors="replace")).strip()
        if stderr:
            parts.append(f"stderr ends with {stderr.splitlines()[-1][-_SHOWN:]!r}")
        return "; ".join(parts)


@asynccontextmanager
async def stdio_transport(
    spec: StdioServer, *, max_message_bytes: int, report: StdioReport, on_end: Callable[[], None]
) -> AsyncIterator[tuple[Any, Any]]:
    """Start the server and yield the streams of its messages; on leaving, the process and its group are gone.

    Args:
        spec: How to start it.
        max_message_bytes: Bytes of the longest message.
        report: Filled with what happens.
        on_end: Called once when the server has closed its output, before the session notices.

    Raises:
        OSError: it cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        spec.command,
        *spec.args,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=get_default_environment() | spec.env,
        cwd=spec.cwd,
        start_new_session=True,
    )
    group = (os.getpid(), process.pid)
    _live.add(group)
    to_session, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    to_server, from_session = anyio.create_memory_object_stream[SessionMessage](0)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_read_messages, process, to_session, max_message_bytes, report, on_end)
            tasks.start_soon(_write_messages, process, from_session)
            tasks.start_soon(_read_stderr, process, report)
            try:
                yield from_server, to_server
            finally:
                report.ended_by_us = True
                from_server.close()  # the reader stops delivering and only empties the pipe
                to_server.close()
                with anyio.CancelScope(shield=True):
                    await _end(process)
                tasks.cancel_scope.cancel()
    finally:  # reached also when this very task is cancelled from outside, past every shield
        _kill(group)
        transport = getattr(process, "_transport", None)  # nothing public closes the pipes of a process
        if transport is not None:
            transport.close()
        for stream in (to_session, from_server, to_server, from_session):
            stream.close()


def kill_all() -> None:
    """Kill the servers of this process that still run, without waiting."""
    for group in tuple(_live):
        _kill(group)


atexit.register(kill_all)  # runs after the sessions were ended in good order, which has a deadline


def _kill(group: tuple[int, int]) -> None:
    _live.discard(group)
    owner, pgid = group
    if owner == os.getpid():  # a fork of ours does not own our servers
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pgid, signal.SIGKILL)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.stdin is not None:
        process.stdin.close()
    if await _exited(process, EXIT_GRACE_S):
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)
    if await _exited(process, EXIT_GRACE_S):
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await _exited(process, EXIT_GRACE_S)


async def _exited(process: asyncio.subprocess.Process, timeout_s: float) -> bool:
    # Polled: `wait` also waits for the end of pipes that a child of the server may hold open.
    with anyio.move_on_after(timeout_s):
        while process.returncode is None:  # noqa: ASYNC110 - there is no such event
            await anyio.sleep(_POLL_S)
    return process.returncode is not None


async def _read_messages(
    process: asyncio.subprocess.Process,
    to_session: MessageSend,
    max_message_bytes: int,
    report: StdioReport,
    on_end: Callable[[], None],
) -> None:
    assert process.stdout is not None
    splitter = LineSplitter(max_message_bytes)
    delivering = True
    while chunk := await process.stdout.read(CHUNK_BYTES):
        await anyio.lowlevel.checkpoint()  # a pipe that is never empty must not keep everybody else waiting
        if not delivering:
            continue
        try:
            for line in splitter.feed(chunk):
                message = _message(line, max_message_bytes, report)
                if message is not None:
                    await to_session.send(message)
            _check_limits(splitter, max_message_bytes, report)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            delivering = False  # the session has gone; a server that is still writing must be able to end
        except _GivenUp:
            delivering = False
            on_end()
            to_session.close()
    if delivering and not report.ended_by_us:
        if await _exited(process, EXIT_GRACE_S / 2):
            code = process.returncode
            assert code is not None
            how = f"exit code {code}" if code >= 0 else f"signal {-code}"
            report.end = f"the process ended with {how}"
        else:
            report.end = "the process closed its output"
        on_end()
        to_session.close()


class _GivenUp(Exception):
    """The server prints what no session can go on with; the report says what."""


def _check_limits(splitter: LineSplitter, max_message_bytes: int, report: StdioReport) -> None:
    if splitter.num_discarded > 4 * max_message_bytes:
        report.end = f"it wrote more than {4 * max_message_bytes} bytes without the end of a message"
        raise _GivenUp
    if report.num_stray_in_a_row > MAX_STRAY_LINES:
        report.end = "it does not speak the protocol"
        raise _GivenUp


def _message(line: bytes | Oversized, max_message_bytes: int, report: StdioReport) -> SessionMessage | None:
    if isinstance(line, Oversized):
        return _refusal(line, max_message_bytes, report)
    if not line.strip():
        return None
    try:
        message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
    except (ValueError, RecursionError):
        report.note_stray_line(line)
        return None
    report.num_stray_in_a_row = 0
    return SessionMessage(message)


def _refusal(line: Oversized, max_message_bytes: int, report: StdioReport) -> SessionMessage | None:
    """An error in place of an answer that is too large, so that only the call that asked for it fails."""
    envelope, is_answer, _ = line.head.partition(b'"result"')
    found = _REQUEST_ID.search(envelope)
    if found is None or not is_answer or b'"method"' in envelope:
        report.note_stray_line(line.head)
        return None
    request_id = int(found[1]) if found[1] else found[2].decode(errors="replace")
    error = types.ErrorData(
        code=types.INTERNAL_ERROR, message=f"the answer is larger than {max_message_bytes} bytes; ask for less"
    )
    return SessionMessage(types.JSONRPCError(jsonrpc="2.0", id=request_id, error=error))


async def _write_messages(
    process: asyncio.subprocess.Process, from_session: MemoryObjectReceiveStream[SessionMessage]
) -> None:
    assert process.stdin is not None
    with suppress(OSError, RuntimeError):  # the server closed its input; the reader sees how it ended
        async for item in from_session:
            text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.stdin.write(text.encode() + b"\n")
            await process.stdin.drain()
    from_session.close()  # who still writes learns that nobody listens


async def _read_stderr(process: asyncio.subprocess.Process, report: StdioReport) -> None:
    assert process.stderr is not None
    while chunk := await process.stderr.read(CHUNK_BYTES):
        await anyio.lowlevel.checkpoint()
        report.note_stderr(chunk)
