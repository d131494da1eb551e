"""Replicas as actors on a real Ray cluster of this host."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from ostinato_engines import (
    EngineClosedError,
    EngineCrashedError,
    EngineInputError,
    EngineLoadError,
    EngineStartError,
    EngineState,
    SamplingParams,
)
from ostinato_engines.testing import check_server
from ostinato_rollout import LLMServerClient, RolloutError

pytest.importorskip("ray")
pytest.importorskip("zmq")

import ray

from ostinato_rollout.ray_cluster import ActorPlacement, ActorProcess, ClusterError, RayReplica
from ostinato_rollout.ray_cluster.testing import is_running, local_cluster, wait_until_gone
from ostinato_rollout.transport import RemoteServer, ReplicaLostError

SERVERS = Path(__file__).with_name("ray_servers.py")
VOCAB = 96
PARAMS = SamplingParams(max_tokens=3)
SMALL = ActorPlacement(num_cpus=0.1)


@pytest.fixture(scope="session", autouse=True)
def cluster():
    """A cluster for all tests here; its devices exist for Ray only."""
    with local_cluster(num_gpus=8):
        yield


@pytest.fixture
async def replica_of():
    """Makes replicas by the class in `ray_servers.py`; shuts down those that are left."""
    made = []

    def make(name="Scripted", **options):
        options.setdefault("placement", SMALL)
        replica = RayReplica(f"{SERVERS}:{name}", "model", **options)
        made.append(replica)
        return replica

    yield make
    for replica in made:
        await replica.shutdown()
        assert replica.place is None or not is_running(replica.place.pid)


@pytest.fixture
def bundles():
    """Makes a placement group of bundles with one device each, and removes it."""
    made = []

    def make(count):
        group = ray.util.placement_group([{"CPU": 1, "GPU": 1}] * count, strategy="STRICT_PACK")
        made.append(group)
        assert group.wait(30)
        return group

    yield make
    for group in made:
        ray.util.remove_placement_group(group)


async def under_way(server):
    """A call has been sent to the server."""
    async with asyncio.timeout(20):
        while not server.num_waiting:  # noqa: ASYNC110  nobody tells
            await asyncio.sleep(0)


async def failed(server):
    """The server has noticed that it has failed."""
    async with asyncio.timeout(20):
        while (await server.health()).state is not EngineState.FAILED:  # noqa: ASYNC110  nobody tells
            await asyncio.sleep(0.01)


async def gone(pids):
    """Those of the processes that have not ended soon."""
    return await asyncio.to_thread(wait_until_gone, set(pids), 10.0)


async def test_a_replica_in_an_actor_passes_the_suite(replica_of):
    """A user's own server, made by class path in an actor, keeps the contract; its process ends with it."""
    replica = replica_of(settings={"delay_s": 0.0})
    assert (await replica.health()).state is EngineState.NEW
    await replica.start()
    await replica.start()
    assert replica.endpoint.address.startswith("tcp://127.0.0.1:")
    assert replica.endpoint.key is None
    assert (replica.max_model_len, replica.capabilities().engine) == (128, "scripted")
    report = await check_server(replica, vocab_size=VOCAB)
    done = {result.name for result in report.results if not result.skipped}
    assert {"turns", "concurrency", "cancellation", "abort", "bad_requests", "shutdown"} <= done
    await replica.shutdown()
    assert await gone([replica.place.pid]) == set()
    with pytest.raises(EngineClosedError):
        await replica.start()


async def test_a_killed_process_fails_its_requests_at_once_and_for_good(replica_of):
    """Ray's notice ends what waits there long before the silence would; nothing that the engine started is left."""
    replica = replica_of("Telling", silence_s=120.0)
    await replica.start()
    child = (await replica.chat_completion({}))["child"]
    params = SamplingParams(max_tokens=64)
    lost = replica_of(settings={"delay_s": 60.0}, silence_s=120.0)
    await lost.start()
    waiting = asyncio.ensure_future(lost.generate([1], params, "r"))
    await under_way(lost)
    for one in (replica, lost):
        os.kill(one.place.pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        with pytest.raises(ReplicaLostError, match="generate of request 'r'"):
            await waiting
    await failed(replica)
    with pytest.raises(EngineCrashedError, match="the process has ended"):
        await replica.generate([1], params, "r")
    assert (lost.endpoint, lost.num_waiting, lost.num_kept) == (None, 0, 0)
    assert await gone([child]) == set()
    await replica.shutdown()
    assert (await replica.health()).state is EngineState.CLOSED


@pytest.mark.slow
async def test_a_stopped_process_is_lost_by_its_silence_and_cannot_come_back(replica_of):
    """A process past its deadline is killed, though Ray believes a stopped one to be dead; continuing it wakes nothing."""
    replica = replica_of(silence_s=0.8)
    await replica.start()
    pid = replica.place.pid
    os.kill(pid, signal.SIGSTOP)
    async with asyncio.timeout(20):
        with pytest.raises(ReplicaLostError, match="got silence"):
            await replica.generate([1], PARAMS, "r")
        assert (await replica.health()).state is EngineState.FAILED
        await replica.shutdown()
    assert await gone([pid]) == set()


@pytest.mark.slow
async def test_whoever_asks_is_told_of_a_failure(replica_of):
    """A replica that has served tells its failure once, soon; one that never has started, or was shut down, tells nothing."""
    told = []
    replica, never, closed = replica_of(), replica_of("FailingAtStart"), replica_of()
    for one in (replica, never, closed):
        one.when_failed(lambda server, error: told.append((server, type(error))))
    await asyncio.gather(replica.start(), closed.start())
    with pytest.raises(EngineLoadError):
        await never.start()
    await closed.shutdown()
    os.kill(replica.place.pid, signal.SIGKILL)
    await failed(replica)
    await replica.shutdown()
    assert told == [(replica, ReplicaLostError)]


@pytest.mark.slow
async def test_turns_go_on_at_another_replica(replica_of):
    """A client whose replica is killed in mid-generation gets the same answer from the other one, and counts nothing twice."""
    replicas = [replica_of(settings={"delay_s": delay_s}) for delay_s in (60.0, 0.0)]
    await asyncio.gather(*(replica.start() for replica in replicas))
    told = []
    client = LLMServerClient(replicas, on_lost=lambda server, error: told.append(server))
    names = ["a", "b", "c", "d"]
    turns = [asyncio.ensure_future(client.generate(name, [1, 2], PARAMS)) for name in names]
    await under_way(replicas[0])
    os.kill(replicas[0].place.pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        outputs = await asyncio.gather(*turns)
        await asyncio.gather(*(client.release(name) for name in names))
    assert [output.token_ids for output in outputs] == [[3, 4, 5]] * len(names)
    assert told == [replicas[0]]
    assert (client.num_in_flight, client.num_sticky) == ({1: 0}, 0)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"name": "FailingAtStart"}, EngineLoadError, "must be a checkpoint"),
        pytest.param({"name": "Nobody"}, EngineLoadError, "must be a class in", marks=pytest.mark.slow),
        pytest.param(
            {"settings": {"color": 1}, "required": ["color"]},
            EngineLoadError,
            "must take color",
            marks=pytest.mark.slow,
        ),
        ({"placement": ActorPlacement(num_cpus=1000), "start_timeout_s": 1.0}, EngineStartError, "place for 1000 CPU"),
    ],
)
async def test_a_start_that_fails_says_why_and_leaves_nothing(replica_of, options, error, words):
    """Errors of the constructor and of the start keep their types; no room and no answer end with the deadline."""
    replica = replica_of(options.pop("name", "Scripted"), **options)
    with pytest.raises(error, match=words):
        await replica.start()
    assert (await replica.health()).state is EngineState.FAILED
    if replica.place is not None:
        assert await gone([replica.place.pid]) == set()


@pytest.mark.slow
async def test_an_engine_without_an_answer_ends_the_start_with_its_deadline(replica_of):
    """The deadline is long enough for the process to be there, on whatever machine: then the engine is what is missing."""
    for start_timeout_s in (8.0, 30.0, 120.0):
        replica = replica_of("HangingAtStart", start_timeout_s=start_timeout_s)
        with pytest.raises(EngineStartError, match=f"within {start_timeout_s:g} s, got no ") as caught:
            await replica.start()
        if replica.place is not None:
            break
    assert "got no answer" in str(caught.value)
    assert (await replica.health()).state is EngineState.FAILED
    assert await gone([replica.place.pid]) == set()


async def test_settings_cross_as_plain_values_only():
    """What could not be said to another process is refused where it is given."""
    with pytest.raises(EngineInputError, match="plain values"):
        RayReplica("transformers", "model", settings={"thing": object()})


@pytest.mark.slow
async def test_a_cancelled_start_leaves_no_process(replica_of, caplog):
    """Whoever gives up a start, at any moment, has no actor afterwards; that is no failure of the replica, and the log does not say so."""
    for delay_s in (0.0, 0.3):
        replica = replica_of("HangingAtStart")
        starting = asyncio.ensure_future(replica.start())
        await asyncio.sleep(delay_s)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        if replica.place is not None:
            assert await gone([replica.place.pid]) == set()
        assert (await replica.health()).state is EngineState.FAILED
        await replica.shutdown()
    assert "must start" not in caplog.text


async def test_without_a_cluster_nothing_is_started(replica_of, monkeypatch):
    """Ray would start a cluster unasked; a replica says that there is none."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(EngineStartError, match="must be initialised"):
        await replica_of().start()


@pytest.mark.slow
async def test_a_tensor_parallel_group_is_placed_whole(replica_of, bundles):
    """One actor has all bundles of its group: its engine sees their devices, and nobody else gets them meanwhile."""
    group = bundles(3)
    replica = replica_of(
        "Telling", placement=ActorPlacement(num_cpus=1, num_gpus=1, placement_group=group, bundles=(1, 2))
    )
    await replica.start()
    devices = (await replica.chat_completion({}))["devices"].split(",")
    assert len(set(devices)) == 2
    late = replica_of(
        placement=ActorPlacement(num_cpus=0, num_gpus=1, placement_group=group, bundles=(2,)), start_timeout_s=1.0
    )
    with pytest.raises(EngineStartError, match=r"1 GPU in bundles 2"):
        await late.start()
    await replica.shutdown()
    again = replica_of(placement=ActorPlacement(num_cpus=0, num_gpus=1, placement_group=group, bundles=(2,)))
    await again.start()
    assert (await again.health()).ready


@pytest.mark.slow
async def test_the_loss_of_any_bundle_is_the_loss_of_the_group(replica_of, bundles):
    """An engine whose device has gone to somebody else cannot go on."""
    placement = ActorPlacement(num_cpus=1, num_gpus=1, placement_group=bundles(2), bundles=(0, 1))
    replica = replica_of(placement=placement)
    await replica.start()
    (holder,) = replica._holders
    os.kill(holder.place.pid, signal.SIGKILL)
    await failed(replica)
    assert await gone([replica.place.pid]) == set()


@pytest.mark.slow
async def test_colocated_actors_share_a_device(replica_of, bundles):
    """Two replicas with half a device each are in one bundle; a variable of the placement reaches the process."""
    group = bundles(1)
    placement = ActorPlacement(
        num_cpus=0.5, num_gpus=0.5, placement_group=group, bundles=(0,), environment={"OSTINATO_TEST": "here"}
    )
    replicas = [replica_of("Telling", placement=placement) for _ in range(2)]
    await asyncio.gather(*(replica.start() for replica in replicas))
    told = [await replica.chat_completion({}) for replica in replicas]
    assert told[0]["devices"] == told[1]["devices"] != ""
    assert [one["own"] for one in told] == ["here"] * 2


@pytest.mark.slow
async def test_beyond_one_host_a_key_is_needed(replica_of):
    """Where other hosts could reach a replica, each of its processes has a key of its own."""
    replica = replica_of(beyond_host=True)
    await replica.start()
    assert (await replica.generate([1, 2], PARAMS, "r")).token_ids == [3, 4, 5]
    assert not replica.endpoint.address.startswith("tcp://127.")
    other = replica.endpoint.connect()
    await other.start()
    assert (await other.generate([2], PARAMS, "o")).token_ids == [2, 3, 4]
    await other.disconnect()
    for key in (None, "another key of 16 bytes"):
        stranger = RemoteServer(replica.endpoint.address, key=key, start_timeout_s=0.5)
        with pytest.raises(ReplicaLostError):
            await stranger.start()


async def test_weights_reach_a_replica_of_another_host(replica_of, monkeypatch):
    """A replica that is not on this host gets the same tensors, in parts; an update that fails at either end is told, and may come again."""
    torch = pytest.importorskip("torch")
    from ostinato_engines import TensorSpec, WeightManifest, WeightUpdateError
    from ostinato_rollout.ray_cluster import replica as module
    from ostinato_rollout.ray_cluster import weights_beyond

    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "c": torch.tensor([7.0]),
    }
    specs = tuple(
        TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    )
    replica = replica_of("Learning")
    await replica.start()
    monkeypatch.setattr(module, "own_node", lambda: "another")
    monkeypatch.setattr(weights_beyond, "_PART_BYTES", 8)

    def broken():
        yield "a", tensors["a"]
        raise ZeroDivisionError("here")

    with pytest.raises(ZeroDivisionError, match="here"):
        await replica.update_weights(WeightManifest(1, specs), broken())
    with pytest.raises(WeightUpdateError, match="must not be 13"):
        await replica.update_weights(WeightManifest(13, specs), iter(tensors.items()))
    await replica.update_weights(WeightManifest(2, specs), iter(tensors.items()))
    assert replica.policy_version == 2
    assert await replica.chat_completion({}) == {"weights": {name: tensor.tolist() for name, tensor in tensors.items()}}


@pytest.mark.parametrize(
    "options",
    [
        {"num_cpus": -1},
        {"num_gpus": -0.5},
        {"bundles": (0,)},
        {"placement_group": None, "bundles": (1, 1)},
    ],
)
def test_a_placement_that_cannot_be_is_refused(options):
    """Amounts are not negative, and bundles are named once, with their group."""
    with pytest.raises(ValueError, match="must"):
        ActorPlacement(**options)


async def test_an_actor_that_has_ended_answers_nobody():
    """Calls before the start and after the end are errors, and ending twice is fine."""
    from ostinato_rollout.ray_cluster import ActorBody

    process = ActorProcess(ActorBody, SMALL)
    with pytest.raises(ClusterError, match="must be running"):
        await process.ask("where")
    place = await process.start()
    await asyncio.gather(process.end(), process.end())
    assert await gone([place.pid]) == set()
    with pytest.raises(RolloutError, match="must be running"):
        await process.ask("where")


async def test_an_actor_that_was_ended_before_its_start_gets_no_process(monkeypatch):
    """A start that comes late, after a shutdown in the same moment, makes nothing that nobody would end."""
    from ostinato_rollout.ray_cluster import ActorBody

    made = []
    monkeypatch.setattr(ray, "remote", made.append)
    process = ActorProcess(ActorBody, SMALL)
    await process.end()
    with pytest.raises(ClusterError, match="must be started before it is ended"):
        await process.start()
    assert made == []
