"""A history finds its conversation: conversations of a client that brings the whole history each time."""

from __future__ import annotations

import asyncio

import pytest

from ostinato_engines import SamplingParams
from ostinato_engines.testing import ScriptedServer
from ostinato_rollout import ChatSession, LLMServerClient, SessionBudget, SessionConfig, SessionInputError
from ostinato_rollout.histories import TrackedChats, digests
from ostinato_tokenization import ContinuousTokens
from ostinato_tokenization.testing import tiny_chat_tokenizer

TOKENIZER = tiny_chat_tokenizer()
END = TOKENIZER.stop_token_ids[0]
HI = {"role": "user", "content": "Hi."}
GO_ON = {"role": "user", "content": "Go on."}


class Client:
    """Brings whole histories to a set of conversations over one server."""

    def __init__(self, replies, *, gate=None, **options) -> None:
        self.server = ScriptedServer(replies, encode=TOKENIZER.encode_text, end_token_id=END, gate=gate)
        self.client = LLMServerClient([self.server])
        self.tokens = ContinuousTokens(TOKENIZER)
        self.chats = TrackedChats(self._open, **{"max_open": 2, **options})

    def _open(self, tools):
        return ChatSession(
            client=self.client,
            tokens=self.tokens,
            config=SessionConfig(),
            budget=SessionBudget(4000, 4000),
            tools=tools,
        )

    async def ask(self, messages):
        """Return the history with its answer."""
        tracked = self.chats.find(messages, ()) or self.chats.begin(())
        async with self.chats.hold(tracked, messages):
            reply = await tracked.chat.generate(SamplingParams())
            tracked.answer(reply.message)
        return [*messages, reply.message]

    def must_be_free(self):
        """Nothing runs and nothing holds a place."""
        assert set(self.client.num_in_flight.values()) == {0}
        assert self.client.num_sticky == 0


async def test_a_history_goes_on_where_it_was_and_a_branch_begins_anew():
    """What begins with all that a conversation has seen extends it; what goes on from an earlier point does not."""
    client = Client(["one", "two", "three"])
    first = await client.ask([HI])
    await client.ask([*first, GO_ON])
    await client.ask([*first, {"role": "user", "content": "Or so."}])
    assert [len(chat.messages) for chat in client.chats.begun] == [4, 4]
    assert len({request.request_id for request in client.server.requests}) == 2
    await client.chats.end()
    client.must_be_free()


async def test_the_longest_idle_ones_are_closed_and_remembered():
    """Beyond max_open the conversation that was used longest ago holds no place any more, and is still there to be trained on."""
    client = Client(["one", "two", "three", "four"])
    histories = [await client.ask([{"role": "user", "content": str(at)}]) for at in range(3)]
    assert len(client.chats.open) == 2
    assert client.client.num_sticky == 2
    await client.ask([*histories[0], GO_ON])
    assert len(client.chats.begun) == 4
    await client.chats.end()
    client.must_be_free()


async def test_a_conversation_in_which_nothing_was_sampled_is_forgotten():
    """One whose first turn fails leaves nothing behind."""
    client = Client([RuntimeError("broken")])
    with pytest.raises(Exception, match="broken"):
        await client.ask([HI])
    assert (client.chats.begun, client.chats.open) == ([], [])
    client.must_be_free()


async def test_the_end_cancels_what_is_under_way():
    """A turn that is sampled while everything ends is cancelled, and its conversation freed."""
    client = Client(["one"], gate=asyncio.Event())
    task = asyncio.ensure_future(client.ask([HI]))
    async with asyncio.timeout(10):
        while not client.server.requests:  # noqa: ASYNC110  (the server has no event for an arrival)
            await asyncio.sleep(0.001)
    await client.chats.end()
    assert task.cancelled()
    client.must_be_free()


def test_half_of_a_surrogate_pair_is_refused():
    """What is no text has no digest, and the error says which message it is."""
    with pytest.raises(SessionInputError, match=r"messages\[1\] must be valid Unicode"):
        digests([HI, {"role": "user", "content": "\ud800"}])
