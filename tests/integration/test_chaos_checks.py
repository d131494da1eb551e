"""The checks of the chaos tests find what they are there for: one planted leak for each."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from ostinato_agent_loop import AgentLoopOutput, Trajectory, TrajectoryTask
from ostinato_engines import PolicySpan, SamplingParams
from ostinato_engines.testing import ScriptedServer
from ostinato_rollout import AdmissionConfig, Failure, FailureKind, LLMServerClient, ServerPool
from ostinato_tools import ToolExecutor
from ostinato_tools.testing import fake_registry, make_call

PARAMS = SamplingParams(max_tokens=4)


@pytest.fixture(scope="module")
def checks():
    """The module of checks."""
    spec = importlib.util.spec_from_file_location("chaos_checks", Path(__file__).with_name("chaos_checks.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trajectory(name, ids=(1, 2), *, version=0, failure=None):
    """A trajectory of one segment."""
    segment = AgentLoopOutput(
        prompt_ids=[9],
        response_ids=list(ids),
        response_mask=[1] * len(ids),
        response_logprobs=[-0.5] * len(ids),
        policy_versions=(PolicySpan(0, version),),
    )
    return Trajectory(group_id="g", trajectory_id=name, row={}, segments=[segment], failure=failure)


def test_lost_doubled_strange_failed_and_changed_trajectories_are_found(checks):
    """One of each is named; what is as it should be, and a failure that may be, is not."""
    tasks = [TrajectoryTask({}, "a", "g", name) for name in "abcde"]
    expected = {name: trajectory(name) for name in "abcde"}
    failure = Failure("x", FailureKind.ENGINE, "gone")
    assert checks.ledger_findings(tasks, list(expected.values()), expected) == []
    came = [
        trajectory("b"),
        trajectory("b"),
        trajectory("c", (1, 2, 2)),
        trajectory("d", failure=failure),
        trajectory("e", failure=failure),
        trajectory("z"),
    ]
    assert checks.ledger_findings(tasks, came, expected, may_fail=["e"]) == [
        "a is lost",
        "b came 2 times",
        "z was not asked for",
        "c has other tokens than without the disturbance",
        "d failed: gone",
    ]


def test_tokens_of_a_stale_version_are_found(checks):
    """A version that was not served by then is named with its trajectory."""
    came = [trajectory("a", version=1), trajectory("b", version=0)]
    assert checks.version_findings(came, {1}) == ["b has tokens of version 0"]


async def test_counters_of_a_client_are_found(checks):
    """A generation in flight, a conversation without release, one that waits and what they hold are four findings."""
    gate = asyncio.Event()
    admission = AdmissionConfig(max_sessions=1)
    client = LLMServerClient([ScriptedServer(lambda request: [1], gate=gate)], admission=admission)
    assert checks.client_findings(client) == []
    running = asyncio.ensure_future(client.generate("a", [1, 2], PARAMS))
    waiting = asyncio.ensure_future(client.generate("b", [1, 2], PARAMS))
    for _ in range(5):
        await asyncio.sleep(0)
    found = checks.client_findings(client)
    assert [words in " ".join(found) for words in ("in flight", "not released", "wait for a place", "the account")] == [
        True
    ] * 4
    gate.set()
    await running
    await client.release("a")
    await waiting
    assert len(checks.client_findings(client)) == 2
    await client.release("b")
    assert checks.client_findings(client) == []


async def test_what_a_transport_keeps_is_found_at_both_ends(checks):
    """A call without an answer and a conversation without release show in the service and in the remote server."""
    pytest.importorskip("zmq")
    from ostinato_rollout.transport import RemoteServer, ReplicaService

    gate = asyncio.Event()
    async with ReplicaService(ScriptedServer(lambda request: [1], gate=gate)) as service:
        remote = RemoteServer(service.address)
        await remote.start()
        assert checks.replica_findings([service]) == checks.remote_findings([remote]) == []
        running = asyncio.ensure_future(remote.generate([1], PARAMS, "a"))
        async with asyncio.timeout(10):
            while not service.num_calls:  # noqa: ASYNC110  nobody tells
                await asyncio.sleep(0)
        assert len(checks.replica_findings([service])) == 3
        assert len(checks.remote_findings([remote])) == 2
        gate.set()
        await running
        assert len(checks.replica_findings([service])) == 2
        await remote.release("a")
        assert checks.replica_findings([service]) == checks.remote_findings([remote]) == []
        await remote.disconnect()


def test_what_workers_have_under_way_is_found(checks):
    """Each counter of a worker, a worker that is missing, and a replica that it does not reach are findings."""
    pytest.importorskip("ray")
    from ostinato_agent_loop.ray_workers import WorkerReport

    names = ("num_trajectories", "num_conversations", "num_in_flight", "num_waiting", "num_open_tools")
    zero = dict.fromkeys(names, 0)
    idle = WorkerReport(num_replicas=2, **zero)
    assert checks.worker_findings([idle, idle], num_workers=2, num_replicas=2) == []
    for name in names:
        busy = WorkerReport(num_replicas=2, **{**zero, name: 1})
        assert len(checks.worker_findings([idle, busy], num_workers=2, num_replicas=2)) == 1
    assert checks.worker_findings([idle], num_workers=2, num_replicas=3) == [
        "1 of 2 workers are there",
        "worker 0 reaches 2 of 3 replicas",
    ]


async def test_tools_that_are_not_released_are_found(checks):
    """A trajectory that left its tools open, and an instance without release, are found until they are closed."""
    journal = []
    executor = ToolExecutor(fake_registry(journal))
    tools = executor.open("t")
    await tools.__aenter__()
    await tools.run([make_call("counter")])
    assert checks.tool_findings(executor) == ["1 trajectories have tools open"]
    (found,) = checks.journal_findings(journal)
    assert "created 1 and released 0 times" in found
    await tools.close()
    assert checks.tool_findings(executor) == checks.journal_findings(journal) == []
    journal.append(journal[-1])
    assert len(checks.journal_findings(journal)) == 1


def test_a_process_that_is_left_is_found(checks):
    """A running and a stopped process are found; one that has ended is not, even before it is waited for."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        (found,) = checks.process_findings({process.pid})
        assert str(process.pid) in found
        process.kill()
        process.wait()
        assert checks.process_findings({process.pid}) == []


async def test_a_replica_that_is_out_or_stale_is_found(checks):
    """A missing replica, and one of another version beside the others, are findings."""
    servers = [ScriptedServer([]) for _ in range(2)]
    pool = ServerPool(servers)
    await pool.start()
    assert checks.pool_findings(pool, num_replicas=2) == []
    servers[0].policy_version = 3
    assert checks.pool_findings(pool, num_replicas=3) == ["in service are 2 of 3", "replicas serve the versions [0, 3]"]
    await pool.shutdown()


def test_memory_that_rises_is_found(checks):
    """A steady rise is found; noise, and a rise in the warm-up alone, are not."""
    mib = 1 << 20
    flat = {"a": [100 * mib, 101 * mib, 99 * mib, 100 * mib, 101 * mib, 100 * mib]}
    assert checks.memory_findings(flat, allowed_bytes=2 * mib) == {}
    rising = {"a": [(100 + 2 * wave) * mib for wave in range(6)]}
    assert checks.memory_findings(rising, allowed_bytes=2 * mib) == {"a": "grew by 6144 KiB over 6 waves"}
    assert checks.resident_bytes("self") > mib
