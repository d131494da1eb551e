"""Chat requests: every field is obeyed or refused by name, and a history has one digest however it is written."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("starlette", reason="the app needs the extra serve")
pytest.importorskip("uvicorn", reason="the app needs the extra serve")

from ostinato_rollout.histories import digests
from ostinato_rollout.openai_app.errors import ApiError
from ostinato_rollout.openai_app.limits import AppLimits
from ostinato_rollout.openai_app.request import _NEUTRAL, parse_request

USER = {"role": "user", "content": "Hi."}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
LIMITS = AppLimits()


def parse(*messages, **fields):
    body = json.dumps({"messages": list(messages or (USER,)), **fields}).encode()
    return parse_request(body, LIMITS, vocab_size=100)


def refused(*messages, **fields):
    """The error of a request that must not be taken."""
    with pytest.raises(ApiError) as caught:
        parse(*messages, **fields)
    assert caught.value.status == 400
    assert ";" in str(caught.value), "there is no cure"
    return caught.value


def digest(*messages):
    return digests(parse(*messages).messages)[-1]


@pytest.mark.parametrize("name", sorted(_NEUTRAL))
def test_what_cannot_be_obeyed_is_refused_by_name(name):
    """A field of OpenAI's that this app does not have is refused, unless its value asks for nothing."""
    for value in (None, *_NEUTRAL[name]):
        assert parse(**{name: value}).messages == [USER]
    error = refused(**{name: {"something": "else"}})
    assert (error.param, error.code) == (name, "unsupported_field")
    assert name in str(error)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"colour": "red"}, "colour"),
        ({"top_k": 2**70}, "top_k"),
        ({"repetition_penalty": 1e-308}, "repetition_penalty"),
        ({"store": 0}, "store"),
        ({"frequency_penalty": False}, "frequency_penalty"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": True}, "seed"),
        ({"seed": -1}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"stop_token_ids": [100]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids[0]"),
        ({"logprobs": 3}, "logprobs"),
        ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": [TOOL]}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools[0].function.strict"),
        ({"tools": [{"type": "code", "function": {"name": "f"}}]}, "tools[0].type"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"messages": []}, "messages"),
        ({"messages": "Hi."}, "messages"),
        ({"messages": None}, "the request"),
        ({"model": 3}, "model"),
    ],
)
def test_wrong_fields_are_refused_by_their_path(fields, param):
    """What is wrong with a field is said with its path in the request."""
    error = refused(**fields)
    assert error.param == param


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "messages[0]"),
        ({"role": "function", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0]"),
        ({"role": "user", "content": None}, "messages[0].content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0].type",
        ),
        ({"role": "user", "content": "x", "colour": "red"}, "messages[0]"),
        ({"role": "assistant"}, "messages[0]"),
        ({"role": "assistant", "content": "x", "refusal": "no"}, "messages[0].refusal"),
        ({"role": "assistant", "content": "x", "annotations": [1]}, "messages[0].annotations"),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"role": "tool", "content": "x"}, "messages[0]"),
    ],
)
def test_wrong_messages_are_refused_by_their_path(message, param):
    """So it is with messages."""
    assert refused(message).param == param


def test_limits_are_413():
    """Too many messages or tools are refused as too large, before they are looked at."""
    limits = AppLimits(max_messages=1, max_tools=1)
    for fields, param in (({"messages": [1, 2]}, "messages"), ({"messages": [USER], "tools": [1, 2]}, "tools")):
        with pytest.raises(ApiError) as caught:
            parse_request(json.dumps(fields).encode(), limits, vocab_size=100)
        assert (caught.value.status, caught.value.param) == (413, param)


def test_messages_get_the_form_of_sessions():
    """Parts become text, developer is system, and a tool's result gets the name of what was called."""
    request = parse(
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "audio": None},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
        tools=[TOOL],
    )
    assert request.messages == [
        {"role": "system", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "1", "tool_call_id": "c", "name": "f"},
    ]
    assert request.tools == [TOOL]
    assert request.calls_allowed


def test_a_history_has_one_digest_however_it_is_written():
    """Parts or text, null or empty content, spaces in arguments, and reasoning that did not come back, are all the same."""
    said = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    spaced = {**CALL, "function": {"name": "f", "arguments": '{ "a":1 }'}, "index": 0}
    again = {"role": "assistant", "content": "", "tool_calls": [spaced], "reasoning_content": "Hm.", "refusal": None}
    assert digest(USER, said) == digest({"role": "user", "content": [{"type": "text", "text": "Hi."}]}, again)


@pytest.mark.parametrize(
    "other",
    [
        {"role": "assistant", "content": "x", "tool_calls": [CALL]},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "d"}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**CALL, "function": {"name": "g", "arguments": '{"a": 1}'}}],
        },
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**CALL, "function": {"name": "f", "arguments": '{"a": 2}'}}],
        },
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**CALL, "function": {"name": "f", "arguments": '{"a": 1'}}],
        },
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "name": "n"},
    ],
)
def test_histories_that_say_different_things_differ(other):
    """Whatever is said otherwise gives another digest."""
    assert digest({"role": "assistant", "content": "", "tool_calls": [CALL]}) != digest(other)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=3), min_size=2, max_size=4))
def test_the_place_of_a_boundary_matters(texts):
    """Histories with the same text in other messages differ, and a digest goes on from where another ended."""
    messages = [{"role": "user", "content": text} for text in texts]
    joined = [{"role": "user", "content": texts[0] + texts[1]}, *messages[2:]]
    found = digests(messages)
    assert found[-1] != digests(joined)[-1]
    assert digests(messages[1:], found[0]) == found[1:]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
field_names = st.sampled_from(
    [
        "messages",
        "tools",
        "tool_choice",
        "n",
        "stream",
        "stream_options",
        "stop",
        "seed",
        "max_tokens",
        "logprobs",
        "role",
    ]
)
messages_of_all_kinds = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "tool_calls", "name", "tool_call_id"]),
        st.sampled_from(["user", "assistant", "tool", "system"]) | json_values,
    ),
    max_size=3,
)


@given(st.dictionaries(field_names, json_values), st.none() | messages_of_all_kinds)
def test_no_json_does_more_than_be_refused(fields, messages):
    """Whatever JSON comes, it is a request or an ApiError, and never another error."""
    body = json.dumps(fields if messages is None else {**fields, "messages": messages}).encode()
    with contextlib.suppress(ApiError):
        parse_request(body, LIMITS, vocab_size=100)


@given(st.binary(max_size=40))
def test_no_bytes_do_more_than_be_refused(body):
    """Whatever bytes come, so it is with them."""
    with pytest.raises(ApiError):
        parse_request(body, LIMITS, vocab_size=100)
