"""An update along routes, as the pool sees it: who is asked, who is told, and what becomes of those that fail."""

import asyncio
import logging
import threading

import pytest

from ostinato_engines import (
    Capabilities,
    ManifestError,
    SamplingParams,
    SocketRoute,
    TensorSpec,
    WeightManifest,
    WeightPlace,
    WeightUpdateError,
)
from ostinato_rollout import ReplicaState, ServerPool

SPECS = tuple(TensorSpec(name, (1,), "float32") for name in ("a.b.w", "a.c.d.w", "a.c.e.w"))
ALL, PART = ["a.b.w", "a.c.d.w", "a.c.e.w"], ["a.c.d.w", "a.c.e.w"]
HERE = WeightPlace("here")
WAIT_S = 300.0


class Source:
    """Weights of two ranks; keeps account of what is asked of it."""

    places = (HERE, HERE)

    def __init__(self):
        self.sent, self.declined, self.num_streams = [], [], 0
        self.error: Exception | None = None
        self.answered, self.expected = threading.Event(), 0

    def __call__(self):
        self.num_streams += 1
        return ((spec.name, place) for place, spec in enumerate(SPECS))

    def open(self, plan, processes):
        self.expected = len(plan.replicas)
        self.answered.clear()
        return {index: SocketRoute((f"/{index}",)) for index in plan.replicas}

    def send(self, manifest, plan):
        self.sent.append(([spec.name for spec in manifest.tensors], plan.replicas))
        if self.error is not None:
            raise self.error
        assert self.answered.wait(WAIT_S)
        return dict.fromkeys(plan.replicas, "")

    def note(self):
        """A replica is done, or declines."""
        self.expected -= 1
        if not self.expected:
            self.answered.set()

    def decline(self, route, why):
        self.declined.append((route.paths[0], why))
        self.note()


class Following:
    """Makes a stub follow routes, but where `refuses` says what it raises."""

    def __init__(self, server, source, *, partial=False):
        self.base, self.followed, self.hangs = "", [], False
        self.refuses: Exception | None = None
        self.asked = asyncio.Event()
        self._server, self._source = server, source
        server.capabilities = lambda: Capabilities(weight_workers=(HERE,), partial_updates=partial)
        server.receive_weights = self.receive_weights

    async def receive_weights(self, manifest, route):
        self.asked.set()
        if self.hangs:
            await asyncio.Event().wait()
        if self.refuses is not None:
            raise self.refuses
        if manifest.is_partial and manifest.base != self.base:
            raise ManifestError("send the whole model")
        self.followed.append(len(manifest.tensors))
        self._server.policy_version, self.base = manifest.version, manifest.base
        self._source.note()


@pytest.fixture
def source():
    return Source()


def manifest(version, base=False):
    found = WeightManifest(version, SPECS)
    return found.resting_on("base", ["a.c.d.w"]) if base else found


async def test_replicas_that_can_follow_are_sent_to_at_once_and_others_as_ever(stub_server, source, caplog):
    """One sending for all of them; a replica without workers reads the stream of this process."""
    servers = [stub_server() for _ in range(3)]
    following = [Following(server, source) for server in servers[:2]]
    pool = ServerPool(servers)
    with caplog.at_level(logging.INFO, logger="ostinato_rollout"):
        await pool.update_weights(manifest(1), source)
    assert (source.sent, source.num_streams, source.declined) == ([(ALL, (0, 1))], 1, [])
    assert [each.followed for each in following] == [[3], [3]]
    assert [name for name, _ in servers[2].received] == ALL
    assert pool.policy_version == 1
    assert "Weights of version 1 go to replica(s) 0, 1 through memory of the host" in caplog.text


async def test_a_replica_that_fails_is_told_of_and_gets_the_weights_another_way(stub_server, source, caplog):
    """The sender hears that it will not come; it is given the weights by this process, with a warning; the others are not disturbed."""
    servers = [stub_server() for _ in range(2)]
    first, second = (Following(server, source) for server in servers)
    second.refuses = WeightUpdateError("no room")
    pool = ServerPool(servers)
    await pool.update_weights(manifest(1), source)
    assert (first.followed, second.followed, source.num_streams) == ([3], [], 1)
    assert source.declined == [("/1", "replica 1: WeightUpdateError: no room")]
    assert [name for name, _ in servers[1].received] == ALL
    assert "Replica 1 did not get the weights along its route, and is sent them through this process" in caplog.text
    assert set(pool.states.values()) == {ReplicaState.SERVING}


async def test_a_replica_that_fails_on_both_ways_is_taken_out(stub_server, source):
    """As one without routes that fails; the others serve the new weights."""
    servers = [stub_server() for _ in range(2)]
    _, second = (Following(server, source) for server in servers)
    second.refuses = WeightUpdateError("gone")

    async def update_weights(given, weights):
        raise WeightUpdateError("gone")

    servers[1].update_weights = update_weights
    pool = ServerPool(servers)
    await pool.update_weights(manifest(1), source)
    assert list(pool.states.values()) == [ReplicaState.SERVING, ReplicaState.LOST]
    assert pool.policy_version == 1


async def test_a_replica_that_never_comes_is_waited_for_within_the_deadline(stub_server, source, caplog):
    """The sender is told at the deadline, and the replica gets the weights another way."""
    servers = [stub_server() for _ in range(2)]
    _, second = (Following(server, source) for server in servers)
    second.hangs = True
    pool = ServerPool(servers, update_timeout_s=1.0)
    await pool.update_weights(manifest(1), source)
    assert [path for path, _ in source.declined] == ["/1"]
    assert [name for name, _ in servers[1].received] == ALL
    assert "RequestTimeoutError" in caplog.text


async def test_where_all_have_the_rest_a_part_is_sent(stub_server, source, caplog):
    """The first update is refused in part and sent whole; the second is sent in part; and whoever has lost the rest gets everything in a second
    round, alone."""
    servers = [stub_server() for _ in range(2)]
    first, second = (Following(server, source, partial=True) for server in servers)
    pool = ServerPool(servers)
    await pool.update_weights(manifest(1, base=True), source)
    assert source.sent == [(PART, (0, 1)), (ALL, (0, 1))]
    source.sent.clear()
    with caplog.at_level(logging.INFO, logger="ostinato_rollout"):
        await pool.update_weights(manifest(2, base=True), source)
    assert source.sent == [(PART, (0, 1))]
    assert "got 2 of 3 tensors: the rest cannot have changed" in caplog.text
    source.sent.clear()
    second.base = ""  # as after a deep sleep
    await pool.update_weights(manifest(3, base=True), source)
    assert source.sent == [(PART, (0, 1)), (ALL, (1,))]
    assert (first.followed, second.followed, source.num_streams) == ([3, 2, 2], [3, 2, 3], 0)


async def test_what_the_source_raises_ends_the_update(stub_server, source):
    """A sender that is lost is nobody's fault here: its error comes out, and nobody waits for what it would have sent."""
    servers = [stub_server() for _ in range(2)]
    for server in servers:
        Following(server, source).hangs = True
    source.error = RuntimeError("rank 1 has died")
    pool = ServerPool(servers)
    with pytest.raises(RuntimeError, match="rank 1 has died"):
        await asyncio.wait_for(pool.update_weights(manifest(1), source), WAIT_S)
    assert source.num_streams == 0


async def test_a_cancelled_update_ends_at_both_ends(stub_server, source):
    """The sender is told that no replica will come."""
    server = stub_server()
    following = Following(server, source)
    following.hangs = True
    pool = ServerPool([server])
    update = asyncio.ensure_future(pool.update_weights(manifest(1), source))
    await asyncio.wait_for(following.asked.wait(), WAIT_S)
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(update, WAIT_S)
    assert [path for path, _ in source.declined] == ["/0"]


class Closed(Source):
    """Ranks that fail before a route is open: where they say their places, or open the routes of one of the rounds."""

    def __init__(self, *, at_places=False, at_round=1):
        super().__init__()
        self.fails, self._at_places, self._at_round, self._num_rounds = True, at_places, at_round, 0

    @property
    def places(self):
        if self.fails and self._at_places:
            raise RuntimeError("rank 1 has died")
        return (HERE, HERE)

    def open(self, plan, processes):
        self._num_rounds += 1
        if self.fails and self._num_rounds >= self._at_round:
            raise RuntimeError("rank 1 has died")
        return super().open(plan, processes)


@pytest.mark.parametrize("where", [{"at_places": True}, {"at_round": 1}, {"at_round": 2}])
async def test_where_no_route_was_opened_all_serve_on(stub_server, where):
    """Nothing has begun where the source fails before, nor where all have refused a part of the weights and it fails then."""
    source = Closed(**where)
    servers = [stub_server() for _ in range(2)]
    for server in servers:
        Following(server, source, partial=True)
    pool = ServerPool(servers)
    client = pool.client()
    with pytest.raises(RuntimeError, match="rank 1 has died"):
        await pool.update_weights(manifest(1, base=True), source)
    assert (set(pool.states.values()), pool.policy_version, source.num_streams) == ({ReplicaState.SERVING}, 0, 0)
    await client.generate("asked", [1], SamplingParams(max_tokens=1))
    source.fails = False
    await pool.update_weights(manifest(2, base=True), source)
    assert (set(pool.states.values()), pool.policy_version) == ({ReplicaState.SERVING}, 2)


class Breaking(Source):
    """Ranks that die once a replica has got everything."""

    def __init__(self):
        super().__init__()
        self.has_arrived = threading.Event()

    def send(self, manifest, plan):
        assert self.has_arrived.wait(WAIT_S)
        raise RuntimeError("rank 1 has died")

    def note(self):
        self.has_arrived.set()


@pytest.mark.parametrize("one_arrives", [False, True])
async def test_an_update_that_breaks_off_leaves_one_policy_in_service(stub_server, one_arrives):
    """A replica with an open route waits for the next weights unless it has them all; one without serves on, unless another has the new ones."""
    source = Breaking()
    servers = [stub_server() for _ in range(3)]
    following = [Following(server, source) for server in servers[:2]]
    following[0].hangs, following[1].hangs = not one_arrives, True
    if not one_arrives:
        source.has_arrived.set()
    pool = ServerPool(servers)
    client = pool.client()
    with pytest.raises(RuntimeError, match="rank 1 has died"):
        await asyncio.wait_for(pool.update_weights(manifest(1), source), WAIT_S)
    serving = 0 if one_arrives else 2
    states = [ReplicaState.WAITING_FOR_WEIGHTS] * 3
    states[serving] = ReplicaState.SERVING
    assert (list(pool.states.values()), pool.lost, source.num_streams) == (states, {}, 0)
    assert pool.policy_version == int(one_arrives)
    await client.generate("asked", [1], SamplingParams(max_tokens=1))
    assert [len(server.requests) for server in servers] == [int(index == serving) for index in range(3)]
    await pool.update_weights(WeightManifest(2, SPECS), source.__call__)
    assert (set(pool.states.values()), pool.policy_version) == ({ReplicaState.SERVING}, 2)


async def test_a_replica_that_got_a_part_serves_on_though_the_others_get_nothing_more(stub_server):
    """It has the new version; the one that lacks the rest waits where no route to it can be opened, for one policy serves."""
    source = Closed(at_round=4)
    servers = [stub_server() for _ in range(2)]
    _, second = (Following(server, source, partial=True) for server in servers)
    pool = ServerPool(servers)
    await pool.update_weights(manifest(1, base=True), source)  # two rounds: nobody had the rest
    second.base = ""
    with pytest.raises(RuntimeError, match="rank 1 has died"):
        await pool.update_weights(manifest(2, base=True), source)
    assert list(pool.states.values()) == [ReplicaState.SERVING, ReplicaState.WAITING_FOR_WEIGHTS]
    assert pool.policy_version == 2
