"""How many conversations are under way, and who waits."""

from __future__ import annotations

import asyncio
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_engines import AsyncServerBase, Capabilities, SamplingParams, StopReason, TokenOutput
from ostinato_rollout import (
    AdmissionConfig,
    LLMServerClient,
    NoReplicaError,
    RequestTimeoutError,
    ServerPool,
    SessionInputError,
    SessionStateError,
)

PARAMS = SamplingParams(max_tokens=10)


@pytest.fixture
def sized(stub_server):
    """Makes servers that say how much they hold."""

    def make(tokens=None, sessions=None):
        server = stub_server()
        server.capabilities = lambda: Capabilities(kv_capacity_tokens=tokens, kv_capacity_sessions=sessions)
        return server

    return make


def begin(client, *request_ids, prompt=10, max_tokens=10):
    params = SamplingParams(max_tokens=max_tokens)
    return [asyncio.create_task(client.generate(name, [1] * prompt, params)) for name in request_ids]


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def running(*servers):
    return [request_id for server in servers for _, _, request_id in server.requests]


async def test_no_more_conversations_than_the_memory_holds_in_order_of_arrival(sized):
    """Of six conversations of 20 tokens, a memory of 50 has two under way; the others come in as places get free, in order,
    and a place is kept between turns until its conversation is released."""
    server = sized(tokens=50)
    client = LLMServerClient([server], admission=AdmissionConfig(expected_tokens=20, growth_share=1))
    tasks = begin(client, *"abcdef")
    await settle()
    assert running(server) == ["a", "b"]
    assert client.num_waiting == 4
    await tasks[0]
    await client.generate("a", [1] * 15, PARAMS)
    await settle()
    assert running(server) == ["a", "b", "a"]
    for done, name in enumerate("abcdef"):
        await tasks[done]
        await client.release(name)
        await settle()
        assert running(server)[3:] == list("cdef")[: done + 1]
    assert (client.num_sticky, client.num_waiting, client.num_in_flight) == (0, 0, {0: 0})
    assert client.activity().replicas[0].held_tokens == 0


async def test_conversations_are_counted_where_only_they_count(sized):
    """An engine that keeps so many conversations has so many, each replica for itself."""
    servers = [sized(sessions=1), sized(sessions=2)]
    client = LLMServerClient(servers, admission=AdmissionConfig())
    tasks = begin(client, *"abcd")
    await settle()
    assert [len(server.requests) for server in servers] == [1, 2]
    await client.release(servers[0].requests[0][2])
    await asyncio.gather(*tasks)
    assert [len(server.requests) for server in servers] == [2, 2]


async def test_settings_come_before_what_engines_say(sized):
    """A capacity in the settings is used instead of the engine's; without admission nobody waits."""
    for admission, expected in (
        (AdmissionConfig(kv_capacity_tokens=64, expected_tokens=20, growth_share=1), 3),
        (AdmissionConfig(kv_capacity_tokens=64, expected_tokens=20, growth_share=0.5), 4),
        (AdmissionConfig(max_sessions=1), 1),
        (AdmissionConfig(expected_tokens=10), 2),
        (AdmissionConfig(enable=False), 5),
        (None, 5),
    ):
        server = sized(tokens=25)
        client = LLMServerClient([server], admission=admission)
        tasks = begin(client, *"abcde")
        await settle()
        assert len(server.requests) == expected
        for task in tasks:
            task.cancel()


async def test_clients_of_the_same_replicas_share_what_they_hold(sized):
    """Two clients that are told so admit half each, of tokens and of sessions, and at least one conversation."""
    admission = AdmissionConfig(expected_tokens=20, growth_share=1)
    for server, share in ((sized(tokens=100), 2), (sized(sessions=5), 2), (sized(sessions=1), 1)):
        clients = [LLMServerClient([server], admission=admission, num_clients=2) for _ in range(2)]
        tasks = [task for client in clients for task in begin(client, *"abcd")]
        await settle()
        assert len(server.requests) == 2 * share
        for task in tasks:
            task.cancel()
    with pytest.raises(SessionInputError, match="num_clients must be at least 1, got 0"):
        LLMServerClient([sized()], num_clients=0)


async def test_nobody_waits_where_no_engine_says_what_it_holds(stub_server):
    """Without figures there is no bound."""
    client = LLMServerClient([stub_server()], admission=AdmissionConfig())
    await asyncio.gather(*begin(client, *(str(number) for number in range(50))))
    assert client.num_sticky == 50


async def test_a_conversation_larger_than_the_memory_gets_an_empty_replica(sized):
    """What is expected to be longer than any memory runs alone instead of waiting for ever."""
    server = sized(tokens=50)
    client = LLMServerClient([server], admission=AdmissionConfig())
    tasks = begin(client, "a") + begin(client, "huge", prompt=500) + begin(client, "b")
    await settle()
    assert running(server) == ["a"]
    await tasks[0]
    await client.release("a")
    await settle()
    assert running(server) == ["a", "huge"]
    await client.release("huge")
    await asyncio.gather(*tasks)
    assert running(server) == ["a", "huge", "b"]


async def test_a_conversation_that_grows_counts_for_what_it_is(sized, output):
    """One that outgrows what was expected of it takes its real length, and never waits again itself."""
    server = sized(tokens=50)
    server.answers = [output(range(10))]
    client = LLMServerClient([server], admission=AdmissionConfig(expected_tokens=10))
    await client.generate("a", [1] * 10, PARAMS)
    assert client.activity().replicas[0].held_tokens == 20
    await client.generate("a", [1] * 60, PARAMS)
    assert client.activity().replicas[0].held_tokens == 61
    (task,) = begin(client, "b")
    await settle()
    assert not task.done()
    await client.generate("a", [1] * 30, PARAMS)
    await task
    assert client.activity().replicas[0].held_tokens == 31 + 11


async def test_conversations_of_one_group_do_not_wait_for_each_other(sized):
    """Where a trajectory has a place, its other conversations get theirs at once, from the queue as well: else two that
    hold one place each would wait for their second one for ever."""
    server = sized(sessions=1)
    client = LLMServerClient([server], admission=AdmissionConfig(timeout_s=5))
    await client.admit("a0", num_prompt_tokens=10, group="a")
    queue = [
        asyncio.create_task(client.admit(name, num_prompt_tokens=10, group=name[0])) for name in ("b0", "c0", "b1")
    ]
    await client.admit("a1", num_prompt_tokens=10, group="a")
    await settle()
    assert [task.done() for task in queue] == [False] * 3
    await client.release("a0")
    await settle()
    assert [task.done() for task in queue] == [False] * 3
    await client.release("a1")
    await settle()
    assert [task.done() for task in queue] == [True, False, True]
    await client.release("b0")
    await client.release("b1")
    assert await queue[1] > 0
    await client.release("c0")
    assert client.num_sticky == 0


async def test_cancelling_gives_the_place_back_wherever_it_strikes(sized):
    """Cancelled in the queue, or between being admitted and noticing it, a conversation leaves nothing behind and the next
    one comes in."""
    server = sized(sessions=1)
    client = LLMServerClient([server], admission=AdmissionConfig())
    tasks = begin(client, *"abcd")
    await settle()
    tasks[1].cancel()
    await settle()
    assert client.num_waiting == 2
    await client.release("a")  # gives the place to c, whose task has not noticed yet
    tasks[2].cancel()
    assert (await tasks[3]).token_ids == [99]
    assert running(server) == ["a", "d"]
    await client.release("d")
    assert (client.num_sticky, client.num_in_flight) == (0, {0: 0})
    assert client.activity().replicas[0].num_sessions == 0


async def test_a_place_that_a_move_leaves_goes_to_the_next(sized):
    """A conversation that is too large for what is left beside others gets the replica that the last one there leaves."""

    class Told:
        def choose(self, request_id, in_flight, previous):
            return {"stays": 1, "moves": 0 if previous is None else 1}.get(request_id, min(in_flight))

    client = LLMServerClient([sized(tokens=100), sized(tokens=100)], policy=Told(), admission=AdmissionConfig())
    await client.generate("moves", [1] * 30, PARAMS)
    await client.generate("stays", [1] * 40, PARAMS)
    (large,) = begin(client, "large", prompt=80)
    await settle()
    assert client.num_waiting == 1
    await client.generate("moves", [1] * 31, PARAMS)
    assert client.num_waiting == 0
    await large
    assert [replica.num_sessions for replica in client.activity().replicas] == [1, 2]
    assert client.num_in_flight == {0: 0, 1: 0}


async def test_a_wait_past_its_deadline_says_who_holds_what(sized, caplog):
    """The error names the request, how long it waited, the last progress and what replicas hold; the log has a dump."""
    client = LLMServerClient([sized(tokens=30)], admission=AdmissionConfig(expected_tokens=30, timeout_s=0.5))
    await client.generate("holder", [1] * 20, PARAMS)
    with caplog.at_level(logging.ERROR), pytest.raises(RequestTimeoutError) as caught:
        await client.generate("late", [1] * 20, PARAMS)
    assert "'late' must get a place within 0.5 s" in str(caught.value)
    assert "replica 0: 0 in flight, 1 conversations with 24 of 30 tokens" in str(caught.value)
    assert (client.num_waiting, client.num_sticky) == (0, 1)
    await client.release("holder")
    assert (await client.generate("late", [1] * 20, PARAMS)).token_ids == [99]


async def test_releasing_one_that_waits_ends_its_wait(sized):
    """Its generate ends with an error instead of staying in the queue."""
    client = LLMServerClient([sized(sessions=1)], admission=AdmissionConfig())
    await client.generate("a", [1], PARAMS)
    (task,) = begin(client, "b")
    await settle()
    await client.release("b")
    with pytest.raises(SessionStateError, match="'b' while it waits for a place"):
        await task
    assert (client.num_waiting, client.num_sticky) == (0, 1)


async def test_replicas_that_come_and_go_change_who_waits(sized):
    """A new replica lets the next ones in; when the last one goes, those that wait are told at once."""
    first, second = sized(sessions=1), sized(sessions=1)
    client = LLMServerClient([first], admission=AdmissionConfig())
    tasks = begin(client, *"abc")
    await settle()
    client.add_server(second)
    await settle()
    assert running(first, second) == ["a", "b"]
    client.remove_server(first)
    await settle()
    assert not tasks[2].done()
    assert (await client.generate("a", [1, 2], PARAMS)).token_ids == [99]  # it moves, although there is no room
    assert running(second) == ["b", "a"]
    client.remove_server(second, reason="was switched off")
    with pytest.raises(NoReplicaError, match=r"'c', got none .the last one, replica 1 was switched off"):
        await tasks[2]


async def test_capacities_are_asked_for_again_when_the_pool_has_started(stub_server):
    """An engine that knows only after its start how much it holds bounds the client that was made before."""

    class Late(stub_server):
        def capabilities(self):
            return Capabilities(kv_capacity_sessions=1 if "start" in self.log else None)

    pool = ServerPool([Late()])
    client = pool.client(admission=AdmissionConfig())
    await pool.start()
    tasks = begin(client, *"ab")
    await settle()
    assert client.num_waiting == 1
    await client.release("a")
    await asyncio.gather(*tasks)


async def test_conversations_count_for_their_length_and_part_of_what_is_expected(sized, output):
    """A conversation counts for its length and its share of what it is still expected to add, never for more than it may
    add, and what is expected is brought up to date with every turn."""
    server = sized(tokens=1000)
    server.answers = [output(range(30)), output(range(40))]
    client = LLMServerClient([server], admission=AdmissionConfig(growth_share=0.5))

    def held():
        return client.activity().replicas[0].held_tokens

    await client.admit("a", num_prompt_tokens=100, max_growth=80)
    assert held() == 100 + 20  # half of the 40 that are expected at first
    await client.generate("a", [1] * 100, SamplingParams(max_tokens=80))
    assert held() == 130 + 21  # 41, for it has added 30 and did not end
    await client.generate("a", [1] * 130, SamplingParams(max_tokens=50))
    assert held() == 170 + 5  # no more than the 10 that it may add
    await client.release("a")
    assert held() == 0


async def test_one_that_need_not_wait_counts_for_its_growth_as_well(sized):
    """A conversation that is let in because its group has a place counts from its beginning on like any other."""
    client = LLMServerClient([sized(tokens=40)], admission=AdmissionConfig(expected_tokens=30, growth_share=0.5))
    for name in ("a0", "a1", "a2"):
        await client.admit(name, num_prompt_tokens=10, group="a")
    assert client.activity().replicas[0].held_tokens == 3 * (10 + 10)


async def test_what_is_expected_of_one_that_waits_is_brought_up_to_date(sized):
    """One that waited because much was expected comes in as soon as little is, though it came when that was not known."""
    server = sized(tokens=400)
    client = LLMServerClient([server], admission=AdmissionConfig(growth_share=1))
    holders = [f"h{number}" for number in range(3)]
    for name in holders:
        await client.admit(name, num_prompt_tokens=10, max_growth=200)
    waiting = asyncio.create_task(client.admit("late", num_prompt_tokens=80, max_growth=200))
    await settle()
    assert (client.num_waiting, client.activity().replicas[0].held_tokens) == (1, 330)
    for name in holders:  # each turn adds one token, and the first two conversations end
        await client.generate(name, [1] * 10, PARAMS)
    for name in holders[:2]:
        await client.release(name)
    await asyncio.wait_for(waiting, 5)
    assert client.num_sticky == 2


async def test_short_conversations_let_more_of_them_in(sized):
    """Conversations that may add 900 tokens and add one each run side by side once that is known."""
    admission = AdmissionConfig(growth_share=1)
    for num_seen, num_at_once in ((0, 6), (2000, 100)):
        server = sized(tokens=3000)
        client = LLMServerClient([server], admission=admission)
        for number in range(num_seen):
            name = f"seen {number}"
            await client.admit(name, num_prompt_tokens=10, max_growth=900)
            await client.generate(name, [1] * 10, PARAMS)
            await client.release(name)
        asked = len(server.requests)
        server.gate = asyncio.Event()
        tasks = begin(client, *(str(number) for number in range(200)), max_tokens=900)
        await settle()
        assert len(server.requests) - asked == pytest.approx(num_at_once, rel=0.2)
        for task in tasks:
            task.cancel()


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("name", ["kv_capacity_tokens", "max_sessions", "expected_tokens", "timeout_s"])
def test_limits_that_allow_nothing_are_refused(name, value):
    """A capacity, an expectation or a deadline of nothing is an error that names it."""
    with pytest.raises(ValueError, match=f"{name} must be"):
        AdmissionConfig(**{name: value})


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_a_share_is_a_share(value):
    """Room for less than nothing or for more than all is an error."""
    with pytest.raises(ValueError, match=f"growth_share must be from 0 to 1, got {value}"):
        AdmissionConfig(growth_share=value)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=25),
    capacities=st.lists(st.none() | st.integers(10, 120), min_size=1, max_size=3),
    turns=st.integers(1, 3),
)
def test_nobody_starves_and_no_memory_is_overbooked(lengths, capacities, turns):
    """Whatever lengths arrive at whatever memories: all are served, first turns reach the replicas in order of arrival, and
    a replica with more than one conversation never holds more than its memory."""

    class Server(AsyncServerBase):
        def __init__(self, capacity):
            self.capacity = capacity

        def capabilities(self):
            return Capabilities(kv_capacity_tokens=self.capacity)

        async def generate(self, prompt_ids, sampling_params, request_id, media=()):
            arrivals.append(request_id)
            for replica in client.activity().replicas:
                bound = replica.capacity_tokens
                assert bound is None or replica.num_sessions == 1 or replica.held_tokens <= bound
            await asyncio.sleep(0)
            return TokenOutput([1], [0.0], StopReason.STOP)

        async def chat_completion(self, raw_request):
            raise NotImplementedError

    arrivals: list[str] = []
    admission = AdmissionConfig(timeout_s=30, growth_share=1)
    client = LLMServerClient([Server(capacity) for capacity in capacities], admission=admission)

    async def one(number, length):
        for _ in range(turns):
            await client.generate(str(number), [1] * length, SamplingParams(max_tokens=1))
        await client.release(str(number))

    async def run():
        await asyncio.gather(*(one(number, length) for number, length in enumerate(lengths)))

    asyncio.run(run())
    assert list(dict.fromkeys(arrivals)) == [str(number) for number in range(len(lengths))]
    assert (client.num_sticky, set(client.num_in_flight.values())) == (0, {0})
    assert {replica.held_tokens for replica in client.activity().replicas} == {0}
