"""A server as tools see it: one shared session that is opened again when it is lost, or a session per trajectory.

A call is repeated only if it cannot have run, or if the server says that repeating it does no harm. A lost session of a
trajectory is not replaced: its state is gone, and a fresh one would answer as if nothing had been done.
"""

import asyncio
import hashlib
import logging
import os
import threading
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ostinato_tools.errors import ToolInfrastructureError
from ostinato_tools.mcp import background
from ostinato_tools.mcp.config import McpOptions, ServerSpec, redactor_of
from ostinato_tools.mcp.secrets import guard_logs

if TYPE_CHECKING:  # importing these imports the SDK, which only those need who have a server
    import mcp_types as types

    from ostinato_tools.mcp.connection import Connection

MAX_STARTING = 16
"""Sessions of one server that are being opened at the same time."""
PROBE_TIMEOUT_S = 5.0
"""Seconds that a server gets for a sign of life after a call had no answer in time."""
_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 5.0

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)
_servers: "weakref.WeakValueDictionary[bytes, McpServer]" = weakref.WeakValueDictionary()
_servers_lock = threading.Lock()


def mcp_server(spec: ServerSpec, options: McpOptions) -> "McpServer":
    """Return the server of this process for this specification; loading tools twice gives the same one."""
    parts = (type(spec).__name__.encode(), msgspec.json.encode(spec), msgspec.json.encode(options))
    key = hashlib.sha256(b"\0".join(parts)).digest()
    with _servers_lock:
        server = _servers.get(key)
        if server is None:
            server = _servers[key] = McpServer(spec, options)
        return server


def close_mcp_servers(timeout_s: float = 10.0) -> None:
    """End all sessions of this process now, and with them the servers that it started. Blocks; in an event loop, run it in a thread.

    Without it they end when nobody holds their tools any more, at the latest with the process. A shared session is opened
    again by the next call.

    Args:
        timeout_s: Seconds to wait.

    Raises:
        TimeoutError: a session did not end in time.
    """
    if not background.running():
        return
    from ostinato_tools.mcp.connection import close_all

    background.run_blocking(close_all(), timeout_s)


class _Shared:
    """The shared session of a server, kept apart from it so that it can be ended when the server is forgotten."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.connection: Connection | None = None
        self.opening: asyncio.Task[Connection] | None = None
        self.starting = asyncio.Semaphore(MAX_STARTING)
        self.tasks: set[asyncio.Task] = set()

    def end(self) -> None:
        """End the session soon; called from any thread."""
        background.post(self._end)

    def _end(self) -> None:
        if self.connection is not None and self.pid == os.getpid():
            self.spawn(self.connection.close())

    def spawn(self, coroutine: Any) -> None:
        """Run a coroutine of the background loop and keep it alive until it ends."""
        task = asyncio.ensure_future(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


class McpServer:
    """One server. Its coroutines run in the background loop."""

    def __init__(self, spec: ServerSpec, options: McpOptions) -> None:
        """Prepare; nothing is started.

        Args:
            spec: How it is reached.
            options: How it is used.
        """
        self.spec = spec
        self.options = options
        self._schemas: dict[str, dict] | None = None
        self._own_shared = self._new_shared()
        guard_logs(redactor_of(spec))

    def _new_shared(self) -> _Shared:
        shared = _Shared()
        weakref.finalize(self, shared.end).atexit = False  # at the exit everything is ended anyway
        return shared

    @property
    def _shared(self) -> _Shared:
        if self._own_shared.pid != os.getpid():  # a fork has neither the thread nor the processes of its parent
            self._own_shared = self._new_shared()
        return self._own_shared

    async def list_tools(self, *, shared: bool) -> "dict[str, types.Tool]":
        """Return what the server offers, by name.

        Args:
            shared: Keep the session as the shared one; otherwise it is ended.

        Raises:
            ToolInfrastructureError: it cannot be reached.
        """
        open_one = self._current if shared else partial(self._open, stateful=True)
        # The program's start waits for this, so what it waits for is said.
        connection = await self._repeated(open_one, repeatable=True, level=logging.WARNING)
        if shared:
            return connection.tools
        try:
            return connection.tools
        finally:
            await connection.close()

    async def call(self, name: str, arguments: dict, *, repeatable: bool) -> "types.CallToolResult":
        """Call a tool in the shared session.

        Raises:
            ToolError: what became of the call.
        """

        async def once() -> "types.CallToolResult":
            connection = await self._current()
            try:
                return await connection.call(name, arguments)
            except asyncio.CancelledError:  # in most cases its deadline
                self._shared.spawn(self._probe(connection))
                raise
            finally:
                if not connection.alive or connection.doubtful:
                    self._drop(connection)

        return await self._repeated(once, repeatable=repeatable)

    async def open_session(self) -> "Connection":
        """Open a session for one trajectory.

        Raises:
            ToolInfrastructureError: it cannot be opened.
        """
        return await self._repeated(lambda: self._open(stateful=True), repeatable=True)

    async def _repeated(
        self, operation: Callable[[], Awaitable[_T]], *, repeatable: bool, level: int = logging.INFO
    ) -> _T:
        from ostinato_tools.mcp.failures import ConnectionLost, Refused

        attempt = 0
        while True:
            try:
                return await operation()
            except ConnectionLost as lost:
                unsafe = lost.may_have_run and not repeatable
                if unsafe or lost.permanent or attempt >= self.options.max_retries:
                    raise self.broken(lost, unsafe=unsafe) from None
                _logger.log(level, "MCP server %s: %s; trying again", self.spec.name, lost.reason)
            except Refused as refused:
                raise self.refused(refused) from None
            await asyncio.sleep(min(_BACKOFF_S * 2**attempt, _MAX_BACKOFF_S))
            attempt += 1

    def broken(self, lost: Any, *, unsafe: bool) -> ToolInfrastructureError:
        """Return the error for a lost session."""
        told = " (the call may have run and was not repeated)" if unsafe else ""
        return ToolInfrastructureError(f"MCP server {self.spec.name!r} must be reachable, got: {lost.reason}{told}")

    def refused(self, refused: Any) -> ToolInfrastructureError:
        """Return the error for what the server would not do."""
        return ToolInfrastructureError(f"MCP server {self.spec.name!r} must answer calls, got: {refused}")

    async def _current(self) -> "Connection":
        shared = self._shared
        if shared.connection is not None and shared.connection.alive:
            return shared.connection
        if shared.opening is None:  # those who come meanwhile wait for the same attempt
            shared.opening = asyncio.create_task(self._open(stateful=False))
            shared.opening.add_done_callback(self._opened)
        return await asyncio.shield(shared.opening)

    def _opened(self, task: "asyncio.Task[Connection]") -> None:
        self._shared.opening = None
        if not task.cancelled() and task.exception() is None:
            self._shared.connection = task.result()

    async def _open(self, *, stateful: bool) -> "Connection":
        from ostinato_tools.mcp.connection import Connection

        async with self._shared.starting:
            connection = Connection(self.spec, self.options, stateful=stateful)
            await connection.open()
        self._compare(connection)
        return connection

    def _compare(self, connection: "Connection") -> None:
        schemas = {name: tool.input_schema for name, tool in connection.tools.items()}
        if self._schemas is not None and schemas != self._schemas:
            changed = [name for name, schema in self._schemas.items() if schemas.get(name) != schema]
            _logger.warning(
                "MCP server %s lists other tools than before; changed or gone: %s; prompts keep the old schemas",
                self.spec.name,
                ", ".join(changed) or "none",
            )
        self._schemas = schemas

    def _drop(self, connection: "Connection") -> None:
        if self._shared.connection is connection:
            self._shared.connection = None
            self._shared.spawn(connection.close(drain=connection.alive))

    async def _probe(self, connection: "Connection") -> None:
        """After a call without an answer: a server that gives no sign of life is ended, so that the next call starts it anew."""
        if connection.alive and not await connection.responds(PROBE_TIMEOUT_S):
            _logger.warning("MCP server %s does not respond and is given up", self.spec.name)
            if self._shared.connection is connection:
                self._shared.connection = None
            await connection.close()


class TrajectorySession:
    """The session of one trajectory with one server, held together by those of its tools that the trajectory uses."""

    def __init__(self, server: McpServer) -> None:
        """Prepare; nothing is opened."""
        self.num_holders = 0
        """Tool instances that have not let go yet."""
        self._server = server
        self._lock = asyncio.Lock()
        self._connection: Connection | None = None
        self._lost = ""

    async def open(self) -> None:
        """Open the session unless it is open.

        Raises:
            ToolInfrastructureError: it cannot be opened.
        """
        async with self._lock:
            if self._connection is None:
                self._connection = await self._server.open_session()

    async def call(self, name: str, arguments: dict) -> "types.CallToolResult":
        """Call a tool.

        Raises:
            ToolError: what became of the call.
        """
        from ostinato_tools.mcp.failures import ConnectionLost, Refused

        if self._lost or self._connection is None:
            raise ToolInfrastructureError(self._lost or "the session of this trajectory must be open, got none")
        try:
            return await self._connection.call(name, arguments)
        except ConnectionLost as lost:
            broken = self._server.broken(lost, unsafe=lost.may_have_run)
            if lost.session_gone:
                self._lost = f"{broken}; the state of this trajectory is lost with it"
                broken = ToolInfrastructureError(self._lost)
            raise broken from None
        except Refused as refused:
            raise self._server.refused(refused) from None

    async def close(self) -> None:
        """End the session; a second time changes nothing.

        Raises:
            ToolInfrastructureError: the server would not end it, and it was cut off.
        """
        async with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None and not await connection.close():
                name = self._server.spec.name
                raise ToolInfrastructureError(
                    f"MCP server {name!r} must end a session soon, got no end; it was cut off"
                )
