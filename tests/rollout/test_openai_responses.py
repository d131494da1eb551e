"""The Responses API: requests that say the same as chat requests, items that come back, events, and what is refused."""

from __future__ import annotations

import asyncio
import json

import pytest

pytest.importorskip("starlette", reason="the app needs the extra serve")
pytest.importorskip("uvicorn", reason="the app needs the extra serve")

from ostinato_rollout.openai_app import AppLimits
from ostinato_rollout.openai_app.answers import Answer, Choice
from ostinato_rollout.openai_app.responses import parse_responses_request, response

PATH = "/v1/responses"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 30}}\n</tool_call><|im_end|>'
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
ADD = {"type": "function", "name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}
CHAT_ADD = {"type": "function", "function": {name: ADD[name] for name in ("name", "description", "parameters")}}


async def test_it_says_the_same_as_a_chat_request(openai_app, ask):
    """Instructions, input and tools give the prompt that the same words give in the chat API."""
    async with openai_app(["Hi.<|im_end|>", "Hi.<|im_end|>"]) as (url, _, server):
        body = {"model": "tiny", "instructions": "Be brief.", "input": "Hello!", "tools": [ADD]}
        status, _, answer = await ask(url, PATH, body)
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
        chat_status, _, _ = await ask(
            url, "/v1/chat/completions", {"model": "tiny", "messages": messages, "tools": [CHAT_ADD]}
        )
    assert (status, chat_status) == (200, 200)
    assert server.requests[0].prompt_ids == server.requests[1].prompt_ids
    answer = json.loads(answer)
    (item,) = answer["output"]
    assert (answer["status"], item["content"][0]["text"]) == ("completed", "Hi.")
    assert answer["usage"]["input_tokens"] == len(server.requests[0].prompt_ids)


async def test_items_sent_back_continue_the_conversation(openai_app, ask, sampled):
    """Output items, sent back as they came beside the call's result, extend the conversation by what is new."""
    async with openai_app(["Let me see." + CALL, "It is 42.<|im_end|>"]) as (url, app, server):
        given = [{"role": "user", "content": [{"type": "input_text", "text": "12 + 30?"}]}]
        headers = {"X-Session-ID": "s"}
        _, _, answer = await ask(url, PATH, {"input": given, "tools": [ADD]}, headers=headers)
        output = json.loads(answer)["output"]
        assert [item["type"] for item in output] == ["message", "function_call"]
        result = {"type": "function_call_output", "call_id": output[1]["call_id"], "output": "42"}
        _, _, answer = await ask(url, PATH, {"input": [*given, *output, result], "tools": [ADD]}, headers=headers)
        assert json.loads(answer)["output"][0]["content"][0]["text"] == "It is 42."
        (chat,) = await app.sessions.take("s")
    (ledger,) = chat.segments
    chosen = [token for token, mask in zip(ledger.response_ids, ledger.response_mask, strict=True) if mask]
    assert chosen == sampled("Let me see." + CALL) + sampled("It is 42.<|im_end|>")
    assert server.requests[1].prompt_ids[: len(server.requests[0].prompt_ids)] == server.requests[0].prompt_ids


async def test_turns_that_follow_each_other_stay_apart(openai_app, ask):
    """Items are put together to turns only as one turn has them: thought, then said, then called."""
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
    said = {"type": "message", "role": "assistant", "content": "One."}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    for items, roles in (
        ([said, said], 2),
        ([thought, said, call, call], 1),
        ([call, said], 2),
        ([said, thought], 2),
        ([thought, thought], 2),
        ([call, thought, call], 2),
    ):
        async with openai_app(["Ok.<|im_end|>"]) as (url, app, _):
            items = [*items, {"role": "user", "content": "And?"}]
            items = [{"role": "user", "content": "First."}, *items]
            items = [
                {**item, "call_id": f"c{number}"} if "call_id" in item else item for number, item in enumerate(items)
            ]
            status, _, answer = await ask(url, PATH, {"input": items, "tools": [ADD]}, headers={"X-Session-ID": "s"})
            if thought in (items[-2],):
                assert status == 400  # a turn that says nothing
                continue
            assert status == 200, answer
            (chat,) = await app.sessions.take("s")
            assert [message["role"] for message in chat.messages].count("assistant") == roles + 1


async def test_a_stream_has_every_event_once_and_ends_with_the_response(openai_app, ask):
    """Events are numbered, say their kind twice as clients expect, and the last one holds what the whole response would."""
    async with openai_app(["See." + CALL]) as (url, _, _):
        status, _, body = await ask(url, PATH, {"input": "12 + 30?", "tools": [ADD], "stream": True})
    assert status == 200
    blocks = [block for block in body.decode().split("\n\n") if block.startswith("event: ")]
    names = [block.split("\n")[0].removeprefix("event: ") for block in blocks]
    found = [json.loads(block.split("\n")[1].removeprefix("data: ")) for block in blocks]
    assert names == [event["type"] for event in found]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert names[0] == "response.created"
    assert names[-1] == "response.completed"
    assert names.count("response.output_item.added") == names.count("response.output_item.done") == 2
    deltas = [event["delta"] for event in found if event["type"].endswith(".delta")]
    output = found[-1]["response"]["output"]
    assert deltas == [output[0]["content"][0]["text"], output[1]["arguments"]]


async def test_a_cut_turn_is_incomplete(openai_app, ask):
    """A turn that max_output_tokens cut says so, whole and as a stream."""
    async with openai_app(["A long answer.<|im_end|>"] * 2) as (url, _, _):
        body = {"input": "Hello!", "max_output_tokens": 2}
        _, _, whole = await ask(url, PATH, body)
        _, _, stream = await ask(url, PATH, {**body, "stream": True})
    answer = json.loads(whole)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert b"event: response.incomplete" in stream


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "the request"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [7]}, "input[0]"),
        ({"input": [{"role": "user"}]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "reasoning", "id": "rs", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "reasoning", "summary": []}, {"role": "user", "content": "x"}]}, "input"),
        ({"input": "x", "tools": [{**ADD, "strict": True}]}, "tools[0].strict"),
        ({"input": "x", "tools": [ADD, ADD]}, "tools[1].name"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "conversation": "conv_1"}, "conversation"),
        ({"input": "x", "store": True}, "store"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "text": {"format": {"type": "json_object"}}}, "text"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "tool_choice": "required", "tools": [ADD]}, "tool_choice"),
        ({"input": "x", "reasoning": {"effort": "high"}}, "reasoning"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "temperature": -1}, "temperature"),
        ({"input": "x", "colour": "blue"}, "colour"),
    ],
)
async def test_what_is_not_obeyed_is_refused_by_name(openai_app, ask, body, param):
    """A field that this server cannot obey, or that is wrong, is an error in OpenAI's form that names it."""
    async with openai_app() as (url, app, _):
        status, _, answer = await ask(url, PATH, body)
        assert app.sessions.num_open == 0
    error = json.loads(answer)["error"]
    assert (status, error["param"]) == (400, param), error


async def test_the_official_client(openai_app):
    """The client's loop with a tool, whole and streamed, sync reading of `output_text` included, is one conversation."""
    openai = pytest.importorskip("openai", reason="the official client is not installed")
    async with (
        openai_app([CALL, "It is 42.<|im_end|>", "Bye.<|im_end|>"], api_key="secret") as (url, app, _),
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="secret", max_retries=0, default_headers={"X-Session-ID": "s"}
        ) as client,
    ):
        items = [{"role": "user", "content": "12 + 30?"}]
        first = await client.responses.create(model="tiny", input=items, tools=[ADD])
        (call,) = first.output
        items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "42"}]
        async with client.responses.stream(model="tiny", input=items, tools=[ADD]) as stream:
            events = [event.type async for event in stream]
            second = await stream.get_final_response()
        assert second.output_text == "It is 42."
        assert events[-1] == "response.completed"
        items += [*second.output, {"role": "user", "content": "Bye!"}]
        third = await client.responses.create(model="tiny", input=items, tools=[ADD])
        assert third.output_text == "Bye."
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await client.responses.create(model="tiny", input="x", previous_response_id=third.id)
        assert len(await app.sessions.take("s")) == 1


async def test_the_clients_helpers(openai_app):
    """`parse` without a form works and with one is refused by name; a stream that is cut ends with its incomplete response."""
    openai = pytest.importorskip("openai", reason="the official client is not installed")
    pydantic = pytest.importorskip("pydantic")
    form = pydantic.create_model("Form", x=(int, ...))
    async with (
        openai_app(["Hi.<|im_end|>", "Hello there.<|im_end|>"]) as (url, _, _),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
    ):
        assert (await client.responses.parse(model="tiny", input="x")).output_text == "Hi."
        with pytest.raises(openai.BadRequestError, match="text must be left out"):
            await client.responses.parse(model="tiny", input="x", text_format=form)
        async with client.responses.stream(model="tiny", input="x", max_output_tokens=1) as stream:
            events = [event async for event in stream]
        assert events[-1].type == "response.incomplete"
        assert events[-1].response.incomplete_details.reason == "max_output_tokens"
        with pytest.raises(openai.NotFoundError, match="/v1/responses"):
            await client.responses.retrieve("resp_1")


async def test_a_stream_that_fails_on_its_way_is_an_error(openai_app):
    """A failure after a stream has begun is an error of the client, in the words that a plain request would have had."""
    openai = pytest.importorskip("openai", reason="the official client is not installed")
    gate, limits = asyncio.Event(), AppLimits(keepalive_s=0.01)
    async with (
        openai_app([RuntimeError("out of memory")], pool_options={"gate": gate}, limits=limits) as (url, _, _),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
    ):
        stream = await client.responses.create(model="tiny", input="x", stream=True)  # returns when it has begun
        gate.set()
        with pytest.raises(openai.APIError, match="out of memory"):
            _ = [event async for event in stream]


@pytest.mark.parametrize(("finish_reason", "reason"), [("length", "max_output_tokens"), ("abort", "abort")])
def test_why_a_response_is_incomplete(finish_reason, reason):
    """A turn that the engine gave up is not said to have reached a limit."""
    message = {"role": "assistant", "content": ""}
    choice = Choice(message, (), finish_reason, [1], [], None, 0, "r", False)
    request = parse_responses_request(b'{"input": "x"}', AppLimits(), vocab_size=9)
    whole = response(Answer("chatcmpl-1", 0, "tiny", [choice]), request)
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": reason})
    assert whole["output"][0]["content"][0]["text"] == ""
