"""The simulated replica, against hand-computed cases, a simulation token by token, and what is conserved."""

from __future__ import annotations

import asyncio

import pytest
from benchmarks.makespan_replica import ReplicaModel, SimulatedReplica
from benchmarks.virtual_time import run_in_virtual_time
from hypothesis import given
from hypothesis import strategies as st

from ostinato_engines import EngineInputError, SamplingParams

MODEL = ReplicaModel(
    count=1,
    kv_capacity_tokens=1000,
    weight_bytes=50.0,
    kv_bytes_per_token=1.0,
    bandwidth_bytes_per_s=100.0,
    prefill_tokens_per_s=10.0,
)
"""A step of an empty replica takes 0.5 s and 0.01 s for each token in memory; a prefill 0.1 s a token."""


def with_capacity(tokens):
    return ReplicaModel(
        **{**{name: getattr(MODEL, name) for name in MODEL.__struct_fields__}, "kv_capacity_tokens": tokens}
    )


def simulate(program, model=MODEL):
    """Run a program with a new replica; return its result and the replica."""
    replica = SimulatedReplica(model)
    return run_in_virtual_time(program(replica)), replica


async def turn(replica, name, num_prompt, num_wanted, at=0.0):
    """A request at some time; return when it was answered, and the answer."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(at - loop.time())
    output = await replica.generate(range(num_prompt), SamplingParams(max_tokens=num_wanted), name)
    return loop.time(), output


@given(
    num_steps=st.integers(1, 400),
    kv_tokens=st.integers(1, 10**6),
    num_running=st.integers(1, 300),
    part=st.floats(0.001, 0.999),
)
def test_steps_in_closed_form_are_the_sum_of_single_ones(num_steps, kv_tokens, num_running, part):
    """The time of many steps is the sum of theirs, and within the last one all of them have begun."""
    single = [MODEL.steps_s(1, kv_tokens + number * num_running, num_running) for number in range(num_steps)]
    assert single[0] == pytest.approx((50 + kv_tokens) / 100)
    assert MODEL.steps_s(num_steps, kv_tokens, num_running) == pytest.approx(sum(single))
    seconds = sum(single[:-1]) + part * single[-1]
    assert MODEL.steps_begun(seconds, kv_tokens, num_running) == num_steps


def test_one_conversation_alone():
    """Prefill of 20 tokens: 2 s. Three steps that read 20, 21 and 22 tokens: 0.70, 0.71, 0.72 s. The next turn finds its 23
    tokens and computes the 7 new ones: 0.7 s, and one step that reads 30: 0.8 s."""

    async def program(replica):
        first, output = await turn(replica, "a", 20, 3)
        second, later = await turn(replica, "a", 30, 1, at=10.0)
        return first, output.num_cached_tokens, second, later.num_cached_tokens, len(later.token_ids)

    result, replica = simulate(program)
    assert result == (pytest.approx(2 + 2.13), 0, pytest.approx(10 + 0.7 + 0.8), 23, 1)
    assert (replica.num_decoded, replica.num_prefilled, replica.kv_tokens) == (4, 27, 31)
    assert replica.busy_s == pytest.approx(2 + 2.13 + 1.5)


def test_two_conversations_share_steps_and_what_comes_waits_for_the_end_of_one():
    """`a` (10 tokens) prefills 1 s, then steps of 0.60, 0.61, ... s. `b` comes at 1.7, in the second step: its prefill begins at
    2.21 and ends at 2.71, while `a` stands still with 12 tokens. Then both go on: steps read 12 + 5, then two more each."""

    async def program(replica):
        return await asyncio.gather(turn(replica, "a", 10, 4), turn(replica, "b", 5, 3, at=1.7))

    (a, b), replica = simulate(program)
    assert a[0] == pytest.approx(2.71 + 0.67 + 0.69)
    # a has ended with 14 tokens, which stay cached and are read all the same: b's last step reads 14 + 7
    assert b[0] == pytest.approx(2.71 + 0.67 + 0.69 + 0.71)
    assert replica.num_decoded == 7


def test_a_conversation_that_is_over_is_read_no_more():
    """After the release of `a`, the next step of `b` reads only its own tokens."""

    async def program(replica):
        (first, _) = await turn(replica, "a", 10, 1)
        waiting = asyncio.create_task(turn(replica, "b", 10, 2, at=first))
        await asyncio.sleep(0.5)
        await replica.release("a")
        return first, (await waiting)[0]

    (first, second), replica = simulate(program)
    assert (first, second) == (pytest.approx(1.6), pytest.approx(1.6 + 1 + 0.60 + 0.61))
    assert replica.kv_tokens == 12


def test_those_who_wait_longest_are_evicted_first():
    """Of three that wait, a memory of 40 drops the one that was used first when it needs room, and then the next one."""

    async def program(replica):
        for name in "abc":
            await turn(replica, name, 10, 1)
        await turn(replica, "a", 11, 1)
        await turn(replica, "d", 10, 1)
        return [(await turn(replica, name, 12, 1))[1].num_cached_tokens for name in "ba"]

    cached, replica = simulate(program, with_capacity(40))
    assert (cached, replica.num_evicted) == ([0, 12], 2)


def test_where_running_ones_outgrow_the_memory_the_newest_is_computed_anew():
    """Two that need 40 tokens each of a memory of 60 are both answered in full: the second one is put aside, and computes its
    prompt and what it had once more."""

    async def program(replica):
        return await asyncio.gather(turn(replica, "a", 10, 30), turn(replica, "b", 10, 30))

    (a, b), replica = simulate(program, with_capacity(60))
    assert (a[1].num_preempted, b[1].num_preempted, len(b[1].token_ids)) == (0, 1, 30)
    assert (replica.num_decoded, replica.num_prefilled) == (60, 20 + 30)
    assert b[0] > a[0]


def test_a_request_that_can_never_fit_is_refused():
    """Prompt and answer must fit the memory of a replica."""

    async def program(replica):
        with pytest.raises(EngineInputError, match="must fit 1000 tokens, got 900 and 101"):
            await turn(replica, "a", 900, 101)
        return (await turn(replica, "a", 900, 100))[0]

    simulate(program)


@pytest.mark.parametrize("at", [0.5, 1.5, 3.05])
def test_a_request_that_is_given_up_leaves_nothing(at):
    """Cancelled while it waits, prefills or runs, it uses no memory afterwards, and others are answered."""

    async def program(replica):
        task = asyncio.create_task(turn(replica, "a", 10, 50, at=1.0))
        other = asyncio.create_task(turn(replica, "b", 20, 5))
        await asyncio.sleep(at)
        task.cancel()
        await other
        await replica.release("b")
        await asyncio.sleep(100)
        return len(other.result()[1].token_ids)

    answered, replica = simulate(program)
    assert (answered, replica.kv_tokens) == (5, 0)


def token_by_token(requests, model):
    """When requests (at, prompt, wanted), sorted by time, end in a replica with room for all: step by step, with no sums."""
    now, queue, running, cached, ends = 0.0, list(enumerate(requests)), [], 0, {}
    while queue or running:
        if queue and queue[0][1][0] <= now + 1e-9:
            index, (_, prompt, wanted) = queue.pop(0)
            now += prompt / model.prefill_tokens_per_s
            running.append([index, prompt, wanted])
        elif running:
            tokens = cached + sum(one[1] for one in running)
            now += (model.weight_bytes + model.kv_bytes_per_token * tokens) / model.bandwidth_bytes_per_s
            for one in running:
                one[1], one[2] = one[1] + 1, one[2] - 1
            for one in [one for one in running if not one[2]]:
                running.remove(one)
                cached += one[1]
                ends[one[0]] = now
        else:
            now = queue[0][1][0]
    return [ends[index] for index in range(len(requests))]


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=8))
def test_requests_end_when_a_simulation_token_by_token_says(requests):
    """Whatever requests come whenever, their answers come at the times that single steps add up to."""
    requests = sorted((at / 9.7, prompt, wanted) for at, prompt, wanted in requests)

    async def program(replica):
        turns = (turn(replica, str(index), prompt, wanted, at) for index, (at, prompt, wanted) in enumerate(requests))
        return [end for end, _ in await asyncio.gather(*turns)]

    ends, _ = simulate(program)
    assert ends == pytest.approx(token_by_token(requests, MODEL), abs=1e-6)


@given(
    conversations=st.lists(
        st.lists(st.tuples(st.integers(1, 30), st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=4),
        min_size=1,
        max_size=8,
    ),
    capacity=st.integers(160, 400),
)
def test_tokens_are_conserved(conversations, capacity):
    """However small the memory, each token is sampled once, none is computed less than once, the memory is never exceeded and
    empty in the end, and a replica computes no longer than the clock runs."""

    async def program(replica):
        async def converse(name, turns):
            length = 10
            for wanted, tool_s, observed in turns:
                output = await replica.generate(range(length), SamplingParams(max_tokens=wanted), name)
                assert len(output.token_ids) == wanted
                assert replica.kv_tokens <= capacity
                length += wanted + observed
                await asyncio.sleep(tool_s)
            await replica.release(name)

        await asyncio.gather(*(converse(str(index), turns) for index, turns in enumerate(conversations)))
        return asyncio.get_running_loop().time()

    seconds, replica = simulate(program, with_capacity(capacity))
    assert replica.num_decoded == sum(wanted for turns in conversations for wanted, _, _ in turns)
    ideal = sum(10 + sum(observed for _, _, observed in turns[:-1]) for turns in conversations)
    assert replica.num_prefilled >= ideal
    if not replica.num_evicted and not replica.num_preempted:
        assert replica.num_prefilled == ideal
    assert (replica.kv_tokens, replica.busy_s <= seconds + 1e-6) == (0, True)
