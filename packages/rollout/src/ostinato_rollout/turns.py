"""Messages in and out of a session, in OpenAI form. Knows no tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ostinato_engines import StopReason
from ostinato_rollout.errors import SessionInputError
from ostinato_rollout.types import Reply
from ostinato_tools import ParsedTurn, ToolCall


def checked_messages(messages: Sequence[dict]) -> list[dict]:
    """Return the messages as a list, or raise SessionInputError."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise SessionInputError(
            f"messages must be a list of dicts, got {type(messages).__name__}; wrap a single one in a list"
        )
    if not messages:
        raise SessionInputError("messages must hold at least one message, got none; say something")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise SessionInputError(
                f"messages[{index}] must be a dict with a role, got {message!r:.80}; use the OpenAI form"
            )
    return list(messages)


def num_characters(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return how much text the messages hold, calls not counted."""
    total = 0
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else (content,):
            text = part.get("text") if isinstance(part, Mapping) else part
            total += len(text) if isinstance(text, str) else 0
    return total


def empty_reply(stop_reason: StopReason) -> Reply:
    """Return the reply of a turn in which nothing was sampled."""
    return Reply({"role": "assistant", "content": ""}, None, (), (), stop_reason)


def assistant_message(parsed: ParsedTurn, text: str) -> dict:
    """Return the turn as an OpenAI message; arguments are the text that the model wrote, or JSON if that was none.

    Where nothing could be read but errors, the content is the whole `text`: the history shows what the model did wrong.
    """
    unread = bool(parsed.errors) and not parsed.tool_calls and parsed.reasoning is None
    message: dict = {"role": "assistant", "content": text if unread else parsed.content}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments_text(call)}}
            for call in parsed.tool_calls
        ]
    return message


def _arguments_text(call: ToolCall) -> str:
    """Return the arguments as a message has them: JSON, since a template cannot read the format of another."""
    if call.arguments is None:
        return call.raw_arguments
    try:
        msgspec.json.decode(call.raw_arguments)
    except (msgspec.DecodeError, ValueError):
        return json.dumps(call.arguments, ensure_ascii=False)
    return call.raw_arguments


def same_turn(said: ParsedTurn, shown: ParsedTurn) -> bool:
    """Tell whether two turns are the same message, however it is written.

    A turn that holds what could not be read has no message that renders to it, so nothing can be said against `shown`.
    """
    if said.errors or any(call.error is not None for call in said.tool_calls):
        return True
    if (said.content, said.reasoning) != (shown.content, shown.reasoning):
        return False
    return [(call.name, call.arguments) for call in said.tool_calls] == [
        (call.name, call.arguments) for call in shown.tool_calls
    ]
