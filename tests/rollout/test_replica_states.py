"""Operations, deaths, late answers and cancellations in any order: the states of replicas stay what they say."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ostinato_engines import (
    AsyncServerBase,
    EngineClosedError,
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
from ostinato_rollout import Failure, FailureKind, ReplicaState, RestartPolicy, RolloutError, ServerPool
from ostinato_rollout.replica_state import IN_SERVICE, TRANSITIONS, Replica, new_history

NUM = 3
STEPS = ("start", "shutdown", "pause", "update_weights", "resume", "sleep", "wake_up", "abort")


class Engine(AsyncServerBase):
    """Every call waits for the test, which lets it end, fail or hang; what an engine really is shows in its fields."""

    def __init__(self, waiting: list[tuple[Engine, str, asyncio.Future]]) -> None:
        self.waiting = waiting
        self.ended = False
        self.is_started = self.is_paused = False
        self.updates_under_way = 0
        self.calls: dict[str, asyncio.Future] = {}

    async def _asked(self, step: str) -> None:
        if self.ended and step != "shutdown":
            raise EngineClosedError("gone")
        answer = asyncio.get_running_loop().create_future()
        entry = (self, step, answer)
        self.waiting.append(entry)
        try:
            await answer
        finally:
            self.waiting.remove(entry)

    def end(self) -> None:
        self.ended = True
        for call in self.calls.values():
            if not call.done():
                call.set_exception(EngineClosedError("gone"))

    async def start(self):
        await self._asked("start")
        self.is_started = True

    async def shutdown(self):
        try:
            await self._asked("shutdown")
        finally:
            self.end()

    async def pause(self, mode=PauseMode.ABORT):
        self.is_paused = True
        await self._asked("pause")
        if mode is PauseMode.ABORT:
            self._abort()

    async def resume(self):
        await self._asked("resume")
        self.is_paused = False

    async def sleep(self, level=1):
        await self._asked("sleep")
        self._abort()

    async def wake_up(self, tags=None):
        await self._asked("wake_up")

    def _abort(self):
        for call in self.calls.values():
            if not call.done():
                call.set_result(StopReason.ABORTED)

    async def abort(self, request_ids=None):
        await self._asked("abort")
        self._abort()
        return 0

    async def update_weights(self, manifest, weights):
        assert not self.updates_under_way, "two updates at once"
        self.updates_under_way += 1
        try:
            await self._asked("update_weights")
            self.policy_version = manifest.version
        finally:
            self.updates_under_way -= 1

    async def health(self):
        return Health(EngineState.FAILED if self.ended else EngineState.READY, self.policy_version)

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        if self.ended:
            raise EngineClosedError("gone")
        call = self.calls[request_id] = asyncio.get_running_loop().create_future()
        try:
            reason = await call
        finally:
            del self.calls[request_id]
        version = self.policy_version
        num = 0 if reason is StopReason.ABORTED else sampling_params.max_tokens
        return TokenOutput([version] * num, [-1.0] * num, reason, None, (PolicySpan(0, version),))

    async def chat_completion(self, raw_request):
        raise UnsupportedError("no chat")


class ErrorLog(logging.Handler):
    """Keeps what was logged with a traceback: no restart ends otherwise than it should."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: list[str] = []

    def emit(self, record):
        if record.exc_info:
            self.broken.append(record.getMessage())


class PoolLife(RuleBasedStateMachine):
    """A pool of three under everything that can happen to it."""

    def __init__(self, make_loop) -> None:
        super().__init__()
        self.make_loop = make_loop
        self.waiting: list[tuple[Engine, str, asyncio.Future]] = []
        self.engines: list[Engine] = []
        self.operations: list[asyncio.Task] = []
        self.turns: list[asyncio.Task] = []
        self.version = 0
        self.pauses = mock.patch.multiple("ostinato_rollout.generating", _FIRST_PAUSE_S=0.0, _LONGEST_PAUSE_S=0.0)
        self.pauses.start()
        self.log = ErrorLog()
        logging.getLogger("ostinato_rollout.revival").addHandler(self.log)
        self.num_turns = 0

    def run(self) -> None:
        """Let everything happen that needs no answer."""

        async def settle() -> None:
            for _ in range(60):
                await asyncio.sleep(0)

        self.loop.run_until_complete(settle())

    def make(self, index: int = 0) -> Engine:
        engine = Engine(self.waiting)
        self.engines.append(engine)
        return engine

    @initialize(order=st.integers(0, 7), replayable=st.booleans(), updated=st.booleans())
    def begin(self, order, replayable, updated):
        async def build():
            self.pool = ServerPool(
                [self.make() for _ in range(NUM)],
                make_server=self.make,
                restarts=RestartPolicy(max_restarts=2, first_backoff_s=0.0, jitter=0.0),
                health_interval_s=None,
            )
            self.client = self.pool.client()

        self.loop = self.make_loop(order)
        self.replayable = replayable
        self.loop.run_until_complete(build())
        self.operate(self.pool.start)
        for _ in range(NUM):
            self.answer(0, None)
        assert set(self.pool.states.values()) == {ReplicaState.SERVING}
        if updated:
            self.update(PauseMode.ABORT)

    def operate(self, operation, *arguments, **options):
        async def begin():
            self.operations.append(asyncio.create_task(operation(*arguments, **options)))

        self.loop.run_until_complete(begin())
        self.run()

    @rule(mode=st.sampled_from(PauseMode))
    def update(self, mode):
        self.version += 1
        manifest = WeightManifest(version=self.version, tensors=())
        self.operate(self.pool.update_weights, manifest, list, pause=mode, replayable=self.replayable)

    @rule()
    def withdraw(self):
        self.operate(self.pool.withdraw_weights)

    @rule(level=st.sampled_from([1, 2]))
    def sleep(self, level):
        self.operate(self.pool.sleep, level)

    @rule()
    def wake(self):
        self.operate(self.pool.wake_up)

    @rule(index=st.integers(0, NUM - 1))
    def drain(self, index):
        self.operate(self.pool.drain, index)

    @rule(index=st.integers(0, NUM - 1))
    def replace(self, index):
        self.operate(self.pool.replace, index)

    @rule()
    def health(self):
        self.operate(self.pool.health)

    @rule(num=st.integers(1, NUM))
    def turn(self, num):
        async def begin():
            for _ in range(num):
                self.num_turns += 1
                turn = self.client.generate(f"turn {self.num_turns}", [7], SamplingParams(max_tokens=2))
                self.turns.append(asyncio.create_task(turn))

        self.loop.run_until_complete(begin())
        self.run()

    @precondition(lambda self: any(engine.calls for engine in self.engines))
    @rule(place=st.integers(0, 7))
    def finish_turn(self, place):
        calls = [call for engine in self.engines if not engine.is_paused for call in engine.calls.values()]
        calls = [call for call in calls if not call.done()]
        if calls:
            calls[place % len(calls)].set_result(StopReason.LENGTH)
            self.run()

    @precondition(lambda self: self.waiting)
    @rule(place=st.integers(0, 7), error=st.sampled_from([None, None, None, RuntimeError("broken")]))
    def answer(self, place, error):
        """Let a call that an engine has got end, or fail."""
        _, _, answer = self.waiting[place % len(self.waiting)]
        if not answer.done():
            answer.set_exception(error) if error is not None else answer.set_result(None)
        self.run()

    @precondition(lambda self: self.waiting)
    @rule(step=st.sampled_from(STEPS))
    def answer_each(self, step):
        """Let all calls of one kind end."""
        for _, asked, answer in list(self.waiting):
            if asked == step and not answer.done():
                answer.set_result(None)
        self.run()

    @precondition(lambda self: self.waiting)
    @rule(rounds=st.integers(1, 4))
    def answer_all_for_a_while(self, rounds):
        for _ in range(rounds):
            for _, _, answer in list(self.waiting):
                if not answer.done():
                    answer.set_result(None)
            self.run()

    @rule(place=st.integers(0, 7))
    def die(self, place):
        """An engine dies: what it was asked fails."""
        alive = [engine for engine in self.engines if not engine.ended and engine.is_started]
        if alive:
            engine = alive[place % len(alive)]
            engine.end()
            for owner, step, answer in list(self.waiting):
                if owner is engine and step != "shutdown" and not answer.done():
                    answer.set_exception(EngineClosedError("gone"))
            self.run()

    @rule(place=st.integers(0, 7))
    def take_out(self, place):
        servers = self.pool.servers
        if servers:

            async def lose():
                server = servers[place % len(servers)]
                self.pool.take_out(server, Failure("replica had to live", FailureKind.ENGINE, "taken out"))

            self.loop.run_until_complete(lose())
            self.run()

    @precondition(lambda self: self.under_way(self.operations))
    @rule(place=st.integers(0, 7))
    def cancel(self, place):
        tasks = self.under_way(self.operations)
        tasks[place % len(tasks)].cancel()
        self.run()

    @precondition(lambda self: self.under_way(self.turns))
    @rule(place=st.integers(0, 7))
    def cancel_turn(self, place):
        tasks = self.under_way(self.turns)
        tasks[place % len(tasks)].cancel()
        self.run()

    @staticmethod
    def under_way(tasks):
        return [task for task in tasks if not task.done()]

    @invariant()
    def clients_know_those_in_service(self):
        if hasattr(self, "pool"):
            in_service = [index for index, state in self.pool.states.items() if state in IN_SERVICE]
            assert list(self.pool.activity().in_service) == in_service
            known = set(map(id, self.client._placement.servers.values()))
            assert known == set(map(id, self.pool.servers))
            assert len(self.client.num_in_flight) == len(in_service)

    @invariant()
    def those_that_serve_have_one_policy(self):
        if hasattr(self, "pool"):
            states = self.pool.states
            serving = [
                replica for replica in self.pool._fleet.replicas if states[replica.index] is ReplicaState.SERVING
            ]
            assert len({replica.server.policy_version for replica in serving}) <= 1
            is_resumed = [replica for replica in serving if replica.server.is_paused]
            assert not is_resumed, "a replica that serves is paused"
            assert not {ReplicaState.SERVING, ReplicaState.ASLEEP} <= set(states.values()), "some sleep and some serve"

    @invariant()
    def changes_follow_the_table(self):
        if hasattr(self, "pool"):
            states = {}
            for change in self.pool.history:
                assert change.after in TRANSITIONS[change.before]
                assert states.setdefault(change.replica, change.before) is change.before
                assert change.cause
                states[change.replica] = change.after

    def settle(self):
        """Let everything end that was begun."""
        for _ in range(20):
            self.answer_all()
            for engine in self.engines:
                for call in list(engine.calls.values()):
                    if not call.done():
                        call.set_result(StopReason.LENGTH)
            self.run()

    def answer_all(self):
        for _ in range(60):
            if not self.waiting:
                return
            for _, _, answer in list(self.waiting):
                if not answer.done():
                    answer.set_result(None)
            self.run()

    def teardown(self):
        try:
            if hasattr(self, "pool"):
                self.end()
        finally:
            logging.getLogger("ostinato_rollout.revival").removeHandler(self.log)
            self.pauses.stop()
            if hasattr(self, "loop"):
                self.loop.close()
        assert not self.log.broken

    def end(self):
        # Left alone, every operation and every turn comes to an end.
        self.settle()
        self.operate(self.pool.wake_up)
        self.settle()
        self.version += 1
        self.operate(self.pool.update_weights, WeightManifest(version=self.version, tensors=()), list)
        self.settle()
        assert all(operation.done() for operation in self.operations), self.pool.activity().text()
        assert all(turn.done() for turn in self.turns), self.pool.activity().text()
        for turn in (*self.operations, *self.turns):
            if not turn.cancelled() and (error := turn.exception()) is not None:
                assert isinstance(error, RolloutError), error
        between = {ReplicaState.SERVING, ReplicaState.DRAINED, ReplicaState.GIVEN_UP}
        assert set(self.pool.states.values()) <= between, self.pool.activity().text()
        in_service = [replica for replica in self.pool._fleet.replicas if replica.is_in_service]
        assert all(replica.server.policy_version == self.version for replica in in_service)
        assert set(self.client.num_in_flight.values()) <= {0}
        assert not self.pool.activity().operations
        for number in range(1, self.num_turns + 1):
            self.loop.run_until_complete(self.client.release(f"turn {number}"))
        assert self.client.num_sticky == 0
        self.operate(self.pool.shutdown)
        self.answer_all()
        assert self.operations[-1].done()
        assert set(self.pool.states.values()) == {ReplicaState.STOPPED}
        assert all(engine.ended for engine in self.engines if engine.is_started)
        with suppress(asyncio.CancelledError):
            assert not asyncio.all_tasks(self.loop)


def test_pool_life(repeatable_loop):
    """Whatever happens in whichever order: clients know those in service, these have one policy and are not paused,
    changes follow the table, and in the end nothing is left."""
    chosen = settings(max_examples=80, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(lambda: PoolLife(repeatable_loop), settings=chosen)


def test_every_state_is_reached_and_left_by_the_table():
    """The table names every state, each can be reached from `new`, and each but `stopped` leads to `stopped`."""
    assert set(TRANSITIONS) == set(ReplicaState)
    reached, front = {ReplicaState.NEW}, [ReplicaState.NEW]
    while front:
        new = TRANSITIONS[front.pop()] - reached
        reached |= new
        front += new
    assert reached == set(ReplicaState)
    assert all(
        ReplicaState.STOPPED in after for state, after in TRANSITIONS.items() if state is not ReplicaState.STOPPED
    )


def test_a_change_against_the_table_is_an_error_of_ours():
    """A change that the table does not have raises at once, and changes nothing."""
    replica = Replica(4, Engine([]), history := new_history())
    with pytest.raises(AssertionError, match="replica 4 cannot go from new to restarting"):
        replica.move(ReplicaState.RESTARTING, "why not")
    assert (replica.state, len(history)) == (ReplicaState.NEW, 0)
