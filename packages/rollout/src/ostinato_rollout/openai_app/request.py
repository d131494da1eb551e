"""A chat request: decoded, checked, and brought into the words of the packages below.

Invariant: every field that a client sent is obeyed or refused by name; none is ignored. Knows no HTTP and no session.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from ostinato_engines import SamplingParams, SamplingParamsError
from ostinato_rollout.openai_app.errors import ApiError
from ostinato_rollout.openai_app.limits import AppLimits
from ostinato_rollout.openai_app.messages import MessageSpec, plain_messages

Neutral = Mapping[str, tuple[Any, ...]]
"""Fields that cannot be obeyed, with the values of each that ask for nothing."""

_NEUTRAL: Neutral = {
    "audio": (),
    "frequency_penalty": (0,),
    "function_call": (),
    "functions": (),
    "logit_bias": ({},),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "stop": ([],),
    "store": (False,),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields of OpenAI's API that this app cannot obey, with the values that ask for nothing."""

_CURES = {
    "functions": "send tools instead",
    "function_call": "send tool_choice instead",
    "stop": "send stop_token_ids instead, since engines know no text",
    "top_logprobs": "engines return the logprob of the sampled token and of no other",
    "response_format": "nothing constrains what is sampled, so ask for it in words",
    "parallel_tool_calls": "nothing constrains what is sampled, so ask for it in words",
}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")

Count = Annotated[int, msgspec.Meta(ge=1)]


class FunctionSpec(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(msgspec.Struct, forbid_unknown_fields=True):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionSpec


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """How a stream ends."""

    include_usage: bool = False


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    """The fields that are obeyed. `user` names who asks, and is answered to nobody."""

    messages: list[MessageSpec]
    model: str | None = None
    tools: list[ToolSpec] = []
    tool_choice: Any = "auto"
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Count = 1
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: list[int] = []
    logprobs: bool = False
    return_token_ids: bool = False
    user: str | None = None


class ChatRequest(msgspec.Struct, frozen=True):
    """A request that can be answered."""

    messages: list[dict]
    """In the form that sessions take: content as text, calls with a name for each result."""
    tools: list[dict]
    """Schemas as the client wrote them; the model sees them as they are."""
    calls_allowed: bool
    """Whether what the model writes may be read as calls."""
    params: SamplingParams
    n: int
    stream: bool
    include_usage: bool
    logprobs: bool
    return_token_ids: bool
    model: str | None


def parse_request(body: bytes, limits: AppLimits, *, vocab_size: int) -> ChatRequest:
    """Read the body of a chat request.

    Args:
        body: JSON.
        limits: How many messages, tools and choices are taken.
        vocab_size: Bound of `stop_token_ids`.

    Raises:
        ApiError: 400 where something is wrong or unsupported, 413 where there is too much; the message names the field.
    """
    return chat_request(decoded(body), limits, vocab_size=vocab_size)


def chat_request(given: dict[str, Any], limits: AppLimits, *, vocab_size: int) -> ChatRequest:
    """Read a chat request that is decoded; see `parse_request`."""
    for name, bound in (("messages", limits.max_messages), ("tools", limits.max_tools)):
        found = given.get(name)
        if isinstance(found, list) and len(found) > bound:
            raise ApiError(
                f"{name} must hold at most {bound} entries, got {len(found)}; send fewer", status=413, param=name
            )
    try:
        parsed = msgspec.convert(obeyed(given, _Body, _NEUTRAL, _CURES), _Body)
    except msgspec.ValidationError as error:
        raise schema_error(error) from None
    _check_tools(parsed.tools)
    if parsed.n > limits.max_choices:
        raise ApiError(f"n must be at most {limits.max_choices}, got {parsed.n}; send several requests", param="n")
    if parsed.stream_options is not None and not parsed.stream:
        raise ApiError(
            "stream_options must come with stream, got a request without; set stream", param="stream_options"
        )
    return ChatRequest(
        messages=plain_messages(parsed.messages),
        tools=given.get("tools") or [],
        calls_allowed=_calls_allowed(parsed),
        params=_sampling_params(parsed, vocab_size),
        n=parsed.n,
        stream=parsed.stream,
        include_usage=parsed.stream_options is not None and parsed.stream_options.include_usage,
        logprobs=parsed.logprobs,
        return_token_ids=parsed.return_token_ids,
        model=parsed.model,
    )


def decoded(body: bytes) -> dict[str, Any]:
    """Read a body of JSON; null is as if it were not there.

    Raises:
        ApiError: It is no JSON object.
    """
    try:
        given = msgspec.json.decode(body)
    except RecursionError:
        raise ApiError("the body must be JSON of some depth, got one that is too deep; flatten it") from None
    except msgspec.MsgspecError as error:
        raise ApiError(
            f"the body must be JSON, got an error: {error}; send an object, without NaN or Infinity"
        ) from None
    if not isinstance(given, dict):
        raise ApiError(f"the body must be a JSON object, got {type(given).__name__}; send one")
    return {name: value for name, value in given.items() if value is not None}


def obeyed(
    given: Mapping[str, Any], body: type[msgspec.Struct], neutral: Neutral, cures: Mapping[str, str]
) -> dict[str, Any]:
    """Return the fields that are obeyed, those of `body`, without others that ask for nothing.

    Raises:
        ApiError: A field asks for something that there is not.
    """
    found = {}
    for name, value in given.items():
        if name in body.__struct_fields__:
            found[name] = value
        elif name not in neutral:
            known = ", ".join(body.__struct_fields__)
            raise ApiError(
                f"the request must hold known fields, got {name!r:.80}; known are {known}",
                param=name[:80],
                code="unknown_field",
            )
        elif not any(value == each and isinstance(value, bool) is isinstance(each, bool) for each in neutral[name]):
            # To JSON, unlike to Python, false is no number.
            raise ApiError(
                f"{name} must be left out, got {value!r:.80}; {cures.get(name, 'this server does not have it')}",
                param=name,
                code="unsupported_field",
            )
    return found


def schema_error(error: msgspec.ValidationError, within: str = "") -> ApiError:
    """Say in our words where in the body, or `within` a part of it, the schema does not hold."""
    what, _, where = str(error).partition(" - at `$")
    path = f"{within}{where.rstrip('`')}".lstrip(".") or "the request"
    what = what[0].lower() + what[1:]
    return ApiError(f"{path} must fit the schema of a request, got an error: {what}; correct it", param=path)


def _check_tools(tools: list[ToolSpec]) -> None:
    seen = set()
    for index, tool in enumerate(tools):
        function, where = tool.function, f"tools[{index}].function"
        if not _TOOL_NAME.fullmatch(function.name):
            raise ApiError(
                f"{where}.name must be 1 to 64 letters, digits, '_', '-' or '.', got {function.name!r:.80}; rename it",
                param=f"{where}.name",
            )
        if function.name in seen:
            raise ApiError(
                f"{where}.name must be its own, got {function.name!r} twice; rename one", param=f"{where}.name"
            )
        if function.strict:
            raise ApiError(
                f"{where}.strict must be left out, got true; nothing constrains what is sampled, so check the arguments",
                param=f"{where}.strict",
                code="unsupported_field",
            )
        seen.add(function.name)


def _calls_allowed(parsed: _Body) -> bool:
    choice = parsed.tool_choice
    if choice not in ("auto", "none"):
        raise ApiError(
            f"tool_choice must be 'auto' or 'none', got {choice!r:.80}; a call cannot be forced, ask for it in words",
            param="tool_choice",
            code="unsupported_field",
        )
    return choice == "auto" and bool(parsed.tools)


def _sampling_params(parsed: _Body, vocab_size: int) -> SamplingParams:
    bounds = {value for value in (parsed.max_tokens, parsed.max_completion_tokens) if value is not None}
    if len(bounds) > 1:
        raise ApiError(
            "max_tokens and max_completion_tokens must not differ, got two values; send one of them", param="max_tokens"
        )
    outside = [token_id for token_id in parsed.stop_token_ids if not 0 <= token_id < vocab_size]
    if outside:
        raise ApiError(
            f"stop_token_ids must be ids of the model's vocabulary, below {vocab_size}, got {outside[0]}; remove it",
            param="stop_token_ids",
        )
    try:
        return SamplingParams(
            **{name: getattr(parsed, name) for name in _SAMPLING},
            max_tokens=bounds.pop() if bounds else None,
            stop_token_ids=tuple(parsed.stop_token_ids),
        )
    except SamplingParamsError as error:
        raise ApiError(str(error), param=str(error).partition(" ")[0]) from None
