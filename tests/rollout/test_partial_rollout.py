"""Aborted generations, from the engine to the ledger."""

from __future__ import annotations

import asyncio

import pytest

from ostinato_engines import PolicySpan, SamplingParams, StopReason, TokenOutput
from ostinato_rollout import ChatSession, LLMServerClient, SessionBudget, SessionConfig, derive_seed
from ostinato_tokenization import ContinuousTokens

USER = {"role": "user", "content": "Count."}


@pytest.fixture
def part():
    """Makes what an engine gives back of a turn: ids, log-probabilities that tell them, and the version they come from."""

    def make(token_ids, version, reason=StopReason.ABORTED, *, logprobs=True):
        values = [-float(token_id) for token_id in token_ids] if logprobs else None
        return TokenOutput(list(token_ids), values, reason, policy_versions=(PolicySpan(0, version),))

    return make


@pytest.fixture
def talk(tokenizer):
    """Makes a session over servers."""

    def make(*servers, response=100, **options):
        return ChatSession(
            client=LLMServerClient(servers),
            tokens=ContinuousTokens(tokenizer),
            config=SessionConfig(),
            budget=SessionBudget(100, response, **options),
            request_id="r",
        )

    return make


async def test_a_turn_over_three_policies_is_one_turn_in_the_ledger(tokenizer, stub_server, part, talk):
    """Aborted twice, once after tokens and once without any, the turn goes on from its last token under the policy that
    serves then: ids and log-probabilities stand once and in order, spans say which policy sampled what, the reply has the last
    attempt's reason, and the next turn's spans follow."""
    end = tokenizer.token_id("<|im_end|>")
    server = stub_server(
        [
            part([11, 12, 13], 1),
            part([], 2),
            part([14], 2),
            part([15, end], 3, StopReason.STOP),
            part([16, end], 3, StopReason.STOP),
        ]
    )
    session = talk(server)
    await session.extend([USER])
    prompt = session.segments[0].prompt_ids
    reply = await session.generate(SamplingParams(max_tokens=10, seed=7))
    assert (reply.num_tokens, reply.stop_reason) == (6, StopReason.STOP)
    assert [ids for ids, _, _ in server.requests] == [
        prompt,
        [*prompt, 11, 12, 13],
        [*prompt, 11, 12, 13],
        [*prompt, 11, 12, 13, 14],
    ]
    assert [params.max_tokens for _, params, _ in server.requests] == [10, 7, 7, 6]
    assert [params.seed for _, params, _ in server.requests] == [7, *(derive_seed(7, number) for number in (1, 2, 3))]
    (ledger,) = session.segments
    assert ledger.response_ids == [11, 12, 13, 14, 15, end]
    assert ledger.response_logprobs == [-11.0, -12.0, -13.0, -14.0, -15.0, -float(end)]
    assert ledger.response_mask == [1] * 6
    assert ledger.policy_versions == [(0, 1), (3, 2), (4, 3)]
    await session.extend([USER])
    await session.generate(SamplingParams(max_tokens=10, seed=7))
    await session.close()
    assert server.requests[4][1].seed == derive_seed(7, 1)
    assert ledger.policy_versions == [(0, 1), (3, 2), (4, 3)]
    assert ledger.response_ids[-2:] == [16, end]
    assert (session.metrics.num_generations, session.metrics.num_sampled_tokens) == (2, 8)
    assert session.metrics.num_mismatches == 0


@pytest.mark.parametrize("limit", ["turn", "response", "asked"])
async def test_the_budget_holds_over_all_attempts(stub_server, part, talk, limit):
    """Of ten tokens six come before an abort: the next attempt may have four, whichever bound the ten are, and the turn ends
    with LENGTH when they are used up, although the engine said aborted."""
    server = stub_server([part(range(6), 1), part(range(6, 10), 2)])
    options = {"turn": {"max_turn_tokens": 10}, "response": {"response": 10}, "asked": {}}[limit]
    session = talk(server, **options)
    await session.extend([USER])
    reply = await session.generate(SamplingParams(max_tokens=10 if limit == "asked" else None))
    assert [params.max_tokens for _, params, _ in server.requests] == [10, 4]
    assert (reply.num_tokens, reply.stop_reason) == (10, StopReason.LENGTH)
    assert session.segments[0].policy_versions == [(0, 1), (6, 2)]


async def test_one_part_without_logprobs_leaves_the_turn_without(stub_server, part, talk):
    """A turn's log-probabilities are all there or all absent: no place is made up."""
    server = stub_server([part([11], 1), part([12], 2, StopReason.STOP, logprobs=False)])
    session = talk(server)
    await session.extend([USER])
    await session.generate(SamplingParams())
    assert session.segments[0].response_logprobs is None


async def test_a_cancelled_resumption_records_nothing(stub_server, part, talk):
    """Cancelled after an abort, the turn leaves ledger and history as they were, and the session may try again."""
    server = stub_server([part([11, 12], 1)])
    session = talk(server)
    await session.extend([USER])
    before = session.segments[0].token_ids
    original, waits = server.generate, asyncio.Event()

    async def then_hang(*args):
        if server.answers:
            return await original(*args)
        waits.set()
        return await asyncio.Event().wait()

    server.generate = then_hang
    task = asyncio.create_task(session.generate(SamplingParams()))
    await waits.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (session.segments[0].token_ids, session.messages) == (before, [USER])
    server.generate = original
    assert (await session.generate(SamplingParams())).num_tokens == 1
    assert session.segments[0].num_sampled == 1


async def test_a_turn_moves_with_what_it_has_when_its_replica_goes(stub_server, part, talk):
    """Aborted because its replica leaves, a turn goes on at another one, from its last token."""
    first, second = stub_server(), stub_server([part([13], 2, StopReason.STOP)])
    session = talk(first)

    async def leave(*args):
        session._client.add_server(second)
        session._client.remove_server(first)
        return part([11, 12], 1)

    first.generate = leave
    await session.extend([USER])
    await session.generate(SamplingParams())
    assert second.requests[0][0][-2:] == [11, 12]
    assert session.segments[0].response_ids == [11, 12, 13]
    assert session.segments[0].policy_versions == [(0, 1), (2, 2)]
