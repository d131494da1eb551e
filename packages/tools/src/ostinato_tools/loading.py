"""Loading of tools from a YAML file and from a Python file: the one loader for dataset filtering and rollout.

Nothing is registered globally, so loading twice gives two equal registries. A Python file whose text has not changed is
executed once per process.
"""

import importlib
import importlib.util
import sys
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from ostinato_tools.base import BaseTool
from ostinato_tools.errors import ToolConfigError, ToolError, ToolFileNotFoundError, ToolImportError
from ostinato_tools.function import FunctionTool
from ostinato_tools.registry import ToolRegistry
from ostinato_tools.yaml_files import home_path, read_config_file

_ENTRY_KEYS = ("class_name", "config", "tool_schema", "policy")
_MCP_ENTRY_KEYS = ("class_name", "config", "mcp", "policy")


def load_tools(
    tool_config_path: str | Path | None = None, function_tool_path: str | Path | None = None
) -> ToolRegistry:
    """Load tools from either file, or from both.

    Args:
        tool_config_path: YAML, `tools: [{class_name, config: {type: native, ...}, tool_schema, policy: {...}}]`;
            `class_name` is the dotted path of a BaseTool subclass (`tool_schema` may be left out where the class brings
            its own) or of a function tool; `policy` changes fields of the tool's own `ToolPolicy`. An entry
            `{config: {type: mcp, ...}, mcp: {mcp_servers_config_path, ...}}` stands for the tools of servers, which are
            asked for them now.
        function_tool_path: Python file; every function tool that is a global of it, imported ones too.

    Returns:
        A new registry: first the tools of the YAML file, then those of the Python file, each in the order written.

    Raises:
        ToolFileNotFoundError: a file does not exist.
        ToolConfigError: the YAML file does not say what it should, or the Python file holds no tool.
        ToolImportError: a class or the Python file cannot be imported.
        DuplicateToolError: two tools have one name; both places are named.
        ToolSchemaError: a schema is wrong or cannot be made.
        ToolInfrastructureError: an MCP server cannot be reached.
    """
    registry = ToolRegistry()
    if tool_config_path is not None:
        _load_config(_existing(tool_config_path, "tool_config_path"), registry)
    if function_tool_path is not None:
        _load_functions(_existing(function_tool_path, "function_tool_path"), registry)
    return registry


def _existing(path: str | Path, key: str) -> Path:
    full = home_path(path, key)
    if not full.is_file():
        what = "a directory" if full.is_dir() else "nothing there"
        raise ToolFileNotFoundError(f"{key} must be an existing file, got {path} ({what}); looked in {full.absolute()}")
    return full


def _load_config(path: Path, registry: ToolRegistry) -> None:
    content = read_config_file(path)
    cure = "; write tools: [{class_name: ..., config: {type: native}, tool_schema: {...}}]"
    if not isinstance(content, dict) or not isinstance(content.get("tools"), list):
        found = type(content.get("tools") if isinstance(content, dict) else content).__name__
        raise ToolConfigError(f"{path} must hold a list under the key 'tools', got {found}{cure}")
    unknown = [key for key in content if key != "tools"]
    if unknown:
        raise ToolConfigError(f"{path} must hold the key 'tools' only, got also {unknown}{cure}")
    for index, entry in enumerate(content["tools"]):
        _load_entry(entry, f"{path}, tools[{index}]", path.parent, registry)


def _load_entry(entry: Any, place: str, folder: Path, registry: ToolRegistry) -> None:
    if not isinstance(entry, dict):
        raise ToolConfigError(f"{place} must be a mapping, got {type(entry).__name__}; write {{class_name: ...}}")
    config = entry.get("config") or {}
    if not isinstance(config, dict):
        raise ToolConfigError(
            f"config of {place} must be a mapping, got {type(config).__name__}; write {{type: native}}"
        )
    kind = config.get("type", "native")
    if kind == "mcp":
        _refuse_unknown_keys(entry, _MCP_ENTRY_KEYS, place)
        _load_mcp_entry(entry, config, place, folder, registry)
    elif kind == "native":
        _refuse_unknown_keys(entry, _ENTRY_KEYS, place)
        _load_native_entry(entry, config, place, registry)
    else:
        raise ToolConfigError(f"config.type of {place} must be 'native' or 'mcp', got {kind!r}; write one of them")


def _refuse_unknown_keys(entry: dict, known: tuple[str, ...], place: str) -> None:
    unknown = [key for key in entry if key not in known]
    if unknown:
        raise ToolConfigError(f"{place} must have no keys but {', '.join(known)}, got {unknown}; remove them")


def _load_mcp_entry(entry: dict, config: dict, place: str, folder: Path, registry: ToolRegistry) -> None:
    from ostinato_tools.mcp.loading import add_mcp_tools  # everything about servers is loaded by those who have some

    if "mcp" not in entry:
        raise ToolConfigError(
            f"{place} must say which servers it means, got no key 'mcp'; write mcp: {{mcpServers: ...}}"
        )
    class_name = entry.get("class_name", "ostinato_tools.mcp.McpTool")
    if not isinstance(class_name, str):
        raise ToolConfigError(f"class_name of {place} must be a string, got {type(class_name).__name__}; correct it")
    tool_class = _import_name(class_name, place)
    add_mcp_tools(tool_class, entry, config, registry, place=place, folder=folder)


def _load_native_entry(entry: dict, config: dict, place: str, registry: ToolRegistry) -> None:
    if not isinstance(entry.get("class_name"), str):
        keys = sorted(map(str, entry))
        raise ToolConfigError(f"{place} must be a mapping with a string class_name, got {keys}; add class_name")
    found = _import_name(entry["class_name"], place)
    schema, policy = entry.get("tool_schema"), entry.get("policy")
    if policy is not None and not isinstance(policy, dict):
        raise ToolConfigError(
            f"policy of {place} must be a mapping, got {type(policy).__name__}; write e.g. {{timeout_s: 5}}"
        )
    if isinstance(found, FunctionTool):
        if schema is not None or set(config) - {"type"}:
            raise ToolConfigError(
                f"{place} must have neither tool_schema nor config, got one for the function tool {found.name!r}; remove it"
            )
        registry.add_function(found, place=place, policy=policy)
    elif isinstance(found, type) and issubclass(found, BaseTool):
        registry.add_class(found, config=config, tool_schema=schema, place=place, policy=policy)
    else:
        raise ToolConfigError(
            f"class_name of {place} must name a BaseTool subclass or a function tool, got {entry['class_name']!r}, "
            f"a {type(found).__name__}; derive it from ostinato_tools.BaseTool"
        )


def _import_name(dotted: str, place: str) -> Any:
    module_name, _, attribute = dotted.rpartition(".")
    cure = "write package.module.ClassName of something that `python -c 'import ...'` finds"
    if not module_name or not all(part.isidentifier() for part in dotted.split(".")):
        raise ToolImportError(f"class_name of {place} must be a dotted path, got {dotted!r}; {cure}")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing runs foreign code
        raise ToolImportError(
            f"class_name of {place} must be importable, got {dotted!r} ({type(error).__name__}: {error}); {cure}"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise ToolImportError(
            f"class_name of {place} must exist, got {dotted!r}, but {module_name} ({module.__file__}) "
            f"has no {attribute}; {cure}"
        ) from error


def _load_functions(path: Path, registry: ToolRegistry) -> None:
    found = [value for value in vars(execute_file(path)).values() if isinstance(value, FunctionTool)]
    if not found:
        raise ToolConfigError(f"{path} must hold a function tool, got none; decorate a function with @function_tool")
    for tool in dict.fromkeys(found):  # one tool under two global names is one tool
        registry.add_function(tool, place=f"{path}, {tool.place}")


def execute_file(path: str | Path, name: str | None = None) -> ModuleType:
    """Execute a Python file as a module, once per process and text, whatever is looked for in it: tools, agents, rewards.

    Args:
        path: The file.
        name: Of the module; one of its own if None.

    Raises:
        ToolImportError: it does not run.
        ToolError: what it raised of this package's own.
    """
    path = Path(path)
    source = path.read_bytes()
    full = path.resolve()
    name = name or f"ostinato_file_{full.stem}_{sha256(bytes(full) + b'/' + source).hexdigest()[:16]}"
    known = sys.modules.get(name)
    if known is not None:
        return known
    module = ModuleType(name)
    module.__file__ = str(full)
    sys.modules[name] = module  # before execution: dataclasses and pickle look their module up
    try:
        exec(compile(source, str(full), "exec"), module.__dict__)
    except BaseException as error:  # the user's file: whatever it raises, there are no tools in it
        del sys.modules[name]
        if isinstance(error, ToolError) or not isinstance(error, Exception | SystemExit):
            raise
        raise ToolImportError(
            f"{path} must run as Python, got {type(error).__name__}: {error}; see what `python {path}` says"
        ) from error
    return module
