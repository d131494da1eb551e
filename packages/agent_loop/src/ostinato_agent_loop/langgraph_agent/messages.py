"""LangChain's messages and ours: what a graph says in OpenAI's form, and a sampled turn as LangChain's message.

Invariant: a turn becomes the same plain message whether it comes back as it was given, out of a stream, or out of a
checkpoint. Knows no session.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ChatMessage, ToolMessage
from langchain_core.messages import InvalidToolCall as LangChainInvalidCall
from langchain_core.messages import ToolCall as LangChainCall
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import tool_call_chunk

from ostinato_agent_loop.errors import GraphInputError
from ostinato_agent_loop.langgraph_agent.conversations import GraphTurn
from ostinato_engines import StopReason
from ostinato_tools import ToolCall

UNREADABLE = "unreadable_calls"
"""Where an AIMessage keeps, among its `additional_kwargs`, the calls that cannot be run, each with its error."""

_PROVIDER = "ostinato"
_ROLES = {"human": "user", "system": "system", "ai": "assistant", "tool": "tool"}
_CHAT_ROLES = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}
_REASONING_BLOCKS = ("reasoning", "thinking")
_CALL_BLOCKS = ("tool_call", "tool_call_chunk", "invalid_tool_call", "tool_use", "function_call")
"""Blocks of a content that say again what stands in `tool_calls`."""


def plain_messages(messages: Sequence[BaseMessage]) -> list[dict]:
    """Return the messages in OpenAI's form; a tool's answer gets the name of what was called.

    A turn's `name`, by which LangGraph labels the agent that said it, is left out: it is not part of what was said.

    Raises:
        GraphInputError: There are none, or one cannot be shown to the model.
    """
    if not messages:
        raise GraphInputError("messages must hold at least one message, got none; say something")
    called: dict[str, str] = {}
    plain = []
    for index, message in enumerate(messages):
        entry: dict[str, Any] = {"role": _role(message, index), "content": _text(message, index)}
        name = message.name
        if isinstance(message, AIMessage):
            _add_turn(entry, message)
            called |= {call["id"]: call["function"]["name"] for call in entry.get("tool_calls", ())}
            name = None
        elif isinstance(message, ToolMessage):
            entry["tool_call_id"] = message.tool_call_id
            name = name or called.get(message.tool_call_id)
        if name is not None:
            entry["name"] = name
        plain.append(entry)
    return plain


def message_of(turn: GraphTurn) -> AIMessage:
    """Return a turn as LangChain's message."""
    unreadable = _unreadable_calls(turn)
    return AIMessage(
        content=_visible_text(turn),
        tool_calls=[LangChainCall(name=call.name, args=call.arguments or {}, id=call.id) for call in _calls(turn)],
        invalid_tool_calls=[LangChainInvalidCall(type="invalid_tool_call", **call) for call in unreadable],
        additional_kwargs=_additional(turn, unreadable),
        response_metadata=_metadata(turn),
        usage_metadata=_usage(turn),
    )


def chunks_of(turn: GraphTurn) -> list[AIMessageChunk]:
    """Return a turn as the parts of a stream: its text, if there is any, and what stands beside it.

    Calls that cannot be run are in `additional_kwargs` alone: whoever puts a stream together reads calls leniently, so
    that a broken one could become one that runs.
    """
    text = _visible_text(turn)
    first = [AIMessageChunk(content=text)] if text else []
    last = AIMessageChunk(
        content="",
        tool_call_chunks=[
            tool_call_chunk(name=call.name, args=_json(call.arguments or {}), id=call.id, index=index)
            for index, call in enumerate(_calls(turn))
        ],
        additional_kwargs=_additional(turn, _unreadable_calls(turn)),
        response_metadata=_metadata(turn),
        usage_metadata=_usage(turn),
        chunk_position="last",
    )
    return [*first, last]


def calls_of(message: AIMessage) -> tuple[list[ToolCall], list[str]]:
    """Return the calls of a turn, malformed ones among them, and what could not be read as a call at all."""
    calls = [_our_call(call) for call in message.tool_calls]
    errors = []
    for call in _unreadable_of(message):
        error = call.get("error") or "the call cannot be read"
        if call.get("id") is None:
            errors.append(error)
        else:
            calls.append(ToolCall(call.get("name") or "", None, call.get("args") or "", call["id"], error))
    return calls, errors


def _our_call(call: LangChainCall) -> ToolCall:
    return ToolCall(call["name"], call["args"], _json(call["args"]), call["id"] or "")


def _role(message: BaseMessage, index: int) -> str:
    if isinstance(message, AIMessage):
        return "assistant"
    role = _CHAT_ROLES.get(message.role) if isinstance(message, ChatMessage) else _ROLES.get(message.type)
    if role is None:
        raise GraphInputError(
            f"messages[{index}] must be a system, human, AI or tool message, got {type(message).__name__}; convert it"
        )
    return role


def _text(message: BaseMessage, index: int) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(_text_of_block(block, message, index) for block in message.content)


def _text_of_block(block: Any, message: BaseMessage, index: int) -> str:
    if isinstance(block, str):
        return block
    kind = block.get("type")
    if kind == "text" and isinstance(block.get("text"), str):
        return block["text"]
    if isinstance(message, AIMessage) and kind in (*_REASONING_BLOCKS, *_CALL_BLOCKS):
        return ""
    raise GraphInputError(f"messages[{index}].content must be text, got a block of type {kind!r}; say it in words")


def _add_turn(entry: dict[str, Any], message: AIMessage) -> None:
    """Add what only turns have: reasoning and calls."""
    reasoning = message.additional_kwargs.get("reasoning_content") or _reasoning_in(message.content)
    if reasoning:
        entry["reasoning_content"] = reasoning
    calls = [(call["id"], call["name"], _json(call["args"])) for call in message.tool_calls]
    calls += [(call["id"], call.get("name"), call.get("args")) for call in _unreadable_of(message) if call.get("id")]
    if calls:
        entry["tool_calls"] = [
            {"id": call_id or "", "type": "function", "function": {"name": name or "", "arguments": arguments or ""}}
            for call_id, name, arguments in calls
        ]


def _unreadable_of(message: AIMessage) -> Sequence[Any]:
    return message.additional_kwargs.get(UNREADABLE, message.invalid_tool_calls)


def _reasoning_in(content: str | list) -> str:
    if isinstance(content, str):
        return ""
    blocks = [block for block in content if isinstance(block, dict) and block.get("type") in _REASONING_BLOCKS]
    return "".join(block.get("reasoning") or block.get("thinking") or "" for block in blocks)


def _visible_text(turn: GraphTurn) -> str:
    """The text of a turn; all that was said where its calls are not offered."""
    return turn.reply.text if turn.is_last else turn.reply.message["content"]


def _calls(turn: GraphTurn) -> list[ToolCall]:
    return [] if turn.is_last else [call for call in turn.reply.tool_calls if call.error is None]


def _unreadable_calls(turn: GraphTurn) -> list[dict]:
    """Return the malformed calls, and what could not be read as a call at all, unless it was cut off."""
    reply = turn.reply
    if turn.is_last:
        return []
    broken = [
        {"name": call.name, "args": call.raw_arguments, "id": call.id, "error": call.error}
        for call in reply.tool_calls
        if call.error is not None
    ]
    if reply.tool_calls or reply.stop_reason is not StopReason.LENGTH:
        broken += [{"name": None, "args": None, "id": None, "error": error} for error in reply.errors]
    return broken


def _additional(turn: GraphTurn, unreadable: list[dict]) -> dict[str, Any]:
    additional: dict[str, Any] = {}
    if turn.reply.reasoning is not None and not turn.is_last:
        additional["reasoning_content"] = turn.reply.reasoning
    if unreadable:
        additional[UNREADABLE] = unreadable
    return additional


def _metadata(turn: GraphTurn) -> dict[str, Any]:
    reason = turn.reply.stop_reason
    words = {StopReason.STOP: "tool_calls" if _calls(turn) else "stop", StopReason.LENGTH: "length"}
    return {"finish_reason": words.get(reason, "abort"), "model_name": _PROVIDER, "model_provider": _PROVIDER}


def _usage(turn: GraphTurn) -> UsageMetadata:
    prompt, sampled = turn.num_prompt_tokens, turn.reply.num_tokens
    return UsageMetadata(
        input_tokens=prompt,
        output_tokens=sampled,
        total_tokens=prompt + sampled,
        input_token_details=InputTokenDetails(cache_read=min(prompt, turn.num_cached_tokens)),
    )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
