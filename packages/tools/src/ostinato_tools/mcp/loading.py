"""Entries of `config: {type: mcp}`: which servers, which of their tools, under which names."""

import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato_tools.errors import ToolConfigError, ToolImportError, ToolInfrastructureError, ToolSchemaError
from ostinato_tools.mcp import background
from ostinato_tools.mcp.config import McpOptions, SessionScope, read_options, read_policy, read_selection
from ostinato_tools.mcp.server import McpServer, mcp_server
from ostinato_tools.mcp.tool import BINDING, McpBinding, McpTool
from ostinato_tools.registry import ToolRegistry

if TYPE_CHECKING:
    import mcp_types as types


def add_mcp_tools(
    tool_class: Any, entry: dict, config: dict, registry: ToolRegistry, *, place: str, folder: Path
) -> None:
    """Ask the servers of an entry for their tools and register those that it selects.

    Blocks until every server has answered, at most `(max_retries + 1) * start_timeout_s` seconds and the pauses between.

    Args:
        tool_class: `McpTool` or a class derived from it.
        entry: The entry: its `mcp` and its `policy`, which holds for every tool.
        config: The entry's `config`.
        registry: Where they go.
        place: Where the entry was written, for messages.
        folder: Its folder, for relative paths.

    Raises:
        ToolConfigError: the entry says something that cannot be meant, or selects a tool that no server offers.
        ToolImportError: the extra `mcp` is missing.
        ToolInfrastructureError: a server cannot be reached.
        ToolSchemaError: a tool that is selected has a schema that is none.
        DuplicateToolError: two tools have one name; both places are named.
    """
    if not (isinstance(tool_class, type) and issubclass(tool_class, McpTool)):
        raise ToolConfigError(
            f"class_name of {place} must name McpTool or a class derived from it, got {tool_class!r:.100}; "
            "write ostinato_tools.mcp.McpTool or leave it out"
        )
    options = read_options(config, place)
    policy = read_policy(entry.get("policy"), config, place)
    selection = read_selection(entry.get("mcp"), place, folder)
    if find_spec("mcp") is None:
        raise ToolImportError(
            f"tools of {place} must have the extra mcp, got an installation without it; "
            "run: pip install 'ostinato-tools[mcp]'"
        )
    servers = [mcp_server(spec, options) for spec in selection.servers]
    try:
        offered = background.run_blocking(_list_all(servers, options), _deadline(options))
    except (ToolInfrastructureError, TimeoutError) as error:
        raise ToolInfrastructureError(f"{error}; start the server, or correct {place}") from None
    wanted = None if selection.tool_names is None else set(selection.tool_names)
    _check_selection(wanted, servers, offered, place)
    for server, tools in zip(servers, offered, strict=True):
        for name, tool in tools.items():
            if wanted is None or name in wanted:
                where = f"{place}, tool {name!r} of MCP server {server.spec.name!r}"
                repeatable = policy.get("idempotent", _says_repeatable(tool)) is True
                binding = McpBinding(server=server, tool_name=name, repeatable=repeatable)
                schema = _schema(tool, selection.name_prefix)
                _register(registry, tool_class, {**config, BINDING: binding}, schema, policy, where)


def _register(
    registry: ToolRegistry, tool_class: type[McpTool], config: dict, schema: dict, policy: dict, place: str
) -> None:
    try:
        registry.add_class(tool_class, config=config, tool_schema=schema, place=place, policy=policy)
    except ToolSchemaError as error:  # nobody here can correct a schema of the server's
        raise ToolSchemaError(f"{error}; correct the server, or leave the tool out with tool_selected_list") from error


async def _list_all(servers: list[McpServer], options: McpOptions) -> "list[dict[str, types.Tool]]":
    shared = options.session is SessionScope.SHARED
    answers = await asyncio.gather(*(server.list_tools(shared=shared) for server in servers), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if not isinstance(answer, BaseException)]


def _deadline(options: McpOptions) -> float:
    pauses_and_closing = 30.0
    return (options.max_retries + 1) * (options.start_timeout_s + pauses_and_closing)


def _check_selection(wanted: set[str] | None, servers: list[McpServer], offered: list[dict], place: str) -> None:
    known = [name for tools in offered for name in tools]
    missing = sorted((wanted or set()) - set(known))
    if missing:
        raise ToolConfigError(
            f"tool_selected_list of {place} must name tools that the servers offer ({', '.join(known) or 'none'}), "
            f"got {missing}; correct the names"
        )
    if not known:
        names = ", ".join(server.spec.name for server in servers)
        raise ToolConfigError(f"the servers of {place} must offer a tool, got none from {names}; check the servers")


def _schema(tool: "types.Tool", prefix: str) -> dict:
    description = tool.description or tool.title or ""
    function = {"name": prefix + tool.name, "description": description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _says_repeatable(tool: "types.Tool") -> bool:
    hints = tool.annotations
    return hints is not None and (hints.read_only_hint is True or hints.idempotent_hint is True)
