"""Sessions over replicas in other processes: whatever happens to connections and replicas, each ledger holds what was sampled."""

from __future__ import annotations

import asyncio
import random
import zlib
from array import array
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_engines import AsyncServerBase, Capabilities, PolicySpan, SamplingParams, StopReason, TokenOutput

pytest.importorskip("zmq")

from ostinato_rollout import (
    AdmissionConfig,
    ChatSession,
    LeastInFlight,
    LLMServerClient,
    NoReplicaError,
    ReplicaError,
    SessionBudget,
    SessionConfig,
    SessionStateError,
    StickyLeastInFlight,
)
from ostinato_rollout.transport import RemoteServer, ReplicaLostError, ReplicaService
from ostinato_tokenization import ContinuousTokens, SanityCheckMode
from ostinato_tokenization.testing import tiny_chat_tokenizer

TOKENIZER = tiny_chat_tokenizer()
TOKENS = ContinuousTokens(TOKENIZER)
END = TOKENIZER.stop_token_ids[0]
CONFIG = SessionConfig(tokenization_sanity_check_mode=SanityCheckMode.DISABLE)
MAX_TOKENS = 6
NUM_REPLICAS = 2

STEP = st.tuples(
    st.sampled_from(("pass", "abort", "cancel", "close", "cut", "forget there", "forget here", "part")),
    st.integers(0, 7),
)


def next_token(prompt, version):
    """The only token that may follow a prompt under a policy; never one that ends a turn."""
    return (zlib.crc32(array("i", prompt).tobytes()) + version) % 300


class Chained(AsyncServerBase):
    """Samples tokens of which each tells the whole context before it, and can be aborted between any two."""

    def __init__(self, version: int) -> None:
        self.policy_version = version
        self.num_aborts = 0
        self.running: Counter[str] = Counter()
        self.conversations: set[str] = set()

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        assert not self.running[request_id]
        self.running[request_id] += 1
        self.conversations.add(request_id)
        num_aborts, context, ids = self.num_aborts, list(prompt_ids), []
        try:
            while len(ids) < sampling_params.max_tokens:
                await asyncio.sleep(0)
                if self.num_aborts != num_aborts:
                    return self.output(ids, StopReason.ABORTED)
                is_last = len(prompt_ids) % 3 == 0 and len(ids) == 2
                ids.append(END if is_last else next_token(context, self.policy_version))
                context.append(ids[-1])
                if is_last:
                    return self.output(ids, StopReason.STOP)
            return self.output(ids, StopReason.LENGTH)
        finally:
            self.running[request_id] -= 1

    def output(self, ids, reason):
        spans = (PolicySpan(0, self.policy_version),)
        return TokenOutput(ids, [-float(token_id) for token_id in ids], reason, policy_versions=spans)

    async def abort(self, request_ids=None):
        self.num_aborts += 1
        return sum(self.running.values())

    async def release(self, request_id):
        assert not self.running[request_id]
        self.conversations.discard(request_id)

    async def chat_completion(self, raw_request):
        raise NotImplementedError

    def capabilities(self):
        return Capabilities(engine="chained", abort=True, kv_capacity_sessions=2)


def check(session: ChatSession, num_turns: int) -> None:
    """Every sampled token is the one that follows all tokens before it, and no turn is there twice or missing."""
    ledger = session.ledger
    if ledger is None:
        return
    context, spans = list(ledger.prompt_ids), dict(ledger.policy_versions)
    version = None
    for place, (token_id, is_sampled) in enumerate(zip(ledger.response_ids, ledger.response_mask, strict=True)):
        version = spans.get(place, version)
        if is_sampled:
            assert token_id in (END, next_token(context, version))
            assert ledger.response_logprobs[place] == -token_id
        context.append(token_id)
    assert sum(message["role"] == "assistant" for message in session.messages) == num_turns


async def talk(client: LLMServerClient, name: str, seed: int, sessions: list[ChatSession]) -> None:
    """A few turns; one that fails is asked for again, with nothing changed by the failure."""
    rng = random.Random(seed)
    budget = SessionBudget(max_prompt_tokens=100, max_response_tokens=200)
    session = ChatSession(client=client, tokens=TOKENS, config=CONFIG, budget=budget, request_id=name)
    sessions.append(session)
    async with session:
        for turn in range(3):
            await session.extend([{"role": "user", "content": "x" * rng.randint(0, 5)}])
            before = list(session.ledger.token_ids)
            for _ in range(20):
                try:
                    reply = await session.generate(SamplingParams(max_tokens=MAX_TOKENS))
                except ReplicaError as error:
                    assert isinstance(error.__cause__, ReplicaLostError)  # noqa: PT017  the others are its siblings'
                    assert list(session.ledger.token_ids) == before
                else:
                    assert 0 < reply.num_tokens <= MAX_TOKENS
                    break
            check(session, turn + 1)


async def play(steps: list[tuple[str, int]], seed: int, *, is_sticky: bool) -> Counter[str]:
    """Conversations, and what happens to them; returns how often each of it did."""
    servers = [Chained(version) for version in range(NUM_REPLICAS)]
    services = [ReplicaService(server) for server in servers]
    for service in services:
        await service.start()
    remotes = [RemoteServer(service.address) for service in services]
    for remote in remotes:
        await remote.start()
    policy = StickyLeastInFlight(seed, 1) if is_sticky else LeastInFlight(seed)
    client = LLMServerClient(remotes, policy=policy, admission=AdmissionConfig(timeout_s=30), timeout_s=30)
    sessions: list[ChatSession] = []
    tasks = [asyncio.create_task(talk(client, f"t{number}", seed + number, sessions)) for number in range(6)]
    for what, number in steps:
        remote, service, server = (some[number % NUM_REPLICAS] for some in (remotes, services, servers))
        match what:
            case "abort":
                await server.abort()
            case "cancel":
                tasks[number % len(tasks)].cancel()
            case "close" if sessions:
                await sessions[number % len(sessions)].close()
            case "cut" if remote._link is not None:
                remote._link.fail(ReplicaLostError("it was cut"))
            case "part" if service._callers:
                service._callers.part_from(next(iter(service._callers)))
            case "forget there":
                service._prompts.clear()
            case "forget here" if remote._link is not None:
                remote._link._prompts.clear()
        for _ in range(number):
            await asyncio.sleep(0)
    async with asyncio.timeout(30):
        for task in tasks:
            with suppress(asyncio.CancelledError, SessionStateError, NoReplicaError):
                await task
        await asyncio.gather(*client._ending)
    for session in sessions:
        check(session, sum(message["role"] == "assistant" for message in session.messages))
    seen = client.activity()
    assert seen.conversations == []
    assert not any(one.num_in_flight or one.num_sessions or one.held_tokens for one in seen.replicas)
    # One whose connection is cut again while it is asked for its health is out of service, and hears of no release.
    assert len(seen.replicas) < NUM_REPLICAS or not any(remote.num_kept for remote in remotes)
    for remote in remotes:
        assert remote.num_waiting == 0
        await remote.disconnect()
        assert remote.num_kept == 0
    for service, server in zip(services, servers, strict=True):
        await service.close()
        assert (service.num_calls, service.num_conversations, service.num_kept_bytes) == (0, 0, 0)
        assert (+server.running, server.conversations) == (Counter(), set())
    return sum((Counter(vars_of(remote)) for remote in remotes), Counter())


def vars_of(remote: RemoteServer) -> dict[str, int]:
    """What a remote server has counted."""
    return {name: getattr(remote.stats, name) for name in remote.stats.__struct_fields__}


@settings(deadline=None, max_examples=60)
@given(st.lists(STEP, max_size=40), st.integers(0, 2**16), st.booleans())
def test_each_ledger_holds_each_sampled_token_once_and_nothing_is_left(steps, seed, is_sticky):
    """In any order of turns, aborts, cancellations, closings, cut connections and forgotten prompts, tokens follow those that
    they were sampled after, and counters, conversations and prompts are gone at both ends."""
    asyncio.run(play(steps, seed, is_sticky=is_sticky))


def test_conversations_that_nothing_happens_to_have_all_turns():
    """All turns of all conversations are had, and not everything is sent each time."""
    counted = asyncio.run(play([], 0, is_sticky=True))
    assert counted["num_generates"] == 18
    assert counted["num_sent_tokens"] < counted["num_prompt_tokens"]
    assert (counted["num_lost"], counted["num_resent"]) == (0, 0)
