"""The life of replicas."""

from __future__ import annotations

import asyncio

import pytest

from ostinato_engines import SamplingParams, UnsupportedError, WeightManifest
from ostinato_rollout import FailureKind, NoReplicaError, ReplicaError, RoundRobin, ServerPool, SessionInputError

MANIFEST = WeightManifest(version=3, tensors=())


async def test_operations_reach_every_replica(stub_server):
    """Start, wake, sleep and shutdown reach all replicas, in that order."""
    servers = [stub_server(), stub_server()]
    pool = ServerPool(servers)
    await pool.start()
    await pool.wake_up()
    await pool.sleep()
    await pool.shutdown()
    assert [server.log for server in servers] == [["start", "wake_up", "sleep", "shutdown"]] * 2


async def test_a_start_that_fails_shuts_the_others_down(stub_server):
    """If one replica cannot start, its error is raised and none is left running."""
    servers = [stub_server(), stub_server()]
    servers[1].failing.add("start")
    with pytest.raises(ReplicaError, match="replica 1: RuntimeError: start is broken"):
        await ServerPool(servers).start()
    assert servers[0].log == ["start", "shutdown"]


async def test_a_start_that_is_cancelled_leaves_nothing_running(stub_server):
    """Whoever gives up a start has shut down those that had started, and those that were about to."""

    begun = asyncio.Event()

    class Slow(stub_server):
        async def start(self):
            begun.set()
            await asyncio.Event().wait()

    servers = [stub_server(), Slow()]
    starting = asyncio.create_task(ServerPool(servers).start())
    await begun.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert [server.log for server in servers] == [["start", "shutdown"], ["shutdown"]]


async def test_an_engine_that_does_not_start_is_told_without_counting(stub_server):
    """Where there is one replica, the message is the engine's own."""
    server = stub_server()
    server.failing.add("start")
    with pytest.raises(ReplicaError, match=r"^the engine must start, got RuntimeError: start is broken"):
        await ServerPool([server]).start()


async def test_new_weights_reach_all_and_each_gets_its_own_stream(stub_server):
    """make_weights is called once per replica, and the pool then serves the new version."""
    servers = [stub_server(), stub_server()]
    pool = ServerPool(servers)
    assert pool.policy_version == 0
    await pool.update_weights(MANIFEST, lambda: iter([("w", 1)]))
    assert [server.received for server in servers] == [[("w", 1)]] * 2
    assert (pool.policy_version, len(pool.servers)) == (3, 2)


async def test_a_replica_that_fails_or_lies_about_its_version_is_taken_out(stub_server):
    """A failed update and a wrong version afterwards both take the replica out of pool and clients."""
    servers = [stub_server() for _ in range(3)]
    servers[0].failing.add("update_weights")
    servers[1].version_to_report = 2
    pool = ServerPool(servers)
    client = pool.client()
    await pool.update_weights(MANIFEST, list)
    assert pool.servers == (servers[2],)
    assert {index: failure.kind for index, failure in pool.lost.items()} == {
        0: FailureKind.ENGINE,
        1: FailureKind.ENGINE,
    }
    assert "policy_version must be 3" in pool.lost[1].message
    assert list(client.num_in_flight) == [2]
    for index in range(4):
        await client.generate(f"r{index}", [1], SamplingParams(max_tokens=2))
    assert len(servers[2].requests) == 4
    servers[2].failing.add("wake_up")
    with pytest.raises(NoReplicaError, match=r"replica 0: .*replica 1: .*replica 2: "):
        await pool.wake_up()
    with pytest.raises(NoReplicaError):
        pool.client()


async def test_a_replica_that_does_not_answer_is_taken_out_at_the_deadline(stub_server):
    """The deadline belongs to the pool; the failure says what the replica had to do."""
    servers = [stub_server(), stub_server()]

    async def hang(tags=None):
        await asyncio.Event().wait()

    servers[0].wake_up = hang
    pool = ServerPool(servers, timeout_s=0.05)
    await pool.wake_up()
    assert pool.lost[0].kind is FailureKind.TIMEOUT
    assert "must wake up within 0.05 s" in pool.lost[0].message
    assert "last progress: replica 1 had to wake up" in pool.lost[0].message


async def test_a_replica_that_cancels_itself_is_taken_out(stub_server):
    """A CancelledError that no one asked for is a failure of that replica, not a success."""
    servers = [stub_server(), stub_server()]

    async def cancelled(tags=None):
        raise asyncio.CancelledError

    servers[0].wake_up = cancelled
    pool = ServerPool(servers)
    await pool.wake_up()
    assert list(pool.lost) == [0]


async def test_a_replica_that_never_sleeps_stays_in_service(stub_server):
    """An engine that cannot sleep stays awake; that is no failure."""
    server = stub_server()

    async def cannot(level=1):
        raise UnsupportedError("this engine cannot sleep; leave it awake")

    server.sleep = cannot
    pool = ServerPool([server])
    await pool.sleep()
    assert pool.servers == (server,)


async def test_health_is_asked_of_each(stub_server):
    """health returns one answer per replica in service; a replica whose health check fails is taken out."""
    servers = [stub_server(), stub_server()]
    pool = ServerPool(servers)
    assert sorted(await pool.health()) == [0, 1]

    async def broken():
        raise RuntimeError("gone")

    servers[1].health = broken
    assert sorted(await pool.health()) == [0]
    assert "gone" in pool.lost[1].message


def test_wrong_arguments_are_refused(stub_server):
    """An empty pool, a server given twice and a deadline of zero are errors."""
    server = stub_server()
    with pytest.raises(NoReplicaError, match="servers must"):
        ServerPool([])
    with pytest.raises(SessionInputError, match="distinct"):
        ServerPool([server, server])
    with pytest.raises(SessionInputError, match="timeout_s"):
        ServerPool([server], timeout_s=-1)


async def test_a_lost_server_that_is_not_the_pools_concerns_its_client_only(stub_server):
    """A server that was added to a client by hand and fails for good is out of that client; the pool is as before."""
    own, foreign = stub_server(), stub_server([ConnectionError("lost")])

    async def broken():
        raise ConnectionError("no route")

    foreign.health = broken
    pool = ServerPool([own])
    client = pool.client(policy=RoundRobin())
    client.add_server(foreign)
    for name in "ab":
        await client.generate(name, [1], SamplingParams(max_tokens=2))
    assert list(client.num_in_flight) == [0]
    assert (pool.servers, pool.lost) == ((own,), {})
