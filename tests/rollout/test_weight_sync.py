"""What a replica is given: everything, or the tensors that may have changed; and what becomes of it where that cannot be made."""

import asyncio
import logging
from functools import partial
from unittest.mock import Mock

import pytest

from ostinato_engines import (
    Capabilities,
    EngineState,
    Health,
    ManifestError,
    SamplingParams,
    TensorSpec,
    WeightManifest,
)
from ostinato_rollout import LLMServerClient, ReplicaState, ServerPool, fleet
from ostinato_rollout.pool_operations import PoolOperations

SPECS = tuple(TensorSpec(name, (1,), "float32") for name in ("a.b.w", "a.c.d.w", "a.c.e.w"))


def manifest(version):
    """Of a model of which the block `a.c` changes."""
    return WeightManifest(version, SPECS).resting_on("base", ["a.c.d.w"])


class Weights:
    """Weights by name, and how often they were asked for."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self):
        self.num_calls += 1
        return ((spec.name, place) for place, spec in enumerate(SPECS))


def remembering(server):
    """A stub that takes parts where it took a whole update before, as an engine does."""
    server.base, server.taken, update = "", [], server.update_weights

    async def update_weights(given, weights):
        if given.is_partial and given.base != server.base:
            raise ManifestError("send the whole model")
        tensors = list(weights)
        server.taken.append([name for name, _ in tensors])
        assert [spec.name for spec in given.tensors] == server.taken[-1]
        await update(given, iter(tensors))
        server.base = given.base

    server.update_weights = update_weights
    server.capabilities = lambda: Capabilities(partial_updates=True)
    return server


ALL, PART = ["a.b.w", "a.c.d.w", "a.c.e.w"], ["a.c.d.w", "a.c.e.w"]


async def test_after_the_first_update_only_what_may_have_changed_is_sent(stub_server, caplog):
    """The first update is whole, the next ones bring whole blocks of what changes, and the log says how much that is."""
    server, weights = remembering(stub_server()), Weights()
    pool = ServerPool([server])
    with caplog.at_level(logging.INFO, logger="ostinato_rollout"):
        for version in (1, 2, 3):
            await pool.update_weights(manifest(version), weights)
            assert pool.policy_version == version
    assert server.taken == [ALL, PART, PART]
    assert caplog.text.count("got 2 of 3 tensors: the rest cannot have changed") == 2


@pytest.mark.parametrize("purpose", ["update", "sleep"])
async def test_clients_elsewhere_have_heard_before_replicas_stop(stub_server, purpose):
    """None of their turns meets a replica that is given weights or sleeps; one that is silent holds up nothing for long."""
    server = stub_server()
    pool = ServerPool([server])
    told = Mock(spec=LLMServerClient)
    told.take_back.return_value = 0
    told.heard.side_effect = partial(server._do, "all have heard")
    pool.follow(told)
    await (pool.update_weights(manifest(1), Weights()) if purpose == "update" else pool.sleep(1))
    assert server.log[:2] == ["all have heard", "update_weights" if purpose == "update" else "sleep"]
    told.hold.assert_called()


async def test_a_silent_client_elsewhere_holds_up_nothing_for_long(stub_server, monkeypatch, caplog):
    """It is said that its turns may fail."""
    monkeypatch.setattr(fleet, "_HEARING_S", 0.01)
    pool = ServerPool([stub_server()])
    told = Mock(spec=LLMServerClient)
    told.take_back.return_value = 0
    told.heard.side_effect = asyncio.Event().wait
    pool.follow(told)
    await pool.update_weights(manifest(1), Weights())
    assert pool.policy_version == 1
    assert "not all clients have heard" in caplog.text


async def test_each_replica_gets_what_it_lacks(stub_server):
    """Of several replicas the one that has lost the rest gets everything, one that takes no parts always does, and none of them is taken out."""
    first, second, plain = remembering(stub_server()), remembering(stub_server()), stub_server()
    pool = ServerPool([first, second, plain])
    await pool.update_weights(manifest(1), Weights())
    second.base = ""  # as after a deep sleep
    await pool.update_weights(manifest(2), Weights())
    assert (first.taken, second.taken) == ([ALL, PART], [ALL, ALL])
    assert [name for name, _ in plain.received] == ALL
    assert len(pool.servers) == 3


async def test_without_a_base_everything_is_sent(stub_server):
    """Where all tensors may change, engines that take parts get none, and the weights are asked for once a replica."""
    server, weights = remembering(stub_server()), Weights()
    pool = ServerPool([server])
    for version in (1, 2):
        await pool.update_weights(WeightManifest(version, SPECS), weights)
    assert (server.taken, weights.num_calls) == ([ALL, ALL], 2)


async def test_a_replica_that_is_replaced_gets_everything(stub_server):
    """A new engine in a replica's place has only its checkpoint: it joins with the whole of the current weights."""
    servers = [remembering(stub_server()) for _ in range(2)]
    made = iter(servers)
    pool = ServerPool([next(made)], make_server=lambda index: next(made))
    await pool.start()
    try:
        await pool.update_weights(manifest(1), Weights(), replayable=True)
        await pool.update_weights(manifest(2), Weights(), replayable=True)
        await pool.replace(0)
        assert pool.servers == (servers[1],)
        assert (servers[0].taken, servers[1].taken) == ([ALL, PART], [ALL])
        await pool.update_weights(manifest(3), Weights())
        assert servers[1].taken == [ALL, PART]
    finally:
        await pool.shutdown()


async def test_new_weights_have_a_deadline_of_their_own(stub_server, monkeypatch):
    """Loading takes longer than all else that a replica is asked, for one that is restarted as well."""
    limits, on_one = {}, PoolOperations.on_one

    async def noting(self, purpose, replica, operation, limit_s):
        limits.setdefault(purpose, set()).add(limit_s)
        await on_one(self, purpose, replica, operation, limit_s)

    monkeypatch.setattr(PoolOperations, "on_one", noting)
    pool = ServerPool([stub_server()], make_server=lambda _: stub_server(), timeout_s=20.0, update_timeout_s=40.0)
    await pool.start()
    try:
        await pool.update_weights(manifest(1), Weights(), replayable=True)
        await pool.replace(0)
        assert pool.policy_version == 1
    finally:
        await pool.shutdown()
    assert limits.pop("take weights of version 1") == {40.0}
    assert limits["pause"] == limits["go on after a pause"] == {20.0}


class Broken:
    """Weights whose making fails: when they are asked for, or behind so many tensors; for each replica, or once."""

    def __init__(self, num_made, *, times=10**9):
        self.num_made, self.times = num_made, times

    def __call__(self):
        self.times -= 1
        if self.times < 0:
            return ((spec.name, place) for place, spec in enumerate(SPECS))
        if self.num_made is None:
            raise OSError("the ranks are gone")
        return self._some()

    def _some(self):
        for place, spec in enumerate(SPECS[: self.num_made]):
            yield spec.name, place
        raise OSError("the ranks are gone")


@pytest.mark.parametrize("num_made", [None, 0])
async def test_weights_that_cannot_be_made_are_the_caller_s_error(stub_server, num_made):
    """No replica is taken out: all go on with the policy that they have, and take the next one."""
    pool = ServerPool([stub_server(), stub_server()])
    servers = pool.servers
    await pool.update_weights(manifest(1), Weights())
    with pytest.raises(OSError, match="the ranks are gone"):
        await pool.update_weights(manifest(2), Broken(num_made))
    assert (pool.servers, set(pool.states.values()), pool.policy_version) == (servers, {ReplicaState.SERVING}, 1)
    assert (await pool.client().generate("talk", [1], SamplingParams())).token_ids == [99]
    await pool.update_weights(manifest(3), Weights())
    assert pool.policy_version == 3


@pytest.mark.parametrize("num_made", [0, 2])
async def test_a_replica_that_may_have_some_of_them_waits_for_the_next_update(stub_server, num_made):
    """One that has read tensors, or that says that its weights are not complete, serves nobody until an update has come whole."""
    server = stub_server()
    pool = ServerPool([server])

    async def health():
        return Health(EngineState.STALE if num_made == 0 else EngineState.READY, 0)

    server.health = health
    with pytest.raises(OSError, match="the ranks are gone"):
        await pool.update_weights(manifest(1), Broken(num_made))
    assert set(pool.states.values()) == {ReplicaState.WAITING_FOR_WEIGHTS}
    assert all(change.after is not ReplicaState.LOST for change in pool.history)
    await pool.update_weights(manifest(2), Weights())
    assert (set(pool.states.values()), pool.policy_version) == ({ReplicaState.SERVING}, 2)


async def test_replicas_never_differ_because_weights_failed_for_one(stub_server):
    """Where others have the new policy, the one whose weights could not be made waits, though it has read none."""
    pool = ServerPool([stub_server(), stub_server(), stub_server()])
    with pytest.raises(OSError, match="the ranks are gone"):
        await pool.update_weights(manifest(1), Broken(None, times=1))
    assert sorted(pool.states.values()) == sorted([ReplicaState.WAITING_FOR_WEIGHTS, *[ReplicaState.SERVING] * 2])
    assert {server.policy_version for server in pool.servers} == {1}
    await pool.update_weights(manifest(2), Weights())
    assert set(pool.states.values()) == {ReplicaState.SERVING}


async def test_a_replica_s_own_failure_is_its_own(stub_server):
    """An engine that fails with good weights is taken out as ever, and the caller hears nothing while others have them."""
    bad, good = stub_server(), stub_server()
    bad.failing.add("update_weights")
    pool = ServerPool([bad, good])
    await pool.update_weights(manifest(1), Weights())
    assert pool.servers == (good,)
