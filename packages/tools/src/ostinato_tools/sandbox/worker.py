"""`Worker`: the parent's side of one worker process.

Two connections lead to it. Over one the warden, which is trusted, says what is enforced and how the worker ended. Over the
other, and a pipe for what is printed, come bytes from untrusted code: their number is bounded, and a message that is not
exactly the answer to the question asked ends the worker. Nothing in them decides more than what the model reads.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from ostinato_tools.errors import ToolInfrastructureError
from ostinato_tools.sandbox.backend import CodeResult, Enforcement, RunEnd
from ostinato_tools.sandbox.config import SandboxConfig
from ostinato_tools.sandbox.inside import scratch

_INSIDE = Path(scratch.__file__).parent
_HEADER_BYTES = 4
_CONTROL_BYTES = 1 << 20
_GRACE_S = 1.0
"""Seconds after which code that was told that its time is up is ended."""
_CLEANUP_S = 8.0
"""Seconds that the warden gets to leave nothing behind; it gives itself fewer."""
_REMOVAL_S = 1.0
"""Seconds for which folders are removed that a process without its warden may still write to."""
_FLOOD_FACTOR = 16


class _Told(msgspec.Struct):
    """What the warden says: first that the worker is ready or why not, last how it ended."""

    ready: bool = False
    report: tuple[Enforcement, ...] = ()
    base: str = ""
    groups: tuple[str, ...] = ()
    failed: str | None = None
    ended: bool = False
    status: int | None = None
    out_of_memory: bool = False
    left: tuple[str, ...] = ()


class _Answer(msgspec.Struct, forbid_unknown_fields=True):
    """The runner's answer."""

    id: str
    value: str | None
    error: str | None
    name: str | None
    timed_out: bool
    dropped: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]


_Message = TypeVar("_Message", _Told, _Answer)


class _Gone(Exception):
    """The connection was closed."""


class _Garbled(_Gone):
    """The connection brought something else than a message."""

    def __init__(self) -> None:
        super().__init__("it wrote into the sandbox's own connection")


class Worker:
    """One warm interpreter, used by one trajectory at a time and never by a second one."""

    def __init__(self, config: SandboxConfig) -> None:
        """Start the process; it becomes ready by itself.

        Raises:
            ToolInfrastructureError: it cannot be started.
        """
        self._config = config
        self.report: tuple[Enforcement, ...] = ()
        self.closed = False
        self._folders: tuple[str, ...] = ()
        self._useless = False
        self._ended: _Told | None = None
        try:
            self._start()
        except OSError as error:
            raise ToolInfrastructureError(
                f"a sandbox process must start, got {error}; each takes three open files and two processes: raise limits or lower max_workers"
            ) from error

    def _start(self) -> None:
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as theirs:
            self._control, control = _pair(on_failure, theirs)
            self._channel, channel = _pair(on_failure, theirs)
            self._output, output = os.pipe()
            on_failure.callback(os.close, self._output)
            theirs.callback(os.close, output)
            for descriptor in (self._control.fileno(), self._channel.fileno(), self._output):
                os.set_blocking(descriptor, False)
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-P", str(_INSIDE), str(control.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_environment(),
                cwd="/",
                pass_fds=(control.fileno(), channel.fileno(), output),
                start_new_session=True,
            )
            own: dict[str, Any] = {"channel_fd": channel.fileno(), "output_fd": output}
            own |= {"parent": os.getpid(), "folder": _folder_for_scratch()}
            with contextlib.suppress(BrokenPipeError):  # it has ended already, which waiting for it will tell
                self._control.sendall(_frame(self._config.as_settings() | own))
            on_failure.pop_all()

    async def ready(self) -> None:
        """Wait until the code can come; the caller sets the deadline.

        Raises:
            ToolInfrastructureError: the sandbox could not be set up.
        """
        try:
            message = await _receive(self._control, _CONTROL_BYTES, _Told)
        except (_Gone, OSError) as error:
            raise ToolInfrastructureError(f"a sandbox process must become ready, got its end ({error})") from error
        self._take(message)

    def wait_ready(self, timeout_s: float) -> None:
        """As `ready`, blocking.

        Raises:
            ToolInfrastructureError: the sandbox could not be set up in time.
        """
        self._control.settimeout(timeout_s)
        try:
            header = self._control.recv(_HEADER_BYTES, socket.MSG_WAITALL)
            body = self._control.recv(int.from_bytes(header, "big"), socket.MSG_WAITALL)
            message = msgspec.json.decode(body, type=_Told)
        except (OSError, msgspec.DecodeError) as error:
            raise ToolInfrastructureError(f"a sandbox process must become ready, got {error}") from error
        finally:
            self._control.setblocking(False)
        self._take(message)

    def _take(self, message: _Told) -> None:
        if message.failed is not None:
            raise ToolInfrastructureError(f"a sandbox must be set up, got {message.failed}")
        self.report = message.report
        self._folders = (message.base, *message.groups)

    async def run(self, code: str) -> CodeResult:
        """Run code; see `SandboxSession.run`."""
        if self._useless or self.closed:
            raise ToolInfrastructureError("a sandbox must not be used after its interpreter was lost; start another")
        loop = asyncio.get_running_loop()
        collected = _Collected(self._output, self._config.output_bytes, self._channel)
        loop.add_reader(self._output, collected.read)
        self._useless = True  # until the answer has come
        try:
            async with asyncio.timeout(self._config.wall_s + _GRACE_S):
                answer = await self._ask(code)
        except TimeoutError:
            return await self._lost(collected, RunEnd.TIMED_OUT, f"it did not end within {self._config.wall_s:g} s")
        except (_Gone, OSError) as error:
            detail = "it wrote far more than is allowed" if collected.flooded else str(error)
            by_itself = not collected.flooded and not isinstance(error, _Garbled)
            return await self._lost(collected, RunEnd.DIED, detail, patience_s=_GRACE_S if by_itself else 0.0)
        except BaseException:  # cancelled: nobody waits for the answer, so the code must not go on
            self._stop()
            raise
        finally:
            loop.remove_reader(self._output)
        collected.read()
        self._useless = False
        end = RunEnd.TIMED_OUT if answer.timed_out else RunEnd.FINISHED if answer.error is None else RunEnd.RAISED
        return CodeResult(
            end=end,
            output=collected.text(),
            value=answer.value,
            error=answer.error,
            num_dropped=answer.dropped + collected.num_dropped,
        )

    async def _ask(self, code: str) -> _Answer:
        loop = asyncio.get_running_loop()
        number = secrets.token_hex(8)
        await loop.sock_sendall(self._channel, _frame({"id": number, "code": code, "seconds": self._config.wall_s}))
        # A character is at most six bytes of JSON; value and traceback have as many as the output may have.
        answer = await _receive(self._channel, 16 * self._config.output_bytes + 4096, _Answer)
        if answer.id != number:
            raise _Garbled
        return answer

    async def _lost(self, collected: "_Collected", end: RunEnd, detail: str, *, patience_s: float = 0.0) -> CodeResult:
        ended = await self._end(patience_s=patience_s)
        collected.read()
        if ended is not None and (ended.status is not None or ended.out_of_memory):
            detail = _how(ended)
        return CodeResult(
            end=end, output=collected.text(), num_dropped=collected.num_dropped, state_lost=True, detail=detail
        )

    async def close(self) -> None:
        """End the worker; see `SandboxSession.close`."""
        if self.closed:
            return
        try:
            ended = await self._end()
        finally:
            self.abandon()
        if ended is None and self._process.poll() is None:
            raise ToolInfrastructureError(
                f"a sandbox must end within {_CLEANUP_S:g} s, got one that still removes its files; it goes on by itself"
            )
        if ended is None:
            left = await asyncio.to_thread(self._clean_for_warden)
            raise ToolInfrastructureError(
                f"a sandbox must be ended by its warden, got one that was killed; left are {left or 'no'} folders"
            )
        if ended.left:
            raise ToolInfrastructureError(f"a sandbox must leave nothing behind, got {', '.join(ended.left)}")

    async def _end(self, *, patience_s: float = 0.0) -> _Told | None:
        """Wait for the warden's last word, for `patience_s` seconds without asking for it."""
        if self._ended is None and patience_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    self._ended = await self._last_word()
        if self._ended is None:
            self._stop()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLEANUP_S):
                    self._ended = await self._last_word()
                    while self._process.poll() is None:  # noqa: ASYNC110 - it has said its last word: a moment is left
                        await asyncio.sleep(0.001)
        self._process.poll()
        return self._ended

    def _clean_for_warden(self) -> list[str]:
        """Remove the folders of a worker whose warden cannot any more; returns those that are still there."""
        for folder in self._folders:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
            scratch.remove_from_under(folder, _REMOVAL_S, lambda: None)
        return [folder for folder in self._folders if os.path.isdir(folder)]

    async def _last_word(self) -> _Told | None:
        try:
            while not (told := await _receive(self._control, _CONTROL_BYTES, _Told)).ended:
                pass
        except (_Gone, OSError):
            return None
        return told

    def _stop(self) -> None:
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)

    def abandon(self) -> None:
        """Let go of the connections: the warden then ends everything by itself."""
        if not self.closed:
            self._stop()
            self.forget()

    def forget(self) -> None:
        """Close the descriptors and do no more, as in a fork of the parent, whose worker it is not."""
        if not self.closed:
            self.closed = True
            self._control.close()
            self._channel.close()
            os.close(self._output)

    def wait_ended(self, timeout_s: float) -> None:
        """Abandon the worker and block until it is gone."""
        self.abandon()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Collected:
    """What is printed during one call: the first bytes are kept, the rest is counted, far too many end the worker."""

    def __init__(self, descriptor: int, limit: int, channel: socket.socket) -> None:
        self._descriptor = descriptor
        self._limit = limit
        self._channel = channel
        self._kept = bytearray()
        self.num_dropped = 0
        self.flooded = False

    def read(self) -> None:
        """Take what has come; a bounded part of it, so that the event loop goes on."""
        for _ in range(16):
            try:
                data = os.read(self._descriptor, 65536)
            except BlockingIOError:
                return
            if not data:  # every writer is gone: the descriptor would stay readable for ever
                with contextlib.suppress(RuntimeError):
                    asyncio.get_running_loop().remove_reader(self._descriptor)
                return
            room = self._limit - len(self._kept)
            self._kept += data[:room]
            self.num_dropped += max(0, len(data) - room)
            if self.num_dropped > _FLOOD_FACTOR * self._limit and not self.flooded:
                self.flooded = True
                with contextlib.suppress(OSError):
                    self._channel.shutdown(socket.SHUT_RDWR)

    def text(self) -> str:
        """Return what was kept, with a mark where bytes are no text."""
        return self._kept.decode("utf-8", "replace")


def _environment() -> dict[str, str]:
    """All that a worker gets: where shared libraries lie, and hashes that make sets of text come out the same each time."""
    kept = {key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ}
    return kept | {"PYTHONHASHSEED": "0"}


def _pair(on_failure: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    ours, other = socket.socketpair()
    on_failure.enter_context(ours)
    theirs.enter_context(other)
    return ours, other


def _frame(message: dict[str, Any]) -> bytes:
    body = msgspec.json.encode(message)
    return len(body).to_bytes(_HEADER_BYTES, "big") + body


async def _receive(connection: socket.socket, limit: int, kind: type[_Message]) -> _Message:
    header = await _exactly(connection, _HEADER_BYTES)
    size = int.from_bytes(header, "big")
    if size > limit:
        raise _Garbled
    body = await _exactly(connection, size)
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _Garbled from None


async def _exactly(connection: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    parts = []
    while size:
        part = await loop.sock_recv(connection, min(size, 1 << 18))
        if not part:
            raise _Gone("it closed the sandbox's own connection")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _how(ended: _Told) -> str:
    if ended.out_of_memory:
        return "it ran out of memory"
    status = ended.status or 0
    if status >= 0:
        return f"it ended its interpreter with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    cause = ", as happens when the processor time of a trajectory is used up" if name == "SIGKILL" else ""
    return f"its interpreter was ended by {name}{cause}"


def _folder_for_scratch() -> str:
    """Where scratch folders are made: the folder for temporary files, or a common one where only we can enter that.

    Code that runs as a user of its own must be able to pass through to its scratch folder.
    """
    usual = tempfile.gettempdir()
    if os.getuid() != 0:
        return usual
    return next((folder for folder in (usual, "/tmp", "/var/tmp") if _all_may_pass(Path(folder).resolve())), usual)


def _all_may_pass(folder: Path) -> bool:
    try:
        return all(path.stat().st_mode & stat.S_IXOTH for path in (folder, *folder.parents))
    except OSError:
        return False
