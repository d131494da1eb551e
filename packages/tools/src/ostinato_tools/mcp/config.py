"""What users write about servers: `mcpServers` (the file that other clients read too), the entry's `mcp`, and its `config`.

Values of `env`, `headers`, `auth_token`, `args` and `url` never appear in a message.
"""

import math
import os
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from ostinato_tools.errors import ToolConfigError, ToolFileNotFoundError
from ostinato_tools.mcp.secrets import Redactor, url_secrets
from ostinato_tools.yaml_files import home_path, read_config_file

_STDIO_KEYS = ("command", "args", "env", "cwd")
_HTTP_KEYS = ("url", "headers", "auth_token")
_TRANSPORTS = {
    "stdio": "stdio",
    "http": "http",
    "streamable-http": "http",
    "streamable_http": "http",
    "streamablehttp": "http",
}
_TRANSPORT_KEYS = ("type", "transport")
_SELECTION_KEYS = ("mcp_servers_config_path", "mcpServers", "tool_selected_list", "name_prefix")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


class SessionScope(StrEnum):
    """Who shares a session with a server."""

    SHARED = "shared"
    TRAJECTORY = "trajectory"


class StdioServer(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """A server that is started as a process and spoken to over its pipes."""

    name: str
    command: str
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    cwd: str | None = None

    def __repr__(self) -> str:
        return f"StdioServer({self.name!r})"  # arguments and environment may hold secrets

    @property
    def secrets(self) -> list[str]:
        """Values that no message may show."""
        return list(self.env.values())


class HttpServer(msgspec.Struct, frozen=True):
    """A server that is reached over streamable HTTP."""

    name: str
    url: str
    headers: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"HttpServer({self.name!r})"

    @property
    def secrets(self) -> list[str]:
        """Values that no message may show."""
        return [*self.headers.values(), *url_secrets(self.url)]


ServerSpec = StdioServer | HttpServer


class McpOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the servers of one entry are used: its `config`, without `type`."""

    session: SessionScope = SessionScope.SHARED
    """`shared`: one session serves all trajectories, and is opened again when it is lost. `trajectory`: each trajectory has
    a session of its own (over stdio a process of its own) from its first call to its end, for servers that keep state."""
    start_timeout_s: float = 30.0
    """Seconds for one attempt to start or reach a server and to learn its tools."""
    max_retries: int = 2
    """How often a lost connection is tried again, with growing pauses. A call that may have run is repeated only where the
    server says that its tool is read-only or idempotent."""
    max_message_bytes: int = 16_777_216
    """Bytes of the longest message that a server may send."""

    def __post_init__(self) -> None:
        if not 0 < self.start_timeout_s < math.inf:
            raise ValueError(
                f"start_timeout_s must be a positive finite number, got {self.start_timeout_s}; give seconds"
            )
        if self.max_retries < 0:
            raise ValueError(f"max_retries must be at least 0, got {self.max_retries}; 0 never tries again")
        if self.max_message_bytes < 1024:
            raise ValueError(f"max_message_bytes must be at least 1024, got {self.max_message_bytes}; give bytes")


class McpSelection(msgspec.Struct, frozen=True):
    """Which tools of which servers an entry means: its `mcp`."""

    servers: tuple[ServerSpec, ...]
    tool_names: tuple[str, ...] | None
    """Names as the servers give them; None for all."""
    name_prefix: str
    """Put before every name that the model sees."""


def read_options(config: Mapping[str, Any], place: str) -> McpOptions:
    """Read the entry's `config`, but for its `timeout`, which is a matter of the policy.

    Raises:
        ToolConfigError: a key is unknown or a value has the wrong form.
    """
    known = ("type", "timeout", *McpOptions.__struct_fields__)
    unknown = [key for key in config if key not in known]
    if unknown:
        cure = "write policy: {max_calls_per_s: ...} beside config" if unknown == ["rate_limit"] else "remove them"
        raise ToolConfigError(f"config of {place} must have no keys but {', '.join(known)}, got {unknown}; {cure}")
    given = {key: value for key, value in config.items() if key not in ("type", "timeout")}
    try:
        return msgspec.convert(given, McpOptions)
    except msgspec.ValidationError as error:
        raise ToolConfigError(f"config of {place} must fit its keys, got: {error}; correct it") from None


def read_policy(policy: Any, config: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Read the entry's `policy`, into which the `timeout` of its `config` goes.

    Raises:
        ToolConfigError: it is no mapping, or says how long twice.
    """
    if policy is not None and not isinstance(policy, dict):
        raise ToolConfigError(
            f"policy of {place} must be a mapping, got {type(policy).__name__}; write e.g. {{timeout_s: 5}}"
        )
    fields = dict(policy or {})
    if config.get("timeout") is not None:
        if "timeout_s" in fields:
            raise ToolConfigError(
                f"{place} must have one deadline, got config.timeout and policy.timeout_s; remove one"
            )
        fields["timeout_s"] = config["timeout"]
    return fields


def read_selection(mcp: Any, place: str, folder: Path) -> McpSelection:
    """Read the entry's `mcp`.

    Args:
        mcp: `{mcp_servers_config_path | mcpServers, tool_selected_list, name_prefix}`.
        place: Where it was written, for messages.
        folder: The folder of the tool configuration, where a relative path is looked up after the working directory.

    Raises:
        ToolConfigError: it has another form.
        ToolFileNotFoundError: the file with the servers does not exist.
    """
    cure = "; write mcp: {mcp_servers_config_path: servers.json}"
    if not isinstance(mcp, dict):
        raise ToolConfigError(f"mcp of {place} must be a mapping, got {type(mcp).__name__}{cure}")
    _refuse_unknown(mcp, _SELECTION_KEYS, f"mcp of {place}")
    inline = mcp.get("mcpServers")
    path = mcp.get("mcp_servers_config_path")
    if (inline is None) == (path is None):
        found = "neither" if inline is None else "both"
        raise ToolConfigError(
            f"mcp of {place} must hold either mcp_servers_config_path or mcpServers, got {found}{cure}"
        )
    if path is not None:
        if not isinstance(path, str):
            raise ToolConfigError(f"mcp_servers_config_path of {place} must be a path, got {type(path).__name__}{cure}")
        inline, place = _read_file(path, place, folder)
    names = mcp.get("tool_selected_list")
    if names is not None and not (isinstance(names, list) and names and all(isinstance(name, str) for name in names)):
        raise ToolConfigError(
            f"tool_selected_list of {place} must be a list of tool names, got {names!r:.80}; leave it out for all tools"
        )
    prefix = mcp.get("name_prefix", "")
    if not isinstance(prefix, str):
        raise ToolConfigError(f"name_prefix of {place} must be a string, got {prefix!r:.80}; for example 'files_'")
    tool_names = None if names is None else tuple(dict.fromkeys(names))
    return McpSelection(servers=read_servers(inline, place), tool_names=tool_names, name_prefix=prefix)


def read_servers(servers: Any, place: str) -> tuple[ServerSpec, ...]:
    """Read `mcpServers`, a mapping from names to servers.

    Raises:
        ToolConfigError: it has another form, or an environment variable that it refers to is not set.
    """
    if not isinstance(servers, dict) or not servers:
        found = "an empty one" if servers == {} else type(servers).__name__
        raise ToolConfigError(
            f"mcpServers of {place} must be a mapping from names to servers, got {found}; "
            "write {name: {command: ..., args: [...]}} or {name: {url: ...}}"
        )
    return tuple(_read_server(name, server, f"MCP server {name!r} of {place}") for name, server in servers.items())


def _read_file(path: str, place: str, folder: Path) -> tuple[Any, str]:
    given = home_path(path, f"mcp_servers_config_path of {place}")
    candidates = list(dict.fromkeys((given.absolute(), (folder / given).absolute())))
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        looked = " and ".join(map(str, candidates))
        raise ToolFileNotFoundError(
            f"mcp_servers_config_path of {place} must be an existing file, got {path}; looked in {looked}"
        )
    content = read_config_file(found)
    if not isinstance(content, dict) or "mcpServers" not in content:
        raise ToolConfigError(
            f"{found} must hold a mapping with the key mcpServers, got {type(content).__name__} without it; "
            'write {"mcpServers": {"name": {"command": ...}}}'
        )
    return content["mcpServers"], str(path)


def _read_server(name: Any, server: Any, place: str) -> ServerSpec:
    if not isinstance(name, str) or not name.strip():
        raise ToolConfigError(f"the name of {place} must be a non-empty string, got {type(name).__name__}; name it")
    if not isinstance(server, dict):
        raise ToolConfigError(
            f"{place} must be a mapping, got {type(server).__name__}; write {{command: ...}} or {{url: ...}}"
        )
    _refuse_unknown(server, (*_STDIO_KEYS, *_HTTP_KEYS, *_TRANSPORT_KEYS), place)
    transport = _transport(server, place)
    wrong = [key for key in (_STDIO_KEYS if transport == "http" else _HTTP_KEYS) if key in server]
    if wrong:
        raise ToolConfigError(f"{place} must have either command or url, got {transport} with {wrong}; remove them")
    if transport == "stdio":
        cwd = server.get("cwd")
        return StdioServer(
            name=name,
            command=_text(server.get("command"), "command", place),
            args=tuple(
                _text(arg, f"args[{index}]", place, may_be_empty=True)
                for index, arg in enumerate(_list(server, "args", place))
            ),
            env=_mapping(server, "env", place),
            cwd=None if cwd is None else _text(cwd, "cwd", place),
        )
    url = _text(server.get("url"), "url", place)
    if not url.startswith(("http://", "https://")):
        raise ToolConfigError(f"url of {place} must begin with http:// or https://, got another one; correct it")
    headers = _mapping(server, "headers", place)
    if server.get("auth_token") is not None:
        if any(key.lower() == "authorization" for key in headers):
            raise ToolConfigError(f"{place} must have one authorization, got auth_token and a header; remove one")
        headers["Authorization"] = f"Bearer {_text(server['auth_token'], 'auth_token', place)}"
    for key, value in headers.items():
        if not (key and f"{key}{value}".isascii() and f"{key}{value}".isprintable() and key.strip() == key):
            raise ToolConfigError(f"headers of {place} must be printable ASCII, got another in {key!r:.80}; correct it")
    return HttpServer(name=name, url=url, headers=headers)


def _transport(server: dict, place: str) -> str:
    named = [server[key] for key in _TRANSPORT_KEYS if server.get(key) is not None]
    if not named:
        if ("command" in server) == ("url" in server):
            raise ToolConfigError(f"{place} must have either command or url, got {sorted(map(str, server))}; add one")
        return "stdio" if "command" in server else "http"
    kinds = {_TRANSPORTS.get(value.lower()) if isinstance(value, str) else None for value in named}
    if len(kinds) > 1 or None in kinds:
        raise ToolConfigError(
            f"type of {place} must be one of stdio, http, streamable-http, got {named}; "
            "give the streamable HTTP address of a server that also offers SSE"
        )
    return str(kinds.pop())


def _refuse_unknown(mapping: dict, known: tuple[str, ...], what: str) -> None:
    unknown = [key for key in mapping if key not in known]
    if unknown:
        raise ToolConfigError(f"{what} must have no keys but {', '.join(known)}, got {unknown}; remove them")


def _list(server: dict, key: str, place: str) -> list:
    value = server.get(key)
    if value is not None and not isinstance(value, list):
        raise ToolConfigError(f"{key} of {place} must be a list, got {type(value).__name__}; write [...]")
    return value or []


def _mapping(server: dict, key: str, place: str) -> dict[str, str]:
    value = server.get(key)
    if value is not None and not isinstance(value, dict):
        raise ToolConfigError(f"{key} of {place} must be a mapping, got {type(value).__name__}; write {{name: value}}")
    items = (value or {}).items()
    if not all(isinstance(name, str) for name, _ in items):
        raise ToolConfigError(f"{key} of {place} must have names that are strings, got another one; quote it")
    return {name: _text(item, f"{key}.{name}", place, may_be_empty=True) for name, item in items}


def _text(value: Any, key: str, place: str, *, may_be_empty: bool = False) -> str:
    """A string with `${NAME}` and `${NAME:-default}` replaced from the environment."""
    if not isinstance(value, str):
        raise ToolConfigError(f"{key} of {place} must be a string, got {type(value).__name__}; quote it")

    def replace(match: re.Match) -> str:
        found = os.environ.get(match[1], match[2])
        if found is None:
            raise ToolConfigError(
                f"${{{match[1]}}} in {key} of {place} must be set in the environment, got none; export it"
            )
        return found

    text = _VARIABLE.sub(replace, value)
    if "\0" in text or not (text or may_be_empty):
        found = "one with a NUL character" if text else "an empty one"
        raise ToolConfigError(f"{key} of {place} must be a usable string, got {found}; correct it")
    return text


def redactor_of(spec: ServerSpec) -> Redactor:
    """Return what masks the secrets of `spec`."""
    return Redactor(spec.secrets)
