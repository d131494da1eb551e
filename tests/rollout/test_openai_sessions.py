"""Which conversation a request continues, and that every sampled token is kept once, as it was sampled."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("starlette", reason="the app needs the extra serve")
pytest.importorskip("uvicorn", reason="the app needs the extra serve")

from ostinato_engines import EngineNotReadyError, SamplingParams
from ostinato_engines.testing import ScriptedServer
from ostinato_rollout import (
    BudgetExceededError,
    ChatSession,
    LLMServerClient,
    ReplicaError,
    SessionBudget,
    SessionConfig,
)
from ostinato_rollout.openai_app import ApiError, AppLimits, SessionStore, UnknownSessionError
from ostinato_rollout.openai_app.request import ChatRequest
from ostinato_rollout.openai_app.turns import answer_request
from ostinato_tokenization import ContinuousTokens, SanityCheckMode
from ostinato_tokenization.testing import TINY_CHAT_TEMPLATE, tiny_chat_tokenizer

USER = {"role": "user", "content": "Hi."}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
TOKENIZER = tiny_chat_tokenizer()
END = TOKENIZER.stop_token_ids[0]


def spelled(text):
    """The text in one token for each letter, as no tokenizer would write it, and the end of a turn."""
    return [*(TOKENIZER.encode_text(letter)[0] for letter in text), END]


class SlowServer(ScriptedServer):
    """Lets others run before it answers."""

    async def generate(self, *args, **kwargs):
        for _ in range(3):
            await asyncio.sleep(0)
        return await super().generate(*args, **kwargs)


class Talk:
    """A store over one server; asks it in plain messages."""

    def __init__(self, replies, *, tokenizer=TOKENIZER, server_class=ScriptedServer, **limits):
        self.server = server_class(replies)
        self.client = LLMServerClient([self.server])
        self.tokens = ContinuousTokens(tokenizer)
        self.store = SessionStore(self._open, AppLimits(**limits))

    def _open(self, session, tools):
        return ChatSession(
            group=session,
            client=self.client,
            tokens=self.tokens,
            config=SessionConfig(tokenization_sanity_check_mode=SanityCheckMode.DISABLE),
            budget=SessionBudget(4000, 4000, 4000),
            tools=tools,
        )

    async def ask(self, messages, *, session=None, tools=(), n=1):
        request = ChatRequest(list(messages), list(tools), True, SamplingParams(), n, False, False, False, False, None)
        answer = await answer_request(request, self.store, session=session, model="m", logprobs_known=True)
        return answer.choices[0].message

    async def asked(self, count):
        """Wait until the server has had so many requests."""
        async with asyncio.timeout(10):
            while len(self.server.requests) < count:  # noqa: ASYNC110  (the server has no event for an arrival)
                await asyncio.sleep(0.001)

    def must_be_free(self):
        assert self.store.num_busy == 0
        assert set(self.client.num_in_flight.values()) == {0}


TRIMMING_TEMPLATE = TINY_CHAT_TEMPLATE.replace(
    "message.role + '\\n' + message.content", "message.role + '\\n' + message.content | trim"
)


@pytest.mark.parametrize("template", [TINY_CHAT_TEMPLATE, TRIMMING_TEMPLATE])
@pytest.mark.parametrize("session", [None, "s"])
async def test_what_was_sampled_stays_as_it_was_sampled(template, session):
    """A second request goes on from the very tokens of the first answer, where rendering its text would give others."""
    tokenizer = tiny_chat_tokenizer(chat_template=template)
    sampled = [spelled(" assistant "), spelled("Bye.")]
    talk = Talk(sampled, tokenizer=tokenizer)
    said = await talk.ask([USER], session=session)
    assert said == {"role": "assistant", "content": " assistant "}
    await talk.ask([USER, said, USER], session=session)
    first, second = (each.prompt_ids for each in talk.server.requests)
    assert second[: len(first) + len(sampled[0])] == first + sampled[0]
    rendered = tokenizer.encode_chat([USER, said, USER])
    assert rendered != second
    assert (talk.store.num_begun, talk.store.num_continued) == (1, 1)
    assert len({each.request_id for each in talk.server.requests}) == 1
    talk.must_be_free()


async def test_a_session_gives_its_ledgers():
    """`take` ends a session and gives its conversations, closed, with all that was sampled, once, and logprobs."""
    sampled = [spelled("one"), spelled("two"), spelled("three")]
    talk = Talk(sampled)
    said = await talk.ask([USER], session="s")
    await talk.ask([USER, said, USER], session="s")
    await talk.ask([{"role": "user", "content": "Something else."}], session="s")
    first, second = await talk.store.take("s")
    assert [_sampled(chat) for chat in (first, second)] == [sampled[0] + sampled[1], sampled[2]]
    (ledger,) = first.segments
    chosen = [value for value, mask in zip(ledger.response_logprobs, ledger.response_mask, strict=True) if mask]
    assert set(chosen) == {-0.5}
    assert sorted(talk.server.released) == sorted(chat.request_id for chat in (first, second))
    assert "s" not in talk.store
    assert len(talk.store) == talk.store.num_open == 0
    with pytest.raises(UnknownSessionError, match="'s'"):
        await talk.store.take("s")


def _sampled(chat):
    """What was sampled in a conversation, in order."""
    return [
        token_id
        for ledger in chat.segments
        for token_id, mask in zip(ledger.response_ids, ledger.response_mask, strict=True)
        if mask
    ]


async def test_a_rewritten_history_is_a_segment_of_its_own():
    """Asked again from an earlier place, or with another answer in the history, a session begins a conversation."""
    talk = Talk(lambda _: spelled("x"))
    said = await talk.ask([USER], session="s")
    await talk.ask([USER], session="s")
    await talk.ask([USER, {"role": "assistant", "content": "y"}, USER], session="s")
    await talk.ask([USER, {**said, "reasoning_content": "not ours"}, USER], session="s")
    assert (talk.store.num_begun, talk.store.num_continued) == (4, 0)
    await talk.ask([USER, said, USER], session="s")
    assert talk.store.num_continued == 1
    assert [len(_sampled(chat)) for chat in await talk.store.take("s")] in ([4, 2, 2, 2], [2, 4, 2, 2])


async def test_a_history_that_ends_with_the_answer_begins_anew():
    """Where there is nothing new to answer, the template decides what comes after an answer, in a segment of its own."""
    talk = Talk(lambda _: spelled("x"))
    said = await talk.ask([USER])
    await talk.ask([USER, said])
    assert (talk.store.num_begun, talk.store.num_continued) == (2, 0)


async def test_the_longest_history_is_continued():
    """Of two conversations that a history continues, it is the one that has seen more of it."""
    talk = Talk(lambda _: spelled("x"))
    said = await talk.ask([USER])
    longer = [USER, said, USER, await talk.ask([USER, said, USER]), USER]
    await talk.ask([USER])
    await talk.ask(longer)
    third = talk.server.requests[3]
    assert third.request_id == talk.server.requests[0].request_id
    assert third.prompt_ids[: len(talk.server.requests[1].prompt_ids)] == talk.server.requests[1].prompt_ids


async def test_sessions_and_tools_keep_conversations_apart():
    """A conversation is found by requests of its session with its tools, and by no others."""
    talk = Talk(lambda _: spelled("x"))
    said = await talk.ask([USER], session="s", tools=TOOLS)
    history = [USER, said, USER]
    await talk.ask(history, session="t", tools=TOOLS)
    await talk.ask(history, tools=TOOLS)
    await talk.ask(history, session="s")
    assert (talk.store.num_begun, talk.store.num_continued) == (4, 0)
    await talk.ask(history, session="s", tools=TOOLS)
    assert talk.store.num_continued == 1


async def test_the_same_request_again_after_a_failure_goes_on():
    """A turn that failed or was cancelled can be asked for again, on the tokens that there were."""
    sampled = [spelled("ab"), EngineNotReadyError("asleep"), spelled("c")]
    talk = Talk(sampled)
    said = await talk.ask([USER], session="s")
    history = [USER, said, USER]
    with pytest.raises(ReplicaError):
        await talk.ask(history, session="s")
    talk.must_be_free()
    await talk.ask(history, session="s")
    (chat,) = await talk.store.take("s")
    assert _sampled(chat) == sampled[0] + sampled[2]
    assert talk.store.num_begun == 1


async def test_a_conversation_in_which_nothing_was_sampled_is_dropped():
    """A first turn that fails leaves neither a conversation nor a session nor an empty segment."""
    talk = Talk([EngineNotReadyError("asleep"), EngineNotReadyError("asleep"), spelled("a")])
    for session in (None, "s"):
        with pytest.raises(ReplicaError):
            await talk.ask([USER], session=session)
    assert talk.store.num_open == len(talk.store) == 0
    assert len(talk.server.released) == 2
    await talk.ask([USER], session="s")
    assert len(await talk.store.take("s")) == 1


async def test_messages_that_do_not_fit_leave_the_conversation_as_it_was():
    """A continuation that is too long is refused, and a shorter one goes on from the same tokens."""
    talk = Talk([spelled("ab"), spelled("c")])
    said = await talk.ask([USER], session="s")
    with pytest.raises(BudgetExceededError):
        await talk.ask([USER, said, {"role": "user", "content": "x" * 5000}], session="s")
    await talk.ask([USER, said, USER], session="s")
    assert (talk.store.num_begun, talk.store.num_continued) == (1, 2)
    first, second = (each.prompt_ids for each in talk.server.requests)
    assert second[: len(first) + 3] == first + spelled("ab")
    talk.must_be_free()


async def test_one_turn_at_a_time():
    """While a conversation is being answered, the same history begins another one."""
    gate = asyncio.Event()
    talk = Talk(lambda _: spelled("a"))
    said = await talk.ask([USER])
    talk.server._gate = gate
    asking = [asyncio.create_task(talk.ask([USER, said, USER])) for _ in range(2)]
    await talk.asked(3)
    assert talk.store.num_busy == 2
    gate.set()
    await asyncio.gather(*asking)
    assert (talk.store.num_begun, talk.store.num_continued) == (2, 1)
    talk.must_be_free()


async def test_taking_a_session_cancels_what_is_under_way():
    """Requests of a session that is taken end, and what they had not sampled is not in it."""
    talk = Talk([spelled("a"), spelled("b")])
    said = await talk.ask([USER], session="s")
    talk.server._gate = asyncio.Event()
    asking = asyncio.create_task(talk.ask([USER, said, USER], session="s"))
    await talk.asked(2)
    (chat,) = await talk.store.take("s")
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert _sampled(chat) == spelled("a")
    (ledger,) = chat.segments
    assert ledger.response_mask[-1] == 1, "what nothing answered is not dropped"
    talk.must_be_free()


async def test_what_is_kept_is_bounded():
    """The longest idle conversation without a session is forgotten; a session closes its own, but keeps what was sampled."""
    talk = Talk(lambda _: spelled("x"), max_unnamed=2, max_open=2, max_segments=3, max_sessions=1)
    histories = [[{"role": "user", "content": text}] for text in "abc"]
    for history in histories:
        await talk.ask(history)
    assert talk.store.num_open == 2
    assert talk.server.released == [talk.server.requests[0].request_id]
    for history in histories:
        await talk.ask(history, session="s")
    assert talk.store.num_open == 4
    with pytest.raises(ApiError, match="at most 3 conversations") as caught:
        await talk.ask([USER], session="s")
    assert caught.value.status == 400
    with pytest.raises(ApiError, match="DELETE") as caught:
        await talk.ask([USER], session="t")
    assert caught.value.status == 503
    chats = await talk.store.take("s")
    assert [chat.messages[0]["content"] for chat in chats] == ["a", "b", "c"]
    assert [len(_sampled(chat)) for chat in chats] == [2, 2, 2]


async def test_samples_that_a_session_has_no_room_for_are_refused_together():
    """A request for more samples than a session may hold is refused before any of them is sampled."""
    talk = Talk(lambda _: spelled("x"), max_segments=2)
    with pytest.raises(ApiError, match="at most 2 conversations, got 3 more"):
        await talk.ask([USER], session="s", n=3)
    assert (talk.server.requests, len(talk.store)) == ([], 0)
    await talk.ask([USER], session="s", n=2)
    assert len(await talk.store.take("s")) == 2
    talk.must_be_free()


async def test_what_is_idle_expires(monkeypatch, caplog):
    """Sessions and conversations that nobody used for the bound end, and are counted; those under way do not."""
    talk = Talk(lambda _: spelled("x"), idle_timeout_s=10)
    await talk.ask([USER], session="s")
    await talk.ask([USER])
    talk.server._gate = asyncio.Event()
    asking = asyncio.create_task(talk.ask([USER], session="busy"))
    await talk.asked(3)
    await talk.store.expire()
    assert (len(talk.store), talk.store.num_open) == (2, 3)
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 11)
    await talk.store.expire()
    assert (len(talk.store), talk.store.num_open, talk.store.num_expired) == (1, 1, 1)
    assert "'s'" in caplog.text
    talk.server._gate.set()
    await asking
    await talk.store.close()
    assert len(talk.server.released) == 3
    talk.must_be_free()


async def test_closing_goes_on_where_who_waits_for_it_leaves():
    """A request that is cancelled while an idle conversation is closed on its behalf does not keep that from being freed."""
    talk = Talk(lambda _: spelled("x"), max_unnamed=1)
    gate, waits, release = asyncio.Event(), asyncio.Event(), talk.server.release

    async def slow_release(request_id):
        waits.set()
        await gate.wait()
        await release(request_id)

    talk.server.release = slow_release
    await talk.ask([USER])
    asking = asyncio.create_task(talk.ask([{"role": "user", "content": "Another."}]))
    await waits.wait()
    asking.cancel()
    await asyncio.wait([asking])
    gate.set()
    await talk.store.close()
    assert sorted(talk.server.released) == sorted(each.request_id for each in talk.server.requests)
    talk.must_be_free()


async def test_taking_goes_on_where_who_takes_leaves():
    """Whoever gives up waiting for a session to end leaves no conversation open, whatever was under way in it."""
    talk = Talk([spelled("a"), spelled("b")])
    said = await talk.ask([USER], session="s")
    talk.server._gate = asyncio.Event()
    asking = asyncio.create_task(talk.ask([USER, said, USER], session="s"))
    await talk.asked(2)
    taking = asyncio.create_task(talk.store.take("s"))
    await asyncio.sleep(0)
    assert "s" not in talk.store
    taking.cancel()
    await asyncio.wait([taking, asking])
    assert taking.cancelled()
    await talk.store.close()
    assert talk.server.released == [talk.server.requests[0].request_id]
    talk.must_be_free()


async def test_what_is_taken_is_closed():
    """A session's conversations are handed out when all of them are closed, one that was let go of before among them."""
    talk = Talk(lambda _: spelled("x"), max_open=1)
    gate, waits, release = asyncio.Event(), asyncio.Event(), talk.server.release

    async def slow_at_first(request_id):
        if not waits.is_set():
            waits.set()
            await gate.wait()
        await release(request_id)

    talk.server.release = slow_at_first
    await talk.ask([USER], session="s")
    asking = asyncio.create_task(talk.ask([{"role": "user", "content": "Another."}], session="s"))
    await waits.wait()
    taking = asyncio.create_task(talk.store.take("s"))
    await asyncio.wait([taking], timeout=0.1)
    assert not taking.done()
    gate.set()
    assert len(await taking) == len(talk.server.released) == 2
    await asking
    talk.must_be_free()


class Client:
    """A client with several histories, which asks, asks twice at once, rewrites, leaves in mid-turn, and ends sessions."""

    def __init__(self, talk):
        self.talk = talk
        self.histories = [[USER]]
        self.taken = []

    async def do(self, kind, place, session):
        history = self.histories[place % len(self.histories)]
        if kind == "rewrite":
            question = {"role": "user", "content": f"{len(self.histories)}"}
            self.histories.append([*history[: len(history) // 2 * 2], question])
        elif kind == "take":
            await self.take(session)
        else:
            asking = [
                asyncio.create_task(self.talk.ask(history, session=session, n=2 if kind == "two" else 1))
                for _ in range(2 if kind == "twice" else 1)
            ]
            if kind == "leave":
                for _ in range(place):
                    await asyncio.sleep(0)
                asking[0].cancel()
            results = await asyncio.gather(*asking, return_exceptions=True)
            if isinstance(results[0], dict):
                history += [results[0], USER]

    async def take(self, session):
        if session in self.talk.store:
            self.taken.extend(await self.talk.store.take(session))


kinds = st.sampled_from(["ask", "ask", "ask", "two", "twice", "leave", "rewrite", "take"])
steps = st.lists(st.tuples(kinds, st.integers(0, 7), st.sampled_from([None, "s", "t"])), max_size=25)


@settings(deadline=None, max_examples=60)
@given(steps, st.integers(2, 9))
async def test_each_sampled_token_is_in_one_ledger_once(steps, failing):
    """However requests of several sessions mix, fail and are cancelled, what a session gives is what was sampled for it."""
    given_out, number = {}, 0

    def reply(request):
        nonlocal number
        number += 1
        if number % failing == 0:
            return EngineNotReadyError("asleep")
        ids = spelled(f"{number}")
        given_out.setdefault(request.request_id, []).extend(ids)
        return ids

    talk = Talk(reply, server_class=SlowServer, max_open=2, max_unnamed=2)
    client = Client(talk)
    for step in steps:
        await client.do(*step)
        talk.must_be_free()
    for session in ("s", "t"):
        await client.take(session)
    await talk.store.close()
    for chat in client.taken:
        assert _sampled(chat) == given_out[chat.request_id]
    assert len({chat.request_id for chat in client.taken}) == len(client.taken)
    assert talk.store.num_open == len(talk.store) == 0
    assert set(talk.server.released) >= {each.request_id for each in talk.server.requests}
    assert talk.client.num_sticky == 0
