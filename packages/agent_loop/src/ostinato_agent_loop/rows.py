"""What agents read from a row of the dataset. Wrong shapes are errors that name the field; nothing is repaired."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ostinato_agent_loop.errors import AgentRowError


def row_messages(row: Mapping[str, Any]) -> list[dict]:
    """Return the first messages: `raw_prompt`, else `prompt`; None, as parquet fills it in, counts as absent.

    Raises:
        AgentRowError: Neither is there, or it is no list of messages.
    """
    for name in ("raw_prompt", "prompt"):
        messages = row.get(name)
        if messages is not None:
            break
    else:
        raise AgentRowError(f"a row must have raw_prompt or prompt, got {sorted(row)}; give its messages")
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise AgentRowError(
            f"{name} must be a list of messages, got {messages!r:.80}; use [{{'role': ..., 'content': ...}}]"
        )
    if not messages:
        raise AgentRowError(f"{name} must hold at least one message, got none; drop the row or give it a prompt")
    return list(messages)


def row_tools_kwargs(row: Mapping[str, Any]) -> Mapping[str, Mapping] | None:
    """Return what the row says to its tools: `tools_kwargs`, else `extra_info.tools_kwargs`, else None.

    Tools for which it says None, as parquet fills it in where other rows have something to say, are left out.

    Raises:
        AgentRowError: It is no mapping of tool names to mappings.
    """
    extra = row.get("extra_info")
    value = row.get("tools_kwargs")
    if value is None and isinstance(extra, Mapping):
        value = extra.get("tools_kwargs")
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(entry, Mapping | None) for entry in value.values()):
        raise AgentRowError(
            f"tools_kwargs must map tool names to mappings, got {value!r:.80}; use {{name: {{create_kwargs: ...}}}}"
        )
    return {name: entry for name, entry in value.items() if entry is not None}


def row_tool_selection(row: Mapping[str, Any]) -> list[str] | None:
    """Return the names of the tools that this row may use: `extra_info.tool_selection`; None: all of them.

    Raises:
        AgentRowError: It is no list of names.
    """
    extra = row.get("extra_info")
    value = extra.get("tool_selection") if isinstance(extra, Mapping) else None
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(name, str) for name in value):
        raise AgentRowError(f"extra_info.tool_selection must be a list of tool names, got {value!r:.80}; list them")
    return list(value)


def row_agent_name(row: Mapping[str, Any], default: str) -> str:
    """Return the agent that the row chooses by `agent_name`, else `default`.

    Raises:
        AgentRowError: `agent_name` is no text.
    """
    name = row.get("agent_name")
    if name is None:
        return default
    if not isinstance(name, str):
        raise AgentRowError(f"agent_name must be a text, got {name!r:.80}; name a registered agent")
    return name
