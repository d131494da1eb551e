"""The Responses API in the words of the chat API: requests into chat requests, answers into responses and their events.

Invariant: items that a client sends back, as the official client does, are the messages that they were made of, so that they
continue their conversation; every field is obeyed or refused by name. Nothing is stored under a response's id.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from ostinato_rollout.openai_app.answers import Answer, Choice
from ostinato_rollout.openai_app.errors import ApiError
from ostinato_rollout.openai_app.limits import AppLimits
from ostinato_rollout.openai_app.request import ChatRequest, Count, Neutral, chat_request, decoded, obeyed, schema_error

_NEUTRAL: Neutral = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "metadata": ({},),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning": ({},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "text": ({}, {"format": {"type": "text"}}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "parallel_tool_calls": (True,),
}
_CURES = {
    "previous_response_id": "send the whole conversation as input, since responses are not stored",
    "conversation": "send the whole conversation as input, since responses are not stored",
    "store": "nothing is stored",
    "text": "nothing constrains what is sampled, so ask for a form in words",
    "parallel_tool_calls": "nothing constrains what is sampled, so ask for it in words",
}
_REASONS = {"length": "max_output_tokens"}
_SAME_NAMES = ("model", "stream", "temperature", "top_p", "tool_choice", "user")


class _Part(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a content; text is the only kind."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


_Content = str | list[_Part]


class _Message(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="message"):
    role: Literal["system", "developer", "user", "assistant"]
    content: _Content
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class _Call(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="function_call"):
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class _CallOutput(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="function_call_output"):
    call_id: str
    output: _Content
    id: str | None = None
    status: str | None = None


class _Reasoning(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="reasoning"):
    id: str | None = None
    summary: list[_Part] = []
    content: list[_Part] | None = None
    encrypted_content: None = None
    status: str | None = None


_Item = _Message | _Call | _CallOutput | _Reasoning


class _Function(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    """The fields that are obeyed."""

    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    tools: list[_Function] = []
    tool_choice: Any = "auto"
    stream: bool = False
    max_output_tokens: Count | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    user: str | None = None


class ResponsesRequest(msgspec.Struct, frozen=True):
    """A request that can be answered."""

    chat: ChatRequest
    """The same in the words of the chat API."""
    given: dict[str, Any]
    """What the client sent; a response repeats some of it."""


def parse_responses_request(body: bytes, limits: AppLimits, *, vocab_size: int) -> ResponsesRequest:
    """Read the body of a request for a response.

    Args:
        body: JSON.
        limits: How many items and tools are taken.
        vocab_size: Of the model.

    Raises:
        ApiError: 400 where something is wrong or unsupported, 413 where there is too much; the message names the field.
    """
    given = decoded(body)
    try:
        parsed = msgspec.convert(obeyed(given, _Body, _NEUTRAL, _CURES), _Body)
    except msgspec.ValidationError as error:
        raise schema_error(error) from None
    chat: dict[str, Any] = {name: given[name] for name in _SAME_NAMES if name in given}
    chat["messages"] = _messages(parsed, limits)
    chat["tools"] = [_chat_tool(tool) for tool in given.get("tools") or []]
    if parsed.max_output_tokens is not None:
        chat["max_completion_tokens"] = parsed.max_output_tokens
    try:
        return ResponsesRequest(chat_request(chat, limits, vocab_size=vocab_size), given)
    except ApiError as error:
        raise _in_items(error) from None


def _in_items(error: ApiError) -> ApiError:
    """Name a tool's fields where they stand here: beside its type, not within `function`."""
    message, param = (text and text.replace("].function.", "].") for text in (str(error), error.param))
    return ApiError(message or "", status=error.status, param=param, code=error.code)


def _messages(parsed: _Body, limits: AppLimits) -> list[dict]:
    messages: list[dict] = []
    if parsed.instructions is not None:
        messages.append({"role": "system", "content": parsed.instructions})
    if isinstance(parsed.input, str):
        return [*messages, {"role": "user", "content": parsed.input}]
    if not parsed.input:
        raise ApiError("input must hold at least one item, got none; say something", param="input")
    if len(parsed.input) > limits.max_messages:
        raise ApiError(
            f"input must hold at most {limits.max_messages} items, got {len(parsed.input)}; send fewer",
            status=413,
            param="input",
        )
    turn: dict[str, Any] | None = None  # the assistant's turn that the items before belong to
    for index, raw in enumerate(parsed.input):
        item = _item(raw, index)
        if isinstance(item, _CallOutput):
            turn = None
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif isinstance(item, _Message) and item.role != "assistant":
            turn = None
            messages.append({"role": item.role, "content": _text(item.content)})
        else:
            turn = _in_turn(turn, item, messages)
    if any(message.keys() <= {"role", "reasoning_content"} for message in messages):
        raise ApiError(
            "input must hold a message or a call after each reasoning, got one alone; send all items of a turn",
            param="input",
        )
    return messages


def _in_turn(turn: dict[str, Any] | None, item: _Message | _Call | _Reasoning, messages: list[dict]) -> dict[str, Any]:
    """Put an item into the assistant's turn under way, or begin one: a turn is thought, then said, then called, each call an item."""
    names = ("reasoning_content", "content", "tool_calls")
    place = 0 if isinstance(item, _Reasoning) else 1 if isinstance(item, _Message) else 2
    if turn is None or (place < 2 and any(name in turn for name in names[place:])):
        turn = {"role": "assistant"}
        messages.append(turn)
    if isinstance(item, _Reasoning):
        turn["reasoning_content"] = _text(item.content or item.summary)
    elif isinstance(item, _Message):
        turn["content"] = _text(item.content)
    else:
        function = {"name": item.name, "arguments": item.arguments}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    return turn


def _item(raw: Any, index: int) -> _Item:
    try:
        if isinstance(raw, dict) and "type" not in raw and "role" in raw:
            raw = {**raw, "type": "message"}
        if isinstance(raw, dict):
            raw = {name: value for name, value in raw.items() if value is not None}
        return msgspec.convert(raw, _Item)
    except msgspec.ValidationError as error:
        raise schema_error(error, f"input[{index}]") from None


def _text(content: _Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _chat_tool(tool: dict) -> dict:
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def response(answer: Answer, request: ResponsesRequest) -> dict[str, Any]:
    """Return the whole response."""
    (choice,) = answer.choices
    cut = choice.finish_reason not in ("stop", "tool_calls")
    return {
        **_head(answer, request),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": _REASONS.get(choice.finish_reason, choice.finish_reason)} if cut else None,
        "output": _items(answer, choice, "incomplete" if cut else "completed"),
        "usage": _usage(choice),
    }


def events(answer: Answer, request: ResponsesRequest) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream: the response begins, each item comes in one part, the response ends."""
    whole = response(answer, request)
    begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    everything = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        *(event for index, item in enumerate(whole["output"]) for event in _item_events(item, index)),
        {"type": f"response.{whole['status']}", "response": whole},
    ]
    for number, event in enumerate(everything):
        yield {**event, "sequence_number": number}


def _head(answer: Answer, request: ResponsesRequest) -> dict[str, Any]:
    given = request.given
    return {
        "id": answer.id.replace("chatcmpl-", "resp_"),
        "object": "response",
        "created_at": answer.created,
        "model": answer.model,
        "error": None,
        "instructions": given.get("instructions"),
        "max_output_tokens": given.get("max_output_tokens"),
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": given.get("temperature", 1.0),
        "text": {"format": {"type": "text"}},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": given.get("tools") or [],
        "top_p": given.get("top_p", 1.0),
        "truncation": "disabled",
    }


def _items(answer: Answer, choice: Choice, status: str) -> list[dict]:
    message, items = choice.message, []
    if message.get("reasoning_content"):
        thought = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
        items.append({"type": "reasoning", "id": _new_id("rs"), "summary": [], "content": thought, "status": status})
    if message["content"] or not message.get("tool_calls"):
        said = [{"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}]
        items.append({"type": "message", "id": _new_id("msg"), "role": "assistant", "content": said, "status": status})
    calls = [
        {
            "type": "function_call",
            "id": _new_id("fc"),
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
            "status": status,
        }
        for call in message.get("tool_calls", ())
    ]
    return [*items, *calls]


def _item_events(item: dict, index: int) -> Iterator[dict[str, Any]]:
    empty = {"function_call": {"arguments": ""}, "message": {"content": []}, "reasoning": {"content": []}}[item["type"]]
    where = {"item_id": item["id"], "output_index": index}
    yield {
        "type": "response.output_item.added",
        "output_index": index,
        "item": {**item, **empty, "status": "in_progress"},
    }
    if item["type"] == "function_call":
        name = "response.function_call_arguments"
        yield {"type": f"{name}.delta", **where, "delta": item["arguments"]}
        yield {"type": f"{name}.done", **where, "name": item["name"], "arguments": item["arguments"]}
    else:
        yield from _text_events(item, where)
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _text_events(item: dict, where: dict[str, Any]) -> Iterator[dict[str, Any]]:
    (part,) = item["content"]
    where = {**where, "content_index": 0}
    name, more = f"response.{part['type']}", {"logprobs": []} if part["type"] == "output_text" else {}
    yield {"type": "response.content_part.added", **where, "part": {**part, "text": ""}}
    if part["text"]:
        yield {"type": f"{name}.delta", **where, "delta": part["text"], **more}
    yield {"type": f"{name}.done", **where, "text": part["text"], **more}
    yield {"type": "response.content_part.done", **where, "part": part}


def _usage(choice: Choice) -> dict[str, Any]:
    prompt, sampled = len(choice.prompt_ids), len(choice.token_ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": min(prompt, choice.num_cached), "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + sampled,
    }


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
