"""The one place where messages and tools are brought into the form that templates expect.

Invariant: what leaves here is the same whichever of the accepted forms the caller used (arguments as JSON string or
mapping, content None or "", tools empty or None, text as string or text parts). Callers' objects are never changed.
It knows nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ostinato_tokenization.errors import MediaNotSupportedError, MessageError

Message = Mapping[str, Any]


class RawArguments(dict[str, Any]):
    """Tool-call arguments that are not a JSON object: printed as written, and a mapping for templates that iterate."""

    def __init__(self, text: str) -> None:
        super().__init__(raw_arguments=text)
        self.text = text


def normalize_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]] | None:
    """Tools as a list; an empty sequence is None, because templates print a header for a list that is there.

    Raises:
        MessageError: An entry is not a mapping.
    """
    if tools is None:
        return None
    if isinstance(tools, (str, bytes, Mapping)):
        raise MessageError(f"tools must be a sequence of schemas, got {type(tools).__name__}; pass a list of dicts")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise MessageError(
                f"tools[{index}] must be a mapping, got {type(tool).__name__}; pass an OpenAI tool schema"
            )
    return list(tools) or None


def normalize_messages(messages: Sequence[Message], *, part_separator: str = "") -> list[Message]:
    """Messages ready for rendering; those already in form are passed through uncopied.

    Args:
        part_separator: What is written between the parts of a content.

    Raises:
        MessageError: There are none, or one has no role, or content of another kind than text.
        MediaNotSupportedError: One carries an image, a video or audio.
    """
    if isinstance(messages, (str, bytes, Mapping)):
        raise MessageError(
            f"messages must be a sequence of messages, got {type(messages).__name__}; pass a list of dicts"
        )
    if not messages:
        raise MessageError("messages must not be empty, got none; give at least one message")
    return [_normalize_message(message, index, part_separator) for index, message in enumerate(messages)]


def _is_mapping(value: Any) -> bool:
    return type(value) is dict or isinstance(value, Mapping)  # the first is far faster, and most often true


def _normalize_message(message: Message, index: int, part_separator: str) -> Message:
    if not _is_mapping(message):
        raise MessageError(f"messages[{index}] must be a mapping, got {type(message).__name__}; pass role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        got = repr(role) if "role" in message else f"the keys {', '.join(map(str, message)) or 'none'}"
        raise MessageError(f"messages[{index}].role must be a non-empty string, got {got}; name who speaks")
    content = message.get("content")
    in_form = isinstance(content, str)
    if in_form and "tool_calls" not in message:
        return message
    changed = dict(message)
    if not in_form:
        changed["content"] = _text_of(content, index, part_separator)
    if "tool_calls" in message:
        calls = message["tool_calls"]
        if not calls:
            del changed["tool_calls"]
        elif type(calls) is not list and (isinstance(calls, (str, bytes, Mapping)) or not isinstance(calls, Sequence)):
            raise MessageError(
                f"messages[{index}].tool_calls must be a list, got {type(calls).__name__}; wrap the call"
            )
        else:
            changed["tool_calls"] = [_normalize_call(call, index) for call in calls]
    return changed


def _text_of(content: Any, index: int, part_separator: str) -> str:
    if content is None:
        return ""
    if isinstance(content, Sequence) and not isinstance(content, (bytes, bytearray)):
        return part_separator.join(_text_of_part(part, index) for part in content)
    raise MessageError(
        f"messages[{index}].content must be text, a list of text parts or None, got {type(content).__name__};"
        " turn it into a string first"
    )


def _text_of_part(part: Any, index: int) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        text = part.get("text")
        if part.get("type", "text") == "text" and isinstance(text, str):
            return text
        if part.get("type", "text") != "text":
            raise MediaNotSupportedError(
                f"messages[{index}].content must be text for now, got a part of type {part.get('type')!r};"
                " remove it or describe it in words"
            )
    raise MessageError(
        f"messages[{index}].content must hold text parts, got {part!r}; use {{'type': 'text', 'text': …}}"
    )


def _normalize_call(call: Any, index: int) -> Mapping[str, Any]:
    if not _is_mapping(call):
        raise MessageError(
            f"messages[{index}].tool_calls must hold mappings, got {type(call).__name__}; see OpenAI's form"
        )
    function = call.get("function")
    if _is_mapping(function):
        arguments = function.get("arguments")
        if _is_mapping(arguments):
            return call
        return {**call, "function": {**function, "arguments": _arguments_of(arguments)}}
    arguments = call.get("arguments")
    return call if _is_mapping(arguments) else {**call, "arguments": _arguments_of(arguments)}


def _arguments_of(arguments: Any) -> dict[str, Any]:
    """A mapping in every case: a conversation with a malformed call still renders, and shows the call as it was."""
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return RawArguments(msgspec.json.encode(arguments).decode())
    if not arguments.strip():
        return {}
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return RawArguments(arguments)
    return value if isinstance(value, dict) else RawArguments(arguments)


def check_unicode(text: str) -> None:
    """Check that a text can be encoded.

    Raises:
        MessageError: It holds unpaired surrogates, or is no text.
    """
    if not isinstance(text, str):
        raise MessageError(f"text must be a string, got {type(text).__name__}; turn it into one first")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MessageError(
            f"text must be valid Unicode, got an unpaired surrogate {text[error.start]!r};"
            " decode its bytes with errors='replace'"
        ) from error
