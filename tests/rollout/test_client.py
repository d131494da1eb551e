"""The client over many replicas."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_engines import PolicySpan, SamplingParams, SamplingParamsError, StopReason, TokenOutput
from ostinato_rollout import (
    LLMServerClient,
    NoReplicaError,
    ReplicaError,
    RequestTimeoutError,
    SessionInputError,
    SessionStateError,
)

PARAMS = SamplingParams(max_tokens=10)


async def test_a_conversation_stays_and_new_ones_go_where_least_is_under_way(stub_server):
    """A first turn goes to the replica with the least in flight, a later turn to the replica of the first."""
    servers = [stub_server() for _ in range(3)]
    client = LLMServerClient(servers)
    for server in servers:
        server.gate = asyncio.Event()
    tasks = [asyncio.create_task(client.generate(f"r{index}", [1], PARAMS)) for index in range(6)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sorted(client.num_in_flight.values()) == [2, 2, 2]
    for server in servers:
        server.gate.set()
    await asyncio.gather(*tasks)
    homes = {request_id: index for index, server in enumerate(servers) for _, _, request_id in server.requests}
    for request_id in homes:
        await client.generate(request_id, [1, 2], PARAMS)
    for index, server in enumerate(servers):
        assert {request_id for _, _, request_id in server.requests} == {r for r, home in homes.items() if home == index}
    assert set(client.num_in_flight.values()) == {0}


async def test_ties_are_drawn_from_the_seed(stub_server):
    """Equal seeds send equal sequences of requests to the same replicas, other seeds to other ones."""

    async def homes(seed):
        servers = [stub_server() for _ in range(4)]
        client = LLMServerClient(servers, seed=seed)
        for index in range(20):
            await client.generate(f"r{index}", [1], PARAMS)
        return [[request_id for _, _, request_id in server.requests] for server in servers]

    assert await homes(1) == await homes(1)
    assert await homes(1) != await homes(2)


async def test_counters_return_to_zero_after_errors_and_cancellations(stub_server):
    """With a third of the requests failing and a third cancelled, every counter ends at zero and none is shared with the
    incarnation that comes back."""
    servers = [stub_server() for _ in range(3)]
    client = LLMServerClient(servers)
    for server in servers:
        server.gate = asyncio.Event()
        server.answers = [
            RuntimeError("broken") if index % 2 else TokenOutput([5], [-1.0], StopReason.STOP) for index in range(10)
        ]
    tasks = [asyncio.create_task(client.generate(f"r{index}", [1], PARAMS)) for index in range(30)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    client.remove_server(servers[1])
    new = client.add_server(servers[1])
    assert client.num_in_flight[new] == 0
    for task in tasks[::3]:
        task.cancel()
    for server in servers:
        server.gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(result, asyncio.CancelledError) for result in results) == 10
    assert any(isinstance(result, ReplicaError) for result in results)
    assert set(client.num_in_flight.values()) == {0}
    assert 1 not in client.num_in_flight
    assert new == 3


async def test_a_conversation_moves_when_its_replica_is_gone(stub_server, output):
    """A sticky conversation whose replica left is served by another, also when it failed because it left."""
    first, second = stub_server(), stub_server()
    client = LLMServerClient([first, second])
    await client.generate("a", [1], PARAMS)
    home, other = (first, second) if first.requests else (second, first)
    client.remove_server(home)
    await client.generate("a", [1, 2], PARAMS)
    assert other.requests[-1][0] == [1, 2]
    third = stub_server()
    client.add_server(third)
    other.gate = asyncio.Event()
    other.answers = [RuntimeError("shut down")]
    task = asyncio.create_task(client.generate("a", [1, 2, 3], PARAMS))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    client.remove_server(other)
    other.gate.set()
    assert (await task).token_ids == [99]
    assert third.requests[-1][0] == [1, 2, 3]
    client.remove_server(third)
    with pytest.raises(NoReplicaError, match="'a'"):
        await client.generate("a", [1], PARAMS)


async def test_an_aborted_generation_goes_on_within_its_first_budget(stub_server, output):
    """Prompt 4, ten tokens wanted, aborted after six: the second request asks for at most four, and ids, log-probabilities
    and versions are joined."""
    server = stub_server(
        [output(range(6), StopReason.ABORTED, version=1), output(range(10, 14), StopReason.LENGTH, version=2)]
    )
    client = LLMServerClient([server])
    result = await client.generate("a", [1, 2, 3, 4], SamplingParams(max_tokens=10, seed=3))
    assert server.requests[1][0] == [1, 2, 3, 4, 0, 1, 2, 3, 4, 5]
    assert server.requests[1][1].max_tokens == 4
    assert server.requests[1][1].seed != 3
    assert result.token_ids == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13]
    assert result.logprobs == [-float(token_id) for token_id in result.token_ids]
    assert result.policy_versions == (PolicySpan(0, 1), PolicySpan(6, 2))
    assert result.stop_reason is StopReason.LENGTH


async def test_a_full_budget_ends_without_another_call(stub_server, output):
    """Aborted with nothing left, or asked for nothing at all: reason LENGTH, and no replica is asked again."""
    server = stub_server([output(range(10), StopReason.ABORTED)])
    client = LLMServerClient([server])
    result = await client.generate("a", [1], PARAMS)
    assert (len(result.token_ids), result.stop_reason, len(server.requests)) == (10, StopReason.LENGTH, 1)
    nothing = await client.generate("b", [1], SamplingParams(max_tokens=0))
    assert (nothing.token_ids, nothing.stop_reason, len(server.requests)) == ([], StopReason.LENGTH, 1)


async def test_an_abort_without_tokens_starts_the_turn_again(stub_server, output):
    """Where the engine gave no tokens, the turn starts again under the version that serves then."""
    server = stub_server([output([], StopReason.ABORTED, version=1), output([7], version=2)])
    result = await LLMServerClient([server]).generate("a", [1], PARAMS)
    assert (result.token_ids, result.policy_versions) == ([7], (PolicySpan(0, 2),))


@settings(max_examples=50, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 4), max_size=6),
    versions=st.lists(st.integers(0, 3), min_size=7, max_size=7),
    seed=st.integers(0, 9),
)
def test_resumption_keeps_every_token_once(cuts, versions, seed):
    """However often a generation is aborted, the result holds every part once, in order, with the right versions."""
    from ostinato_engines import AsyncServerBase

    draw = random.Random(seed)
    parts = [[draw.randrange(100) for _ in range(cut)] for cut in cuts]

    class Aborting(AsyncServerBase):
        async def generate(self, prompt_ids, sampling_params, request_id, media=()):
            expected = [token_id for part in parts[: self.turn] for token_id in part]
            assert list(prompt_ids) == [1, *expected]
            assert sampling_params.max_tokens == 40 - len(expected)
            span = (PolicySpan(0, versions[self.turn]),)
            part = parts[self.turn] if self.turn < len(parts) else [9]
            stop = StopReason.ABORTED if self.turn < len(parts) else StopReason.STOP
            self.turn += 1
            return TokenOutput(part, [-1.0] * len(part), stop, policy_versions=span)

        async def chat_completion(self, raw_request):
            raise NotImplementedError

    server = Aborting()
    server.turn = 0
    client = LLMServerClient([server])
    result = asyncio.run(client.generate("a", [1], SamplingParams(max_tokens=40)))
    flat = [(token_id, versions[index]) for index, part in enumerate([*parts, [9]]) for token_id in part]
    assert result.token_ids == [token_id for token_id, _ in flat]
    assert len(result.logprobs) == len(flat)
    starts = [span.start for span in result.policy_versions]
    seen = [[span.version for span in result.policy_versions if span.start <= index][-1] for index in range(len(flat))]
    assert seen == [version for _, version in flat]
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    assert set(client.num_in_flight.values()) == {0}


async def test_a_wait_past_its_deadline_says_what_it_waited_for(stub_server):
    """The timeout names request, replica, start and progress, and leaves no counter behind."""
    server = stub_server([TokenOutput([1, 2], [-1.0, -1.0], StopReason.ABORTED)])
    client = LLMServerClient([server], timeout_s=0.05)

    async def hang(*args):
        await asyncio.Event().wait()

    original = server.generate

    async def first_then_hang(*args):
        return await (original(*args) if server.answers else hang())

    server.generate = first_then_hang
    with pytest.raises(RequestTimeoutError, match=r"'abc'.*replica 0 since .*2 tokens after 1 aborted") as caught:
        await client.generate("abc", [1], PARAMS)
    assert isinstance(caught.value, TimeoutError)
    assert set(client.num_in_flight.values()) == {0}


async def test_release_forgets_the_conversation_and_tells_the_replica(stub_server):
    """After release the conversation has no place; releasing twice, or before the first turn, is no error."""
    server = stub_server()
    client = LLMServerClient([server])
    await client.release("a")
    await client.generate("a", [1], PARAMS)
    assert client.num_sticky == 1
    await client.release("a")
    await client.release("a")
    assert (client.num_sticky, server.released) == (0, ["a"])


async def test_no_live_conversation_is_forgotten(stub_server, monkeypatch):
    """Conversations that nobody releases stay where they are; beyond a bound a new one is refused, and no old one dropped."""
    monkeypatch.setattr("ostinato_rollout.placement._MAX_CONVERSATIONS", 3)
    client = LLMServerClient([stub_server()])
    for index in range(3):
        await client.generate(f"r{index}", [1], PARAMS)
    with pytest.raises(SessionStateError, match="must be released at their end, got 3"):
        await client.generate("r3", [1], PARAMS)
    assert client.num_sticky == 3
    await client.release("r0")
    await client.generate("r3", [1], PARAMS)


async def test_a_bare_list_of_ids_is_an_output_without_logprobs(stub_server):
    """A third party's server may return ids only."""
    result = await LLMServerClient([stub_server([[4, 5]])]).generate("a", [1], {"max_tokens": 3})
    assert (result.token_ids, result.logprobs) == ([4, 5], None)


async def test_an_answer_beyond_its_budget_is_an_error(stub_server, output):
    """A replica that returns more tokens than asked for breaks the contract and is named."""
    with pytest.raises(ReplicaError, match="at most max_tokens \\(10\\), got 11 from replica 0"):
        await LLMServerClient([stub_server([output(range(11))])]).generate("a", [1], PARAMS)


async def test_a_failing_replica_is_named_with_its_own_error_as_cause(stub_server):
    """What a server raises arrives as ReplicaError with replica, request, and the cause."""
    with pytest.raises(ReplicaError, match=r"replica 0 failed .*'a'.*KeyError") as caught:
        await LLMServerClient([stub_server([KeyError("x")])]).generate("a", [1], PARAMS)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.replica == 0


async def test_a_policy_of_ones_own_is_asked_and_checked(stub_server):
    """A ReplicaPolicy decides; one that names no replica in service is told so."""

    class Last:
        def choose(self, request_id, in_flight, previous):
            return max(in_flight) if request_id == "a" else 17

    servers = [stub_server(), stub_server()]
    client = LLMServerClient(servers, policy=Last())
    await client.generate("a", [1], PARAMS)
    assert [len(server.requests) for server in servers] == [0, 1]
    with pytest.raises(ReplicaError, match=r"one of \[0, 1\], got 17"):
        await client.generate("b", [1], PARAMS)


def test_wrong_arguments_are_refused(stub_server):
    """No servers, no time and unknown sampling parameters are errors that name what is wrong."""
    with pytest.raises(NoReplicaError, match="servers must"):
        LLMServerClient([])
    with pytest.raises(SessionInputError, match="timeout_s must be positive, got 0"):
        LLMServerClient([stub_server()], timeout_s=0)
    with pytest.raises(SamplingParamsError, match="temprature"):
        asyncio.run(LLMServerClient([stub_server()]).generate("a", [1], {"temprature": 1}))
