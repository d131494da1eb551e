"""Weights on their way from two ranks to the workers of two engines, along each kind of route: ranks that are processes of this host, and actors."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ostinato_engines import WeightPlace
from ostinato_engines.loading import load_server_class
from ostinato_engines.weight_routes import host_name
from ostinato_rollout import ReplicaState, ServerPool
from ostinato_trainer.backends.fsdp2 import Fsdp2Factory, Fsdp2Options
from ostinato_trainer.backends.lora import LoraOptions
from ostinato_trainer.backends.ranks.group import RankGroup
from ostinato_trainer.backends.ranks.processes import RankProcesses, RankProcessOptions
from ostinato_trainer.backends.ranks.weights import Meeting
from ostinato_trainer.backends.ranks.workers import RankDiedError

pytestmark = pytest.mark.timeout(900)
SETTINGS = {"dtype": "float32", "lr": 1e-3, "total_steps": 4, "device": "cpu"}
ENGINES = Path(__file__).with_name("route_engines.py")
HERE, ELSEWHERE = WeightPlace(host_name()), WeightPlace("elsewhere")
WAYS = pytest.mark.parametrize("way", ["SocketRoute", "CollectiveRoute"])


def processes(home: Path, **options) -> RankGroup:
    """Two ranks as processes of this host."""
    factory = Fsdp2Factory(str(home / "model"), Fsdp2Options(**SETTINGS, **options))
    return RankGroup(RankProcesses(RankProcessOptions(num_ranks=2)), factory)


def send_by(way: str, group: RankGroup) -> None:
    """For a broadcast the ranks say that they are on another host, from which there is no other way; it is then of many buckets."""
    group._weight_places = [HERE if way == "SocketRoute" else ELSEWHERE] * group.num_ranks
    meeting: Any = group._meeting
    meeting.route = lambda *given: msgspec.structs.replace(Meeting.route(meeting, *given), bucket_bytes=4096)


@pytest.fixture(scope="module")
def ranks(quickstart_home: Path) -> Iterator[RankGroup]:
    """Ranks that outlive a test."""
    group = processes(quickstart_home)
    yield group
    group.close()


@pytest.fixture(scope="module")
def adapted_ranks(quickstart_home: Path) -> Iterator[RankGroup]:
    """The same with adapters on queries and values."""
    group = processes(quickstart_home, lora=LoraOptions(rank=4, alpha=8.0, target_modules=["q_proj", "v_proj"]))
    yield group
    group.close()


def telling() -> Any:
    """The class of engines that tell what they have; actors load it in the same way."""
    return load_server_class(ENGINES, "Telling")


@asynccontextmanager
async def two_engines(home: Path, *, timeout_s: float = 600.0, **options) -> AsyncIterator[Any]:
    """A pool of two embedded engines of this process, whose weights are zero."""
    servers = [telling()(str(home / "model"), **options if place else {}) for place in range(2)]
    for server in servers:
        await server.start()  # one after the other: transformers reads one model at a time
    pool = ServerPool(servers, timeout_s=timeout_s, update_timeout_s=timeout_s)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.shutdown()


def zero(pool: Any) -> None:
    """Leaves no weight as it is."""
    for server in pool.servers:
        server.zero()


async def digests(pool: Any) -> list[dict[str, str]]:
    answers = await asyncio.gather(*(server.chat_completion({}) for server in pool.servers))
    return [dict(answer["digests"]) for answer in answers]


def digests_of_ranks(group: RankGroup) -> dict[str, str]:
    _, stream = group.weights()
    return {name: telling().digest_of(tensor) for name, tensor in stream()}


async def check_sync(group: RankGroup, pool: Any, version: int) -> None:
    """One update leaves every engine in service with the bits of the ranks."""
    manifest, source = group.weights(version=version)
    await pool.update_weights(manifest, source)
    assert pool.policy_version == version
    expected = await asyncio.to_thread(digests_of_ranks, group)
    for found in await digests(pool):
        assert {name: found[name] for name in expected} == expected


@pytest.mark.slow
@WAYS
async def test_every_bit_arrives_along_the_route_and_the_log_says_which(quickstart_home, ranks, way, caplog) -> None:
    """Both engines have the ranks' bits after each of three updates; none of them was read by this process, and the way is in the log."""
    said = {"SocketRoute": "through memory of the host", "CollectiveRoute": "through a broadcast of rank 0"}[way]
    async with two_engines(quickstart_home) as pool:
        send_by(way, ranks)
        with caplog.at_level(logging.INFO, logger="ostinato_rollout"):
            for version in (1, 2, 3):
                zero(pool)
                await check_sync(ranks, pool, version)
        assert caplog.text.count(f"to replica(s) 0, 1 {said}") == 3
        assert "did not get the weights along its route" not in caplog.text
        assert [server.routes for server in pool.servers] == [[way] * 3] * 2


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None or torch.cuda.is_available(),
    reason="no megatron.core here, or a GPU; .ci/megatron.py makes an environment for CPUs",
)
@WAYS
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
async def test_shares_of_megatrons_ranks_arrive_whole(
    quickstart_home, way, tensor, pipeline, caplog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both engines have, along the route and with every bit, the folder's tensors, which two ranks of Megatron share by rows or by layers; the second
    rank sends, too, where there are sockets."""
    beside = str(Path(__file__).parent)
    monkeypatch.syspath_prepend(beside)
    monkeypatch.setenv("PYTHONPATH", beside)
    import megatron_on_cpu  # pyright: ignore[reportMissingImports]

    from ostinato_trainer.backends.megatron.options import MegatronOptions, MegatronRankFactory
    from ostinato_trainer.backends.megatron.shape import MegatronLayout

    layout = MegatronLayout(tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline)
    model = str(quickstart_home / "model")
    factory = MegatronRankFactory(path=model, options=MegatronOptions(layout=layout, total_steps=4))
    async with two_engines(quickstart_home) as pool:
        expected = (await digests(pool))[0]
        workers = RankProcesses(RankProcessOptions(num_ranks=2))
        group = await asyncio.to_thread(RankGroup, workers, megatron_on_cpu.OnCPU(factory))
        try:
            send_by(way, group)
            for version in (1, 2):
                zero(pool)
                await check_sync(group, pool, version)
                assert await digests(pool) == [expected] * 2
            assert "did not get the weights along its route" not in caplog.text
            assert [server.routes for server in pool.servers] == [[way] * 2] * 2
        finally:
            await asyncio.to_thread(group.close)


@pytest.mark.slow
@WAYS
async def test_adapted_layers_travel_alone_along_a_route(quickstart_home, adapted_ranks, way, caplog) -> None:
    """The first update is whole, since no engine has the rest; the next brings what adapters change, and engines have all bits of the ranks."""
    async with two_engines(quickstart_home) as pool:
        send_by(way, adapted_ranks)
        with caplog.at_level(logging.INFO, logger="ostinato_rollout"):
            zero(pool)
            await check_sync(adapted_ranks, pool, 1)
            assert caplog.text.count("gets all tensors") == 2
            await check_sync(adapted_ranks, pool, 2)
        assert caplog.text.count("the rest cannot have changed") == 1
        assert "did not get the weights along its route" not in caplog.text


@pytest.mark.slow
@WAYS
async def test_an_engine_that_never_comes_is_given_the_weights_another_way(quickstart_home, ranks, way, caplog) -> None:
    """The other engine is not held up beyond the deadline; the one that does not follow its route gets them as without routes, with a warning;
    the next update goes along routes again."""
    async with two_engines(quickstart_home, timeout_s=20.0, absent_at=2) as pool:
        send_by(way, ranks)
        await check_sync(ranks, pool, 1)
        zero(pool)
        await check_sync(ranks, pool, 2)
        assert "Replica 1 did not get the weights along its route" in caplog.text
        assert "RequestTimeoutError" in caplog.text
        zero(pool)
        caplog.clear()
        await check_sync(ranks, pool, 3)
        assert "did not get the weights along its route" not in caplog.text


@pytest.mark.slow
@WAYS
async def test_a_rank_that_dies_ends_the_update_with_its_name(quickstart_home, way) -> None:
    """Killed once the update has begun: no engine waits for it, and none serves a part of the weights."""
    async with two_engines(quickstart_home) as pool:
        group = await asyncio.to_thread(processes, quickstart_home)
        try:
            send_by(way, group)
            await check_sync(group, pool, 1)
            manifest, source = group.weights(version=2)
            workers: Any = group._workers
            servers = pool.servers
            servers[0].kills_at = 2, workers.process_ids[1]
            with pytest.raises(RankDiedError, match="rank 1 of 2 must live"):
                await pool.update_weights(manifest, source)
            assert {server.policy_version for server in servers} == {1}
            assert set(pool.states.values()) == {ReplicaState.WAITING_FOR_WEIGHTS}
        finally:
            await asyncio.to_thread(group.close)


@pytest.mark.slow
@WAYS
async def test_actors_send_to_actors_and_go_on_without_one_that_dies(quickstart_home, way, caplog) -> None:
    """Ranks and engines are actors: the bits arrive along the route; an engine that is killed in the middle is taken out, and the other has the
    weights."""
    pytest.importorskip("ray")
    pytest.importorskip("zmq")
    from ostinato_rollout.ray_cluster import ActorPlacement, RayReplica
    from ostinato_rollout.ray_cluster.testing import local_cluster
    from ostinato_trainer.backends.ranks.ray_workers import RankActors

    engine, model = f"{ENGINES}:Telling", str(quickstart_home / "model")
    place = ActorPlacement(num_cpus=0.5)
    with local_cluster():
        replicas = [RayReplica(engine, model, settings=settings, placement=place) for settings in ({}, {"dies_at": 3})]
        pool = ServerPool(replicas)
        await pool.start()
        factory = Fsdp2Factory(model, Fsdp2Options(**SETTINGS))
        group = await asyncio.to_thread(RankGroup, RankActors((place, place)), factory)
        send_by(way, group)
        try:
            for version in (1, 2):
                await check_sync(group, pool, version)
            answers = await asyncio.gather(*(server.chat_completion({}) for server in pool.servers))
            assert [answer["routes"] for answer in answers] == [[way] * 2] * 2
            await check_sync(group, pool, 3)
            assert list(pool.states.values()) == [ReplicaState.SERVING, ReplicaState.LOST]
            assert "Replica 1 did not get the weights along its route" in caplog.text
            await check_sync(group, pool, 4)
        finally:
            await pool.shutdown()
            await asyncio.to_thread(group.close)
