"""What policies chose, written and asked again."""

from __future__ import annotations

import asyncio
import dataclasses
import random

import pytest

from ostinato_engines import SamplingParams
from ostinato_rollout import (
    AdmissionConfig,
    BalancedTokens,
    DecisionLog,
    LeastInFlight,
    LLMServerClient,
    RandomReplica,
    RoundRobin,
    SessionInputError,
    StickyLeastInFlight,
    replay,
)
from ostinato_rollout.decision_log import read_decisions

PARAMS = SamplingParams(max_tokens=4)


async def converse(stub_server, path, policy, *, seed=0, admission=None, **options):
    """Thirty conversations of some turns, interleaved and cut by a seed, while a replica leaves and another one comes."""
    draw = random.Random(seed)
    servers = [stub_server() for _ in range(4)]
    log = DecisionLog(path, **options)
    client = LLMServerClient(servers, policy=policy, admission=admission, decision_log=log)

    async def one(number):
        for _ in range(draw.randint(1, 4)):
            for _ in range(draw.randint(0, 3)):
                await asyncio.sleep(0)
            await client.generate(f"r{number}", [1], PARAMS)
        await client.release(f"r{number}")

    async def change():
        for _ in range(4):
            await asyncio.sleep(0)
        client.remove_server(servers[1])
        client.add_server(stub_server())

    await asyncio.gather(*map(one, range(30)), change())
    log.close()
    return client


@pytest.mark.parametrize(
    "policy",
    [BalancedTokens(3, 0), StickyLeastInFlight(3, 2), LeastInFlight(3), RandomReplica(3), RoundRobin()],
    ids=lambda p: type(p).__name__,
)
async def test_a_replay_makes_the_same_choices(stub_server, tmp_path, policy):
    """A new policy with the same settings answers every question of the log as the first one did, while replicas come and
    go; the header says which policy it was."""
    path = tmp_path / "decisions.jsonl"
    await converse(stub_server, path, policy)
    header, decisions = read_decisions(path)
    decisions = list(decisions)
    assert header.policy == repr(policy)
    assert len(decisions) >= 30
    result = replay(path, dataclasses.replace(policy))
    assert result.difference is None
    assert result.choices == [decision.chosen for decision in decisions]
    assert {1, 4} <= {replica for decision in decisions for replica in decision.in_flight}


async def test_a_replay_names_the_first_choice_that_differs(stub_server, tmp_path):
    """Another policy is stopped at the first question that it answers otherwise, which is told with both answers."""
    path = tmp_path / "decisions.jsonl"
    await converse(stub_server, path, StickyLeastInFlight(3))
    logged = [decision.chosen for decision in read_decisions(path)[1]]
    result = replay(path, RoundRobin())
    assert result.difference is not None
    number = result.difference.number
    assert result.choices[:-1] == logged[:number]
    assert result.difference.chosen == result.choices[-1] != logged[number] == result.difference.decision.chosen


async def test_the_log_holds_what_the_policy_saw(stub_server, tmp_path):
    """With admission, that is the replicas with room and the one where the conversation is."""
    path = tmp_path / "decisions.jsonl"
    log = DecisionLog(path)
    client = LLMServerClient(
        [stub_server(), stub_server()],
        policy=RoundRobin(),
        admission=AdmissionConfig(max_sessions=1),
        decision_log=log,
    )
    for request_id in "ab":
        await client.generate(request_id, [1], PARAMS)
    await client.generate("a", [1, 2], PARAMS)
    seen = [(one.request_id, one.in_flight, one.previous, one.chosen) for one in read_decisions(path)[1]]
    assert seen == [("a", {0: 0, 1: 0}, None, 0), ("b", {1: 0}, None, 1), ("a", {0: 0}, 0, 0)]


async def test_any_policy_can_be_asked_any_log(stub_server, tmp_path):
    """The log holds counts and tokens, whatever its policy saw; one from before tokens were written asks by counts."""
    path = tmp_path / "decisions.jsonl"
    client = LLMServerClient([stub_server(), stub_server()], policy=RoundRobin(), decision_log=DecisionLog(path))
    for request_id, length in (("a", 30), ("b", 9), ("c", 9), ("b", 10)):
        await client.generate(request_id, [1] * length, PARAMS)
    seen = [(one.held_tokens, one.num_tokens) for one in read_decisions(path)[1]]
    assert seen == [({0: 0, 1: 0}, 30), ({0: 31, 1: 0}, 9), ({0: 31, 1: 10}, 9), ({0: 41, 1: 0}, 10)]
    assert replay(path, BalancedTokens(2)).choices == [0, 1, 1]
    lines = [line.replace(b"held_tokens", b"unknown") for line in path.read_bytes().splitlines()]
    path.write_bytes(b"\n".join(lines))
    assert replay(path, BalancedTokens(2)).choices[:2] == [0, 0]


async def test_a_full_log_keeps_the_first_choices_and_says_so(stub_server, tmp_path, caplog):
    """The bound cuts the end, not the beginning, which every replay needs; choices go on being made."""
    path = tmp_path / "decisions.jsonl"
    await converse(stub_server, path, StickyLeastInFlight(3), max_decisions=10)
    assert len(list(read_decisions(path)[1])) == 10
    assert replay(path, StickyLeastInFlight(3)).difference is None
    assert sum("is full with 10 choices" in record.getMessage() for record in caplog.records) == 1


def test_what_is_no_log_is_refused(stub_server, tmp_path):
    """No file, an empty one, another format, a line that was cut off, and a place that cannot be written are named."""
    path = tmp_path / "decisions.jsonl"
    with pytest.raises(SessionInputError, match="path must be a decision log"):
        replay(path, RoundRobin())
    path.write_text("")
    with pytest.raises(SessionInputError, match="empty file"):
        replay(path, RoundRobin())
    path.write_text('{"format":2,"policy":"x","max_decisions":1}\n')
    with pytest.raises(SessionInputError, match="format must be 1, got 2"):
        replay(path, RoundRobin())
    path.write_text('{"format":1,"policy":"x","max_decisions":1}\n{"request_id":"a","in_fl')
    with pytest.raises(SessionInputError, match="line 2 of a decision log must be a Decision"):
        replay(path, RoundRobin())
    with pytest.raises(SessionInputError, match="path must be a file that can be written"):
        DecisionLog(tmp_path / "no" / "such.jsonl")
    with pytest.raises(SessionInputError, match="max_decisions must be at least 1, got 0"):
        DecisionLog(path, max_decisions=0)
    log = DecisionLog(path)
    LLMServerClient([stub_server()], decision_log=log)
    with pytest.raises(SessionInputError, match="must have one client"):
        LLMServerClient([stub_server()], decision_log=log)
