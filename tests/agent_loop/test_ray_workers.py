"""Workers as actors on a real Ray cluster of this host, over replicas that are actors as well."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import threading
import time
import types

import pytest

from ostinato_agent_loop import (
    AgentConfig,
    AgentConfigError,
    AgentLoopBase,
    AgentLoopContext,
    AgentLoopManager,
    AgentLoopWorker,
    MultiTurnConfig,
    RewardResult,
    RolloutConfig,
    TrajectoryEnd,
    TrajectoryTask,
    UnknownAgentError,
    make_parser,
)
from ostinato_engines import SamplingParams
from ostinato_engines.testing import ScriptedServer
from ostinato_rollout import AdmissionConfig, FailureKind, LLMServerClient, ServerPool, SessionBudget
from ostinato_tokenization import ContinuousTokens
from ostinato_tokenization.testing import tiny_chat_tokenizer
from ostinato_tools import ToolError, ToolExecutor, ToolRegistry
from ostinato_tools.testing import echo, failing

pytest.importorskip("ray")
pytest.importorskip("zmq")

from ostinato_agent_loop.ray_workers import RayWorkers, WorkerSpec
from ostinato_agent_loop.ray_workers import workers as workers_module
from ostinato_rollout.ray_cluster import ActorPlacement, ClusterError, RayReplica
from ostinato_rollout.ray_cluster.testing import CallingServer, local_cluster, wait_until_gone
from ostinato_rollout.restarts import RestartPolicy

CALLING = "ostinato_rollout.ray_cluster.testing:CallingServer"
SMALL = ActorPlacement(num_cpus=0.1)
PARAMS = SamplingParams()
QUICK = RestartPolicy(first_backoff_s=0.0)


@pytest.fixture(scope="session", autouse=True)
def cluster():
    """A cluster for all tests here."""
    with local_cluster(num_gpus=8):
        yield


@pytest.fixture
async def pool_of():
    """Starts a pool of so many replicas; shuts them down."""
    pools = []

    async def start(count=1, *, restarts=None, **settings):
        def make(place):
            return RayReplica(CALLING, "model", settings=settings, placement=SMALL)

        pool = ServerPool(
            [make(place) for place in range(count)],
            make_server=None if restarts is None else make,
            restarts=restarts,
            health_interval_s=600.0,
        )
        pools.append(pool)
        await pool.start()
        return pool

    yield start
    for pool in pools:
        await pool.shutdown()


def config_of(**agent):
    """Settings of so many workers whose agents use tools."""
    agent = {"num_workers": 2, "default_agent_loop": "tool_agent", **agent}
    return RolloutConfig(multi_turn=MultiTurnConfig(enable=True), agent=AgentConfig(**agent))


def spec_of(config=None, **options):
    """What workers are made from; what it calls is sent to them as it is."""

    def make_tools():
        return ToolExecutor(ToolRegistry([echo, failing]))

    def make_reward_fn():
        async def reward(row, outputs):
            return RewardResult(float(row["index"]), {"pid": os.getpid()})

        return reward

    options = {"make_tools": make_tools, "make_reward_fn": make_reward_fn, **options}
    return WorkerSpec(
        config=config_of() if config is None else config,
        tokens=ContinuousTokens(tiny_chat_tokenizer()),
        budget=SessionBudget(600, 400),
        **options,
    )


def task_of(index, agent="tool_agent", **row):
    """A trajectory of a prompt of its own."""
    row = {"raw_prompt": [{"role": "user", "content": f"Question {index}."}], "index": index, **row}
    return TrajectoryTask(row, agent, f"g{index}", f"g{index}/0", index)


async def undisturbed(tasks):
    """What the same policy and agent give in one process."""
    spec = spec_of()
    context = AgentLoopContext(
        client=LLMServerClient([CallingServer("model")]),
        tokens=spec.tokens,
        config=spec.config.multi_turn,
        budget=spec.budget,
        tools=spec.make_tools(),
        parser=make_parser(spec.config.multi_turn, spec.tokens.tokenizer),
    )
    worker = AgentLoopWorker(context, spec.config.agent, reward_fn=spec.make_reward_fn())
    return await worker.generate_sequences(tasks, PARAMS)


def what_counts(trajectory):
    """What training reads of a trajectory."""
    assert trajectory.failure is None, trajectory.failure
    (segment,) = trajectory.segments
    return (
        (trajectory.group_id, trajectory.trajectory_id, segment.group_id, segment.trajectory_id),
        (segment.prompt_ids, segment.response_ids, segment.response_mask, segment.response_logprobs),
        (segment.policy_versions, segment.num_turns, segment.stop_reason, trajectory.reward.score),
    )


def places(workers):
    """The processes of the workers that are there."""
    return [worker.process.place for worker in workers.workers if worker.process is not None]


async def under_way(workers, count):
    """So many trajectories are inside of workers."""
    async with asyncio.timeout(30):
        while sum(report.num_trajectories for report in await workers.report()) < count:  # noqa: ASYNC110  nobody tells
            await asyncio.sleep(0.02)


async def idle(workers, num_workers, num_replicas):
    """All workers are there, reach all replicas, and have nothing under way."""
    async with asyncio.timeout(30):
        while True:
            reports = await workers.report()
            settled = all(report.is_idle and report.num_replicas == num_replicas for report in reports)
            if settled and len(reports) == num_workers:
                return
            await asyncio.sleep(0.05)


async def test_workers_in_actors_give_what_one_in_the_process_gives(pool_of):
    """Ids, masks, log-probabilities, versions, rewards and rows are the same; each worker has a process of its own."""
    tasks = [task_of(index) for index in range(8)]
    pool = await pool_of(2)
    async with RayWorkers(spec_of(), pool, placements=[SMALL] * 2) as workers:
        ran = await asyncio.gather(
            *(workers.workers[place % 2].run_trajectory(task, PARAMS) for place, task in enumerate(tasks))
        )
        assert await workers.workers[0].generate_sequences([], PARAMS) == []
        await idle(workers, 2, 2)
        pids = {place.pid for place in places(workers)}
    expected = await undisturbed(tasks)
    assert [what_counts(trajectory) for trajectory in ran] == [what_counts(trajectory) for trajectory in expected]
    assert all(trajectory.row is task.row for trajectory, task in zip(ran, tasks, strict=True))
    assert ran[0].segments[0].stop_reason is TrajectoryEnd.NO_TOOL_CALL
    assert {trajectory.reward.extra["pid"] for trajectory in ran} == pids
    assert await asyncio.to_thread(wait_until_gone, pids) == set()
    late = await workers.workers[0].run_trajectory(tasks[0], PARAMS)
    assert "are shut down" in late.failure.message


@pytest.mark.slow
async def test_a_manager_runs_batches_on_workers_in_actors(pool_of):
    """Groups, order, rewards and metrics are those of workers in this process."""
    rows = [dict(task_of(index).row) for index in range(4)]
    pool = await pool_of(2)
    config = config_of()
    options = {"tokens": ContinuousTokens(tiny_chat_tokenizer()), "budget": SessionBudget(600, 400)}
    async with RayWorkers(spec_of(), pool, placements=[SMALL] * 2) as workers:
        with pytest.raises(ClusterError, match="started once"):
            await workers.start()
        manager = AgentLoopManager(config, workers=workers.workers, **options)
        batch = await manager.generate_sequences(rows, n=2, step=3)
    here = AgentLoopManager(
        config,
        client=LLMServerClient([CallingServer("model")]),
        tools=spec_of().make_tools(),
        reward_fn=spec_of().make_reward_fn(),
        **options,
    )
    expected = await here.generate_sequences(rows, n=2, step=3)
    assert [what_counts(one) for one in batch.trajectories] == [what_counts(one) for one in expected.trajectories]
    assert batch.metrics.keys() == expected.metrics.keys()


@pytest.mark.slow
async def test_a_killed_worker_is_replaced_and_its_trajectories_begin_anew(pool_of):
    """Nothing of the first run is in what the second one gives, and everybody else goes on."""
    tasks = [task_of(index) for index in range(6)]
    pool = await pool_of(delay_s=0.3)
    async with RayWorkers(spec_of(), pool, placements=[SMALL] * 2, restarts=QUICK) as workers:
        running = asyncio.gather(
            *(workers.workers[place % 2].run_trajectory(task, PARAMS) for place, task in enumerate(tasks))
        )
        await under_way(workers, 6)
        os.kill(workers.workers[0].process.place.pid, signal.SIGKILL)
        ran = await running
        assert (workers.num_reruns, [worker.num_under_way for worker in workers.workers]) == (3, [0, 0])
        await idle(workers, 2, 1)
        assert workers.num_replaced == 1
    expected = await undisturbed(tasks)
    assert [what_counts(trajectory) for trajectory in ran] == [what_counts(trajectory) for trajectory in expected]


@pytest.mark.slow
async def test_a_worker_that_stands_still_is_lost(pool_of):
    """A stopped worker is killed after its silence, and does not deliver a second time when it would be continued."""
    pool = await pool_of(delay_s=0.2)
    async with RayWorkers(spec_of(), pool, placements=[SMALL] * 2, silence_s=5.0, restarts=QUICK) as workers:
        running = asyncio.ensure_future(workers.workers[0].run_trajectory(task_of(1), PARAMS))
        await under_way(workers, 1)
        pid = workers.workers[0].process.place.pid
        os.kill(pid, signal.SIGSTOP)
        async with asyncio.timeout(60):
            ran = await running
        assert await asyncio.to_thread(wait_until_gone, {pid}) == set()
        await idle(workers, 2, 1)
    assert what_counts(ran) == what_counts((await undisturbed([task_of(1)]))[0])


class Blocking(AgentLoopBase):
    """Computes without suspending."""

    async def run(self, sampling_params, **row):
        end = time.monotonic() + 120
        while time.monotonic() < end:
            pass
        raise AssertionError("nobody waits so long")


@pytest.mark.slow
async def test_an_agent_that_blocks_its_worker_is_named(pool_of, caplog):
    """The worker is replaced, and its trajectory's failure and the log say which agent blocked it, and where it is."""
    pool = await pool_of()
    options = {"silence_s": 5.0, "restarts": QUICK, "max_reruns": 0}
    spec = spec_of(config_of(num_workers=1), agents={"blocking": Blocking})
    async with RayWorkers(spec, pool, placements=[SMALL], **options) as workers:
        async with asyncio.timeout(100):
            ran = await workers.workers[0].run_trajectory(task_of(1, "blocking"), PARAMS)
        assert ran.failure.kind is FailureKind.AGENT
        await idle(workers, 1, 1)
    where = r"its event loop stands still in trajectory g1/0, agent blocking at .*test_ray_workers\.py:\d+, in run"
    assert re.search(where, caplog.text)
    assert "while time.monotonic() < end" in caplog.text


@pytest.mark.slow
async def test_a_worker_that_is_lost_too_often_is_given_up(pool_of):
    """Reruns and replacements are bounded; what has no worker left is a recorded failure that names the causes."""
    pool = await pool_of(delay_s=0.5)
    spec = spec_of(config_of(num_workers=1))
    restarts = RestartPolicy(max_restarts=1, first_backoff_s=0.0)
    async with RayWorkers(spec, pool, placements=[SMALL], restarts=restarts) as workers:
        (worker,) = workers.workers
        running = asyncio.ensure_future(worker.run_trajectory(task_of(1), PARAMS))
        for _ in range(2):
            await under_way(workers, 1)
            os.kill(worker.process.place.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            first, second = await running, await worker.run_trajectory(task_of(2), PARAMS)
        assert first.failure.kind is FailureKind.AGENT
        assert "the process has ended" in first.failure.message
        assert worker.is_given_up
        assert "at least one worker must be there" in second.failure.message


@pytest.mark.slow
async def test_a_cancelled_trajectory_is_ended_in_its_worker(pool_of, monkeypatch):
    """Cancelling returns when the worker has ended the trajectory, and frees its conversation, tools and replica; the worker serves on."""
    monkeypatch.setattr(workers_module, "_LETTING_GO_S", 60.0)
    pool = await pool_of(delay_s=20.0)
    async with RayWorkers(spec_of(config_of(num_workers=1)), pool, placements=[SMALL]) as workers:
        running = asyncio.ensure_future(workers.workers[0].run_trajectory(task_of(1), PARAMS))
        await under_way(workers, 1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert [report.num_trajectories for report in await workers.report()] == [0]
        await idle(workers, 1, 1)
        assert workers.num_reruns == 0


class Unpicklable(AgentLoopBase):
    """Gives what cannot cross a process."""

    async def run(self, sampling_params, **row):
        async with self.context.open_session(row) as session:
            await session.extend(row["raw_prompt"])
            await session.generate(sampling_params)
        raise ValueError(f"row {row['index']} is not for me")


@pytest.mark.slow
async def test_what_goes_wrong_with_one_trajectory_is_its_own_failure(pool_of):
    """A failing agent, a failing row, and a row that cannot be sent are recorded; agents registered here are known there."""

    class Local(Unpicklable):
        """Of this process only."""

    pool = await pool_of()
    spec = spec_of(config_of(num_workers=1), agents={"local": Local})
    async with RayWorkers(spec, pool, placements=[SMALL]) as workers:
        (worker,) = workers.workers
        ran = await asyncio.gather(
            worker.run_trajectory(task_of(0, "local"), PARAMS),
            worker.run_trajectory(task_of(1, "nobody"), PARAMS),
            worker.run_trajectory(task_of(2, stream=(byte for byte in b"x")), PARAMS),
            worker.run_trajectory(task_of(3), PARAMS),
        )
        assert "row 0 is not for me" in ran[0].failure.message
        assert "agent_name of a row, or agent.default_agent_loop, must be one of" in ran[1].failure.message
        assert "generator" in ran[2].failure.message
        assert ran[3].failure is None
        await idle(workers, 1, 1)


@pytest.mark.slow
async def test_replicas_come_and_go_under_the_workers(pool_of):
    """A lost replica leaves every worker's client, its turns wait for the new one, and one that is drained gets no turns."""
    pool = await pool_of(2, restarts=QUICK, delay_s=0.2)
    async with RayWorkers(spec_of(), pool, placements=[SMALL] * 2) as workers:
        await idle(workers, 2, 2)
        running = asyncio.gather(
            *(workers.workers[index % 2].run_trajectory(task_of(index), PARAMS) for index in range(4))
        )
        await under_way(workers, 4)
        for replica in pool.servers:
            os.kill(replica.place.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            ran = await running
        expected = await undisturbed([task_of(index) for index in range(4)])
        assert [what_counts(trajectory) for trajectory in ran] == [what_counts(trajectory) for trajectory in expected]
        await idle(workers, 2, 2)
        running = asyncio.ensure_future(workers.workers[0].run_trajectory(task_of(1), PARAMS))
        await under_way(workers, 1)
        await pool.drain(0)
        await idle(workers, 2, 1)
        assert what_counts(await running) == what_counts(expected[1])
        await pool.replace(0)
        await idle(workers, 2, 2)
        view = workers._follower.view
        assert (len(view.endpoints), view.draining, view.held) == (2, (), "")


@pytest.mark.slow
async def test_without_replicas_turns_fail(pool_of):
    """Where no replica comes back, the failure says what became of the last one."""
    pool = await pool_of()
    spec = spec_of(config_of(num_workers=1))
    async with RayWorkers(spec, pool, placements=[SMALL]) as workers:
        os.kill(pool.servers[0].place.pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            ran = await workers.workers[0].run_trajectory(task_of(1), PARAMS)
        assert ran.failure.kind is FailureKind.ENGINE
        assert "NoReplicaError" in ran.failure.message


@pytest.mark.slow
async def test_workers_share_what_replicas_hold(pool_of):
    """Two workers with room for two conversations together have one under way each."""
    pool = await pool_of(delay_s=0.3)
    config = config_of()
    config = RolloutConfig(multi_turn=config.multi_turn, agent=config.agent, admission=AdmissionConfig(max_sessions=2))
    async with RayWorkers(spec_of(config), pool, placements=[SMALL] * 2) as workers:
        running = asyncio.gather(
            *(workers.workers[index % 2].run_trajectory(task_of(index), PARAMS) for index in range(6))
        )
        await under_way(workers, 6)
        for _ in range(5):
            reports = await workers.report()
            assert max(report.num_in_flight for report in reports) <= 1
            await asyncio.sleep(0.1)
        assert [trajectory.failure for trajectory in await running] == [None] * 6


@pytest.mark.slow
async def test_a_start_that_fails_leaves_no_worker(pool_of):
    """Tools that cannot be made, and no room, are errors of the start; nothing is left of the others."""
    pool = await pool_of()

    def no_tools():
        raise ToolError("tools must be there, got none")

    for spec, placement, error, words, start_timeout_s in (
        (spec_of(make_tools=no_tools), SMALL, ToolError, "must be there", 120.0),
        # The first worker must be there before the second, for which there is no room, has waited for as long as this.
        (spec_of(), ActorPlacement(num_cpus=1000), ClusterError, "place for 1000 CPU", 30.0),
    ):
        workers = RayWorkers(spec, pool, placements=[SMALL, placement], start_timeout_s=start_timeout_s)
        with pytest.raises(error, match=words):
            await workers.start()
        assert places(workers) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"placements": [SMALL]}, "one for each of 2"),
        ({"max_reruns": -1}, "max_reruns"),
        ({"silence_s": 0}, "silence_s"),
    ],
)
async def test_settings_of_workers_are_checked(options, words):
    """What cannot be is refused before anything is started."""
    pool = ServerPool([ScriptedServer([])])
    with pytest.raises(AgentConfigError, match=words):
        RayWorkers(spec_of(), pool, **options)


async def test_replicas_of_this_process_are_refused():
    """A replica that only this process reaches is named as the cause."""
    workers = RayWorkers(spec_of(), ServerPool([ScriptedServer([])]))
    with pytest.raises(AgentConfigError, match="got ScriptedServer; use RayReplica"):
        await workers.start()


async def test_an_agent_that_cannot_travel_harms_no_other(pool_of):
    """Agents that cannot be pickled, or whose module workers do not have, fail their own trajectories; the others run."""

    class Locked(AgentLoopBase):
        lock = threading.Lock()

        async def run(self, sampling_params, **row):
            raise AssertionError

    class Elsewhere(AgentLoopBase):
        async def run(self, sampling_params, **row):
            raise AssertionError

    module = types.ModuleType("module_of_the_driver")
    module.Elsewhere = Elsewhere
    Elsewhere.__module__, Elsewhere.__qualname__ = module.__name__, "Elsewhere"
    sys.modules[module.__name__] = module
    try:
        agents = {"locked": Locked, "elsewhere": Elsewhere}
        pool = await pool_of()
        async with RayWorkers(spec_of(config_of(num_workers=1), agents=agents), pool, placements=[SMALL]) as workers:
            (worker,) = workers.workers
            for name in agents:
                failed = await worker.run_trajectory(task_of(1, name), PARAMS)
                assert failed.failure is not None
                assert name in failed.failure.message
            what_counts(await worker.run_trajectory(task_of(2), PARAMS))
    finally:
        del sys.modules[module.__name__]


async def test_a_default_agent_that_workers_do_not_know_is_told_at_start(pool_of):
    """Workers do not start for a run none of whose trajectories they could run."""
    pool = await pool_of()
    config = config_of(num_workers=1, default_agent_loop="nobody_knows_it")
    with pytest.raises(UnknownAgentError, match="nobody_knows_it"):
        async with RayWorkers(spec_of(config, agents={}), pool, placements=[SMALL]):
            pass
