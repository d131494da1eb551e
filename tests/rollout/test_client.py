"""The client over many replicas."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_engines import (
    AsyncServerBase,
    EngineClosedError,
    EngineNotReadyError,
    EngineState,
    Health,
    PolicySpan,
    SamplingParams,
    SamplingParamsError,
    StopReason,
    TokenOutput,
)
from ostinato_rollout import (
    AdmissionConfig,
    BalancedTokens,
    LLMServerClient,
    NoReplicaError,
    ReplicaError,
    RequestTimeoutError,
    RoundRobin,
    ServerPool,
    SessionInputError,
    SessionStateError,
    StickyLeastInFlight,
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


async def test_a_replica_that_a_conversation_leaves_frees_it_before_the_turn_elsewhere(stub_server):
    """With a policy whose conversations stay, one that moves is released at once where it was, and only there; with one that
    goes round, each replica keeps it until the end."""
    for policy, expected in ((BalancedTokens(move_ratio=0), ["a"]), (RoundRobin(), [])):
        first, second = stub_server(), stub_server()
        client = LLMServerClient([first, second], policy=policy)
        await client.generate("a", [1] * 10, PARAMS)
        left, other = (first, second) if first.requests else (second, first)
        if policy != RoundRobin():
            await client.generate("b", [1] * 5, PARAMS)
            await client.generate("c", [1] * 50, PARAMS)  # beside b, so that a is alone
            await client.release("b")
            await client.admit("d", num_prompt_tokens=30)
            await client.generate("d", [1] * 30, PARAMS)
            await client.release("c")
            other.released.clear()
        await client.generate("a", [1] * 12, PARAMS)
        assert other.requests[-1][2] == "a"
        assert (left.released, other.released) == (expected, [])
        await client.release("a")
        assert sorted([*left.released, *other.released]) == ["a", "a"]


async def test_a_replica_that_does_not_answer_keeps_no_conversation_from_moving_on(stub_server, monkeypatch, caplog):
    """The turn goes on elsewhere after a moment, the log says who did not answer, and the end tells that one again."""
    monkeypatch.setattr("ostinato_rollout.replica_calls._LEAVING_TIMEOUT_S", 0.02)

    class Deaf(stub_server):
        answers_release = asyncio.Event()

        async def release(self, request_id):
            await self.answers_release.wait()
            await super().release(request_id)

    class Told:
        stays = True

        def choose(self, request_id, in_flight, previous):
            return 0 if previous is None else 1

    deaf, other = Deaf(), stub_server()
    client = LLMServerClient([deaf, other], policy=Told())
    await client.generate("a", [1], PARAMS)
    await client.generate("a", [1, 2], PARAMS)
    assert [len(server.requests) for server in (deaf, other)] == [1, 1]
    assert "replica 0 must release request a within 0.02 s, got no answer" in caplog.text
    deaf.answers_release.set()
    await client.release("a")
    assert (deaf.released, other.released, client.num_in_flight) == (["a"], ["a"], {0: 0, 1: 0})


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


@pytest.mark.parametrize("was_held", [True, False])
async def test_a_turn_that_met_new_weights_begins_again_however_late_it_hears_of_it(stub_server, was_held):
    """Turns were held and went on while its answer was under way; an engine that is not ready otherwise is an error."""
    server = stub_server([EngineNotReadyError("server must be ready, is without complete weights")])
    server.gate = asyncio.Event()
    client = LLMServerClient([server])
    turn = asyncio.ensure_future(client.generate("r", [1], PARAMS))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert server.running == 1
    if was_held:
        client.hold("replicas are given new weights")
        client.proceed()
    server.gate.set()
    if was_held:
        assert (await turn).token_ids == [99]
    else:
        with pytest.raises(ReplicaError, match="without complete weights"):
            await turn
    assert client.num_in_flight == {0: 0}


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


async def test_one_turn_at_a_time(stub_server):
    """A second turn of a conversation, while one is under way, is refused; the first goes on."""
    server = stub_server()
    server.gate = asyncio.Event()
    client = LLMServerClient([server])
    task = asyncio.create_task(client.generate("a", [1], PARAMS))
    await asyncio.sleep(0)
    with pytest.raises(SessionStateError, match="one turn under way at a time, got a second for 'a'"):
        await client.generate("a", [1], PARAMS)
    server.gate.set()
    assert (await task).token_ids == [99]


async def test_a_release_ends_the_turn_under_way(stub_server):
    """The turn fails with an error that says so, its counter is back before the replica is told, and the id is free again."""
    server = stub_server()
    server.gate = asyncio.Event()
    client = LLMServerClient([server])
    task = asyncio.create_task(client.generate("a", [1], PARAMS))
    await asyncio.sleep(0)
    await client.release("a")
    assert (server.running, client.num_in_flight, client.num_sticky, server.released) == (0, {0: 0}, 0, ["a"])
    with pytest.raises(SessionStateError, match="'a' while it generates; await its turn first"):
        await task
    server.gate.set()
    assert (await client.generate("a", [1], PARAMS)).token_ids == [99]


class Ending(AsyncServerBase):
    """Takes its time at the end of a cancelled turn, or makes nothing of the first cancellation; keeps the order of what it is told."""

    def __init__(self, *, ignores_first=False):
        self.log, self.let_go, self._ignores_first = [], asyncio.Event(), ignores_first

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.log.append("cancelled")
            await self.let_go.wait()
            self.log.append("ended")
            if self._ignores_first:
                await asyncio.Event().wait()
            raise

    async def chat_completion(self, raw_request):
        raise NotImplementedError

    async def release(self, request_id):
        self.log.append("released")


async def cancelled_turn(client, server):
    """A turn that was cancelled and has not ended, and a release that waits for it."""
    turn = asyncio.create_task(client.generate("a", [1], PARAMS))
    await asyncio.sleep(0)
    turn.cancel()
    await asyncio.sleep(0)
    assert server.log[0] == "cancelled"
    release = asyncio.create_task(client.release("a"))
    for _ in range(50):  # all that would happen by now has happened
        await asyncio.sleep(0)
    return turn, release


async def test_a_release_lets_a_cancelled_turn_end_and_is_told_afterwards():
    """It does not disturb a server that ends its request; until that has ended nothing is freed, and then nothing is left."""
    server = Ending()
    client = LLMServerClient([server], admission=AdmissionConfig(max_sessions=2))
    turn, release = await cancelled_turn(client, server)
    assert (server.log, client.num_in_flight, client.num_sticky) == (["cancelled"], {0: 1}, 1)
    server.let_go.set()
    await release
    assert turn.cancelled()
    assert server.log == ["cancelled", "ended", "released"]
    assert (client.num_in_flight, client.num_sticky) == ({0: 0}, 0)
    assert [replica.num_sessions for replica in client.activity().replicas] == [0]


async def test_a_turn_that_goes_on_though_it_was_cancelled_is_told_again(monkeypatch):
    """A server that swallowed its cancellation keeps a release for a while only."""
    monkeypatch.setattr("ostinato_rollout.conversation.GRACE_S", 0.05)
    server = Ending(ignores_first=True)
    server.let_go.set()
    client = LLMServerClient([server])
    turn, release = await cancelled_turn(client, server)
    await asyncio.wait_for(release, 20)
    assert turn.cancelled()
    assert (server.log[-1], client.num_in_flight, client.num_sticky) == ("released", {0: 0}, 0)


async def test_a_release_has_a_deadline(stub_server, monkeypatch, caplog):
    """A replica that never answers a release keeps nobody; what is not answered is in the log, and the place is free."""
    monkeypatch.setattr("ostinato_rollout.client._RELEASE_TIMEOUT_S", 0.02)
    server = stub_server()

    async def hang(request_id):
        await asyncio.Event().wait()

    server.release = hang
    client = LLMServerClient([server])
    await client.generate("a", [1], PARAMS)
    await client.release("a")
    assert client.num_sticky == 0
    assert "replica 0 must release request 'a' within 0.02 s" in caplog.text


async def test_a_cancelled_release_frees_the_place(stub_server):
    """Whoever is cancelled while it releases has released."""
    server = stub_server()
    entered = asyncio.Event()

    async def hang(request_id):
        entered.set()
        await asyncio.Event().wait()

    server.release = hang
    client = LLMServerClient([server])
    await client.generate("a", [1], PARAMS)
    task = asyncio.create_task(client.release("a"))
    await entered.wait()
    with pytest.raises(SessionStateError, match="is being released"):
        await client.generate("a", [1], PARAMS)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.num_sticky == 0


async def test_a_replica_that_has_failed_for_good_is_taken_out_and_its_turns_begin_again(stub_server):
    """A dead replica answers faster than any other and so would draw all new conversations: the first failure finds out that
    it is dead, and that turn and all others are served elsewhere."""
    dead, other = stub_server(), stub_server()
    dead.answers = [EngineClosedError("it is gone")] * 50

    async def health():
        return Health(EngineState.FAILED, 0)

    dead.health = health
    pool = ServerPool([dead, other])
    client = pool.client()
    outputs = await asyncio.gather(*(client.generate(f"r{index}", [1], PARAMS) for index in range(20)))
    assert [output.token_ids for output in outputs] == [[99]] * 20
    assert client.num_in_flight == {1: 0}
    assert pool.servers == (other,)
    assert "it is gone" in pool.lost[0].message
    other.answers, other.health = [EngineClosedError("so is this one")], health
    with pytest.raises(NoReplicaError, match=r"replica 0: .*it is gone; replica 1: .*so is this one"):
        await client.generate("r0", [1], PARAMS)


async def test_a_replica_that_does_not_tell_its_health_counts_as_lost(stub_server, monkeypatch):
    """After a failure, a health check that raises, or that does not answer in time, takes the replica out."""
    monkeypatch.setattr("ostinato_rollout.replica_calls._HEALTH_TIMEOUT_S", 0.02)
    servers = [stub_server() for _ in range(3)]

    async def broken():
        raise ConnectionError("no route")

    async def hang():
        await asyncio.Event().wait()

    for server, health in zip(servers, (broken, hang), strict=False):
        server.answers, server.health = [ConnectionError("lost")], health
    client = LLMServerClient(servers, policy=RoundRobin())
    assert (await client.generate("a", [1], PARAMS)).token_ids == [99]
    assert list(client.num_in_flight) == [2]


async def test_a_health_that_was_told_while_the_loop_stood_still_counts(stub_server, monkeypatch):
    """An answer that came in time, but is read only when the deadline has passed too, takes nobody out."""
    monkeypatch.setattr("ostinato_rollout.replica_calls._HEALTH_TIMEOUT_S", 0.2)
    server = stub_server([ValueError("a request that it refuses")])
    told = server.health

    async def health():
        answered = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.01, answered.set_result, None)
        asyncio.get_running_loop().call_soon(time.sleep, 0.3)  # as a trainer that computes on the event loop
        await answered
        return await told()

    server.health = health
    client = LLMServerClient([server])
    with pytest.raises(ReplicaError, match="a request that it refuses"):
        await client.generate("a", [1], PARAMS)
    assert client.num_in_flight == {0: 0}


async def test_a_replica_that_cancels_itself_is_named(stub_server):
    """A CancelledError that nobody asked for is that replica's failure, and cancels no trajectory."""
    client = LLMServerClient([stub_server([asyncio.CancelledError()])])
    with pytest.raises(ReplicaError, match="replica 0 must not cancel itself"):
        await client.generate("a", [1], PARAMS)
    assert client.num_in_flight == {0: 0}


async def test_a_busy_replica_is_left_by_the_margin(stub_server):
    """A conversation whose replica has so many more under way than the best moves there at its next turn, and stays."""
    servers = [stub_server(), stub_server()]
    client = LLMServerClient(servers, policy=StickyLeastInFlight(0, 3))
    for number in range(8):
        await client.generate(f"r{number}", [1], PARAMS)
    home, other = (0, 1) if len(servers[0].requests) >= 4 else (1, 0)
    *busy, mine = [request_id for _, _, request_id in servers[home].requests[:4]]
    servers[home].gate = asyncio.Event()
    tasks = [asyncio.create_task(client.generate(request_id, [1], PARAMS)) for request_id in busy]
    await asyncio.sleep(0)
    assert client.num_in_flight == {home: 3, other: 0}
    await client.generate(mine, [1, 2], PARAMS)
    assert servers[other].requests[-1] == ([1, 2], PARAMS, mine)
    servers[home].gate.set()
    await asyncio.gather(*tasks)
    await client.generate(mine, [1, 2, 3], PARAMS)
    assert servers[other].requests[-1] == ([1, 2, 3], PARAMS, mine)


async def test_an_abort_after_the_stop_token_is_an_end(stub_server, output):
    """A turn whose last token ends it is over, whatever the engine calls it: nothing is sampled behind a stop token."""
    server = stub_server([output([4, 7], StopReason.ABORTED)])
    result = await LLMServerClient([server]).generate("a", [1], SamplingParams(max_tokens=9, stop_token_ids=(7,)))
    assert (result.token_ids, result.stop_reason, result.stop_token_id) == ([4, 7], StopReason.STOP, 7)
    assert len(server.requests) == 1


async def test_a_server_that_answers_a_cancellation_with_an_abort_keeps_nobody(stub_server, output):
    """A cancellation, or a deadline, that a server turns into an aborted output still ends the turn."""

    class Swallowing(stub_server):
        async def generate(self, prompt_ids, sampling_params, request_id, media=()):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return output([5], StopReason.ABORTED)

    client = LLMServerClient([Swallowing()], timeout_s=0.05)
    task = asyncio.create_task(client.generate("a", [1], PARAMS))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(RequestTimeoutError, match="generate must finish within"):
        await client.generate("b", [1], PARAMS)
    assert client.num_in_flight == {0: 0}


async def test_a_span_without_tokens_is_no_span(stub_server):
    """A version that an engine switched to without sampling under it leaves no empty span behind an abort."""
    first = TokenOutput([1, 2], [-1.0] * 2, StopReason.ABORTED, policy_versions=(PolicySpan(0, 1), PolicySpan(2, 2)))
    last = TokenOutput([3], [-1.0], StopReason.STOP, policy_versions=(PolicySpan(0, 3),))
    result = await LLMServerClient([stub_server([first, last])]).generate("a", [1], PARAMS)
    assert result.policy_versions == (PolicySpan(0, 1), PolicySpan(2, 3))


async def test_a_cancellation_that_a_server_turns_into_anything_ends_the_turn(stub_server, output):
    """An answer, an error or its own death: whoever was cancelled, or is past the deadline, begins nothing elsewhere."""
    made_of_it = [output([5]), ValueError("disturbed"), EngineClosedError("gone")]

    class Swallowing(stub_server):
        async def generate(self, prompt_ids, sampling_params, request_id, media=()):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if isinstance(self.answers[0], Exception):
                    raise self.answers[0] from None
                return self.answers[0]

        async def health(self):
            return Health(EngineState.FAILED, 0)

    for made in made_of_it:
        other = stub_server()
        client = LLMServerClient([Swallowing([made]), other], timeout_s=0.05, policy=First())
        task = asyncio.create_task(client.generate("a", [1], PARAMS))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(RequestTimeoutError, match="generate must finish within"):
            await client.generate("b", [1], PARAMS)
        assert (client.num_in_flight, other.requests) == ({0: 0, 1: 0}, [])


class First:
    """Chooses the first replica."""

    def choose(self, request_id, in_flight, previous):
        return min(in_flight)


async def test_a_turn_that_was_cancelled_before_may_end(stub_server):
    """Only what strikes the turn itself ends it: a task that has survived a cancellation still gets answers."""
    client = LLMServerClient([stub_server()])
    entered = asyncio.Event()

    async def survive():
        with contextlib.suppress(asyncio.CancelledError):
            entered.set()
            await asyncio.Event().wait()
        return await client.generate("a", [1], PARAMS)

    task = asyncio.create_task(survive())
    await entered.wait()
    task.cancel()
    assert (await task).token_ids == [99]


@pytest.mark.parametrize("end", ["dies", "answers"])
async def test_what_ends_after_its_release_leaves_nothing(stub_server, monkeypatch, output, end, let_go):
    """A server that ignores that its turn was given up until the release has passed its deadline: no place is held
    afterwards, and nobody gets what it brings."""
    monkeypatch.setattr("ostinato_rollout.client._RELEASE_TIMEOUT_S", 0.02)

    class Stubborn(stub_server):
        async def generate(self, prompt_ids, sampling_params, request_id, media=()):
            while not let_go.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await let_go.wait()
            if end == "dies":
                raise EngineClosedError("gone")
            return output([5])

        async def health(self):
            return Health(EngineState.FAILED, 0)

    client = LLMServerClient([Stubborn()], admission=AdmissionConfig(max_sessions=2))
    task = asyncio.create_task(client.generate("a", [1], PARAMS))
    await asyncio.sleep(0)
    other = stub_server()
    client.add_server(other)
    await client.release("a")
    let_go.set()
    with pytest.raises(SessionStateError, match="release must follow the last turn"):
        await task
    assert (other.requests, client.num_sticky, client.num_in_flight) == ([], 0, {0: 0, 1: 0})
    assert [replica.num_sessions for replica in client.activity().replicas] == [0, 0]


@pytest.mark.parametrize("answer", [None, asyncio.CancelledError()])
async def test_a_health_that_is_none_counts_as_none(stub_server, answer):
    """A replica that answers nothing, or cancels itself, when asked for its health is lost like one that is silent."""

    class Odd(stub_server):
        async def health(self):
            if answer is not None:
                raise answer

    client = LLMServerClient([Odd([ValueError("broken")]), stub_server()], policy=First())
    assert (await client.generate("a", [1], PARAMS)).token_ids == [99]
    assert client.num_in_flight == {1: 0}


async def test_all_replicas_that_served_a_conversation_hear_of_its_end(stub_server):
    """Those that it has moved away from keep something of it, too; one that fails to free it keeps no other from it."""

    class Failing(stub_server):
        async def release(self, request_id):
            await super().release(request_id)
            raise asyncio.CancelledError if request_id == "a" else ValueError("broken")

    servers = [stub_server(), Failing(), stub_server(), stub_server()]
    client = LLMServerClient(servers, policy=RoundRobin())
    for request_id in ("a", "b"):
        for _ in range(3):
            await client.generate(request_id, [1], PARAMS)
    await client.release("a")
    await client.release("b")
    assert [server.released for server in servers] == [["a", "b"], ["a", "b"], ["a"], ["b"]]
    assert client.num_sticky == 0


async def test_a_server_that_does_not_tell_what_it_can_is_not_added(stub_server):
    """Its error is the caller's, and the client goes on as if it had not been there."""

    class Broken(stub_server):
        def capabilities(self):
            raise ValueError("broken")

    client = LLMServerClient([stub_server()])
    with pytest.raises(ValueError, match="broken"):
        client.add_server(Broken())
    assert client.num_in_flight == {0: 0}
    assert (await client.generate("a", [1], PARAMS)).token_ids == [99]


async def test_a_cancelled_release_still_reaches_the_replicas(stub_server):
    """Whoever is cancelled while it releases leaves nothing at any replica."""
    entered, free = asyncio.Event(), asyncio.Event()

    class Slow(stub_server):
        async def release(self, request_id):
            entered.set()
            await free.wait()
            await super().release(request_id)

    servers = [Slow(), stub_server()]
    client = LLMServerClient(servers, policy=RoundRobin())
    for _ in servers:
        await client.generate("a", [1], PARAMS)
    task = asyncio.create_task(client.release("a"))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    free.set()
    await asyncio.gather(*client._ending)
    assert [server.released for server in servers] == [["a"], ["a"]]
    await asyncio.sleep(0)
    assert (client._ending, client.num_sticky) == (set(), 0)


async def test_a_release_that_comes_late_spares_who_goes_on_under_the_name(stub_server, let_go):
    """A release that was cancelled while the turn would not end tells no replica if the name is in
    use again by then; the next release tells all."""

    class Stubborn(stub_server):
        async def generate(self, prompt_ids, sampling_params, request_id, media=()):
            while not let_go.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await let_go.wait()
            return await super().generate(prompt_ids, sampling_params, request_id, media)

    server, other = Stubborn(), stub_server()
    client = LLMServerClient([server, other], policy=RoundRobin())
    turn = asyncio.create_task(client.generate("a", [1], PARAMS))
    await asyncio.sleep(0)
    release = asyncio.create_task(client.release("a"))
    await asyncio.sleep(0)
    release.cancel()
    with pytest.raises(asyncio.CancelledError):
        await release
    assert (await client.generate("a", [1], PARAMS)).token_ids == [99]
    let_go.set()
    with pytest.raises(SessionStateError):
        await turn
    await asyncio.gather(*client._ending)
    assert (server.released, other.released, client.num_sticky) == ([], [], 1)
    await client.release("a")
    assert (server.released, other.released, client.num_sticky) == (["a"], ["a"], 0)
