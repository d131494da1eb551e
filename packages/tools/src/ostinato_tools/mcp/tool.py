"""`McpTool`: a tool of a server as the executor knows tools."""

import json
from typing import Any

import msgspec

from ostinato_tools.base import BaseTool
from ostinato_tools.errors import ToolArgumentError, ToolConfigError, ToolFailedError
from ostinato_tools.mcp import background
from ostinato_tools.mcp.config import SessionScope
from ostinato_tools.mcp.results import McpResult, response_of
from ostinato_tools.mcp.server import McpServer, TrajectorySession
from ostinato_tools.policies import ToolPolicy
from ostinato_tools.responses import ToolResponse

BINDING = "mcp"
"""Key of the tool's configuration under which the loader leaves an `McpBinding`."""


class McpBinding(msgspec.Struct, frozen=True):
    """Which tool of which server a registered name stands for."""

    server: McpServer
    tool_name: str
    """Its name on the server."""
    repeatable: bool
    """The server says that it is read-only or idempotent: a call may be repeated after a lost connection."""


class McpTool(BaseTool):
    """A tool of an MCP server; made by `load_tools`. Derive from it to read rewards out of results (`parse_result`)."""

    def __init__(self, config: dict, tool_schema: dict) -> None:
        """Keep the configuration; nothing is connected.

        Args:
            config: What the loader made of the entry's configuration.
            tool_schema: The server's schema of the tool.

        Raises:
            ToolConfigError: the tool was not made by the loader.
        """
        super().__init__(config, tool_schema)
        binding = config.get(BINDING)
        if not isinstance(binding, McpBinding):
            raise ToolConfigError(
                f"config of {type(self).__name__} must come from an entry of type mcp, got {sorted(map(str, config))}; "
                "write config: {type: mcp} and mcp: {mcp_servers_config_path: ...}"
            )
        self._binding = binding
        self._session: TrajectorySession | None = None
        if binding.repeatable:
            self.policy = msgspec.structs.replace(self.policy or ToolPolicy(), idempotent=True)

    async def create(self, instance_id: str | None = None, **create_kwargs: Any) -> None:
        """Open the trajectory's session with the server, if it is to have one of its own."""
        _refuse(create_kwargs, "create_kwargs", self.name)
        server = self._binding.server
        if server.options.session is SessionScope.TRAJECTORY:
            scope = {} if self.trajectory_scope is None else self.trajectory_scope
            # the tools of one server share the session, and the last to let go ends it
            session = self._session = scope.setdefault((BINDING, id(server)), TrajectorySession(server))
            session.num_holders += 1
            await background.run(session.open())

    async def execute(
        self, instance_id: str, parameters: dict, **execute_kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        """Run one call on the server."""
        _refuse(execute_kwargs, "execute_kwargs", self.name)
        _check_json(parameters)
        binding = self._binding
        if self._session is not None:
            call = self._session.call(binding.tool_name, parameters)
        else:
            call = binding.server.call(binding.tool_name, parameters, repeatable=binding.repeatable)
        raw = await background.run(call)
        content = [block.model_dump(mode="json", by_alias=True, exclude_none=True) for block in raw.content]
        return self.parse_result(McpResult(content=content, structured=raw.structured_content, is_error=raw.is_error))

    def parse_result(self, result: McpResult) -> tuple[ToolResponse, float, dict]:
        """Turn what the server answered into response, reward and metrics.

        Args:
            result: The answer.

        Returns:
            The response of `response_of`, reward 0.0, and the structured content, if any, as the metric `structured_content`.

        Raises:
            ToolFailedError: the tool reports that it failed.
        """
        response = response_of(result)
        if result.is_error:
            raise ToolFailedError(response.text or f"{self.name} failed and gave no reason.")
        metrics = {} if result.structured is None else {"structured_content": result.structured}
        return response, 0.0, metrics

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """Let go of the trajectory's session."""
        _refuse(release_kwargs, "release_kwargs", self.name)
        session, self._session = self._session, None
        if session is not None:
            session.num_holders -= 1
            if not session.num_holders:
                await background.run(session.close())


def _refuse(kwargs: dict, key: str, name: str) -> None:
    if kwargs:
        raise ToolConfigError(
            f"{key} of {name} must be empty, got {sorted(kwargs)}; an MCP server takes arguments only"
        )


def _check_json(parameters: dict) -> None:
    """Refuse what cannot be sent unchanged."""
    try:
        json.dumps(parameters, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolArgumentError(f"the arguments must be plain JSON and valid Unicode, got others: {error}") from None
