"""Turns of the policy as OpenAI's responses: whole, and as the chunks of a stream.

Invariant: a message that a client is sent has a call only where the call can be run; a turn with any other is sent as
the text that the model wrote, with what is wrong beside it. Knows no HTTP and no session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from ostinato_engines import StopReason
from ostinato_rollout.openai_app.request import ChatRequest
from ostinato_rollout.types import Reply


class Choice(msgspec.Struct, frozen=True):
    """One sampled answer, with its tokens."""

    message: dict
    """As the client gets it: role, content, and reasoning_content and tool_calls where there are any."""
    errors: tuple[str, ...]
    """Why what looks like a call is none, in words that can be shown to the model."""
    finish_reason: str
    prompt_ids: Sequence[int]
    token_ids: list[int]
    logprobs: list[float] | None
    """One for each token; None where the engine gave none."""
    num_cached: int
    request_id: str
    """Of its conversation."""
    goes_on: bool
    """Its prompt holds earlier turns of the policy as they were sampled."""


class Answer(msgspec.Struct, frozen=True):
    """What a request is answered with."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    choices: list[Choice]


def visible_message(reply: Reply, *, calls_allowed: bool) -> tuple[dict, tuple[str, ...]]:
    """Return the message that a client gets, in the plain form of histories, and what is wrong with its calls."""
    errors = (*reply.errors, *(call.error for call in reply.tool_calls if call.error is not None))
    if not reply.tool_calls or (calls_allowed and not errors):
        return reply.message, errors
    return {"role": "assistant", "content": reply.text}, errors


def finish_reason(reply: Reply, message: dict) -> str:
    """Return OpenAI's word for how a turn ended."""
    if reply.stop_reason is StopReason.STOP:
        return "tool_calls" if "tool_calls" in message else "stop"
    return "length" if reply.stop_reason is StopReason.LENGTH else "abort"


def completion(answer: Answer, request: ChatRequest, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    """Return the whole response."""
    response = {
        **_head(answer, "chat.completion"),
        "choices": [
            {
                "index": index,
                "message": _message(choice),
                **_ending(choice, request, decode),
            }
            for index, choice in enumerate(answer.choices)
        ],
        "usage": usage(answer.choices),
    }
    if request.return_token_ids:
        response["prompt_token_ids"] = list(answer.choices[0].prompt_ids)
    return response


def chunks(answer: Answer, request: ChatRequest, decode: Callable[[list[int]], str]) -> Iterator[dict[str, Any]]:
    """Yield the parts of a stream: for each choice its role, reasoning, content, calls and end; then the usage."""
    head = _head(answer, "chat.completion.chunk")
    more = {"usage": None} if request.include_usage else {}
    first = {"prompt_token_ids": list(answer.choices[0].prompt_ids)} if request.return_token_ids else {}
    for index, choice in enumerate(answer.choices):
        for delta in _deltas(choice):
            yield {**head, "choices": [{"index": index, "delta": delta, "finish_reason": None}], **more, **first}
            first = {}
        yield {**head, "choices": [{"index": index, "delta": {}, **_ending(choice, request, decode)}], **more}
    if request.include_usage:
        yield {**head, "choices": [], "usage": usage(answer.choices)}


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return what a request cost; the prompt, which all choices share, counts once."""
    prompt, sampled = len(choices[0].prompt_ids), sum(len(choice.token_ids) for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": min(prompt, max(choice.num_cached for choice in choices))},
    }


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": answer.created, "model": answer.model}


def _message(choice: Choice) -> dict[str, Any]:
    """Return the message with null for a content that is empty beside calls, as OpenAI writes it."""
    content = choice.message["content"]
    return {
        **choice.message,
        "content": content or None if "tool_calls" in choice.message else content,
        "refusal": None,
    }


def _deltas(choice: Choice) -> Iterator[dict[str, Any]]:
    message = choice.message
    yield {"role": "assistant", "content": ""}
    if message.get("reasoning_content"):
        yield {"reasoning_content": message["reasoning_content"]}
    if message["content"]:
        yield {"content": message["content"]}
    for index, call in enumerate(message.get("tool_calls", ())):
        yield {"tool_calls": [{"index": index, **call}]}


def _ending(choice: Choice, request: ChatRequest, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    """Return what is told about a choice beside its message."""
    ending: dict[str, Any] = {"finish_reason": choice.finish_reason, "logprobs": None}
    if request.logprobs and choice.logprobs is not None:
        pairs = zip(choice.token_ids, choice.logprobs, strict=True)
        ending["logprobs"] = {
            "content": [_token_logprob(decode([token_id]), logprob) for token_id, logprob in pairs],
            "refusal": None,
        }
    if request.return_token_ids:
        ending["token_ids"] = choice.token_ids
    if choice.errors:
        ending["tool_call_errors"] = list(choice.errors)
    return ending


def _token_logprob(text: str, logprob: float) -> dict[str, Any]:
    """Return a token's entry; a token that is only a part of a character has no bytes of its own to show."""
    known = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": known, "top_logprobs": []}
