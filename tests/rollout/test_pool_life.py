"""Replicas that are lost, restarted, drained and replaced, and the policy that they then serve."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from ostinato_engines import (
    AsyncServerBase,
    EngineCrashedError,
    EngineNotReadyError,
    EngineState,
    Health,
    PauseMode,
    PolicySpan,
    SamplingParams,
    StopReason,
    TokenOutput,
    UnsupportedError,
    WeightManifest,
)
from ostinato_rollout import (
    AdmissionConfig,
    ChatSession,
    NoReplicaError,
    ReplicaError,
    ReplicaState,
    RequestTimeoutError,
    RestartPolicy,
    ServerPool,
    SessionBudget,
    SessionConfig,
    SessionInputError,
    SessionStateError,
)
from ostinato_tokenization import ContinuousTokens

AT_ONCE = RestartPolicy(first_backoff_s=0.0, jitter=0.0)
PARAMS = SamplingParams(max_tokens=4)


def manifest(version: int) -> WeightManifest:
    return WeightManifest(version=version, tensors=())


class Engine(AsyncServerBase):
    """Generates when its gate is open: its version as many times as it may, until it is aborted or dies."""

    def __init__(self, *, modes=tuple(PauseMode), aborts=True):
        self.modes, self.aborts = modes, aborts
        self.gate = asyncio.Event()
        self.gate.set()
        self.log: list[str] = []
        self.broken: dict[str, BaseException | asyncio.Event] = {}
        self.state = EngineState.NEW
        self.paused = False
        self.calls: dict[str, asyncio.Future] = {}
        self.prompts: list[list[int]] = []

    async def _do(self, what):
        self.log.append(what)
        trouble = self.broken.get(what)
        if isinstance(trouble, asyncio.Event):
            await trouble.wait()
        elif trouble is not None:
            raise trouble

    def die(self):
        self.state = EngineState.FAILED
        for call in self.calls.values():
            if not call.done():
                call.set_exception(EngineCrashedError("the process is gone"))

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        if self.state is not EngineState.READY:
            raise EngineCrashedError(f"it is {self.state.value}")
        self.prompts.append(list(prompt_ids))
        version, num = self.policy_version, sampling_params.max_tokens
        call = self.calls[request_id] = asyncio.get_running_loop().create_future()
        opened = asyncio.ensure_future(self.gate.wait())
        try:
            await asyncio.wait([call, opened], return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                num = call.result()
                return TokenOutput([version] * num, [-0.5] * num, StopReason.ABORTED, None, (PolicySpan(0, version),))
            return TokenOutput([version] * num, [-0.5] * num, StopReason.LENGTH, None, (PolicySpan(0, version),))
        finally:
            opened.cancel()
            call.cancel()
            del self.calls[request_id]

    async def chat_completion(self, raw_request):
        raise UnsupportedError("no chat")

    async def start(self):
        await self._do("start")
        self.state = EngineState.READY

    async def shutdown(self):
        await self._do("shutdown")
        self.die()
        self.state = EngineState.CLOSED

    async def sleep(self, level=1):
        await self._do("sleep")
        await self.abort()

    async def wake_up(self, tags=None):
        await self._do("wake_up")

    async def pause(self, mode=PauseMode.ABORT):
        if mode not in self.modes:
            raise UnsupportedError(f"cannot {mode}")
        await self._do(f"pause {mode}")
        self.paused = True
        if mode is PauseMode.ABORT:
            await self.abort()
        if mode is PauseMode.WAIT:
            await until(lambda: not self.calls)

    async def resume(self):
        await self._do("resume")
        self.paused = False

    async def abort(self, request_ids=None):
        if not self.aborts:
            raise UnsupportedError("cannot abort")
        await self._do("abort")
        waiting = [call for call in self.calls.values() if not call.done()]
        for call in waiting:
            call.set_result(2)
        return len(waiting)

    async def update_weights(self, manifest, weights):
        if self.state is not EngineState.READY:
            raise EngineCrashedError("no engine")
        await self._do("update_weights")
        self.received = list(weights)
        self.policy_version = manifest.version

    async def health(self):
        await self._do("health")
        return Health(self.state, self.policy_version)


class Factory:
    """Makes engines for a pool, and keeps them."""

    def __init__(self, **options):
        self.options, self.made, self.fail, self.version = options, [], 0, 0

    def __call__(self, index):
        if self.fail:
            self.fail -= 1
            raise RuntimeError("no device")
        engine = Engine(**self.options)
        engine.policy_version = self.version
        self.made.append(engine)
        return engine


@pytest.fixture
async def started():
    """Starts a pool of engines that are restarted at once, and sees to it that it ends."""
    pools = []

    async def make(num=2, *, restarts=AT_ONCE, factory=None, engines=None, make=True, **options):
        factory = factory or Factory()
        engines = engines or [Engine() for _ in range(num)]
        options = {"health_interval_s": None, **options}
        pool = ServerPool(engines, make_server=factory if make else None, restarts=restarts, **options)
        pools.append(pool)
        await pool.start()
        return pool, engines, factory

    yield make
    for pool in pools:
        await pool.shutdown()
        assert set(pool.states.values()) == {ReplicaState.STOPPED}


async def until(condition):
    """Wait until something holds."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  the pool has no event for everything that a test looks at
            await asyncio.sleep(0.001)


async def under_way(client, engines, *names):
    """Begin turns, and wait until they are inside of engines."""
    tasks = [asyncio.create_task(client.generate(name, [7], PARAMS)) for name in names]
    await until(lambda: sum(len(engine.calls) for engine in engines) >= len(names))
    return tasks


def serving(pool):
    return [index for index, state in pool.states.items() if state is ReplicaState.SERVING]


# Loss and restart


async def test_a_replica_that_dies_in_mid_generation_comes_back_and_the_turn_is_served(started):
    """Its turn begins again elsewhere, the old engine is shut down, and a new one takes its place."""
    pool, engines, factory = await started(2)
    for engine in engines:
        engine.gate.clear()
    client = pool.client()
    turns = await under_way(client, engines, "a", "b")
    engines[1].die()
    engines[0].gate.set()
    outputs = await asyncio.gather(*turns)
    assert [output.token_ids for output in outputs] == [[0] * 4] * 2
    await until(lambda: serving(pool) == [0, 1])
    assert engines[1].log[-1] == "shutdown"
    assert pool.servers == (engines[0], factory.made[0])
    assert set(client.num_in_flight.values()) == {0}
    assert pool.lost == {}
    assert [change.after for change in pool.history if change.replica == 1] == [
        ReplicaState.STARTING,
        ReplicaState.SERVING,
        ReplicaState.LOST,
        ReplicaState.BACKING_OFF,
        ReplicaState.RESTARTING,
        ReplicaState.SERVING,
    ]


async def test_turns_wait_for_the_restart_of_the_only_replica(started):
    """While a restart is under way, running and new turns wait and are then served; nothing is refused."""
    pool, (engine,), _ = await started(1, restarts=RestartPolicy(first_backoff_s=0.1, jitter=0))
    engine.gate.clear()
    client = pool.client()
    turns = await under_way(client, [engine], "a")
    engine.die()
    await until(lambda: not pool.servers)
    turns.append(asyncio.create_task(client.generate("b", [7], PARAMS)))
    assert [output.token_ids for output in await asyncio.gather(*turns)] == [[0] * 4] * 2


async def test_a_restarted_replica_takes_the_weights_that_can_be_had_again(started):
    """With replayable weights it serves only once it has them."""
    pool, engines, factory = await started(2)
    await pool.update_weights(manifest(5), lambda: iter([("w", 1)]), replayable=True)
    engines[0].die()
    assert await pool.health()
    pool.take_out(engines[0], failure_of("it died"))
    await until(lambda: serving(pool) == [0, 1])
    assert (factory.made[0].policy_version, factory.made[0].received) == (5, [("w", 1)])
    assert pool.policy_version == 5


def failure_of(text):
    from ostinato_rollout import Failure, FailureKind

    return Failure("replica 0 had to live", FailureKind.ENGINE, text)


async def test_a_restarted_replica_waits_for_weights_that_cannot_be_had_again(started):
    """Otherwise it is out of service until the next update, and serves that."""
    pool, engines, factory = await started(2)
    await pool.update_weights(manifest(5), list)
    pool.take_out(engines[0], failure_of("it died"))
    await until(lambda: pool.states[0] is ReplicaState.WAITING_FOR_WEIGHTS)
    assert pool.servers == (engines[1],)
    assert "update_weights" not in factory.made[0].log
    await pool.update_weights(manifest(6), list)
    assert [server.policy_version for server in pool.servers] == [6, 6]
    assert len(pool.servers) == 2


async def test_withdrawn_weights_are_given_to_nobody(started):
    """After withdraw_weights nobody reads them, not even a replica that was taking them; it waits for the next update."""
    pool, engines, factory = await started(2)
    calls = []
    await pool.update_weights(manifest(5), lambda: calls.append(1) or iter(()), replayable=True)
    stuck = Factory()

    def make(index):
        engine = stuck(index)
        engine.broken["update_weights"] = asyncio.Event()
        factory.made.append(engine)
        return engine

    pool._revival._make_server = make
    pool.take_out(engines[0], failure_of("it died"))
    await until(lambda: factory.made and "update_weights" in factory.made[0].log)
    await pool.withdraw_weights()
    await until(lambda: not pool._revival.is_at_work_on(pool._fleet.replicas[0]))
    assert (pool.states[0], len(calls)) == (ReplicaState.WAITING_FOR_WEIGHTS, 3)
    factory.made[0].broken.clear()
    await pool.update_weights(manifest(6), list)
    assert serving(pool) == [0, 1]


async def test_weights_are_given_to_nobody_once_others_have_come(started):
    """A replica that is restarted during an update, even one that fails on all, never asks for the weights before it."""
    pool, (engine,), factory = await started(1)
    calls = []
    await pool.update_weights(manifest(5), lambda: calls.append(5) or iter(()), replayable=True)
    engine.broken["update_weights"] = RuntimeError("no memory")
    await pool.update_weights(manifest(6), lambda: calls.append(6) or iter(()))
    assert calls == [5, 6, 6]
    assert [server.policy_version for server in pool.servers] == [6]
    assert factory.made[0].log == ["start", "update_weights"]


async def test_an_engine_that_goes_on_reading_gets_no_withdrawn_weights(started, monkeypatch, let_go):
    """One that makes nothing of being cancelled is refused the next tensor, so that it never has half of two policies."""
    monkeypatch.setattr("ostinato_rollout.patience.GRACE_S", 0.01)
    pool, engines, factory = await started(2)
    await pool.update_weights(manifest(5), lambda: iter([("a", 1), ("b", 2)]), replayable=True)
    read, ends = [], []

    async def update(manifest, weights):
        weights = iter(weights)
        read.append(next(weights))
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue
        try:
            read.extend(weights)
        except ReplicaError as error:
            ends.append(error)

    def make(index):
        engine = factory(index)
        engine.update_weights = update
        return engine

    pool._revival._make_server = make
    pool.take_out(engines[0], failure_of("it died"))
    await until(lambda: read)
    await pool.withdraw_weights()
    let_go.set()
    await until(lambda: ends)
    assert read == [("a", 1)]
    assert "withdrawn" in str(ends[0])
    assert serving(pool) == [1]


async def test_a_new_server_of_another_policy_never_serves(started):
    """Before a first update, a restarted replica must start with the version of the others; one that does not is given up."""
    factory = Factory()
    factory.version = 9
    pool, engines, _ = await started(2, factory=factory, restarts=RestartPolicy(max_restarts=2, first_backoff_s=0))
    pool.take_out(engines[0], failure_of("it died"))
    await until(lambda: pool.states[0] is ReplicaState.GIVEN_UP)
    assert [engine.log[-1] for engine in factory.made] == ["shutdown"] * 2
    assert "policy_version must be 0" in pool.lost[0].message


async def test_a_storm_of_restarts_ends(started):
    """What fails again and again is given up within its budget, and turns end with an error that names every cause."""
    factory = Factory()
    factory.fail = 100
    pool, engines, _ = await started(
        2, factory=factory, restarts=RestartPolicy(max_restarts=3, max_pool_restarts=4, first_backoff_s=0)
    )
    client = pool.client()
    turn = asyncio.create_task(client.generate("a", [7], PARAMS))
    await turn
    for engine in engines:
        pool.take_out(engine, failure_of("it died"))
    with pytest.raises(NoReplicaError, match=r"replica 0: .*no device.*replica 1: .*no device"):
        await client.generate("a", [7], PARAMS)
    assert set(pool.states.values()) == {ReplicaState.GIVEN_UP}
    assert 100 - factory.fail == 4
    assert any("max_pool_restarts" in change.cause for change in pool.history)


async def test_turns_wait_no_longer_than_the_pool_says(started):
    """With no replica for no_replica_timeout_s, waiting turns and new conversations end; a later restart still helps the next."""
    factory = Factory()
    pool, (engine,), _ = await started(1, factory=factory, no_replica_timeout_s=0.2)
    client = pool.client()
    hung = asyncio.Event()
    make = Factory()

    def slow(index):
        made = make(index)
        made.broken["start"] = hung
        return made

    pool._revival._make_server = slow
    pool.take_out(engine, failure_of("it died"))
    with pytest.raises(NoReplicaError, match="replica 0: it died"):
        await client.generate("a", [7], PARAMS)
    with pytest.raises(NoReplicaError, match="restarting"):
        await client.generate("a", [7], PARAMS)
    hung.set()
    await until(lambda: serving(pool) == [0])
    assert (await client.generate("a", [7], PARAMS)).token_ids == [0] * 4


async def test_a_lost_replica_stays_lost_where_nothing_makes_another(started):
    """Without make_server it is shut down, and the others serve on; with none left, the error comes at once."""
    pool, engines, _ = await started(2, make=False)
    client = pool.client()
    pool.take_out(engines[0], failure_of("it died"))
    await until(lambda: engines[0].log[-1] == "shutdown")
    assert (await client.generate("a", [7], PARAMS)).token_ids == [0] * 4
    pool.take_out(engines[1], failure_of("so did this"))
    with pytest.raises(NoReplicaError, match=r"replica 0: it died; replica 1: so did this"):
        await client.generate("a", [7], PARAMS)


async def test_the_old_engine_is_ended_before_the_new_one_starts(started):
    """A restart waits for the shutdown, but no longer than its deadline; what did not end is shut down again at the end."""
    pool, engines, factory = await started(1, shutdown_timeout_s=0.1)
    engines[0].broken["shutdown"] = asyncio.Event()
    pool.take_out(engines[0], failure_of("it died"))
    await until(lambda: "shutdown" in engines[0].log)
    assert not factory.made
    await until(lambda: serving(pool) == [0])
    await pool.shutdown()
    assert engines[0].log.count("shutdown") == 2


async def test_a_replica_whose_calls_hang_lets_go_of_them_when_it_is_lost(started):
    """Turns inside of a replica that is taken out are taken back, however silent it is."""
    pool, engines, _ = await started(2)
    for engine in engines:
        engine.gate.clear()
    client = pool.client()
    turns = await under_way(client, engines, "a", "b")
    pool.take_out(engines[0], failure_of("silent"))
    engines[1].gate.set()
    assert [output.token_ids for output in await asyncio.gather(*turns)] == [[0] * 4] * 2


async def test_a_replica_that_ignores_cancellation_holds_nobody_up(started, monkeypatch, let_go):
    """An engine that goes on whatever it is told is lost at the deadline, and the pool goes on with another in its place."""
    monkeypatch.setattr("ostinato_rollout.patience.GRACE_S", 0.01)
    pool, engines, factory = await started(2, timeout_s=0.05)
    await pool.sleep()

    async def stubborn(tags=None):
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue

    engines[0].wake_up = stubborn
    await pool.wake_up()
    await until(lambda: serving(pool) == [0, 1])
    assert set(pool.servers) == {engines[1], factory.made[0]}
    let_go.set()


# Health


async def test_the_watch_finds_replicas_that_die_or_fall_silent_unasked(started):
    """One that says that it has failed, one that does not answer and one with another policy are each taken out and replaced."""
    pool, engines, factory = await started(3, health_interval_s=0.01, health_timeout_s=0.1)
    await pool.update_weights(manifest(2), list, replayable=True)
    engines[0].state = EngineState.FAILED
    engines[1].broken["health"] = asyncio.Event()
    engines[2].policy_version = 1
    await until(lambda: serving(pool) == [0, 1, 2] and len(factory.made) == 3)
    causes = {change.replica: change.cause for change in pool.history if change.after is ReplicaState.LOST}
    assert "got failed" in causes[0]
    assert "must be healthy within 0.1 s" in causes[1]
    assert "must be 2, got 1" in causes[2]
    assert [server.policy_version for server in pool.servers] == [2, 2, 2]


# Weights


@pytest.mark.parametrize(
    ("mode", "options", "expected"),
    [
        (PauseMode.ABORT, {}, [0, 0, 1, 1]),
        (PauseMode.WAIT, {}, [0, 0, 0, 0]),
        (PauseMode.KEEP, {"modes": (PauseMode.ABORT,)}, [0, 0, 1, 1]),
        (PauseMode.ABORT, {"modes": ()}, [0, 0, 1, 1]),
        (PauseMode.ABORT, {"modes": (), "aborts": False}, [1, 1, 1, 1]),
        (PauseMode.WAIT, {"modes": ()}, [0, 0, 0, 0]),
    ],
)
async def test_turns_go_through_an_update(started, mode, options, expected):
    """Whatever an engine can do, a turn under way ends with all its tokens, each with the version that sampled it; a turn that
    comes meanwhile is served under the new weights; the engine is resumed."""
    engine = Engine(**options)
    engine.gate.clear()
    pool, _, _ = await started(engines=[engine])
    client = pool.client()
    (turn,) = await under_way(client, [engine], "a")
    hold = engine.broken["update_weights"] = asyncio.Event()
    updating = asyncio.create_task(pool.update_weights(manifest(1), list, pause=mode))
    await until(lambda: pool.states[0] is ReplicaState.UPDATING)
    if mode is PauseMode.WAIT:
        engine.gate.set()
    await until(lambda: "update_weights" in engine.log)
    late = asyncio.create_task(client.generate("b", [7], PARAMS))
    await asyncio.sleep(0.02)
    assert len(engine.prompts) == 1
    hold.set()
    engine.gate.set()
    await updating
    output = await turn
    assert output.token_ids == expected
    spans = output.policy_versions
    assert [spans[[span.start <= place for span in spans].count(True) - 1].version for place in range(4)] == expected
    assert (await late).token_ids == [1] * 4
    assert not engine.paused


@pytest.mark.parametrize("step", ["pause abort", "update_weights", "resume"])
async def test_a_replica_that_fails_in_a_sync_is_taken_out_and_comes_back_with_the_new_policy(started, step):
    """Whichever step it fails in, it serves no stale policy; with weights that can be had again, its successor joins."""
    pool, engines, factory = await started(2)
    engines[0].broken[step] = RuntimeError("broken")
    await pool.update_weights(manifest(3), list, replayable=True)
    assert pool.servers[-1] is engines[1]
    await until(lambda: serving(pool) == [0, 1])
    assert [server.policy_version for server in pool.servers] == [3, 3]
    assert not any(engine.paused for engine in (engines[1], *factory.made))


async def test_an_update_waits_for_the_restart_of_the_last_replica(started):
    """An engine that died unnoticed fails the update; the one that is started in its place takes it."""
    pool, (engine,), factory = await started(1)
    engine.state = EngineState.FAILED
    await pool.update_weights(manifest(4), list)
    assert pool.servers == (factory.made[0],)
    assert pool.policy_version == 4


@pytest.mark.parametrize("step", ["pause abort", "update_weights", "resume"])
@pytest.mark.parametrize("stuck", [[0], [0, 1]])
async def test_a_cancelled_sync_leaves_nobody_paused_and_one_policy_in_service(started, step, stuck):
    """Wherever it is cancelled: those in service have one version, nobody is left paused, and the next update reaches all."""
    pool, engines, factory = await started(2)
    await pool.update_weights(manifest(1), list)
    gate = asyncio.Event()
    for index in stuck:
        engines[index].broken[step] = gate
    updating = asyncio.create_task(pool.update_weights(manifest(2), list, replayable=True))
    await until(lambda: all(engines[index].log.count(step) == 2 for index in stuck))
    await asyncio.sleep(0)
    if step == "resume":
        gate.set()
    updating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await updating
    gate.set()
    versions = {server.policy_version for server in pool.servers}
    assert len(versions) <= 1
    assert not any(server.paused for server in pool.servers)
    states = set(pool.states.values())
    assert states <= {ReplicaState.SERVING, ReplicaState.WAITING_FOR_WEIGHTS}
    await pool.update_weights(manifest(3), list)
    assert [server.policy_version for server in pool.servers] == [3, 3]
    assert not any(engine.paused for engine in engines)
    assert not factory.made


async def test_updates_come_one_after_the_other(started):
    """Two updates at once, and a sleep among them, are carried out in the order in which they were asked for."""
    pool, engines, _ = await started(2)
    await asyncio.gather(
        pool.update_weights(manifest(1), list), pool.update_weights(manifest(2), list), pool.sleep(), pool.wake_up()
    )
    kept = ("update_weights", "sleep", "wake_up")
    assert [what for what in engines[0].log if what in kept] == ["update_weights", "update_weights", "sleep", "wake_up"]
    assert (serving(pool), pool.policy_version) == ([0, 1], 2)


# Sleep


async def test_a_replica_lost_in_sleep_is_started_when_the_pool_wakes(started):
    """Its memory belongs to somebody else until then; it then takes part like the others."""
    pool, engines, factory = await started(2)
    client = pool.client()
    await pool.sleep()
    pool.take_out(engines[0], failure_of("it died"))
    await until(lambda: pool.states[0] is ReplicaState.BACKING_OFF)
    turn = asyncio.create_task(client.generate("a", [7], PARAMS))
    await asyncio.sleep(0.02)
    assert not factory.made
    assert not turn.done()
    await pool.wake_up()
    assert (await turn).token_ids == [0] * 4
    await until(lambda: serving(pool) == [0, 1])


async def test_weights_that_come_while_all_that_sleep_are_lost_are_taken_at_waking(started):
    """Nobody waits for an engine that must not start yet: it takes the weights, which can be had again, once the pool wakes."""
    pool, (engine,), factory = await started(1)
    await pool.sleep()
    pool.take_out(engine, failure_of("it died"))
    await pool.update_weights(manifest(4), list, replayable=True)
    assert not factory.made
    await pool.wake_up()
    await until(lambda: serving(pool) == [0])
    assert pool.policy_version == 4


async def test_a_sleep_does_not_use_up_the_wait_for_a_replica(started):
    """However long the pool slept, waking waits for a replica that could not be restarted before."""
    pool, (engine,), _ = await started(1, no_replica_timeout_s=0.1)
    await pool.sleep()
    pool.take_out(engine, failure_of("it died"))
    await until(lambda: pool._fleet._is_impatient)
    await pool.wake_up()
    await until(lambda: serving(pool) == [0])


async def test_a_pool_that_falls_asleep_during_a_start_ends_it_and_starts_anew(started):
    """A replica whose start had begun is shut down again, and started when the pool wakes."""
    pool, engines, factory = await started(2)
    gate = asyncio.Event()

    def make(index):
        engine = factory(index)
        engine.broken["start"] = gate
        return engine

    pool._revival._make_server = make
    pool.take_out(engines[0], failure_of("it died"))
    await until(lambda: factory.made and "start" in factory.made[0].log)
    await pool.sleep()
    gate.set()
    await until(lambda: factory.made[0].log[-1] == "shutdown")
    assert pool.states == {0: ReplicaState.BACKING_OFF, 1: ReplicaState.ASLEEP}
    await pool.wake_up()
    await until(lambda: serving(pool) == [0, 1])


async def test_a_turn_that_sleep_aborts_goes_on_after_waking(started):
    """Sleep loses no turn: it goes on from its last token once the pool is awake."""
    pool, engines, _ = await started(1)
    engines[0].gate.clear()
    (turn,) = await under_way(pool.client(), engines, "a")
    await pool.sleep()
    engines[0].gate.set()
    await asyncio.sleep(0.01)
    assert not turn.done()
    await pool.wake_up()
    assert (await turn).token_ids == [0] * 4
    assert engines[0].prompts == [[7], [7, 0, 0]]


async def test_a_cancelled_sleep_is_a_sleep(started):
    """Whoever is asleep by then, the pool is; wake_up brings it back."""
    pool, engines, _ = await started(2)
    engines[0].broken["sleep"] = asyncio.Event()
    sleeping = asyncio.create_task(pool.sleep())
    await until(lambda: "sleep" in engines[0].log)
    sleeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeping
    assert set(pool.states.values()) == {ReplicaState.ASLEEP}
    await pool.wake_up()
    assert serving(pool) == [0, 1]


async def test_a_sleeping_pool_takes_weights(started):
    """Weights that come between batches are taken in sleep, and served after waking."""
    pool, engines, _ = await started(2)
    await pool.sleep()
    await pool.update_weights(manifest(1), list)
    assert set(pool.states.values()) == {ReplicaState.ASLEEP}
    assert not any("pause" in what for what in engines[0].log)
    await pool.wake_up()
    assert serving(pool) == [0, 1]
    await pool.sleep(2)
    await pool.wake_up(["weights"])
    assert set(pool.states.values()) == {ReplicaState.ASLEEP}
    await pool.wake_up(["kv_cache"])
    assert (serving(pool), pool.policy_version) == ([0, 1], 1)


class DeepSleeper(Engine):
    """Gives up the memory of its weights, too, however it sleeps, as vLLM does."""

    def __init__(self):
        super().__init__()
        self.asleep = set()

    async def sleep(self, level=1):
        self.asleep = {"kv_cache", "weights"}

    async def wake_up(self, tags=None):
        self.asleep -= self.asleep if tags is None else set(tags)

    async def update_weights(self, manifest, weights):
        if "weights" in self.asleep:
            raise EngineNotReadyError("weights must be awake")
        await super().update_weights(manifest, weights)


async def test_a_sleeping_engine_has_memory_for_the_weights_that_it_takes(started):
    """An engine whose weights are asleep gets their memory back before new ones come, and stays in service; the rest sleeps on."""
    engines = [DeepSleeper(), DeepSleeper()]
    pool, _, _ = await started(engines=engines)
    await pool.sleep()
    await pool.update_weights(manifest(1), list)
    assert (set(pool.states.values()), pool.lost) == ({ReplicaState.ASLEEP}, {})
    assert [engine.asleep for engine in engines] == [{"kv_cache"}] * 2
    await pool.wake_up()
    assert (serving(pool), pool.policy_version) == ([0, 1], 1)
    assert not any(engine.asleep for engine in engines)


async def given_weights_asleep(started, first, later):
    """A pool of two, and the engines that it began with, after weights came in its sleep; the first replica, lost before, was waiting for them."""
    pool, engines, _ = await started(engines=[first(), first()])
    pool._revival._make_server = lambda index: later()
    await pool.update_weights(manifest(1), list)
    pool.take_out(engines[0], failure_of("it died"))
    await until(lambda: pool.states[0] is ReplicaState.WAITING_FOR_WEIGHTS)
    await pool.sleep()
    await pool.update_weights(manifest(2), list)
    return pool, engines


@pytest.mark.parametrize("kind", [DeepSleeper, Engine])
async def test_a_replica_that_waits_for_weights_takes_them_in_a_sleeping_pool(started, kind):
    """It sleeps like the others, if its kind does, so it is woken for them like the others."""
    pool, _ = await given_weights_asleep(started, kind, kind)
    assert (set(pool.states.values()), pool.lost) == ({ReplicaState.ASLEEP}, {})
    await pool.wake_up()
    assert (serving(pool), [server.policy_version for server in pool.servers]) == ([0, 1], [2, 2])


class Sleepless(Engine):
    """Of a kind that never sleeps."""

    async def sleep(self, level=1):
        await AsyncServerBase.sleep(self, level)


@pytest.mark.parametrize(("first", "later"), [(Engine, Sleepless), (Sleepless, DeepSleeper)])
async def test_a_replica_that_gets_its_weights_while_others_sleep_is_what_its_kind_is(started, first, later):
    """One that never sleeps serves, also once those that sleep are lost; one that sleeps is woken for its weights, and sleeps on."""
    pool, engines = await given_weights_asleep(started, first, later)
    states = {Sleepless: ReplicaState.SERVING, Engine: ReplicaState.ASLEEP, DeepSleeper: ReplicaState.ASLEEP}
    assert (pool.states, pool.lost) == ({0: states[later], 1: states[first]}, {})
    if later is Sleepless:
        assert "wake_up" not in pool.servers[0].log
        pool.take_out(engines[1], failure_of("it died in sleep"))
        output = await pool.client().generate("asked", [1], {"max_tokens": 1})
        assert output.token_ids == [2]
    await pool.wake_up()
    assert pool.states[0] is ReplicaState.SERVING


# Drain and replace


@pytest.mark.parametrize("aborts", [True, False])
async def test_a_drained_replica_lets_its_turns_end_or_go_on_elsewhere(started, aborts):
    """No new turn goes there; what runs at the deadline is aborted and goes on elsewhere, from its last token if it can be."""
    engines = [Engine(aborts=aborts), Engine(aborts=aborts)]
    pool, _, _ = await started(engines=engines)
    client = pool.client()
    for engine in engines:
        engine.gate.clear()
    turns = await under_way(client, engines, "a", "b")
    engines[1].gate.set()
    await pool.drain(0, timeout_s=0.05)
    assert [output.token_ids for output in await asyncio.gather(*turns)] == [[0] * 4] * 2
    assert engines[1].prompts[-1] == ([7, 0, 0] if aborts else [7])
    assert pool.states[0] is ReplicaState.DRAINED
    await client.generate("c", [7], PARAMS)
    assert len(engines[0].prompts) == 1
    with pytest.raises(SessionStateError, match="drained"):
        await pool.drain(0)


async def test_a_replica_comes_back_while_another_is_drained(started):
    """Turns that found no other replica are served before the drain ends, and an update waits for its end."""
    pool, engines, _ = await started(2)
    client = pool.client()
    for engine in engines:
        engine.gate.clear()
    turns = await under_way(client, engines, "a", "b")
    draining = asyncio.create_task(pool.drain(0))
    await until(lambda: pool.states[0] is ReplicaState.DRAINING)
    updating = asyncio.create_task(pool.update_weights(manifest(1), list))
    pool.take_out(engines[1], failure_of("it died"))
    assert (await client.generate("c", [7], PARAMS)).token_ids == [0] * 4
    assert pool.states == {0: ReplicaState.DRAINING, 1: ReplicaState.SERVING}
    assert not draining.done()
    engines[0].gate.set()
    await asyncio.gather(draining, updating, *turns)
    assert (pool.states[0], pool.policy_version) == (ReplicaState.DRAINED, 1)


async def test_a_cancelled_drain_puts_the_replica_back(started):
    """Nothing is in between: it serves as before, and the turn that it had ends there."""
    pool, engines, _ = await started(1)
    engines[0].gate.clear()
    client = pool.client()
    (turn,) = await under_way(client, engines, "a")
    draining = asyncio.create_task(pool.drain(0))
    await until(lambda: pool.states[0] is ReplicaState.DRAINING)
    draining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await draining
    engines[0].gate.set()
    assert (await turn).token_ids == [0] * 4
    assert (await client.generate("b", [7], PARAMS)).token_ids == [0] * 4
    assert serving(pool) == [0]


async def test_a_replaced_replica_is_another_engine_with_the_current_weights(started):
    """Replace drains, shuts down, starts and updates; turns of a pool of one wait meanwhile."""
    pool, (engine,), factory = await started(1)
    await pool.update_weights(manifest(2), list, replayable=True)
    client = pool.client()
    replacing = asyncio.create_task(pool.replace(0))
    turn = asyncio.create_task(client.generate("a", [7], PARAMS))
    await replacing
    assert (await turn).token_ids == [2] * 4
    assert pool.servers == (factory.made[0],)
    assert engine.log[-1] == "shutdown"
    await pool.sleep()
    with pytest.raises(SessionStateError, match="awake"):
        await pool.replace(0)


async def test_a_replica_that_was_given_up_can_be_replaced(started):
    """Whoever has mended the cause brings it back by hand, whatever the budget."""
    factory = Factory()
    factory.fail = 2
    pool, (engine,), _ = await started(1, factory=factory, restarts=RestartPolicy(max_restarts=2, first_backoff_s=0))
    pool.take_out(engine, failure_of("it died"))
    await until(lambda: pool.states[0] is ReplicaState.GIVEN_UP)
    await pool.replace(0)
    assert serving(pool) == [0]


async def test_a_replica_that_waits_or_is_under_repair_is_not_replaced(started):
    """One that waits for weights, is drained by somebody, is being replaced, or is of a pool that is shut down, is refused."""
    pool, engines, _ = await started(2)
    await pool.update_weights(manifest(1), list)
    pool.take_out(engines[0], failure_of("it died"))
    await until(lambda: pool.states[0] is ReplicaState.WAITING_FOR_WEIGHTS)
    with pytest.raises(SessionStateError, match="waiting for weights"):
        await pool.replace(0)
    engines[1].gate.clear()
    (turn,) = await under_way(pool.client(), [engines[1]], "a")
    replacing = asyncio.create_task(pool.replace(1))
    await until(lambda: pool.states[1] is ReplicaState.DRAINING)
    with pytest.raises(SessionStateError, match="draining"):
        await pool.replace(1)
    engines[1].gate.set()
    assert (await turn).token_ids == [1] * 4
    await replacing
    await pool.shutdown()
    with pytest.raises(SessionStateError, match="stopped"):
        await pool.replace(1)


async def test_nobody_waits_for_a_replacement_that_was_given_up(started):
    """An update that waits for a replica which is to be replaced ends when that fails: somebody else had it drained first."""
    pool, (engine,), _ = await started(1)
    held = engine.broken["update_weights"] = asyncio.Event()
    async with asyncio.timeout(20):
        first = asyncio.create_task(pool.update_weights(manifest(1), list))
        await until(lambda: "update_weights" in engine.log)
        draining = asyncio.create_task(pool.drain(0))
        await asyncio.sleep(0)
        second = asyncio.create_task(pool.update_weights(manifest(2), list))
        await asyncio.sleep(0)
        replacing = asyncio.create_task(pool.replace(0))
        await asyncio.sleep(0)
        held.set()
        await asyncio.gather(first, draining)
        with pytest.raises(SessionStateError, match="drained"):
            await replacing
        with pytest.raises(NoReplicaError, match="it is idle"):
            await second


async def test_what_is_held_back_tells_why(started):
    """A turn and a conversation that wait too long for a pool that is asleep say that it is."""
    pool, _, _ = await started(1)
    client = pool.client(timeout_s=0.5, admission=AdmissionConfig(timeout_s=0.5))
    await client.generate("a", [7], PARAMS)
    await pool.sleep()
    with pytest.raises(RequestTimeoutError, match=r"waits until replicas go on \(replicas are asleep\)"):
        await client.generate("a", [7], PARAMS)
    with pytest.raises(RequestTimeoutError, match="replicas are asleep"):
        await client.generate("b", [7], PARAMS)
    assert client.num_sticky == 1


async def test_what_cannot_be_drained_or_replaced_is_refused(started):
    """An index that is none, a pool that makes no servers, and a pool that is shut down are errors that say so."""
    pool, _, _ = await started(1, make=False)
    for index in (1, -1, True, "0"):
        with pytest.raises(SessionInputError, match="replica must be an index"):
            await pool.drain(index)
    with pytest.raises(SessionInputError, match="make_server"):
        await pool.replace(0)
    with pytest.raises(SessionInputError, match="one of this pool's replicas"):
        pool.take_out(Engine(), failure_of("who"))
    await pool.shutdown()
    with pytest.raises(SessionStateError, match="shut down"):
        await pool.wake_up()


# The end


async def test_shutdown_ends_whatever_is_under_way(started):
    """An update, a restart and turns under way end with errors that say why, and every engine is shut down."""
    pool, engines, factory = await started(2)
    engines[1].gate.clear()
    engines[0].broken["update_weights"] = asyncio.Event()
    client = pool.client()
    updating = asyncio.create_task(pool.update_weights(manifest(1), list))
    await until(lambda: "update_weights" in engines[0].log)
    turn = asyncio.create_task(client.generate("a", [7], PARAMS))
    await asyncio.sleep(0)
    await asyncio.gather(pool.shutdown(), pool.shutdown())
    with pytest.raises(SessionStateError, match="shut down"):
        await updating
    with pytest.raises(NoReplicaError, match="shut down"):
        await turn
    assert [engine.log.count("shutdown") for engine in engines] == [1, 1]
    assert not factory.made


async def test_a_replacement_that_a_shutdown_ends_says_so(started):
    """Nobody who was not cancelled gets a CancelledError, and no engine is made afterwards."""
    pool, engines, factory = await started(2)
    engines[0].broken["shutdown"] = gate = asyncio.Event()
    replacing = asyncio.create_task(pool.replace(0))
    await until(lambda: engines[0].log[-1:] == ["shutdown"])
    stopping = asyncio.create_task(pool.shutdown())
    await until(lambda: pool.states[0] is ReplicaState.STOPPED)
    gate.set()
    await stopping
    with pytest.raises(ReplicaError, match="got stopped: the pool is shut down"):
        await replacing
    assert not factory.made


async def test_the_dump_tells_the_life_of_replicas(started):
    """States, since when, restarts and the next one are in the pool's activity and in its text."""
    pool, engines, _ = await started(2, restarts=RestartPolicy(first_backoff_s=50, jitter=0))
    pool.take_out(engines[1], failure_of("it died"))
    await until(lambda: pool.states[1] is ReplicaState.BACKING_OFF)
    seen = pool.activity()
    assert (seen.in_service, seen.lost) == ([0], {1: "it died"})
    assert [(one.state, one.num_restarts) for one in seen.replicas] == [("serving", 0), ("backing off", 0)]
    assert 40 < seen.replicas[1].next_restart_in_s <= 50
    assert "replica 1 is backing off for" in seen.text()
    assert "the next one in 4" in seen.text() or "the next one in 50" in seen.text()


@pytest.mark.parametrize("chances", [1, 2])
async def test_a_session_goes_through_the_loss_of_its_replica_as_one_conversation(started, tokenizer, chances):
    """Ids, logprobs, mask and spans after a loss in mid-turn are those of one generation: what an abort had kept stays, the
    rest is sampled once, by the replica that came back."""
    pool, (engine,), factory = await started(1)
    engine.gate.clear()
    client = pool.client()
    session = ChatSession(
        client=client,
        tokens=ContinuousTokens(tokenizer),
        config=SessionConfig(tokenization_sanity_check_mode="disable"),
        budget=SessionBudget(max_prompt_tokens=100, max_response_tokens=50),
    )
    async with session:
        await session.extend([{"role": "user", "content": "hi"}])
        turn = asyncio.create_task(session.generate(SamplingParams(max_tokens=4)))
        await until(lambda: engine.calls)
        if chances == 2:
            await engine.abort()
            await until(lambda: len(engine.prompts) == 2)
        engine.die()
        await turn
        ledger = session.ledger
        assert (ledger.response_ids, ledger.response_mask) == ([0] * 4, [1] * 4)
        assert ledger.response_logprobs == [-0.5] * 4
        assert [tuple(span)[:2] for span in ledger.policy_versions] == [(0, 0)]
        assert len(factory.made[0].prompts) == 1
        assert len(factory.made[0].prompts[0]) == len(ledger.prompt_ids) + (2 if chances == 2 else 0)
    assert (client.num_sticky, set(client.num_in_flight.values())) == (0, {0})


async def test_clients_and_pools_that_nobody_holds_are_forgotten(started, caplog):
    """A pool follows its clients weakly, and logs every change once."""
    caplog.set_level(logging.INFO, "ostinato_rollout.replica_state")
    pool, _, _ = await started(1)
    client = pool.client()
    assert len(pool._fleet._followers) == 1
    del client
    gc.collect()
    assert len(pool._fleet._followers) == 0
    assert caplog.messages.count("replica 0 is serving, was starting: it is started") == 1


async def test_an_error_that_a_replica_is_told_by_name(started):
    """ReplicaError tells which replica was given up when a replacement fails for good."""
    factory = Factory()
    pool, _, _ = await started(1, factory=factory, restarts=RestartPolicy(max_restarts=1, first_backoff_s=0))
    factory.fail = 5
    with pytest.raises(ReplicaError, match="given up"):
        await pool.replace(0)
