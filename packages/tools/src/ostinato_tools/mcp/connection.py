"""One session with one server, entered and left by a task of its own.

The SDK's task groups must be left by the task that entered them, so nobody else enters them: an owner task opens the
session, waits until it is to end, and closes it. Calls run in the tasks of their callers. Everything here lives in the
background loop.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

import anyio
import mcp_types as types
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from ostinato_tools.mcp import background
from ostinato_tools.mcp.config import HttpServer, McpOptions, ServerSpec, StdioServer, redactor_of
from ostinato_tools.mcp.failures import ConnectionLost, Refused, describe_error, root_cause, tool_error
from ostinato_tools.mcp.http import NOTES, HttpNotes, make_http_client
from ostinato_tools.mcp.stdio import StdioReport, stdio_transport

CLOSE_GRACE_S = 5.0
"""Seconds that a session gets to end by itself before it is cut off."""
MAX_PAGES = 100
_REASON_WAIT_S = 2.0

_logger = logging.getLogger(__name__)


class Connection:
    """A session. `open` it once, `call` as often and as concurrently as wanted, `close` it; it does not come back."""

    def __init__(self, spec: ServerSpec, options: McpOptions, *, stateful: bool) -> None:
        """Prepare.

        Args:
            spec: The server.
            options: Limits.
            stateful: The server is to keep a session for us; a protocol without sessions is not accepted over HTTP.
        """
        self.spec = spec
        self.tools: dict[str, types.Tool] = {}
        """What the server offers, by name; learnt on opening and again when the server says that it changed."""
        self.doubtful = False
        """A request met a network failure, or the server has forgotten the session: the next call should open another."""
        self._options = options
        self._needs_session = stateful and isinstance(spec, HttpServer)
        self._mode = "legacy" if self._needs_session else "auto"  # the newest protocol has no sessions over HTTP
        self._redact = redactor_of(spec)
        self._report = StdioReport(spec.name, self._redact)
        self._notes = HttpNotes()
        self._client: Client | None = None
        self._failure: BaseException | None = None
        self._scope = anyio.CancelScope()
        self._ready = asyncio.Event()
        self._ending = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._num_calls = 0
        self._probing = False
        self._tools_changed = False
        self._owner: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        """Whether calls may be tried."""
        return self._client is not None and not self._ending.is_set()

    async def open(self) -> None:
        """Open the session and learn the tools.

        Raises:
            ConnectionLost: it cannot be opened, or not within `start_timeout_s`; nothing is left behind.
        """
        owner = self._owner = asyncio.create_task(self._own(), name=f"mcp {self.spec.name}")
        _connections.add(self)
        try:
            with anyio.move_on_after(self._options.start_timeout_s):
                await self._ready.wait()
        except BaseException:
            self._scope.cancel()
            raise
        if self._client is not None:
            return
        in_time = self._ready.is_set()
        # what is known so far, before we end the process ourselves
        late = (f"no answer within {self._options.start_timeout_s} s", *self._known())
        self._scope.cancel()
        await asyncio.wait((owner,), timeout=CLOSE_GRACE_S)
        reason = self._reason() if in_time else "; ".join(filter(None, late))
        raise ConnectionLost(reason, may_have_run=False, permanent=in_time and self._is_permanent())

    async def call(self, name: str, arguments: dict[str, Any]) -> types.CallToolResult:
        """Call a tool.

        Raises:
            ConnectionLost: the session is lost; it says whether the call may have run.
            Refused: the server would have none of it, but the session goes on.
            ToolError: what became of the call, as the executor understands it.
        """
        client = self._client
        if client is None or self._ending.is_set():
            raise ConnectionLost(self._reason(), may_have_run=False)
        self._num_calls += 1
        self._drained.clear()
        notes = HttpNotes()
        token = NOTES.set(notes)
        try:
            if self._tools_changed:
                await self._relist(client)
            if name not in self.tools:
                raise Refused(f"the server offers no tool {name!r} any more")
            return await client.call_tool(name, arguments)
        except Exception as error:  # whatever the session raises becomes one of three kinds
            if isinstance(self.spec, StdioServer) and _is_closed(error):
                await self._lost()
                raise ConnectionLost(self._reason(), may_have_run=True) from None
            known = tool_error(error, notes, self._redact)
            if isinstance(known, ConnectionLost):
                self.doubtful = True
            raise known from None
        finally:
            NOTES.reset(token)
            self._num_calls -= 1
            if not self._num_calls:
                self._drained.set()

    async def responds(self, timeout_s: float) -> bool:
        """Ask for a sign of life."""
        if self._client is None or self._probing:
            return True  # there is nothing to end, or somebody asks already
        self._probing = True
        try:
            with anyio.fail_after(timeout_s):
                await self._client.list_tools()
        except MCPError:
            return True  # an error is an answer
        except Exception:  # no answer that could be understood, or none in time
            return False
        finally:
            self._probing = False
        return True

    async def close(self, *, drain: bool = False) -> bool:
        """End the session; returns when it has ended. A session that has ended stays so.

        Args:
            drain: Let calls that are running end first.

        Returns:
            Whether it ended by itself; otherwise it was cut off after `CLOSE_GRACE_S` seconds.
        """
        owner = self._owner
        if owner is None:
            return True
        if drain:
            await self._drained.wait()
        self._ending.set()
        done, _ = await asyncio.wait((owner,), timeout=CLOSE_GRACE_S)
        if not done:
            self._scope.cancel()
            await asyncio.wait((owner,), timeout=CLOSE_GRACE_S)
        return bool(done)

    async def _own(self) -> None:
        NOTES.set(self._notes)
        try:
            with self._scope:
                async with self._session() as client, anyio.create_task_group() as watchers:
                    if self._needs_session and not self._notes.has_session:
                        raise Refused("it keeps no sessions over HTTP; write session: shared")
                    await self._relist(client)
                    self._client = client
                    self._ready.set()
                    watchers.start_soon(self._watch, client)
                    await self._ending.wait()
                    watchers.cancel_scope.cancel()
        except Exception as error:  # the session's end is recorded; those who wait for it raise
            self._failure = root_cause(error)
            _logger.debug(
                "MCP server %s: the session failed with %s", self.spec.name, self._redact(describe_error(error))
            )
        finally:
            self._client = None
            self._ending.set()
            self._ready.set()
            _connections.discard(self)

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[Client]:
        spec, limit = self.spec, self._options.max_message_bytes
        async with contextlib.AsyncExitStack() as stack:
            if isinstance(spec, HttpServer):
                http_client = await stack.enter_async_context(make_http_client(spec, limit))
                transport = streamable_http_client(spec.url, http_client=http_client, max_sse_event_size=2 * limit)
            else:
                transport = stdio_transport(spec, max_message_bytes=limit, report=self._report, on_end=self._ending.set)
            client = Client(
                transport,
                mode=self._mode,
                cache=None,
                message_handler=self._on_message,
                client_info=types.Implementation(name="ostinato-tools", version=version("ostinato-tools")),
            )
            yield await stack.enter_async_context(client)

    async def _watch(self, client: Client) -> None:
        """Learn of changed tools under the newest protocol, where one has to ask for notices."""
        tools = client.server_capabilities.tools
        if client.protocol_version not in MODERN_PROTOCOL_VERSIONS or tools is None or not tools.list_changed:
            return
        NOTES.set(HttpNotes())  # what becomes of this request says nothing about the session
        try:
            async with client.listen(tools_list_changed=True) as notices:
                async for _ in notices:
                    self._tools_changed = True
        except Exception as error:  # the server gives no notices, or no longer
            _logger.debug("MCP server %s gives no notices: %s", self.spec.name, self._redact(describe_error(error)))
        self._tools_changed = True

    async def _on_message(self, message: Any) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            self._tools_changed = True

    async def _relist(self, client: Client) -> None:
        self._tools_changed = False
        tools: dict[str, types.Tool] = {}
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                if tool.name in tools:
                    raise Refused(f"the server lists two tools named {tool.name!r}")
                tools[tool.name] = tool
            cursor = page.next_cursor
            if cursor is None:
                self.tools = tools
                return
        raise Refused(f"the server lists its tools on more than {MAX_PAGES} pages")

    async def _lost(self) -> None:
        """Wait for the owner to learn why the session ended."""
        self._ending.set()
        if self._owner is not None:
            await asyncio.wait((self._owner,), timeout=_REASON_WAIT_S)

    def _known(self) -> list[str]:
        """What was seen below the session; secrets are masked in what others wrote, not in our own words."""
        return [self._report.describe(), self._redact(self._notes.describe())]

    def _reason(self) -> str:
        parts = self._known()
        failure = self._failure
        if failure is not None and not (any(parts) and _says_nothing(failure)):
            parts.append(self._redact(describe_error(failure)))
        return "; ".join(filter(None, parts)) or "the session ended"

    def _is_permanent(self) -> bool:
        """Whether trying again is pointless: there is no such program, or the address or the credentials are wrong."""
        if isinstance(self._failure, Refused) or (isinstance(self._failure, OSError) and self._report.end is None):
            return True
        status = self._notes.status
        return self._notes.failure is None and status is not None and status < 500 and status not in (408, 425, 429)


def _is_closed(error: Exception) -> bool:
    return isinstance(error, MCPError) and error.code == types.CONNECTION_CLOSED


def _says_nothing(failure: BaseException) -> bool:
    """Whether the SDK only says that there was no answer, where we know why."""
    return isinstance(failure, MCPError) and failure.code in (types.CONNECTION_CLOSED, types.INTERNAL_ERROR)


_connections: set[Connection] = set()
"""Every connection with a running owner; touched in the background loop only."""


async def close_all() -> None:
    """End every session."""
    connections = tuple(_connections)
    if connections:
        await asyncio.gather(*(connection.close() for connection in connections))


background.on_exit(close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_connections.clear)
