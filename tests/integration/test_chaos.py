"""Replicas and workers on a real Ray cluster while processes die, stand still, crawl, and messages are lost.

After each disturbance: every trajectory has one outcome, with the tokens of an undisturbed run; everything comes back; all
counters are zero; no process is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
from pathlib import Path

import pytest
import pytest_asyncio

from ostinato_agent_loop import (
    AgentConfig,
    AgentLoopContext,
    AgentLoopWorker,
    MultiTurnConfig,
    RolloutConfig,
    TrajectoryTask,
    make_parser,
)
from ostinato_engines import SamplingParams, WeightManifest
from ostinato_rollout import AdmissionConfig, FailureKind, LLMServerClient, ServerPool, SessionBudget
from ostinato_tokenization import ContinuousTokens
from ostinato_tokenization.testing import tiny_chat_tokenizer
from ostinato_tools import ToolExecutor, ToolRegistry
from ostinato_tools.testing import echo

pytest.importorskip("ray")
pytest.importorskip("zmq")

from ostinato_agent_loop.ray_workers import RayWorkers, WorkerSpec
from ostinato_rollout.ray_cluster import ActorPlacement, ClusterError, RayReplica
from ostinato_rollout.ray_cluster.testing import CallingServer, local_cluster
from ostinato_rollout.restarts import RestartPolicy
from ostinato_rollout.transport.mailbox import Mailbox

pytestmark = pytest.mark.asyncio(loop_scope="module")

SMALL = ActorPlacement(num_cpus=0.1)
PARAMS = SamplingParams()
SILENCE_S = 5.0
"""Long enough for a process that shares two cores with many others."""
DELAY_S = 0.15
CONFIG = RolloutConfig(
    multi_turn=MultiTurnConfig(enable=True), agent=AgentConfig(num_workers=2, default_agent_loop="tool_agent")
)
ALWAYS = RestartPolicy(max_restarts=1000, max_pool_restarts=1000, first_backoff_s=0.0)
MIB = 1 << 20


def _checks():
    spec = importlib.util.spec_from_file_location("chaos_checks", Path(__file__).with_name("chaos_checks.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


checks = _checks()


def make_tools():
    """An executor with the tool that the policy calls."""
    return ToolExecutor(ToolRegistry([echo]))


def context_of(client, tools):
    """The world of an agent in this process."""
    tokens = ContinuousTokens(tiny_chat_tokenizer())
    parser = make_parser(CONFIG.multi_turn, tokens.tokenizer)
    return AgentLoopContext(
        client=client,
        tokens=tokens,
        config=CONFIG.multi_turn,
        budget=SessionBudget(600, 400),
        tools=tools,
        parser=parser,
    )


def tasks_of(wave, count):
    """Trajectories of prompts of their own."""
    return [
        TrajectoryTask(
            {"raw_prompt": [{"role": "user", "content": f"Question {number} of {wave}."}]},
            "tool_agent",
            f"{wave}-{number}",
            f"{wave}-{number}/0",
            number,
        )
        for number in range(count)
    ]


async def undisturbed(tasks):
    """What the same policy and agent give in one process, by trajectory id."""
    context = context_of(LLMServerClient([CallingServer("model")]), make_tools())
    ran = await AgentLoopWorker(context, CONFIG.agent).generate_sequences(tasks, PARAMS)
    assert [trajectory.failure for trajectory in ran] == [None] * len(tasks)
    return {trajectory.trajectory_id: trajectory for trajectory in ran}


class World:
    """Replicas and workers, the processes that they have had, and what must hold of them."""

    def __init__(self, *, num_replicas, num_workers):
        self.num_replicas, self.num_workers = num_replicas, num_workers
        self.made = []
        self.worker_pids = set()
        self.pool = ServerPool(
            [self.make_replica(number) for number in range(num_replicas)],
            make_server=self.make_replica,
            restarts=ALWAYS,
            health_interval_s=0.3,
            no_replica_timeout_s=60.0,
        )

        def tools():
            return ToolExecutor(ToolRegistry([echo]))

        spec = WorkerSpec(
            config=RolloutConfig(
                multi_turn=CONFIG.multi_turn,
                agent=AgentConfig(num_workers=num_workers, default_agent_loop="tool_agent"),
            ),
            tokens=ContinuousTokens(tiny_chat_tokenizer()),
            budget=SessionBudget(600, 400),
            make_tools=tools,
        )
        placements = [SMALL] * num_workers
        self.workers = RayWorkers(spec, self.pool, placements=placements, silence_s=2 * SILENCE_S, restarts=ALWAYS)

    def make_replica(self, number):
        """A replica that is not started."""
        replica = RayReplica(
            "ostinato_rollout.ray_cluster.testing:CallingServer",
            "model",
            settings={"delay_s": DELAY_S, "update_s": 1.0},
            placement=SMALL,
            silence_s=SILENCE_S,
        )
        self.made.append(replica)
        return replica

    async def __aenter__(self):
        await self.pool.start()
        await self.workers.start()
        return self

    async def __aexit__(self, *exc_info):
        self.note_workers()
        await self.workers.shutdown()
        await self.pool.shutdown()
        pids = {replica.place.pid for replica in self.made if replica.place is not None} | self.worker_pids
        await self.until(lambda: checks.process_findings(pids))

    def note_workers(self):
        """Remember the processes of the workers that are there."""
        places = [worker.process.place for worker in self.workers.workers if worker.process is not None]
        self.worker_pids |= {place.pid for place in places}
        return [place.pid for place in places]

    async def until(self, find):
        """Waits until a check finds nothing; fails with what it found last."""
        found = ["nothing was looked at"]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60):
                while found:
                    found = find()
                    found = await found if asyncio.iscoroutine(found) else found
                    await asyncio.sleep(0.05)
        assert found == []

    async def findings(self):
        """What is not as it must be when nothing is under way and everything has come back."""
        found = checks.pool_findings(self.pool, num_replicas=self.num_replicas)
        found += checks.remote_findings(self.pool.servers)
        try:
            found += checks.replica_findings([await replica.report() for replica in self.pool.servers])
            reports = await self.workers.report()
        except ClusterError as error:
            return [*found, str(error)]
        found += checks.worker_findings(reports, num_workers=self.num_workers, num_replicas=self.num_replicas)
        serving = {replica.place.pid for replica in self.pool.servers}
        ended = {replica.place.pid for replica in self.made if replica.place is not None} - serving
        found += checks.process_findings(ended | (self.worker_pids - set(self.note_workers())))
        found += [f"worker {worker.number} counts" for worker in self.workers.workers if worker.num_under_way]
        return found

    async def run(self, tasks):
        """All trajectories, spread over the workers."""
        workers = self.workers.workers
        return await asyncio.gather(
            *(workers[place % len(workers)].run_trajectory(task, PARAMS) for place, task in enumerate(tasks))
        )

    async def disturbed(self, tasks, disturb, *, at_least=4):
        """Runs trajectories, and disturbs them once so many generations are inside of replicas."""
        self.note_workers()
        running = asyncio.ensure_future(self.run(tasks))
        while sum(report.num_calls for report in await self.reports()) < at_least:
            assert not running.done(), "the trajectories ended before they could be disturbed"
            await asyncio.sleep(0.01)
        await disturb()
        async with asyncio.timeout(90):
            ran = await running
        self.note_workers()
        return ran

    async def reports(self):
        """Of the replicas in service."""
        return [await replica.report() for replica in self.pool.servers]

    async def check(self, tasks, ran, *, versions=None):
        """All that must hold now."""
        assert checks.ledger_findings(tasks, ran, await undisturbed(tasks)) == []
        assert checks.version_findings(ran, {self.pool.policy_version} if versions is None else versions) == []
        await self.until(self.findings)

    async def update(self, version, **options):
        """New weights, of a number each."""
        import torch

        weights = [("w", torch.full((4,), float(version)))]
        manifest = WeightManifest.from_tensors(version, weights)
        await self.pool.update_weights(manifest, lambda: iter(weights), replayable=True, **options)


@pytest.fixture(scope="session", autouse=True)
def cluster():
    """A cluster for all tests here."""
    with local_cluster(num_gpus=8):
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world():
    """Four replicas and two workers, which come back after each test."""
    async with World(num_replicas=4, num_workers=2) as world:
        yield world


async def test_a_replica_dies_under_its_trajectories():
    """The quick form: two replicas, a worker, one kill in mid-generation; all turns go on elsewhere, token for token."""
    async with World(num_replicas=2, num_workers=1) as world:
        tasks = tasks_of("smoke", 8)
        ran = await world.disturbed(tasks, lambda: kill(world.pool.servers[0].place.pid))
        await world.check(tasks, ran)


async def kill(pid, number=signal.SIGKILL):
    """A signal to a process, which may have gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@pytest.mark.slow
async def test_replicas_die_in_mid_generation(world):
    """One of four, then three at once: no trajectory is lost or has a token twice, and all replicas come back."""
    for count in (1, 3):
        tasks = tasks_of(f"kill{count}", 24)
        victims = [replica.place.pid for replica in world.pool.servers[:count]]

        async def disturb(victims=victims):
            for pid in victims:
                await kill(pid)

        ran = await world.disturbed(tasks, disturb)
        await world.check(tasks, ran)


@pytest.mark.slow
async def test_all_replicas_die_at_once(world):
    """Turns wait until the first one has been restarted, and go on there."""
    tasks = tasks_of("all", 12)

    async def disturb():
        for replica in world.pool.servers:
            await kill(replica.place.pid)

    ran = await world.disturbed(tasks, disturb)
    await world.check(tasks, ran)


@pytest.mark.slow
async def test_a_replica_dies_in_mid_update(world):
    """The others have the new weights and serve them; the killed one comes back with them, never without."""
    pytest.importorskip("torch")
    before = world.pool.policy_version
    tasks = tasks_of("update", 16)

    async def disturb():
        updating = asyncio.ensure_future(world.update(before + 1))
        await asyncio.sleep(0.6)  # within the second that a replica takes for its update, whether it has begun or not
        await kill(
            world.made[-1].place.pid if world.made[-1] in world.pool.servers else world.pool.servers[0].place.pid
        )
        await updating
        assert {server.policy_version for server in world.pool.servers} == {before + 1}

    ran = await world.disturbed(tasks, disturb)
    await world.check(tasks, ran, versions={before, before + 1})
    tasks = tasks_of("updated", 8)
    await world.check(tasks, await world.run(tasks), versions={before + 1})


@pytest.mark.slow
async def test_a_worker_dies(world):
    """Its trajectories begin anew on the other one, with nothing of the first run in them."""
    tasks = tasks_of("worker", 24)
    pid = world.workers.workers[0].process.place.pid
    before = world.workers.num_reruns
    ran = await world.disturbed(tasks, lambda: kill(pid))
    assert world.workers.num_reruns > before
    await world.check(tasks, ran)


@pytest.mark.slow
async def test_a_replica_stands_still_past_its_deadline(world):
    """It is lost and ended; when it would be continued, there is nothing that could serve old weights or answer twice."""
    pytest.importorskip("torch")
    tasks = tasks_of("stop", 24)
    stopped = world.pool.servers[1]

    async def disturb():
        await kill(stopped.place.pid, signal.SIGSTOP)

    ran = await world.disturbed(tasks, disturb)
    await world.update(world.pool.policy_version + 1)
    await kill(stopped.place.pid, signal.SIGCONT)
    late = tasks_of("continued", 8)
    await world.check(late, await world.run(late))
    await world.check(tasks, ran, versions={world.pool.policy_version - 1})
    assert stopped not in world.pool.servers


@pytest.mark.slow
async def test_a_replica_is_continued_just_when_it_is_given_up(world):
    """Whichever comes first, a late answer is in no ledger twice."""
    for wait_s in (0.5 * SILENCE_S, 1.25 * SILENCE_S, 1.5 * SILENCE_S):
        tasks = tasks_of(f"race{wait_s}", 12)
        pid = world.pool.servers[0].place.pid

        async def disturb(pid=pid, wait_s=wait_s):
            await kill(pid, signal.SIGSTOP)
            await asyncio.sleep(wait_s)
            await kill(pid, signal.SIGCONT)

        ran = await world.disturbed(tasks, disturb)
        await world.check(tasks, ran)


@pytest.mark.slow
async def test_a_worker_stands_still_past_its_deadline(world):
    """It is ended and replaced; continuing it delivers nothing a second time."""
    tasks = tasks_of("stopped worker", 16)
    pid = world.workers.workers[1].process.place.pid
    ran = await world.disturbed(tasks, lambda: kill(pid, signal.SIGSTOP))
    await kill(pid, signal.SIGCONT)
    await world.check(tasks, ran)


@pytest.mark.slow
async def test_a_replica_crawls(world):
    """A process that gets a tenth of the time holds up its own turns only; nobody is lost, and nothing is restarted."""
    tasks = tasks_of("crawl", 24)
    servers, pid = world.pool.servers, world.pool.servers[2].place.pid
    crawling = None

    async def crawl():
        try:
            while True:
                await kill(pid, signal.SIGSTOP)
                await asyncio.sleep(0.18)
                await kill(pid, signal.SIGCONT)
                await asyncio.sleep(0.02)
        finally:
            await kill(pid, signal.SIGCONT)

    async def disturb():
        nonlocal crawling
        crawling = asyncio.ensure_future(crawl())

    ran = await world.disturbed(tasks, disturb)
    crawling.cancel()
    await asyncio.wait([crawling])
    await world.check(tasks, ran)
    assert world.pool.servers == servers


@pytest.mark.slow
async def test_messages_are_lost(world, monkeypatch):
    """A turn whose message is lost fails at its deadline, as data; the others are right, and both ends forget everything."""
    remotes = [replica.endpoint.connect() for replica in world.pool.servers]
    await asyncio.gather(*(remote.start() for remote in remotes))
    mailboxes = {remote._link._mailbox for remote in remotes}
    count = 0
    send, receive = Mailbox.send, Mailbox._drain_now

    def lossy_send(mailbox, frames):
        nonlocal count
        if mailbox in mailboxes and len(frames) == 2:
            count += 1
            if count % 7 == 0:
                return True
        return send(mailbox, frames)

    client = LLMServerClient(remotes, timeout_s=3.0)
    tools = make_tools()
    worker = AgentLoopWorker(context_of(client, tools), CONFIG.agent)
    tasks = tasks_of("lossy", 24)
    monkeypatch.setattr(Mailbox, "send", lossy_send)
    async with asyncio.timeout(60):
        ran = await worker.generate_sequences(tasks, PARAMS)
    monkeypatch.setattr(Mailbox, "send", send)
    assert Mailbox._drain_now is receive
    failed = {trajectory.trajectory_id for trajectory in ran if trajectory.failure is not None}
    assert 0 < len(failed) < len(tasks)
    assert {trajectory.failure.kind for trajectory in ran if trajectory.failure} == {FailureKind.TIMEOUT}
    assert checks.ledger_findings(tasks, ran, await undisturbed(tasks), may_fail=failed) == []
    assert checks.client_findings(client) + checks.tool_findings(tools) + checks.remote_findings(remotes) == []
    await asyncio.gather(*(remote.disconnect() for remote in remotes))
    await world.until(world.findings)


@pytest.mark.slow
async def test_the_queue_is_exhausted(world):
    """Far more conversations than places: those that got none within the deadline fail, as data, and nothing is held."""
    admission = AdmissionConfig(max_sessions=1, timeout_s=1.0)
    client, tools = world.pool.client(admission=admission), make_tools()
    worker = AgentLoopWorker(context_of(client, tools), CONFIG.agent)
    tasks = tasks_of("queue", 64)
    async with asyncio.timeout(60):
        ran = await worker.generate_sequences(tasks, PARAMS)
    failed = {trajectory.trajectory_id for trajectory in ran if trajectory.failure is not None}
    assert 0 < len(failed) < len(tasks)
    assert {trajectory.failure.kind for trajectory in ran if trajectory.failure} == {FailureKind.TIMEOUT}
    assert checks.ledger_findings(tasks, ran, await undisturbed(tasks), may_fail=failed) == []
    assert checks.client_findings(client) + checks.tool_findings(tools) == []
    await world.until(world.findings)


@pytest.mark.slow
async def test_everything_is_cancelled(world):
    """Trajectories that nobody waits for any more end in their workers and at the replicas."""
    tasks = tasks_of("cancel", 32)
    running = asyncio.ensure_future(world.run(tasks))
    while sum(report.num_calls for report in await world.reports()) < 4:  # noqa: ASYNC110  nobody tells
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await world.until(world.findings)


@pytest.mark.slow
@pytest.mark.timeout(900)  # up to 28 waves
async def test_a_thousand_conversations_at_once_and_flat_memory(world):
    """Waves of a thousand multi-turn conversations over four replicas hold, and no process grows with them.

    The conversations of all waves are the same: what is kept of texts, up to a bound, is kept in the first one. A leak grows in every
    window of waves; an allocator that has met a busier moment than before grows once.
    """
    tasks = tasks_of("wave", 1000)
    for _ in range(4):
        await wave_of(world, tasks)
    growing = None
    for _ in range(4):
        samples = {}
        for _ in range(6):
            for pid in await wave_of(world, tasks):
                samples.setdefault(pid, []).append(checks.resident_bytes(pid))
        # A worker that a crowded host has cost its place is new, and grows as every process does that has just begun.
        steady = {pid: sizes for pid, sizes in samples.items() if len(sizes) == 6}
        assert {os.getpid(), *(replica.place.pid for replica in world.pool.servers)} <= steady.keys()
        # 2 KiB for each conversation of the waves between, where its tokens alone take ten times as much.
        found = checks.memory_findings(steady, allowed_bytes=8 * MIB)
        growing = found if growing is None else {pid: text for pid, text in found.items() if pid in growing}
        if not growing:
            break
    assert not growing
    await world.check(tasks, await world.run(tasks))


async def wave_of(world, tasks):
    """Runs a wave, which must not fail, and returns the processes of all that took part."""
    async with asyncio.timeout(120):
        ran = await world.run(tasks)
    assert [trajectory.failure for trajectory in ran if trajectory.failure] == []
    return [*(replica.place.pid for replica in world.pool.servers), *world.note_workers(), os.getpid()]


@pytest.mark.slow
async def test_a_real_engine_dies_and_comes_back_with_the_current_weights(tmp_path):
    """Greedy tokens of a tiny transformer go on elsewhere as if nothing had been, and a restarted replica has the new policy."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    def model_of(seed):
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(
            transformers.Qwen3Config(
                vocab_size=96,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                intermediate_size=48,
                max_position_embeddings=512,
                initializer_range=0.2,
            )
        ).eval()

    model_of(0).save_pretrained(tmp_path / "model")
    placement = ActorPlacement(num_cpus=1, environment={"OMP_NUM_THREADS": "1"})

    def make(number):
        settings = {"device": "cpu", "max_num_seqs": 8}
        return RayReplica("transformers", tmp_path / "model", settings=settings, placement=placement)

    pool = ServerPool([make(0), make(1)], make_server=make, restarts=ALWAYS, health_interval_s=0.3)
    params = SamplingParams(temperature=0.0, max_tokens=300)
    try:
        await pool.start()
        client = pool.client()
        whole = await client.generate("alone", [1, 2, 3], params)
        running = [asyncio.ensure_future(client.generate(f"r{number}", [1, 2, 3], params)) for number in range(4)]
        victim = pool.servers[0]
        while not victim.num_waiting:  # noqa: ASYNC110  nobody tells
            await asyncio.sleep(0.01)
        await kill(victim.place.pid)
        async with asyncio.timeout(120):
            outputs = await asyncio.gather(*running)
        assert [output.token_ids for output in outputs] == [whole.token_ids] * 4
        tensors = dict(model_of(1).named_parameters())
        manifest = WeightManifest.from_tensors(1, tensors.items())
        await pool.update_weights(manifest, lambda: iter(tensors.items()), replayable=True)
        async with asyncio.timeout(120):
            while len(pool.servers) < 2:  # noqa: ASYNC110  nobody tells
                await asyncio.sleep(0.1)
        answers = [await server.generate([1, 2, 3], params, "new") for server in pool.servers]
        assert answers[0].token_ids == answers[1].token_ids != whole.token_ids
        assert {answer.policy_versions[0].version for answer in answers} == {1}
        for name in ("alone", *(f"r{number}" for number in range(4))):
            await client.release(name)
        assert checks.client_findings(client) == []
    finally:
        await pool.shutdown()
