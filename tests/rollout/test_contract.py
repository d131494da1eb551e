"""What a replica answers is checked before anything is made of it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato_engines import PolicySpan, SamplingParams, StopReason, TokenOutput
from ostinato_rollout import (
    ChatSession,
    FailureKind,
    LLMServerClient,
    ReplicaError,
    SessionBudget,
    SessionConfig,
    classify,
)
from ostinato_rollout.contract import checked_output
from ostinato_tokenization import ContinuousTokens

PARAMS = SamplingParams(max_tokens=10, stop_token_ids=(9,))


def answer(token_ids=(5, 9), logprobs=None, stop_reason=StopReason.STOP, spans=((0, 0),), **counts):
    """An output, whatever is in it."""
    if isinstance(spans, tuple):
        spans = tuple(PolicySpan(*span) for span in spans)
    ids = list(token_ids) if isinstance(token_ids, tuple) else token_ids
    return TokenOutput(ids, logprobs, stop_reason, policy_versions=spans, **counts)


LIES = {
    "nothing": (None, "must return a TokenOutput or a list of token ids, got None"),
    "text": ("abc", "must return a TokenOutput"),
    "no ids": (answer(None), "token_ids must be a list"),
    "a negative id": (answer((-1,)), "token_ids must be .* got \\[-1\\] from replica 0"),
    "an id that no id is": (answer((2**31,)), "token_ids must be .* from 0 to 2"),
    "a fraction": (answer((1.5,)), "token_ids must be"),
    "a truth value for an id": (answer((5, True)), "token_ids must be"),
    "words": (answer(("a",)), "token_ids must be"),
    "more than was asked for": (answer((1,) * 11), "at most max_tokens \\(10\\), got 11 from replica 0"),
    "a logprob that is no number": (answer((5, 9), [float("nan"), -1.0]), "logprobs must be None or a list of finite"),
    "a missing logprob": (answer((5, 9), [None, -1.0]), "logprobs must be"),
    "a probability above 1": (answer((5, 9), [-0.5, 0.5]), "finite numbers of at most 0, got \\[-0.5, 0.5\\]"),
    "a truth value for a logprob": (answer((5, 9), [False, -1.0]), "logprobs must be"),
    "an unknown end": (answer(stop_reason="aborted"), "stop_reason must be a StopReason, got 'aborted'"),
    "no end": (answer(stop_reason=None), "stop_reason must be"),
    "no version": (answer(spans=()), "policy_versions must be PolicySpans, sorted by start, the first at 0"),
    "no version of an abort": (answer((), None, StopReason.ABORTED, ()), "policy_versions must be"),
    "no versions": (answer(spans=None), "policy_versions must be"),
    "a late version": (answer(spans=((1, 0),)), "policy_versions must be"),
    "a late version of an abort": (answer((5,), None, StopReason.ABORTED, ((1, 0),)), "policy_versions must be"),
    "versions in disorder": (answer((5, 6, 9), spans=((0, 1), (2, 2), (1, 3))), "policy_versions must be"),
    "a version below 0": (answer(spans=((0, -1),)), "policy_versions must be"),
    "a version without number": (answer(spans=((0, "x"),)), "policy_versions must be"),
    "a count below 0": (answer(num_cached_tokens=-1), "num_cached_tokens must be a number of at least 0, got -1"),
    "a truth value for a count": (answer(num_preempted=True), "num_preempted must be a number"),
    "a count that is none": (answer(num_preempted=None), "num_preempted must be a number"),
}


@pytest.mark.parametrize(("lie", "message"), LIES.values(), ids=LIES.keys())
async def test_an_answer_against_the_contract_is_the_replicas_failure(tokenizer, stub_server, lie, message):
    """It is an error that names the replica and what is wrong, the session is as before, and the next turn goes well."""
    client = LLMServerClient([stub_server([lie], stop_id=tokenizer.stop_token_ids[0])])
    budget = SessionBudget(max_prompt_tokens=100, max_response_tokens=100)
    session = ChatSession(client=client, tokens=ContinuousTokens(tokenizer), config=SessionConfig(), budget=budget)
    async with session:
        await session.extend([{"role": "user", "content": "Hi."}])
        before = list(session.ledger.token_ids)
        with pytest.raises(ReplicaError, match=message) as caught:
            await session.generate(SamplingParams(max_tokens=10))
        assert (caught.value.replica, classify(caught.value)) == (0, FailureKind.ENGINE)
        assert list(session.ledger.token_ids) == before
        assert client.num_in_flight == {0: 0}
        assert (await session.generate(SamplingParams(max_tokens=10))).num_tokens == 1


@given(st.lists(st.integers(0, 5)), st.lists(st.integers(0, 3), min_size=1))
def test_every_token_keeps_its_version_and_none_is_left_without_tokens(steps, versions):
    """Of spans that overlap in nothing but their starts, those that hold a token remain, whatever they begin with."""
    starts = [0]
    for step in steps:
        starts.append(starts[-1] + step)
    spans = [(start, versions[number % len(versions)]) for number, start in enumerate(starts)]
    length = sum(steps)
    meant = [next(version for start, version in reversed(spans) if start <= place) for place in range(length)]
    kept = checked_output(answer((1,) * length, spans=tuple(spans)), SamplingParams(), 0).policy_versions
    bounds = [*(span.start for span in kept), length]
    assert [span.version for span, (a, b) in zip(kept, pairwise(bounds), strict=True) for _ in range(a, b)] == meant
    assert kept[0].start == 0
    assert length == 0 or all(a < b for a, b in pairwise(bounds))


@pytest.mark.parametrize("stop_reason", list(StopReason))
def test_nothing_comes_after_a_stop_token(stop_reason):
    """Tokens after one that ends the turn are a failure, however the answer ended; as the last token it is in its place."""
    with pytest.raises(ReplicaError, match=r"must end with the first stop token, got tokens after 9 in \[5, 9, 5\]"):
        checked_output(answer((5, 9, 5), stop_reason=stop_reason), PARAMS, 0)
    assert checked_output(answer((5, 5, 9), stop_reason=stop_reason), PARAMS, 0).token_ids == [5, 5, 9]
    assert checked_output(answer((5, 9, 5), stop_reason=stop_reason), SamplingParams(), 0).token_ids == [5, 9, 5]


def test_a_certain_token_may_be_rounded():
    """A logprob that rounding has put a little above 0 is taken as it is."""
    assert checked_output(answer((5, 9), [1e-6, 0.0]), PARAMS, 0).logprobs == [1e-6, 0.0]
