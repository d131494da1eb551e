"""Messages of clients: their schema, and the plain form that sessions take.

Invariant: how a client writes a message (text or parts, null or an empty content) makes no difference to its plain form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ostinato_rollout.openai_app.errors import ApiError


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a content; text is the only kind."""

    type: Literal["text"]
    text: str


Content = str | list[TextPart]


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """What was called."""

    name: str
    arguments: str
    """JSON, if the model wrote well."""


class CallSpec(msgspec.Struct, forbid_unknown_fields=True):
    """A call that an earlier turn made."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | None = None
    """Left by clients that put a stream together; says nothing more than the order."""


class SystemMessage(msgspec.Struct, forbid_unknown_fields=True, tag_field="role", tag="system"):
    """What the application tells the model."""

    content: Content
    name: str | None = None


class DeveloperMessage(SystemMessage, forbid_unknown_fields=True, tag_field="role", tag="developer"):
    """The newer name of a system message."""


class UserMessage(msgspec.Struct, forbid_unknown_fields=True, tag_field="role", tag="user"):
    """What the user says."""

    content: Content
    name: str | None = None


class AssistantMessage(msgspec.Struct, forbid_unknown_fields=True, tag_field="role", tag="assistant"):
    """An earlier turn of the model, with every field that clients keep of a response."""

    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallSpec] | None = None
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None


class ToolMessage(msgspec.Struct, forbid_unknown_fields=True, tag_field="role", tag="tool"):
    """What a tool answered."""

    content: Content
    tool_call_id: str
    name: str | None = None


MessageSpec = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


def plain_messages(specs: Sequence[MessageSpec]) -> list[dict]:
    """Return the messages as sessions take them; a tool's result gets the name of what was called.

    Raises:
        ApiError: There are none, or one says nothing.
    """
    if not specs:
        raise ApiError("messages must hold at least one message, got none; say something", param="messages")
    called: dict[str, str] = {}
    messages = []
    for index, spec in enumerate(specs):
        message: dict[str, Any] = {"role": _ROLES[type(spec)], "content": _text(spec.content)}
        name = spec.name
        if isinstance(spec, AssistantMessage):
            _check_assistant(spec, index)
            if spec.reasoning_content is not None:
                message["reasoning_content"] = spec.reasoning_content
            if spec.tool_calls:
                called |= {call.id: call.function.name for call in spec.tool_calls}
                message["tool_calls"] = [_plain_call(call) for call in spec.tool_calls]
        elif isinstance(spec, ToolMessage):
            message["tool_call_id"] = spec.tool_call_id
            name = name or called.get(spec.tool_call_id)
        if name is not None:
            message["name"] = name
        messages.append(message)
    return messages


_ROLES = {
    SystemMessage: "system",
    DeveloperMessage: "system",
    UserMessage: "user",
    AssistantMessage: "assistant",
    ToolMessage: "tool",
}


def _text(content: Content | None) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _check_assistant(spec: AssistantMessage, index: int) -> None:
    if spec.content is None and not spec.tool_calls:
        raise ApiError(
            f"messages[{index}] must have content or tool_calls, got neither; send the turn as it was answered",
            param=f"messages[{index}]",
        )
    if spec.annotations:
        raise ApiError(
            f"messages[{index}].annotations must be empty, got some; leave them out",
            param=f"messages[{index}].annotations",
        )


def _plain_call(call: CallSpec) -> dict:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": function}
