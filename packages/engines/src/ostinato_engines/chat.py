"""An OpenAI-style chat request answered through an injected codec. Renders and parses no text itself."""

import time
import uuid
from collections.abc import Mapping
from typing import Any

from ostinato_engines.errors import EngineInputError
from ostinato_engines.server import AsyncServerBase, ChatCodec
from ostinato_engines.types import SamplingParams, StopReason

_SAMPLING_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
}
_OTHER_KEYS = {"messages", "tools", "model", "user", "n", "stream"}


async def answer_chat(server: AsyncServerBase, codec: ChatCodec, raw_request: Any) -> dict[str, Any]:
    """Renders, generates and parses one reply.

    Args:
        server: Generates.
        codec: Turns messages into ids and ids into a message.
        raw_request: The decoded body of `POST /v1/chat/completions`, or a web framework's request whose awaitable
            `json()` gives it. One choice, not streamed.

    Raises:
        EngineInputError: A field is missing or not supported; nothing is ignored.
    """
    raw_request = await _body(raw_request)
    for key, value in raw_request.items():
        if key not in _OTHER_KEYS and key not in _SAMPLING_KEYS:
            known = ", ".join(sorted(_OTHER_KEYS | set(_SAMPLING_KEYS)))
            raise EngineInputError(f"chat request must hold supported fields, got {key!r}; supported are {known}")
        if (key == "n" and value != 1) or (key == "stream" and value):
            raise EngineInputError(
                f"{key} must be {'1' if key == 'n' else 'false'}, got {value!r}; send one request each"
            )
    if (
        len({raw_request[key] for key in ("max_tokens", "max_completion_tokens") if raw_request.get(key) is not None})
        > 1
    ):
        raise EngineInputError("max_tokens and max_completion_tokens must not differ, got two values; send one of them")
    messages = raw_request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise EngineInputError(f"messages must be a non-empty list, got {messages!r:.80}; send the conversation")
    params = SamplingParams.from_mapping(
        {
            **{
                _SAMPLING_KEYS[key]: value
                for key, value in raw_request.items()
                if key in _SAMPLING_KEYS and value is not None
            },
            "stop_token_ids": tuple(codec.stop_token_ids),
        }
    )
    prompt_ids = codec.render(messages, raw_request.get("tools"))
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    try:
        output = await server.generate(prompt_ids, params, request_id)
    finally:
        await server.release(request_id)
    message = dict(codec.parse(output.token_ids))
    finish = "tool_calls" if message.get("tool_calls") else "stop"
    if output.stop_reason is not StopReason.STOP:
        finish = "length" if output.stop_reason is StopReason.LENGTH else "abort"
    return {
        "id": request_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": raw_request.get("model") or type(server).__name__,
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(output.token_ids),
            "total_tokens": len(prompt_ids) + len(output.token_ids),
        },
    }


async def decoded_body(raw_request: Any) -> Any:
    """The body of a web framework's request, or what was given if it is none.

    Raises:
        EngineInputError: The body is not JSON.
    """
    if isinstance(raw_request, Mapping) or not callable(getattr(raw_request, "json", None)):
        return raw_request
    try:
        return await raw_request.json()
    except ValueError as error:
        raise EngineInputError(f"raw_request must be JSON, got {error}; send an object") from error


async def _body(raw_request: Any) -> Mapping[str, Any]:
    raw_request = await decoded_body(raw_request)
    if not isinstance(raw_request, Mapping):
        raise EngineInputError(
            f"raw_request must be a mapping, got {type(raw_request).__name__}; decode the body first"
        )
    return raw_request
