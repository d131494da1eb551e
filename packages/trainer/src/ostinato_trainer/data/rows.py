"""What a row must be before an agent may run on it, and what the agent gets: `check_row` and `row_item`.

Pure functions over one decoded row; they know no file and no tokens. A problem is a sentence that begins with the field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ostinato_trainer.config.data import DataConfig
from ostinato_trainer.data.files import as_mapping, parsed_json_text

__all__ = ["check_row", "row_item"]

_MEDIA_COLUMNS = ("images", "videos")
_NAMES = ("agent_name", "data_source")
_RESERVED = ("self", "sampling_params")
"""What `AgentLoopBase.run` is given beside the row's fields."""


def row_item(row: dict[str, Any], config: DataConfig, position: int) -> dict[str, Any]:
    """The fields that an agent receives: the row's own, and in addition

    `raw_prompt` (messages), `extra_info` and `tools_kwargs` (mappings, maybe empty; a tool of which the row says null is not
    among them), `index` (that of extra_info, else the row's own, a number or text; else `position`), and `agent_name`,
    `data_source` and `reward_model` where the row has them.

    Args:
        row: a decoded row that `check_row` found right.
        config: the node `data`.
        position: number of the row over all files, from 0.
    """
    item = dict(row)
    item["raw_prompt"] = parsed_json_text(row[config.prompt_key], list)
    extra_info = dict(as_mapping(row.get("extra_info")) or {})
    told = as_mapping(_tools_kwargs(row, extra_info)) or {}
    tools_kwargs = {name: kwargs for name, kwargs in told.items() if kwargs is not None}
    if "tools_kwargs" in extra_info:
        extra_info["tools_kwargs"] = tools_kwargs
    item["extra_info"] = extra_info
    item["tools_kwargs"] = tools_kwargs
    index = _index(row, extra_info)
    if _is_absent(index):
        index = position
    item["index"] = int(index) if isinstance(index, float) else index  # a column with gaps makes floats of integers
    for field in _NAMES:
        if _is_absent(row.get(field)):
            item.pop(field, None)
    if "reward_model" in row:
        item["reward_model"] = as_mapping(row["reward_model"])
    if not config.return_multi_modal_inputs:
        for column in _MEDIA_COLUMNS:
            item.pop(column, None)
    return item


def check_row(row: Mapping[str, Any], config: DataConfig) -> str | None:
    """The first problem of a row as `<field> must ..., got ...; cure`, or None."""
    problem = (
        _check_columns(row, config.prompt_key)
        or _check_prompt(row, config.prompt_key)
        or _check_media(row, config)
        or _check_mappings(row)
        or next(filter(None, (_check_text(row, field) for field in _NAMES)), None)
    )
    if problem is not None:
        return problem
    extra_info = as_mapping(row.get("extra_info")) or {}
    return (
        _check_index(row, extra_info)
        or _check_tool_selection(extra_info.get("tool_selection"))
        or _check_tools(_tools_kwargs(row, extra_info), extra_info)
        or _check_ground_truth(as_mapping(row.get("reward_model")) or {})
    )


def _tools_kwargs(row: Mapping[str, Any], extra_info: Mapping[str, Any]) -> Any:
    """What the row says to its tools, in extra_info or else in a column."""
    inside = extra_info.get("tools_kwargs")
    return row.get("tools_kwargs") if inside is None else inside


def _index(row: Mapping[str, Any], extra_info: Mapping[str, Any]) -> Any:
    """What the row says of its number, in extra_info or else in a column."""
    inside = extra_info.get("index")
    return row.get("index") if _is_absent(inside) else inside


def _check_columns(row: Mapping[str, Any], prompt_key: str) -> str | None:
    if "raw_prompt" in row and prompt_key != "raw_prompt":
        return (
            f"raw_prompt must not be a column beside {prompt_key}, whose messages agents are given by that name, got both; "
            "rename it, or write data.prompt_key=raw_prompt"
        )
    for name in _RESERVED:
        if name in row:
            return (
                f"{name} must not be a column: agents are given something else by that name, got it; rename the column"
            )
    return None


def _check_prompt(row: Mapping[str, Any], key: str) -> str | None:
    if key not in row:
        return f"{key} must be there, got the columns {', '.join(row) or 'none'}; add it or set data.prompt_key"
    messages = parsed_json_text(row[key], list)
    if not isinstance(messages, list):
        cure = "write [{role: user, content: TEXT}]"
        return f"{key} must be a list of messages, got {type(messages).__name__}; {cure}"
    if not messages:
        return f"{key} must hold at least one message, got an empty list; write the question as a user message"
    for number, message in enumerate(messages):
        problem = _message_problem(message)
        if problem is not None:
            return f"{key}[{number}]{problem}"
    return None


def _message_problem(message: Any) -> str | None:
    if not isinstance(message, Mapping):
        return f" must be a message with role and content, got {type(message).__name__}; write a mapping"
    role, content = message.get("role"), message.get("content")
    if role is None:
        keys = ", ".join(map(str, message)) or "none"
        return f".role must be text such as user, got the keys {keys}; write {{role: user, content: TEXT}}"
    if not isinstance(role, str) or not role:
        return f".role must be text such as user, got {role!r}; name the speaker"
    if content is None:
        if role == "assistant" and message.get("tool_calls"):
            return None
        return ".content must be text, got nothing; write the text, which may be empty"
    if isinstance(content, str):
        return None
    if not isinstance(content, list):
        return f".content must be text or a list of parts, got {type(content).__name__}; write text"
    for part in content:
        if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            return f".content must have text parts only, got a part of type {kind!r}; media is refused for now"
    return None


def _check_media(row: Mapping[str, Any], config: DataConfig) -> str | None:
    if not config.return_multi_modal_inputs:
        return None
    for column in _MEDIA_COLUMNS:
        if row.get(column):
            return (
                f"{column} must be empty, got {len(row[column])} of them: media is refused for now; "
                "write data.return_multi_modal_inputs=false to ignore the column"
            )
    return None


def _check_mappings(row: Mapping[str, Any]) -> str | None:
    for field in ("extra_info", "reward_model", "tools_kwargs"):
        if field in row and row[field] is not None and as_mapping(row[field]) is None:
            return f"{field} must be a mapping, got {type(row[field]).__name__}; write a mapping or its JSON text"
    return None


def _check_index(row: Mapping[str, Any], extra_info: Mapping[str, Any]) -> str | None:
    index = _index(row, extra_info)
    is_whole = isinstance(index, int | str) or (isinstance(index, float) and index.is_integer())
    if not (_is_absent(index) or is_whole) or isinstance(index, bool):
        where = "index" if _is_absent(extra_info.get("index")) else "extra_info.index"
        return f"{where} must be a whole number or text, got {index!r:.80}; mend it or leave it out"
    return None


def _check_tool_selection(selection: Any) -> str | None:
    if selection is None:
        return None
    if not isinstance(selection, list) or not all(isinstance(name, str) for name in selection):
        return f"extra_info.tool_selection must be a list of tool names, got {selection!r:.80}; list them"
    return None


def _check_ground_truth(reward_model: Mapping[str, Any]) -> str | None:
    truth = reward_model.get("ground_truth")
    if isinstance(truth, float) and not math.isfinite(truth):
        return f"reward_model.ground_truth must be an answer, got {truth}; write it, or leave the row out"
    return None


def _is_absent(value: Any) -> bool:
    """Whether a table had no value here: null, or the NaN that some writers make of it."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _check_tools(raw: Any, extra_info: Mapping[str, Any]) -> str | None:
    tools_kwargs = as_mapping(raw)
    if raw is not None and tools_kwargs is None:
        return (
            f"extra_info.tools_kwargs must be a mapping, got {type(raw).__name__}; write tool names with their kwargs"
        )
    for name, kwargs in (tools_kwargs or {}).items():
        if not isinstance(kwargs, Mapping | None):
            return (
                f"extra_info.tools_kwargs.{name} must be a mapping, got {type(kwargs).__name__}; "
                "write create_kwargs, execute_kwargs or release_kwargs"
            )
    if extra_info.get("need_tools_kwargs") and all(kwargs is None for kwargs in (tools_kwargs or {}).values()):
        return (
            "extra_info.tools_kwargs must name a tool where need_tools_kwargs is true, got none; add the tools' kwargs"
        )
    return None


def _check_text(row: Mapping[str, Any], field: str) -> str | None:
    value = row.get(field)
    if _is_absent(value) or (isinstance(value, str) and value):
        return None
    return f"{field} must be text, got {value!r}; write a name or leave the column out"
