"""From what a server answered to what the model sees.

Text stays text, images stay the bytes that they are: a data URL with the server's own base64. What has no place in a
response (sound, binary files) is named in the text, never dropped silently.
"""

import json
from typing import Any

import msgspec

from ostinato_tools.responses import ToolResponse


class McpResult(msgspec.Struct, frozen=True):
    """The result of a tool call, as the protocol has it."""

    content: list[dict]
    """Blocks as on the wire: `{"type": "text", "text": ...}`, `{"type": "image", "data": ..., "mimeType": ...}`, ..."""
    structured: Any = None
    """Structured content; None where the server gave none."""
    is_error: bool = False
    """The tool reports that it failed."""


def response_of(result: McpResult) -> ToolResponse:
    """Return the result as a response: texts joined by newlines, images as data URLs, structured content where there is no text."""
    texts: list[str] = []
    images: list[str] = []
    for block in result.content:
        _place(block, texts, images)
    if not texts and result.structured is not None:
        texts.append(json.dumps(result.structured, ensure_ascii=False))
    return ToolResponse(text="\n".join(texts), image=images or None)


def _place(block: dict, texts: list[str], images: list[str]) -> None:
    kind = block.get("type")
    if kind == "text":
        texts.append(block["text"])
    elif kind == "image":
        images.append(_data_url(block["mimeType"], block["data"]))
    elif kind == "resource_link":
        texts.append(f"[resource {block.get('name', '')}: {block.get('uri', '')}]")
    elif kind == "resource":
        resource = block["resource"]
        mime_type = resource.get("mimeType") or "unknown type"
        if "text" in resource:
            texts.append(resource["text"])
        elif mime_type.startswith("image/"):
            images.append(_data_url(mime_type, resource["blob"]))
        else:
            texts.append(f"[resource {resource.get('uri', '')} of {mime_type} cannot be shown]")
    else:
        texts.append(f"[{kind} of {block.get('mimeType', 'unknown type')} cannot be shown]")


def _data_url(mime_type: str, data: str) -> str:
    return f"data:{mime_type};base64,{data}"
