"""Release: whatever happens in whatever order, every instance that was begun is released exactly once."""

import asyncio
import contextlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, precondition, rule

from ostinato_tools import OutcomeKind, ToolClosedError, ToolExecutor, ToolRegistry, ToolRewardError
from ostinato_tools.testing import MischievousTool, fake_registry, make_call, make_schema

METHODS = ("create", "execute", "calc_reward", "release")
PLANS = st.sampled_from(["ok", "ok", "ok", "fail", "hang", "ignore", "cancel", "exit"])
ALL_PLANS = st.fixed_dictionaries({method: st.lists(PLANS, max_size=3) for method in METHODS})
STEPS = st.integers(0, 14)


class Trajectory:
    """A trajectory in a task of its own that does what it is told, one thing after the other."""

    def __init__(self, executor: ToolExecutor, name: str) -> None:
        self.orders: asyncio.Queue[str | list[str]] = asyncio.Queue()
        self.tools = executor.open(name)
        self.task = asyncio.ensure_future(self._live())

    async def _live(self) -> None:
        async with self.tools:
            while (order := await self.orders.get()) != "finish":
                if order == "raise":
                    raise ZeroDivisionError
                with contextlib.suppress(ToolClosedError, ToolRewardError):
                    if order == "score":
                        await self.tools.calc_rewards()
                    else:
                        outcomes = await self.tools.run([make_call(name) for name in order])
                        assert [outcome.call.name for outcome in outcomes] == order


class Lives(RuleBasedStateMachine):
    """Trajectories that begin, call, end, fail, are cancelled, are closed by others, and an executor that is shut down."""

    trajectories = Bundle("trajectories")

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("ostinato_tools.deadline.GRACE_S", 0.001)
        self.loop = asyncio.new_event_loop()
        self.journal: list[tuple[str, str]] = []
        registry = ToolRegistry()
        self.config: dict = {"journal": self.journal, **{method: [] for method in METHODS}}
        for name in ("a", "b"):
            # Every instance reads its plans from the same lists, which rules fill.
            registry.add_class(MischievousTool, config=self.config, tool_schema=make_schema(name))
        self.executor = ToolExecutor(registry, timeout_s=0.005)
        self.is_shut = False
        self.all: list[Trajectory] = []
        self.others: list[asyncio.Future] = []

    def run(self, coroutine) -> object:
        return self.loop.run_until_complete(coroutine)

    def let_run(self, steps: int) -> None:
        """Let everything take some steps; every seventh time, let deadlines pass."""

        async def step() -> None:
            for _ in range(steps):
                await asyncio.sleep(0)
            if steps % 7 == 6:
                await asyncio.sleep(0.006)

        self.run(step())

    @initialize(target=trajectories, plans=ALL_PLANS)
    def begin_the_first(self, plans: dict) -> Trajectory:
        self.plan(plans)
        return self.begin(3)

    @rule(plans=ALL_PLANS)
    def plan(self, plans: dict) -> None:
        for method, steps in plans.items():
            self.config[method] += steps

    @precondition(lambda self: not self.is_shut)
    @rule(target=trajectories, steps=STEPS)
    def begin(self, steps: int) -> Trajectory:
        async def make() -> Trajectory:
            return Trajectory(self.executor, f"t{len(self.all)}")

        trajectory = self.run(make())
        self.all.append(trajectory)
        self.let_run(steps)
        return trajectory

    @rule(trajectory=trajectories, names=st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=4), steps=STEPS)
    def call(self, trajectory: Trajectory, names: list[str], steps: int) -> None:
        trajectory.orders.put_nowait(names)
        self.let_run(steps)

    @rule(trajectory=trajectories, steps=STEPS)
    def score(self, trajectory: Trajectory, steps: int) -> None:
        trajectory.orders.put_nowait("score")
        self.let_run(steps)

    @rule(trajectory=consumes(trajectories), end=st.sampled_from(["finish", "raise", "cancel", "close"]), steps=STEPS)
    def end(self, trajectory: Trajectory, end: str, steps: int) -> None:
        if end == "cancel":
            trajectory.task.cancel()
        elif end == "close":
            self.others.append(self.loop.create_task(trajectory.tools.close()))
        else:
            trajectory.orders.put_nowait(end)
        self.let_run(steps)
        trajectory.task.cancel()
        self.let_run(steps)

    @precondition(lambda self: len(self.all) > 2)
    @rule(steps=STEPS)
    def shut_down(self, steps: int) -> None:
        self.is_shut = True
        self.others.append(self.loop.create_task(self.executor.close()))
        self.let_run(steps)

    def teardown(self) -> None:
        async def end() -> None:
            await self.executor.close()
            for trajectory in self.all:
                trajectory.task.cancel()
            await asyncio.gather(*(trajectory.task for trajectory in self.all), *self.others, return_exceptions=True)
            others = asyncio.all_tasks() - {asyncio.current_task()}  # those that ignore their cancellation for a while
            if others:
                await asyncio.wait(others)

        try:
            self.run(end())
            begun = [instance for event, instance in self.journal if event == "create"]
            released = [instance for event, instance in self.journal if event == "release"]
            assert sorted(begun) == sorted(released)
            assert len(set(begun)) == len(begun)
            for instance in begun:
                events = [event for event, other in self.journal if other == instance]
                assert events[0] == "create"
                assert events[-1] == "release"
            for trajectory in self.all:
                error = None if trajectory.task.cancelled() else trajectory.task.exception()
                assert error is None or isinstance(error, ZeroDivisionError | ToolClosedError), error
            for other in self.others:
                assert other.exception() is None
        finally:
            self.loop.close()
            self.patch.undo()


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


async def test_closing_the_executor_releases_what_is_open() -> None:
    """Trajectories that nobody left are released, what runs is stopped and answered, and nothing can be opened any more."""
    journal: list = []
    executor = ToolExecutor(fake_registry(journal))
    first, second = executor.open("a"), executor.open("b")
    await first.__aenter__()
    await second.__aenter__()
    await first.run([make_call("counter")])
    running = asyncio.ensure_future(second.run([make_call("hanging"), make_call("counter")]))
    while len(journal) < 4:  # noqa: ASYNC110 - the journal is a plain list
        await asyncio.sleep(0)
    await executor.close()
    assert sorted(item for item in journal if item[0] == "release") == [
        ("release", "a/counter"),
        ("release", "b/counter"),
    ]
    hanging, counter = await running
    assert (hanging.kind, counter.kind) == (OutcomeKind.INFRASTRUCTURE, OutcomeKind.OK)
    assert "closed" in hanging.message["content"]
    await first.__aexit__(None, None, None)
    await executor.close()
    assert len([item for item in journal if item[0] == "release"]) == 2
    with pytest.raises(ToolClosedError, match="closed"):
        executor.open("c")


async def test_closing_waits_for_a_release_that_is_under_way() -> None:
    """A trajectory that is just being left is released once, and the executor is closed only when that is done."""
    go_on, journal = asyncio.Event(), []

    class Slow(MischievousTool):
        async def release(self, instance_id: str, **release_kwargs) -> None:
            journal.append("begun")
            await go_on.wait()
            journal.append("ended")

    registry = ToolRegistry()
    registry.add_class(Slow)
    executor = ToolExecutor(registry)

    async def trajectory() -> None:
        async with executor.open("t") as tools:
            await tools.run([make_call("counter")])

    task = asyncio.ensure_future(trajectory())
    while not journal:  # noqa: ASYNC110 - as above
        await asyncio.sleep(0)
    closing = asyncio.ensure_future(executor.close())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not closing.done()
    go_on.set()
    await closing
    await task
    assert journal == ["begun", "ended"]


async def test_the_executor_is_a_context() -> None:
    """Leaving the executor closes it."""
    async with ToolExecutor(fake_registry()) as executor:
        tools = executor.open("t")
    with pytest.raises(ToolClosedError):
        await tools.__aenter__()


async def test_a_call_that_ignores_its_deadline_keeps_its_instance(
    monkeypatch: pytest.MonkeyPatch, let_go: asyncio.Event
) -> None:
    """While an earlier call still runs, the next one of the same tool is refused; afterwards it runs on the same instance."""
    monkeypatch.setattr("ostinato_tools.deadline.GRACE_S", 0.001)
    journal = []

    class Deaf(MischievousTool):
        async def execute(self, instance_id: str, parameters: dict, **execute_kwargs):
            while not let_go.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await let_go.wait()
            return await super().execute(instance_id, parameters, **execute_kwargs)

    registry = ToolRegistry()
    registry.add_class(Deaf, config={"journal": journal}, tool_schema=make_schema("m"))
    async with ToolExecutor(registry, timeout_s=0.3).open("t") as tools:
        late, refused = await tools.run([make_call("m", id="a"), make_call("m", id="b")])
        let_go.set()
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})
        (good,) = await tools.run([make_call("m", id="c")])
    assert [item.kind for item in (late, refused, good)] == ["timeout", "infrastructure", "ok"]
    assert "still runs an earlier call" in refused.message["content"]
    assert good.message["content"] == "2"
    assert [event for event, _ in journal] == ["create", "execute", "execute", "release"]
