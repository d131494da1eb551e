"""Agents by name: `register` in code, `load_agent_loops` from a file, `agent_loop_class` to look one up."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ostinato_agent_loop.base import AgentLoopBase
from ostinato_agent_loop.errors import AgentConfigError, AgentLoopError, UnknownAgentError
from ostinato_tools import ToolError
from ostinato_tools.loading import execute_file

_AGENTS: dict[str, type[AgentLoopBase]] = {}
_OPTIONAL = {"gateway_agent": "ostinato_agent_loop.gateway", "react_agent": "ostinato_agent_loop.langgraph_agent"}
"""Agents of this package that need an extra, with the module that registers them; imported when somebody asks for one."""

AgentClass = TypeVar("AgentClass", bound=type[AgentLoopBase])


def register(name: str) -> Callable[[AgentClass], AgentClass]:
    """Register an agent class under `name`.

    Raises:
        AgentConfigError: The name is empty or belongs to another class, or the class is no AgentLoopBase, or lacks what that leaves open.
    """
    if not isinstance(name, str) or not name:
        raise AgentConfigError(f"an agent's name must be a text, got {name!r}; write @register('my_agent')")

    def decorate(cls: AgentClass) -> AgentClass:
        _add(name, cls, "@register")
        return cls

    return decorate


def agent_loop_class(name: str) -> type[AgentLoopBase]:
    """Return the class registered under `name`.

    Raises:
        UnknownAgentError: Nobody registered it.
        MissingDependencyError: It comes with this package, but needs an extra that is not installed.
    """
    if name in _OPTIONAL and name not in _AGENTS:
        importlib.import_module(_OPTIONAL[name])
    try:
        return _AGENTS[name]
    except KeyError:
        known = sorted({*_AGENTS, *_OPTIONAL})
        near = difflib.get_close_matches(str(name), known, n=1)
        raise UnknownAgentError(
            f"agent_name of a row, or agent.default_agent_loop, must be one of {', '.join(known)}, got {name!r};"
            f" {f'did you mean {near[0]}? Else ' if near else ''}register it, or add it to agent_loop_config_path"
        ) from None


def registered_agents() -> dict[str, type[AgentLoopBase]]:
    """Return the classes registered by now, by name; for processes that shall know the same."""
    return dict(_AGENTS)


def load_agent_loops(agent_loop_config_path: str | Path) -> tuple[str, ...]:
    """Register the agents of a file; return their names.

    Args:
        agent_loop_config_path: A Python file whose classes are decorated with `@register`, or a YAML file that lists classes,
            each with `name` and `_target_`.

    Raises:
        AgentConfigError: The file, an entry or a class cannot be used; the message names file and entry.
    """
    path = Path(agent_loop_config_path)
    try:
        return _load_python(path) if path.suffix == ".py" else _load_yaml(path)
    except OSError as error:
        raise AgentConfigError(
            f"agent_loop_config_path must be a readable file, got {str(path)!r} ({error.strerror}); correct the path"
        ) from error


def _load_python(path: Path) -> tuple[str, ...]:
    try:
        module = execute_file(path)
    except ToolError as error:
        refused = error.__cause__ if isinstance(error.__cause__, AgentLoopError) else None
        said = error if refused is None else f"{path}: {refused}"
        raise AgentConfigError(f"agent_loop_config_path: {said}") from error
    names = tuple(name for name, cls in _AGENTS.items() if cls.__module__ == module.__name__)
    if not names:
        raise AgentConfigError(
            f"agent_loop_config_path must register an agent, got none in {str(path)!r}; write @register('my_agent') above its class"
        )
    return names


def _load_yaml(path: Path) -> tuple[str, ...]:
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise AgentConfigError(
            f"agent_loop_config_path must hold YAML, got {str(path)!r}: {error}; correct it"
        ) from error
    if not isinstance(entries, list):
        raise AgentConfigError(
            f"{path} must be a list of agents, got {type(entries).__name__}; write `- name: ...` and `  _target_: ...`"
        )
    found: dict[str, type[AgentLoopBase]] = {}
    for index, entry in enumerate(entries):
        name, cls = _read_entry(entry, f"{path}, entry {index}")
        if name in found:
            raise AgentConfigError(f"{path}, entry {index}: name must be unique, got {name!r} twice; rename one")
        found[name] = cls
    for name, cls in found.items():
        _add(name, cls, str(path))
    return tuple(found)


def import_class(target: str, base: type, where: str) -> type:
    """Import a class by its dotted path.

    Raises:
        AgentConfigError: It cannot be imported, or is no subclass of `base`; `where` says who asked.
    """
    module_name, _, attribute = target.rpartition(".") if isinstance(target, str) else ("", "", "")
    if not module_name:
        raise AgentConfigError(
            f"{where}: the class must be a dotted path, got {target!r}; write package.module.ClassName"
        )
    try:
        value = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:
        raise AgentConfigError(
            f"{where}: {target!r} must be importable, got {type(error).__name__}: {error}; check the path, and"
            " that the module lies in the working directory of `ostinato`, or in PYTHONPATH"
        ) from error
    if not isinstance(value, type) or not issubclass(value, base):
        kind, cure = ("class", "name one") if base is object else (f"subclass of {base.__name__}", "derive it")
        raise AgentConfigError(f"{where}: {target!r} must be a {kind}, got {value!r}; {cure}")
    return value


def _read_entry(entry: Any, where: str) -> tuple[str, type[AgentLoopBase]]:
    if not isinstance(entry, dict) or set(entry) != {"name", "_target_"}:
        raise AgentConfigError(f"{where} must have exactly the keys name and _target_, got {entry!r:.120}; correct it")
    name = entry["name"]
    if not isinstance(name, str) or not name:
        raise AgentConfigError(f"{where}: name must be a text, got {name!r}; quote it")
    return name, import_class(entry["_target_"], AgentLoopBase, where)


def _add(name: str, cls: Any, where: str) -> None:
    if not isinstance(cls, type) or not issubclass(cls, AgentLoopBase):
        raise AgentConfigError(f"agent {name!r} must be a subclass of AgentLoopBase, got {cls!r}; derive it")
    if inspect.isabstract(cls):
        raise AgentConfigError(
            f"agent {name!r} must be a whole class, got {cls.__qualname__} without {', '.join(sorted(cls.__abstractmethods__))};"
            " write it"
        )
    known = _AGENTS.get(name)
    same = known is not None and (known.__module__, known.__qualname__) == (cls.__module__, cls.__qualname__)
    if known is not None and not same:
        raise AgentConfigError(
            f"agent {name!r} must be registered once, got {cls.__module__}.{cls.__qualname__} ({where}) beside"
            f" {known.__module__}.{known.__qualname__}; rename one"
        )
    _AGENTS[name] = cls
