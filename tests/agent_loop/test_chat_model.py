"""The policy as a LangChain chat model: what it is asked, what it gives, and that its tokens stay what they are."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_agent_loop import MultiTurnConfig, TrajectoryEnd
from ostinato_engines import SamplingParams
from ostinato_engines.testing import ScriptedServer
from ostinato_rollout import ChatSession, LLMServerClient, SessionBudget
from ostinato_tokenization import ContinuousTokens
from ostinato_tokenization.testing import tiny_chat_tokenizer
from ostinato_tools import get_parser

pytest.importorskip("langgraph", reason="needs the extra langgraph")

from langchain_core.caches import InMemoryCache
from langchain_core.exceptions import OutputParserException
from langchain_core.globals import set_llm_cache
from langchain_core.load import dumpd, load
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    messages_from_dict,
    messages_to_dict,
)
from langchain_core.tools import tool
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from pydantic import BaseModel

from ostinato_agent_loop.errors import GraphInputError, GraphStateError, TurnLimitError
from ostinato_agent_loop.langgraph_agent import ChatModel, GraphConversations, LoopBridge, plain_messages

TOKENIZER = tiny_chat_tokenizer()
END = TOKENIZER.stop_token_ids[0]
HI = HumanMessage("Hi.")
GO_ON = HumanMessage("Go on.")
BROKEN = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": \n</tool_call>'


def encode(text):
    """Ids as a model would sample them: the tags of calls are control tokens."""
    ids = []
    while text:
        tag = next((tag for tag in ("<tool_call>", "</tool_call>") if text.startswith(tag)), None)
        if tag is not None:
            ids.append(TOKENIZER.token_id(tag))
            text = text[len(tag) :]
            continue
        plain = min((at for tag in ("<tool_call>", "</tool_call>") if (at := text.find(tag)) >= 0), default=len(text))
        ids += TOKENIZER.encode_text(text[:plain])
        text = text[plain:]
    return ids


def spelled(text):
    """The text in one token for each letter, as no tokenizer would write it, and the end of a turn."""
    return [*(TOKENIZER.encode_text(letter)[0] for letter in text), END]


def call(arguments='{"a": 1, "b": 2}', name="add"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Answer(BaseModel):
    """What the answer is."""

    value: int


class Talk:
    """A model over one server, without an agent around it."""

    def __init__(self, replies, *, budget=None, seed=None, gate=None, **multi_turn) -> None:
        self.server = ScriptedServer(replies, encode=encode, end_token_id=END, gate=gate)
        self.client = LLMServerClient([self.server])
        self.tokens = ContinuousTokens(TOKENIZER)
        self.config = MultiTurnConfig(**multi_turn)
        self.budget = budget or SessionBudget(4000, 4000)
        self.conversations = GraphConversations(self._open, SamplingParams(seed=seed), self.config)
        self.bridge = LoopBridge()
        self.model = ChatModel.over(self.conversations, self.bridge)

    def _open(self, tools, number):
        return ChatSession(
            client=self.client,
            tokens=self.tokens,
            config=self.config,
            budget=self.budget,
            parser=get_parser("hermes") if tools else None,
            tools=tools,
            call_id_prefix=f"call_{number}_",
        )

    async def close(self):
        await self.bridge.close()
        await self.conversations.close()
        assert set(self.client.num_in_flight.values()) == {0}
        assert self.client.num_sticky == 0

    def sampled(self):
        """What was sampled, by conversation."""
        return [[token for each in chat.segments for token in _masked(each)] for chat in self.conversations.chats]

    def check_exact(self):
        """Each turn stands behind the very prompt that the server was asked, and in one ledger only."""
        served = sorted(tuple(request.prompt_ids) for request in self.server.requests)
        found = []
        for ledger in (each for chat in self.conversations.chats for each in chat.segments):
            ids = ledger.prompt_ids + ledger.response_ids
            mask = [0] * len(ledger.prompt_ids) + ledger.response_mask
            found += [tuple(ids[:at]) for at in range(1, len(mask)) if mask[at] and not mask[at - 1]]
        assert sorted(found) == served


def _masked(ledger):
    return [token for token, mask in zip(ledger.response_ids, ledger.response_mask, strict=True) if mask]


@pytest.fixture
async def talk():
    """Makes a Talk; after the test everything must be free."""
    made = []

    def make(replies, **options):
        made.append(Talk(replies, **options))
        return made[-1]

    yield make
    for each in made:
        await each.close()


async def test_a_turn_is_an_ai_message(talk):
    """Text, usage and the reason of the end are where LangChain has them."""
    said = talk([spelled("Bye.")])
    answer = await said.model.ainvoke([SystemMessage("Be brief."), HI])
    prompt = len(said.server.requests[0].prompt_ids)
    assert answer.content == "Bye."
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata == {
        "input_tokens": prompt,
        "output_tokens": 5,
        "total_tokens": prompt + 5,
        "input_token_details": {"cache_read": 0},
    }


async def test_a_conversation_goes_on_in_the_tokens_that_were_sampled(talk):
    """The second turn's prompt begins with the first one's tokens as they were sampled, not as a tokenizer writes them."""
    said = talk([spelled(" assistant "), spelled("two")])
    answer = await said.model.ainvoke([HI])
    await said.model.ainvoke([HI, answer, GO_ON])
    first, second = (request.prompt_ids for request in said.server.requests)
    assert second[: len(first) + len(spelled(" assistant "))] == first + spelled(" assistant ")
    assert said.sampled() == [spelled(" assistant ") + spelled("two")]
    said.check_exact()


ROUND_TRIPS = {
    "load": lambda messages: load(dumpd(messages), allowed_objects="all"),
    "dicts": lambda messages: messages_from_dict(json.loads(json.dumps(messages_to_dict(messages)))),
    "checkpoint": lambda messages: _through(JsonPlusSerializer(), messages),
    "pickle": lambda messages: pickle.loads(pickle.dumps(messages)),
    "named": lambda messages: [m.model_copy(update={"name": "helper"} if m.type == "ai" else {}) for m in messages],
    "new ids": lambda messages: [m.model_copy(update={"id": f"id-{at}"}) for at, m in enumerate(messages)],
    "blocks": lambda messages: [m.model_copy(update={"content": m.content_blocks}) for m in messages],
    "bare": lambda messages: [AIMessage(m.content, tool_calls=m.tool_calls) if m.type == "ai" else m for m in messages],
}


def _through(serializer, messages):
    return serializer.loads_typed(serializer.dumps_typed(messages))


@pytest.mark.parametrize("way", ROUND_TRIPS)
@pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")
async def test_messages_that_were_stored_find_their_conversation(talk, way):
    """Whatever a graph does to keep messages, a history that says the same goes on in its tokens."""
    said = talk([call('{"b":  2, "a": 1.0}'), "<think>Hm.</think>three", "more"])
    model = said.model.bind_tools([add])
    history = [HI, await model.ainvoke([HI])]
    history.append(ToolMessage("3", tool_call_id=history[1].tool_calls[0]["id"], name="add"))
    history.append(await model.ainvoke(ROUND_TRIPS[way](history)))
    await model.ainvoke([*ROUND_TRIPS[way](history), GO_ON])
    assert len(said.sampled()) == 1
    said.check_exact()


async def test_v1_content_finds_its_conversation(talk):
    """With LangChain's content blocks as the form of answers the conversation goes on as well."""
    said = talk([call(), "three"])
    said.model.output_version = "v1"
    model = said.model.bind_tools([add])
    answer = await model.ainvoke([HI])
    assert isinstance(answer.content, list)
    await model.ainvoke([HI, answer, ToolMessage("3", tool_call_id=answer.tool_calls[0]["id"])])
    assert len(said.sampled()) == 1
    said.check_exact()


@pytest.mark.parametrize("reply", ["Bye.", call(), "Look: " + call(), BROKEN, BROKEN + "\n" + call()])
async def test_a_stream_is_the_same_turn(talk, reply):
    """The parts of a stream, put together, say what the whole message says; a broken call does not become one that runs; the
    conversation goes on from either."""
    said = talk([reply, reply, "two"])
    model = said.model.bind_tools([add])
    whole = await model.ainvoke([HI])
    parts = [part async for part in model.astream([HI])]
    assert parts[-1].chunk_position == "last"
    merged = parts[0]
    for part in parts[1:]:
        merged += part
    assert merged.content == whole.content
    assert [(c["name"], c["args"]) for c in merged.tool_calls] == [(c["name"], c["args"]) for c in whole.tool_calls]
    assert merged.usage_metadata == whole.usage_metadata
    assert merged.response_metadata == whole.response_metadata
    answers = [ToolMessage("3", tool_call_id=c["id"], name="add") for c in merged.tool_calls] or [GO_ON]
    await model.ainvoke([HI, merged, *answers])
    assert len(said.sampled()) == 2
    said.check_exact()


async def test_calls_and_broken_calls(talk):
    """A call that can be run is in tool_calls, a malformed one in invalid_tool_calls with what is wrong, each with its id."""
    said = talk([BROKEN + "\n" + call()])
    answer = await said.model.bind_tools([add]).ainvoke([HI])
    (good,), (bad,) = answer.tool_calls, answer.invalid_tool_calls
    assert (good["name"], good["args"]) == ("add", {"a": 1, "b": 2})
    assert bad["error"]
    assert '"b":' in bad["args"]
    assert good["id"] != bad["id"]
    assert answer.response_metadata["finish_reason"] == "tool_calls"


async def test_a_sync_call_waits_in_its_thread(talk):
    """`invoke` and `stream` in another thread run on the model's loop, in the same conversation."""
    said = talk(["one", "two", "three"])

    def program():
        history = [HI, said.model.invoke([HI]), GO_ON]
        parts = list(said.model.stream(history))
        whole = parts[0]
        for part in parts[1:]:
            whole += part
        return said.model.invoke([*history, whole, GO_ON]).content

    assert await asyncio.to_thread(program) == "three"
    assert len(said.sampled()) == 1
    said.check_exact()


async def test_another_loop_in_another_thread_may_call(talk):
    """A thread with an event loop of its own awaits the model there."""
    said = talk(["one"])
    answer = await asyncio.to_thread(lambda: asyncio.run(said.model.ainvoke([HI])))
    assert answer.content == "one"


async def test_a_sync_call_on_the_loop_is_refused(talk):
    """`invoke` on the loop's own thread, which could only wait for itself, is an error that says what to do."""
    said = talk(["one"])
    with pytest.raises(GraphStateError, match="await ainvoke"):
        said.model.invoke([HI])
    with pytest.raises(GraphStateError, match="await ainvoke"):
        list(said.model.stream([HI]))


async def test_closing_ends_calls_of_other_threads(talk):
    """A thread that waits for a turn gets an error when the model is closed, and one that comes later, too."""
    gate = asyncio.Event()
    said = talk(["one"], gate=gate)
    ended = threading.Event()

    def program():
        try:
            said.model.invoke([HI])
        finally:
            ended.set()

    waiting = asyncio.ensure_future(asyncio.to_thread(program))
    async with asyncio.timeout(10):
        while not said.server.requests:  # noqa: ASYNC110  (the server has no event for an arrival)
            await asyncio.sleep(0.001)
    await said.close()
    with pytest.raises(BaseException):  # noqa: B017  (the thread's cancellation, in whichever class)
        await waiting
    assert ended.is_set()
    with pytest.raises(GraphStateError, match="after its end"):
        await asyncio.to_thread(said.model.invoke, [HI])
    with pytest.raises(GraphStateError, match="after its end"):
        await said.model.ainvoke([HI])


async def test_two_calls_at_once_are_two_branches(talk):
    """Two turns for one history at the same time are two conversations; each goes on in its own tokens."""
    said = talk(["a", "b", "c", "d"])
    answers = await asyncio.gather(said.model.ainvoke([HI]), said.model.ainvoke([HI]))
    await asyncio.gather(*(said.model.ainvoke([HI, answer, GO_ON]) for answer in answers))
    assert len(said.sampled()) == 2
    assert said.conversations.num_exact_continuations == 2
    said.check_exact()


async def test_nothing_comes_out_of_a_cache(talk):
    """With a cache set in LangChain each call is sampled."""
    said = talk(["one", "two"])
    set_llm_cache(InMemoryCache())
    try:
        answers = [(await said.model.ainvoke([HI])).content for _ in range(2)]
    finally:
        set_llm_cache(None)
    assert answers == ["one", "two"]


async def test_structured_output(talk):
    """An answer is read from the call of a tool with the schema: as a pydantic object, as a dict, and beside the message."""
    value = call('{"value": 42}', "Answer")
    said = talk([value, value, value])
    assert await said.model.with_structured_output(Answer).ainvoke([HI]) == Answer(value=42)
    schema = {"title": "Answer", "description": "It.", "type": "object", "properties": {"value": {"type": "integer"}}}
    assert await said.model.with_structured_output(schema).ainvoke([HI]) == {"value": 42}
    both = await said.model.with_structured_output(Answer, include_raw=True).ainvoke([HI])
    assert (both["parsed"], both["parsing_error"]) == (Answer(value=42), None)
    assert both["raw"].tool_calls[0]["name"] == "Answer"


async def test_structured_output_that_is_not_there(talk):
    """An answer without the call, or with one that does not fit, is an error, not None."""
    said = talk(["It is 42.", call('{"value": "x"}', "Answer"), "It is 42."])
    for _ in range(2):
        with pytest.raises((OutputParserException, ValueError)):
            await said.model.with_structured_output(Answer).ainvoke([HI])
    both = await said.model.with_structured_output(Answer, include_raw=True).ainvoke([HI])
    assert both["parsed"] is None
    assert isinstance(both["parsing_error"], OutputParserException)
    with pytest.raises(GraphInputError, match="function_calling"):
        said.model.with_structured_output(Answer, method="json_mode")


@pytest.mark.parametrize("choice", ["any", "required", "none", "add", True, {"type": "function"}])
async def test_a_choice_that_cannot_be_forced_is_refused(talk, choice):
    """Nothing constrains what is sampled, so a forced or a forbidden call is refused, not ignored."""
    with pytest.raises(GraphInputError, match="tool_choice"):
        talk([]).model.bind_tools([add], tool_choice=choice)


@pytest.mark.parametrize(
    "asked", [{"stop": ["x"]}, {"temperature": 0.5}, {"max_tokens": 0}, {"response_format": {}}, {"tool_choice": "any"}]
)
async def test_what_cannot_be_obeyed_is_refused(talk, asked):
    """A keyword that the model would not obey is an error that names it; nothing is sampled."""
    said = talk(["one"])
    with pytest.raises(GraphInputError, match=next(iter(asked))):
        await said.model.ainvoke([HI], **asked)
    assert said.server.requests == []


async def test_a_longest_turn(talk):
    """`max_tokens` bounds a turn; it says that it was cut."""
    said = talk([spelled("Hello there.")])
    answer = await said.model.ainvoke([HI], max_tokens=3)
    assert answer.usage_metadata["output_tokens"] == 3
    assert answer.response_metadata["finish_reason"] == "length"
    assert said.conversations.last_end is TrajectoryEnd.TURN_LENGTH


async def test_calls_of_a_turn_that_the_response_has_cut_are_not_offered(talk):
    """Where no turn can follow, what was written is text: nobody runs a call whose answer nobody reads."""
    ids = encode(call())
    said = talk([ids], budget=SessionBudget(4000, len(ids)))
    answer = await said.model.bind_tools([add]).ainvoke([HI])
    assert answer.tool_calls == []
    assert "<tool_call>" in answer.content
    assert said.conversations.last_end is TrajectoryEnd.RESPONSE_LENGTH
    with pytest.raises(TurnLimitError) as caught:
        await said.model.bind_tools([add]).ainvoke([HI, answer, GO_ON])
    assert caught.value.end is TrajectoryEnd.TOOL_RESPONSE_LENGTH
    assert pickle.loads(pickle.dumps(caught.value)).end == caught.value.end


async def test_limits_hold_over_all_conversations_and_at_once(talk):
    """Of three calls at the same time two may have a turn where there are two turns for all."""
    said = talk(["a", "b", "c"], max_assistant_turns=2)
    results = await asyncio.gather(*(said.model.ainvoke([HI]) for _ in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [AIMessage, AIMessage, TurnLimitError]
    assert results[2].end is TrajectoryEnd.MAX_ASSISTANT_TURNS


async def test_a_turn_that_fails_counts_as_none(talk):
    """After an engine's failure the same call may be made again, and is no turn of its own."""
    said = talk([RuntimeError("broken"), "one", "two"], max_assistant_turns=2)
    with pytest.raises(Exception, match="broken"):
        await said.model.ainvoke([HI])
    answer = await said.model.ainvoke([HI])
    await said.model.ainvoke([HI, answer, GO_ON])
    assert said.conversations.num_assistant_turns == 2
    assert len(said.sampled()) == 1


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([], "at least one message"),
        ([HumanMessage([{"type": "image_url", "image_url": {"url": "x"}}])], "image_url"),
        ([HumanMessage([{"type": "reasoning", "reasoning": "x"}])], "reasoning"),
        ([FunctionMessage("x", name="f")], "FunctionMessage"),
        ([ChatMessage("x", role="critic")], "ChatMessage"),
    ],
)
def test_messages_that_cannot_be_shown_are_refused(messages, what):
    """What the policy cannot read is an error that says what it is."""
    with pytest.raises(GraphInputError, match=what):
        plain_messages(messages)


async def test_what_is_no_text_is_refused(talk):
    """Half of a surrogate pair is an error that names the message; nothing is sampled."""
    said = talk(["one"])
    with pytest.raises(ValueError, match="valid Unicode"):
        await said.model.ainvoke([HumanMessage("\ud800")])
    assert said.server.requests == []


def test_messages_in_plain_form():
    """System, human, AI and tool messages in any of LangChain's forms become OpenAI's; a tool's answer gets its tool's name."""
    messages = [
        SystemMessage([{"type": "text", "text": "Be "}, "brief."]),
        ChatMessage("Hi.", role="user"),
        AIMessage(
            [
                {"type": "thinking", "thinking": "Hm."},
                {"type": "text", "text": "Well."},
                {"type": "tool_use", "id": "1"},
            ],
            tool_calls=[{"name": "add", "args": {"a": "ä"}, "id": "1"}],
            name="helper",
        ),
        ToolMessage("3", tool_call_id="1"),
    ]
    assert plain_messages(messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi."},
        {
            "role": "assistant",
            "content": "Well.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": "ä"}'}}],
        },
        {"role": "tool", "content": "3", "tool_call_id": "1", "name": "add"},
    ]


WALK = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 6), st.sampled_from(["on", "stream", "edit", "cut", "twice"])),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(walk=WALK)
async def test_any_walk_over_histories_is_exact(walk):
    """However a program goes on from, edits, shortens, repeats and branches the histories that it has, every sampled token
    stands in one ledger, once, behind the very prompt that the server was asked."""
    talk = Talk(lambda request: spelled(f"r{len(talk.server.requests)} "), budget=SessionBudget(9000, 9000))
    histories = [[HI]]
    for number, (which, length, how) in enumerate(walk):
        history = histories[which % len(histories)]
        history = history[: 1 + length % len(history)] if how == "cut" else list(history)
        if how == "edit":
            history[-1] = history[-1].model_copy(update={"content": f"edit {number}"})
        if history[-1].type == "ai":
            history.append(HumanMessage(f"q{number}"))
        if how == "twice":
            first, second = await asyncio.gather(talk.model.ainvoke(history), talk.model.ainvoke(history))
            histories += [[*history, first], [*history, second]]
        elif how == "stream":
            parts = [part async for part in talk.model.astream(history)]
            whole: AIMessageChunk = parts[0]
            for part in parts[1:]:
                whole += part
            histories.append([*history, whole])
        else:
            histories.append([*history, await talk.model.ainvoke(history)])
    talk.check_exact()
    assert sum(map(len, talk.sampled())) == sum(
        len(spelled(f"r{at} ")) for at in range(1, len(talk.server.requests) + 1)
    )
    await talk.close()
