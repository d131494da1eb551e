"""The manager's streaming form: the trajectories of a batch, as groups that come when they are finished."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import count

import msgspec
import pytest

from ostinato_agent_loop import (
    AgentConfig,
    AgentConfigError,
    AgentLoopBase,
    AgentLoopManager,
    AgentLoopOutput,
    AgentRowError,
    RewardResult,
    RolloutConfig,
    Trajectory,
    UnknownAgentError,
    batch_metrics,
    register,
)
from ostinato_agent_loop.trajectory_stream import oldest_version
from ostinato_engines import EngineNotReadyError, PolicySpan, WeightManifest
from ostinato_rollout import (
    FailureKind,
    GroupFate,
    Leftover,
    NoReplicaError,
    OnFailure,
    ServerPool,
    SessionBudget,
    SessionInputError,
    StreamOptions,
    StreamState,
    derive_seed,
)

DONE = "done<|im_end|>"


def make_rows(num_rows, **fields):
    """Rows with a prompt and an index."""
    return [{"raw_prompt": [{"role": "user", "content": f"row {i}"}], "index": i, **fields} for i in range(num_rows)]


def endless(**fields):
    """Rows without end."""
    return ({"raw_prompt": [{"role": "user", "content": f"row {i}"}], "index": i, **fields} for i in count())


def seen(trajectory):
    """What training gets of a trajectory."""
    return (
        trajectory.group_id,
        trajectory.trajectory_id,
        trajectory.row["index"],
        trajectory.reward,
        [(one.prompt_ids, one.response_ids, one.response_mask, one.stop_reason) for one in trajectory.segments],
    )


@register("stream_test_gated")
class GatedAgent(AgentLoopBase):
    """Waits for its row's gate after its first turn; fails as often as its row says."""

    gates: dict[int, asyncio.Event] = {}  # noqa: RUF012
    failures: dict[str, int] = {}  # noqa: RUF012

    async def run(self, sampling_params, *, raw_prompt, index, gated=(), fails=(), **row):
        async with self.context.open_session(row) as session:
            await session.extend(raw_prompt)
            reply = await session.generate(sampling_params)
            if index in gated:
                await self.gates.setdefault(index, asyncio.Event()).wait()
            if index in fails:
                raise LookupError(f"seed {sampling_params.seed}")
        ledger = session.segments[0]
        return AgentLoopOutput(
            prompt_ids=ledger.prompt_ids,
            response_ids=ledger.response_ids,
            response_mask=ledger.response_mask,
            num_turns=2,
            policy_versions=tuple(PolicySpan(start, version) for start, version in ledger.policy_versions),
            extra_fields={"text": reply.message["content"]},
        )


@pytest.fixture(autouse=True)
def _gates():
    GatedAgent.gates = {}


async def settle(condition):
    """Let things happen until the condition holds."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never held")


async def test_a_stream_over_the_rows_of_a_batch_gives_its_trajectories(world, call):
    """Sorted by index, groups of a stream hold the very same trajectories as the batch of the same step: names, tokens, rewards,
    and their seeds."""

    turns: Counter = Counter()

    def reply(request):
        turns[request.request_id] += 1
        return call(("echo", f'{{"text": "{request.params.seed}"}}')) if turns[request.request_id] == 1 else DONE

    manager = world.build(reply)
    batch = await manager.generate_sequences(make_rows(4), n=3, step=5)
    seeds = {request.request_id: request.params.seed for request in world.server.requests}
    world.server.requests.clear()
    turns.clear()
    async with manager.stream(make_rows(4), n=3, step=5) as stream:
        groups = sorted([group async for group in stream], key=lambda group: group.index)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    assert [seen(one) for one in trajectories] == [seen(one) for one in batch.trajectories]
    assert {request.request_id: request.params.seed for request in world.server.requests} == seeds
    assert [(group.group_id, group.row["index"]) for group in groups] == [(f"train-5-{i}", i) for i in range(4)]


async def test_a_greedy_trajectory_goes_beside_each_group(world):
    """With greedy_baseline each row has one trajectory more, sampled at temperature 0: it is in no batch, and all others are the
    ones that there are without it."""
    manager = world.build(lambda request: DONE)
    async with manager.stream(make_rows(2), n=2, step=3) as stream:
        alone = await stream.take_batch(2)
    world.server.requests.clear()
    async with manager.stream(make_rows(2), n=2, step=3, greedy_baseline=True) as stream:
        batch = await stream.take_batch(2)
    assert [seen(one) for one in batch.trajectories] == [seen(one) for one in alone.trajectories]
    assert {group: one.trajectory_id for group, one in batch.baselines.items()} == {
        "train-3-0": "train-3-0/2",
        "train-3-1": "train-3-1/2",
    }
    assert sorted(request.params.temperature for request in world.server.requests) == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert alone.baselines == {}


async def test_a_straggler_holds_no_other_group(world):
    """Groups come while one trajectory of the first row is still under way, and that one in the end."""
    manager = world.build(lambda request: DONE, agent="stream_test_gated")
    async with manager.stream(make_rows(6, gated=[0]), n=2, step=0) as stream:
        groups = [await anext(stream) for _ in range(5)]
        assert {group.index for group in groups} == {1, 2, 3, 4, 5}
        assert all(trajectory.reward.score == 1.0 for group in groups for trajectory in group.trajectories)
        GatedAgent.gates[0].set()
        assert [group.index async for group in stream] == [0]
        assert await stream.take_batch(1) is not None


async def test_a_batch_from_a_stream_has_the_metrics_of_a_batch(world, call):
    """take_batch gives the trajectories of so many groups with every metric that generate_sequences gives, and what became of
    the other groups."""
    turns: Counter = Counter()

    def reply(request):
        turns[request.request_id] += 1
        return call(("failing", "{}")) if turns[request.request_id] == 1 else DONE

    manager = world.build(reply, agent_options={"max_concurrency": 4})
    names = set((await manager.generate_sequences(make_rows(2), n=2, step=0)).metrics)
    options = StreamOptions(queue_size=1, in_order=True)
    async with manager.stream(
        endless(), n=2, step=1, options=options, keep_group=lambda group: group.index % 2 == 1
    ) as stream:
        batch = await stream.take_batch(3)
        assert [trajectory.row["index"] for trajectory in batch.trajectories] == [1, 1, 3, 3, 5, 5]
    assert names < set(batch.metrics)
    for name in ("generate_sequences", "tool_calls", "compute_score"):
        assert {f"agent_loop/{name}/{spread}" for spread in ("min", "max", "mean")} <= names
    assert {"agent_loop/slowest/total", "num_turns/mean", "tool_call_counts/mean", "agent_loop/failures/tool"} <= names
    assert batch.metrics["agent_loop/tool_outcomes/tool_error"] == 6
    assert batch.metrics["agent_loop/groups/kept"] == 3
    assert batch.metrics["agent_loop/groups/filtered"] >= 3
    assert batch.metrics["agent_loop/staleness/max"] == 0
    assert names >= set(batch_metrics(batch.trajectories))


async def test_a_filter_sees_rewards_and_may_be_awaited(world):
    """keep_group gets the scored trajectories of a row, and drops by a reason that is counted."""

    async def reward(row, outputs):
        return RewardResult(float(row["index"] % 3))

    async def keep_group(group):
        await asyncio.sleep(0)
        scores = [trajectory.reward.score for trajectory in group.trajectories]
        return True if scores == [2.0, 2.0] else f"score {scores[0]:g}"

    manager = world.build(lambda request: DONE, agent="stream_test_gated", reward_fn=reward)
    async with manager.stream(
        endless(), n=2, step=0, keep_group=keep_group, options=StreamOptions(num_groups=2)
    ) as stream:
        assert [group.index async for group in stream] == [2, 5]
    assert stream.counts().filtered == {"score 0": 2, "score 1": 2}


async def test_failures_stay_in_their_groups_or_drop_them(world):
    """By default a failed trajectory is data in its group; with reruns it is run again under another seed and name, and with
    DROP its group goes and another row comes."""
    manager = world.build(lambda request: DONE, agent="stream_test_gated")
    async with manager.stream(make_rows(2, fails=[1]), n=2, step=0) as stream:
        groups = sorted([group async for group in stream], key=lambda group: group.index)
    assert [one.failure is None for group in groups for one in group.trajectories] == [True, True, False, False]
    world.server.requests.clear()
    options = StreamOptions(num_groups=2, max_reruns=1, on_failure=OnFailure.DROP)
    async with manager.stream(endless(fails=[1]), n=2, step=1, options=options) as stream:
        assert sorted([group.index async for group in stream]) == [0, 2]
    assert (stream.counts().fates["failed"], stream.counts().num_reruns >= 1) == (1, True)
    (dropped,) = stream.dropped
    assert (dropped.index, dropped.failure.kind) == (1, FailureKind.AGENT)
    assert dropped.failure.where.startswith("trajectory train-1-1/")
    seeds = {one.request_id: one.params.seed for one in world.server.requests if "-1-1/" in one.request_id}
    assert any(name.endswith("+1") for name in seeds)
    assert len(set(seeds.values())) == len(seeds)


async def test_a_failure_of_the_scheduler_is_a_trajectory_too(world):
    """A worker that hangs beyond all deadlines gives a trajectory with that failure, in a batch and in a stream."""

    class Hanging:
        async def run_trajectory(self, task, sampling_params):
            await asyncio.Event().wait()

    world.build([])
    manager = manager_of(world, [Hanging()])
    manager._team.run_timeout_s = 0.05
    batch = await manager.generate_sequences(make_rows(1), n=1, step=0)
    async with manager.stream(make_rows(1), n=1, step=0) as stream:
        ((trajectory,),) = [group.trajectories async for group in stream]
    for one in (batch.trajectories[0], trajectory):
        assert (one.failure.kind, one.group_id, one.trajectory_id) == (FailureKind.TIMEOUT, "train-0-0", "train-0-0/0")
        assert one.row["index"] == 0


def manager_of(world, workers, **options):
    """A manager over workers of another kind."""
    return AgentLoopManager(
        RolloutConfig(agent=AgentConfig(max_concurrency=options.pop("max_concurrency", 256))),
        tokens=None,
        budget=SessionBudget(10, 10),
        workers=workers,
        **options,
    )


class Recording:
    """A worker as there may be in another process: it knows tasks only."""

    def __init__(self) -> None:
        self.tasks: list = []
        self.running = self.peak = 0

    async def run_trajectory(self, task, sampling_params):
        """Take as many steps as the row says."""
        task = msgspec.json.decode(msgspec.json.encode(task), type=type(task))
        self.tasks.append(task)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            for _ in range(task.row.get("steps", 3)):
                await asyncio.sleep(0)
        finally:
            self.running -= 1
        return Trajectory(group_id=task.group_id, trajectory_id=task.trajectory_id, row=task.row)


async def test_workers_of_any_kind_share_the_trajectories_by_what_is_under_way(world):
    """A worker that is busy gets fewer; none has more than it may; tasks are plain data; each trajectory runs once."""
    rows = [{"index": i, "steps": 200 if i == 0 else 3} for i in range(24)]
    for form in ("batch", "stream"):
        workers = [Recording() for _ in range(3)]
        manager = manager_of(world, workers, max_concurrency=2)
        if form == "batch":
            batch = await manager.generate_sequences(rows, n=2, step=3)
            names = [trajectory.trajectory_id for trajectory in batch.trajectories]
        else:
            async with manager.stream(rows, n=2, step=3) as stream:
                groups = sorted([group async for group in stream], key=lambda group: group.index)
            names = [trajectory.trajectory_id for group in groups for trajectory in group.trajectories]
        assert names == [f"train-3-{i}/{number}" for i in range(24) for number in range(2)]
        assert sorted(task.trajectory_id for worker in workers for task in worker.tasks) == sorted(names)
        assert {worker.peak for worker in workers} == {2}
        busy = [worker for worker in workers if any(task.row["steps"] == 200 for task in worker.tasks)]
        assert min(len(worker.tasks) for worker in workers) == min(len(worker.tasks) for worker in busy)
        task = next(task for worker in workers for task in worker.tasks if task.trajectory_id == "train-3-7/1")
        assert (task.step, task.sample_index, task.rollout_n, task.validate) == (3, 7, 1, False)


async def test_workers_have_what_they_need_of_their_own(world):
    """Tools, client, reward or tracer beside workers are refused, as is no worker at all."""
    world.build([])
    with pytest.raises(AgentConfigError, match=r"workers must be at least one.*got 0 workers"):
        manager_of(world, [])
    with pytest.raises(AgentConfigError, match=r"of their own, got 1 workers and \['reward_fn'\]"):
        manager_of(world, [Recording()], reward_fn=world.reward)


async def test_the_pool_is_awake_while_a_stream_is_open(world):
    """It wakes with the first group that is asked for, and sleeps when the stream is closed, or has ended."""
    log = []
    manager = world.build(lambda request: log.append("generate") or DONE, colocated=True, agent="stream_test_gated")
    world.pool.wake_up, world.pool.sleep = lambda: note(log, "wake"), lambda: note(log, "sleep")
    stream = manager.stream(endless(), n=1, step=0, options=StreamOptions(queue_size=1))
    assert log == []
    await asyncio.gather(stream.take(1), stream.take(1))
    assert (log[0], log.count("wake"), log.count("sleep")) == ("wake", 1, 0)
    await asyncio.gather(stream.aclose(), stream.aclose())
    assert (log[-1], log.count("sleep")) == ("sleep", 1)
    async with manager.stream(make_rows(1), n=1, step=1) as stream:
        assert len([group async for group in stream]) == 1
        assert (log[-1], log.count("wake"), log.count("sleep")) == ("sleep", 2, 2)
    unused = manager.stream(make_rows(1), n=1, step=2)
    await unused.aclose()
    assert (await unused.take(1), log.count("wake")) == ([], 2)


async def note(log, what):
    """Take a while, and write it down."""
    for _ in range(5):
        await asyncio.sleep(0)
    log.append(what)


async def test_whoever_comes_while_the_pool_wakes_waits_for_it(world):
    """A second batch or stream that begins in the midst of the waking samples nothing before the pool is awake; one cancelled then
    leaves it to the other, and the last puts it to sleep."""
    log, gate = [], asyncio.Event()
    manager = world.build(lambda request: log.append("generate") or DONE, colocated=True, agent="stream_test_gated")

    async def wake_up():
        await gate.wait()
        log.append("wake")

    world.pool.wake_up, world.pool.sleep = wake_up, lambda: note(log, "sleep")
    first = asyncio.create_task(manager.generate_sequences(make_rows(1), n=1, step=0))
    second = asyncio.create_task(manager.generate_sequences(make_rows(1), n=1, step=1))
    stream = manager.stream(make_rows(1), n=1, step=2)
    third = asyncio.create_task(stream.take(1))
    await asyncio.sleep(0.01)
    assert log == []
    second.cancel()
    gate.set()
    await asyncio.gather(first, third)
    await stream.aclose()
    assert second.cancelled()
    assert (log[0], log.count("generate"), log.count("wake"), log[-1]) == ("wake", 2, 1, "sleep")


async def test_a_pool_that_cannot_wake_fails_the_take_and_can_be_asked_again(world):
    """The error is that of the pool; the stream has drawn nothing, and is closed without harm."""
    manager = world.build(lambda request: DONE, colocated=True)

    async def broken(tags=None):
        raise EngineNotReadyError("no memory")

    world.server.wake_up = broken
    async with manager.stream(make_rows(1), n=1, step=0) as stream:
        for _ in range(2):
            with pytest.raises(NoReplicaError):
                await anext(stream)
        assert stream.counts().num_drawn == 0


async def test_rows_are_checked_when_they_are_drawn(world):
    """What cannot be run ends the stream with its place and the cure, after the groups before it; in a state it is refused at once."""
    manager = world.build(lambda request: DONE, agent="stream_test_gated")

    async def later(rows):
        for row in rows:
            yield row

    for wrong, error in (("row", AgentRowError), ({"agent_name": "nobody"}, UnknownAgentError)):
        rows = [*make_rows(2), wrong]
        for source in (rows, later(rows)):
            async with manager.stream(source, n=1, step=0) as stream:
                assert {(await anext(stream)).index for _ in range(2)} == {0, 1}
                with pytest.raises(error, match=r"rows\[2\]"):
                    await anext(stream)
    state = {"num_drawn": 1, "groups": [{"index": 0, "prompt": {"agent_name": "nobody"}}]}
    with pytest.raises(UnknownAgentError, match=r"rows\[0\]"):
        manager.stream([], n=1, step=0, state=msgspec.convert(state, StreamState[dict, Trajectory]))
    async with manager.stream(["row"], n=1, step=0, state=StreamState(num_drawn=7)) as stream:
        with pytest.raises(AgentRowError, match=r"rows\[7\]"):
            await anext(stream)
    with pytest.raises(AgentConfigError, match="n must be at least 1, got 0"):
        manager.stream([], n=0, step=0)


async def test_closing_frees_every_trajectory_at_any_moment(world):
    """Conversations are released, counters are zero and the pool sleeps, with trajectories in mid-turn and others that are finished."""
    log = []
    manager = world.build(lambda request: DONE, agent="stream_test_gated", colocated=True)
    world.pool.sleep = lambda: note(log, "sleep")
    stream = manager.stream(endless(gated=[1, 3]), n=2, step=0, options=StreamOptions(queue_size=3))
    assert len(await stream.take(2)) == 2
    consuming = asyncio.create_task(stream.take(1_000_000))
    await asyncio.sleep(0.01)
    consuming.cancel()
    await stream.aclose()
    assert consuming.cancelled()
    assert (set(world.client.num_in_flight.values()), world.client.num_sticky, log) == ({0}, 0, ["sleep"])
    counts = stream.counts()
    assert counts.num_drawn == counts.fates["kept"] + counts.fates["cancelled"] > 4


async def test_a_stream_goes_on_from_its_state_in_another_manager(world):
    """What was finished and what was under way survive MessagePack; the second manager gives the same trajectories as one stream."""
    rows = make_rows(8, gated=[1, 2])
    options = StreamOptions(leftover=Leftover.HAND_BACK)
    manager = world.build(lambda request: DONE, agent="stream_test_gated")
    for index in (1, 2):
        GatedAgent.gates[index] = asyncio.Event()
    first = manager.stream(rows, n=2, step=4, options=options)
    taken = await first.take(2)
    await settle(lambda: first.counts().num_ready == 4)
    await first.aclose()
    assert first.counts().fates["handed_back"] == 6
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(first.state()), type=StreamState[dict, Trajectory])
    GatedAgent.gates = {1: asyncio.Event(), 2: asyncio.Event()}
    for gate in GatedAgent.gates.values():
        gate.set()
    manager = world.build(lambda request: DONE, agent="stream_test_gated")
    async with manager.stream(rows[state.num_drawn :], n=2, step=4, options=options, state=state) as second:
        taken += [group async for group in second]
    assert {request.request_id.split("/")[0] for request in world.server.requests} == {"train-4-1", "train-4-2"}
    trajectories = [one for group in sorted(taken, key=lambda group: group.index) for one in group.trajectories]
    batch = await world.build(lambda request: DONE, agent="stream_test_gated").generate_sequences(rows, n=2, step=4)
    assert [seen(one) for one in trajectories] == [seen(one) for one in batch.trajectories]


async def test_staleness_is_counted_in_the_versions_of_the_pool(world):
    """Groups whose oldest token is too old when the pool has moved on are dropped; with 0 nothing is sampled ahead."""
    manager = world.build(lambda request: DONE, agent="stream_test_gated")
    options = StreamOptions(max_staleness=1, groups_per_version=2)

    async def move(version):
        await world.pool.update_weights(WeightManifest(version=version, tensors=()), list)

    async with manager.stream(endless(gated=[1]), n=2, step=0, options=options) as stream:
        first = await stream.take_batch(2)
        assert {one.row["index"] for one in first.trajectories} == {0, 2}
        await settle(lambda: stream.counts().num_ready == 1)
        await move(1)
        second = await stream.take_batch(2)
        assert second.metrics["agent_loop/staleness/max"] == 1
        await move(2)
        GatedAgent.gates[1].set()
        third = await stream.take_batch(2)
        assert (third.metrics["agent_loop/staleness/min"], third.metrics["agent_loop/staleness/max"]) == (0, 1)
        assert [(one.index, one.fate) for one in stream.dropped] == [(1, GroupFate.STALE)]
        spans = [one.segments[0].policy_versions[0].version for one in third.trajectories]
        assert min(spans) == 1
    options = StreamOptions(max_staleness=0, groups_per_version=2)
    world.server.requests.clear()
    async with manager.stream(endless(), n=1, step=1, options=options) as stream:
        await stream.take(2)
        await asyncio.sleep(0.01)
        assert len(world.server.requests) == 2
        await move(3)
        assert len(await stream.take(2)) == 2


async def test_a_bounded_stream_labels_its_tasks_with_the_steps_that_it_samples_for(world):
    """With groups_per_version, tasks say the step and the place in it, as a tracer that takes a few of each step needs them; names and
    seeds are those of the stream."""
    world.build([])
    labels = {}
    for rows_per_step in (None, 4):
        worker = Recording()
        options = StreamOptions(max_staleness=2, groups_per_version=rows_per_step) if rows_per_step else None
        manager = manager_of(world, [worker], pool=world.pool)
        async with manager.stream(make_rows(10), n=1, step=6, options=options) as stream:
            assert len([group async for group in stream]) == 10
        worker.tasks.sort(key=lambda task: task.row["index"])
        labels[rows_per_step] = [(task.step, task.sample_index) for task in worker.tasks]
        assert [(task.trajectory_id, task.seed) for task in worker.tasks] == [
            (f"train-6-{i}/0", derive_seed(0, 6, i, 0, 0)) for i in range(10)
        ]
    assert labels == {None: [(6, i) for i in range(10)], 4: [(6 + i // 4, i % 4) for i in range(10)]}


async def test_no_replica_for_a_while_is_no_end_of_a_bounded_stream(world):
    """While no replica is in service the last version counts; one that nobody has ever told is an error where it is a bound, and no
    figure otherwise."""
    manager = world.build(lambda request: DONE, agent="stream_test_gated")
    options = StreamOptions(max_staleness=0, groups_per_version=2)
    stream = manager.stream(endless(), n=1, step=0, options=options)
    original = ServerPool.servers
    try:
        ServerPool.servers = property(lambda pool: ())
        with pytest.raises(NoReplicaError):
            manager.stream(endless(), n=1, step=1, options=options)
        assert len(await stream.take(2)) == 2
        async with manager.stream(make_rows(2), n=1, step=2) as unbounded:
            batch = await unbounded.take_batch(2)
        assert (len(batch.trajectories), "agent_loop/staleness/max" in batch.metrics) == (2, False)
    finally:
        ServerPool.servers = original
    await stream.aclose()


async def test_bounds_that_cannot_hold_are_refused(world):
    """Staleness without a pool, and options that do not fit together."""
    world.build([])
    manager = manager_of(world, [Recording()])
    with pytest.raises(AgentConfigError, match="max_staleness must go with a pool"):
        manager.stream([], n=1, step=0, options=StreamOptions(max_staleness=0, groups_per_version=1))
    with pytest.raises(SessionInputError, match="oversample must go with num_groups"):
        manager.stream([], n=1, step=0, options=StreamOptions(oversample=2))


def test_the_oldest_span_of_all_segments_is_a_trajectorys_version():
    """Whatever the order; none where nothing is known."""

    def segment(*versions):
        spans = tuple(PolicySpan(start, version) for start, version in enumerate(versions))
        return AgentLoopOutput(prompt_ids=[1], response_ids=[2] * 3, response_mask=[1] * 3, policy_versions=spans)

    segments = [segment(), segment(5, 3, 7), segment(4)]
    assert oldest_version(Trajectory(group_id="g", trajectory_id="t", row={}, segments=segments)) == 3
    assert oldest_version(Trajectory(group_id="g", trajectory_id="t", row={})) is None
