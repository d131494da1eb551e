"""Running tools: outcomes in order, state across turns, release exactly once, nothing escapes."""

import asyncio
import contextlib
import contextvars
import json
import logging
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_tools import (
    BaseTool,
    OutcomeKind,
    ToolArgumentError,
    ToolCall,
    ToolClosedError,
    ToolConfigError,
    ToolDefinitionError,
    ToolExecutor,
    ToolFailedError,
    ToolInfrastructureError,
    ToolRateLimitedError,
    ToolRegistry,
    ToolResponse,
    ToolRewardError,
    ToolTimeoutError,
    UnknownToolError,
    function_tool,
)
from ostinato_tools.testing import CounterTool, MischievousTool, fake_registry, make_call, make_schema

EVENT = contextvars.ContextVar("EVENT", default="unset")


def tool_of(function, name="f", properties=None):
    """A registry with one function tool under a schema of its own."""
    return ToolRegistry([function_tool(schema=make_schema(name, properties or {}))(function)])


async def outcome_of(registry: ToolRegistry, call: ToolCall, **policies):
    async with ToolExecutor(registry, **policies).open("t") as tools:
        (outcome,) = await tools.run([call])
    return outcome


async def test_outcomes_keep_the_order_of_the_calls() -> None:
    """Good, failing, hanging, unknown and malformed calls of one turn are each answered, in order, under their ids."""
    malformed = ToolCall(name="echo", arguments=None, raw_arguments="{", id="c5", error="bad JSON at character 1")
    calls = [
        make_call("echo", {"text": "hi"}, id="c0"),
        make_call("failing", id="c1"),
        make_call("hanging", id="c2"),
        make_call("nope", id="c3"),
        make_call("echo", {"text": 5}, id="c4"),
        malformed,
        make_call("stopping", id="c6"),
    ]
    executor = ToolExecutor(fake_registry(), timeout_s=0.5)
    async with executor.open("t") as tools:
        outcomes = await tools.run(calls)
        assert await tools.run([]) == []
    assert [item.kind for item in outcomes] == ["ok", "tool_error", "timeout", "unknown_tool"] + [
        "bad_arguments"
    ] * 2 + ["ok"]
    assert [item.message["tool_call_id"] for item in outcomes] == [f"c{index}" for index in range(7)]
    assert [item.message["role"] for item in outcomes] == ["tool"] * 7
    texts = [item.message["content"] for item in outcomes]
    assert texts[0] == "hi"
    assert "always fails" in texts[1]
    assert "0.5 s" in texts[2]
    assert "echo, failing, hanging, stopping, counter" in texts[3]
    assert "text: 5 is not of type 'string'" in texts[4]
    assert "bad JSON at character 1" in texts[5]
    assert [item.terminate for item in outcomes] == [False] * 6 + [True]
    assert outcomes[6].reward == 1.0
    assert executor.stats["echo"].outcomes == {OutcomeKind.OK: 1, OutcomeKind.BAD_ARGUMENTS: 2}
    assert executor.stats[""].outcomes == {OutcomeKind.UNKNOWN_TOOL: 1}
    assert executor.stats["echo"].num_calls == 3


async def test_traceback_goes_to_the_log_only(caplog: pytest.LogCaptureFixture) -> None:
    """The model reads one line; the log holds the traceback."""
    with caplog.at_level(logging.WARNING, "ostinato_tools"):
        outcome = await outcome_of(fake_registry(), make_call("failing"))
    assert "Traceback" not in outcome.message["content"]
    assert "\n" not in outcome.message["content"]
    assert caplog.records[0].exc_info is not None
    assert "Traceback" in caplog.text


async def test_state_lives_across_turns() -> None:
    """One instance serves all turns with the row's keyword arguments; None, as parquet writes it, counts as absent."""
    journal: list = []
    executor = ToolExecutor(fake_registry(journal))
    kwargs = {
        "counter": {"create_kwargs": {"start": 10}, "execute_kwargs": {"step": 5}, "release_kwargs": None},
        "echo": None,
    }
    async with executor.open("t", kwargs) as tools:
        first = await tools.run([make_call("counter"), make_call("counter")])
        second = await tools.run([make_call("counter")])
        assert await tools.calc_rewards() == {"counter": 25.0}
        assert tools.release_failures == []
    assert [item.message["content"] for item in first + second] == ["15", "20", "25"]
    assert [event for event, _ in journal] == ["create", "execute", "execute", "execute", "calc_reward", "release"]
    assert {instance for _, instance in journal} == {"t/counter"}


async def test_unused_tools_are_not_made() -> None:
    """A tool that the model never called is neither created nor scored nor released."""
    journal: list = []
    async with ToolExecutor(fake_registry(journal)).open("t") as tools:
        await tools.run([make_call("echo", {"text": "a"})])
        assert await tools.calc_rewards() == {}
    assert journal == []


async def test_trajectories_do_not_share_state() -> None:
    """Each trajectory has its own instance and its own copy of nested keyword arguments."""
    seen = []

    class Pool(BaseTool):
        async def create(self, instance_id=None, *, items):
            self.items = items

        async def execute(self, instance_id, parameters, **_):
            self.items.append(1)
            parameters["list"].append("changed")
            seen.append(len(self.items))
            return ToolResponse(text=""), 0.0, {}

    registry = ToolRegistry()
    registry.add_class(Pool, tool_schema=make_schema("pool", {"list": {"type": "array"}}))
    executor = ToolExecutor(registry)
    kwargs = {"pool": {"create_kwargs": {"items": []}}}
    call = make_call("pool", {"list": []})
    for trajectory in ("a", "b"):
        async with executor.open(trajectory, kwargs) as tools:
            await tools.run([call])
    assert seen == [1, 1]
    assert call.arguments == {"list": []}


PLANS = st.sampled_from(["ok", "ok", "fail", "hang", "cancel", "exit"])


@settings(max_examples=60, deadline=None)
@given(
    plans=st.lists(
        st.fixed_dictionaries(dict.fromkeys(("create", "execute", "calc_reward", "release"), PLANS)),
        min_size=1,
        max_size=3,
    ),
    turns=st.lists(st.lists(st.integers(0, 2), max_size=3), max_size=3),
    cancel_after=st.none() | st.integers(0, 12),
)
def test_every_begun_instance_is_released_once(plans, turns, cancel_after) -> None:
    """Whatever fails, hangs, cancels itself, exits, or is cancelled from outside: one release per begun create."""
    journal: list = []
    registry = ToolRegistry()
    for index, plan in enumerate(plans):
        registry.add_class(
            MischievousTool, config={"journal": journal, **plan}, tool_schema=make_schema(f"tool{index}")
        )
    executor = ToolExecutor(registry, timeout_s=0.002)

    async def trajectory() -> None:
        async with executor.open("t") as tools:
            for turn in turns:
                outcomes = await tools.run([make_call(f"tool{index}") for index in turn])
                assert [item.call.name for item in outcomes] == [f"tool{index}" for index in turn]
            with contextlib.suppress(ToolRewardError):
                await tools.calc_rewards()

    async def main() -> None:
        task = asyncio.ensure_future(trajectory())
        if cancel_after is not None:
            for _ in range(cancel_after):
                await asyncio.sleep(0)
            task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            assert cancel_after is not None
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    created = sorted(instance for event, instance in journal if event == "create")
    released = sorted(instance for event, instance in journal if event == "release")
    assert created == released
    assert len(set(created)) == len(created)


async def test_failing_release_is_recorded() -> None:
    """A release that raises or hangs is a record, and the other instances are still released."""
    journal: list = []
    registry = ToolRegistry()
    for name, plan in (("a", "ok"), ("b", "fail"), ("c", "hang"), ("d", "ok")):
        registry.add_class(MischievousTool, config={"journal": journal, "release": plan}, tool_schema=make_schema(name))
    async with ToolExecutor(registry, timeout_s=0.5).open("t") as tools:
        await tools.run([make_call(name) for name in "abcd"])
    assert [instance for event, instance in journal if event == "release"] == ["t/d", "t/c", "t/b", "t/a"]
    assert len(tools.release_failures) == 2
    assert "c: release did not end" in tools.release_failures[0]
    assert "b: RuntimeError: release always fails" in tools.release_failures[1]


async def test_release_happens_when_the_body_raises() -> None:
    """An exception in the agent's own code releases the tools and stays that exception."""
    journal: list = []

    async def agent() -> None:
        async with ToolExecutor(fake_registry(journal)).open("t") as tools:
            await tools.run([make_call("counter")])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await agent()
    assert journal[-1] == ("release", "t/counter")


def test_release_survives_the_end_of_the_loop() -> None:
    """Ctrl-C, which cancels every task including the release itself, still begins every release once."""
    journal: list = []

    async def main() -> None:
        async with ToolExecutor(fake_registry(journal)).open("t") as tools:
            await tools.run([make_call("counter")])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())

    async def orphan() -> None:
        async with ToolExecutor(fake_registry(journal)).open("u") as tools:
            await tools.run([make_call("counter")])
            await asyncio.Event().wait()

    async def leave_an_orphan() -> None:
        task = asyncio.ensure_future(orphan())
        while ("execute", "u/counter") not in journal:  # noqa: ASYNC110 - the journal is a plain list
            await asyncio.sleep(0)
        assert not task.done()

    asyncio.run(leave_an_orphan())
    assert [item for item in journal if item[0] == "release"] == [("release", "t/counter"), ("release", "u/counter")]


async def test_a_failed_create_is_tried_again() -> None:
    """A create that fails is infrastructure, is released once, and the next call begins a new instance."""
    journal: list = []
    registry = ToolRegistry()
    config = {"journal": journal, "create": ["fail", "hang"]}
    registry.add_class(MischievousTool, config=config, tool_schema=make_schema("m"))
    async with ToolExecutor(registry, timeout_s=0.5).open("t") as tools:
        outcomes = [(await tools.run([make_call("m")]))[0] for _ in range(4)]
    assert [item.kind for item in outcomes] == ["infrastructure", "infrastructure", "ok", "ok"]
    assert [instance for event, instance in journal if event == "create"] == ["t/m", "t/m/2", "t/m/3"]
    assert sorted(instance for event, instance in journal if event == "release") == ["t/m", "t/m/2", "t/m/3"]


async def test_tools_of_one_trajectory_share_a_scope() -> None:
    """The tool instances of a trajectory find one dict in `trajectory_scope`; another trajectory has another."""
    scopes: dict[str, list] = {}

    class Scoped(CounterTool):
        async def create(self, instance_id: str | None = None, *, start: int = 0, **create_kwargs) -> None:
            scopes.setdefault((instance_id or "").split("/")[0], []).append(self.trajectory_scope)

    registry = ToolRegistry()
    registry.add_class(Scoped, tool_schema=make_schema("a"))
    registry.add_class(Scoped, tool_schema=make_schema("b"))
    executor = ToolExecutor(registry)
    async with executor.open("t") as first, executor.open("u") as second:
        await first.run([make_call("a"), make_call("b")])
        await second.run([make_call("a")])
    assert scopes["t"][0] is scopes["t"][1]
    assert scopes["t"][0] is not scopes["u"][0]
    assert all(isinstance(scope, dict) for group in scopes.values() for scope in group)


async def test_cancellation_passes_through() -> None:
    """A cancelled trajectory is cancelled: no outcome pretends otherwise, and the running tool is cancelled too."""
    ended = []

    async def slow() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        return ""

    async def trajectory() -> None:
        async with ToolExecutor(tool_of(slow)).open("t") as tools:
            await tools.run([make_call("f"), make_call("f")])

    task = asyncio.ensure_future(trajectory())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True, True]


async def test_a_tool_that_ignores_cancellation_does_not_hang_the_trajectory(monkeypatch, let_go) -> None:
    """After its deadline and its grace a stubborn tool is left to itself."""
    monkeypatch.setattr("ostinato_tools.deadline.GRACE_S", 0.01)

    async def stubborn() -> str:
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue
        return ""

    outcome = await asyncio.wait_for(outcome_of(tool_of(stubborn), make_call("f"), timeout_s=0.01), 30)
    assert outcome.kind is OutcomeKind.TIMEOUT
    let_go.set()


async def test_sync_tools_run_off_the_loop() -> None:
    """Eight synchronous tools wait for each other, so they run at the same time, off the loop, with context variables."""
    EVENT.set("set")
    barrier = threading.Barrier(9, timeout=30)
    loop_thread = threading.get_ident()

    def wait() -> dict:
        assert threading.get_ident() != loop_thread
        barrier.wait()
        return {"event": EVENT.get()}

    async with ToolExecutor(tool_of(wait)).open("t") as tools:
        run = asyncio.ensure_future(tools.run([make_call("f")] * 8))
        while barrier.n_waiting < 8:  # noqa: ASYNC110 - that the loop is free to count is what is tested
            await asyncio.sleep(0.001)
        barrier.wait()
        outcomes = await run
    assert {item.message["content"] for item in outcomes} == {'{"event": "set"}'}


async def test_a_hung_sync_tool_times_out() -> None:
    """A thread that hangs costs its call the deadline and nothing else."""
    release = threading.Event()
    outcome = await outcome_of(tool_of(lambda: release.wait() and "late"), make_call("f"), timeout_s=0.05)
    release.set()
    assert outcome.kind is OutcomeKind.TIMEOUT


@pytest.mark.parametrize(
    "error", [StopIteration("s"), StopAsyncIteration(), SystemExit(1), TimeoutError("mine"), KeyError("k")]
)
@pytest.mark.parametrize("asynchronous", [True, False])
async def test_whatever_a_tool_raises_is_its_outcome(error: BaseException, asynchronous: bool) -> None:
    """StopIteration, SystemExit, a tool's own TimeoutError and others are tool errors of that call."""

    def sync() -> str:
        raise error

    async def async_() -> str:
        raise error

    outcome = await outcome_of(tool_of(async_ if asynchronous else sync), make_call("f"), timeout_s=10)
    assert outcome.kind is OutcomeKind.TOOL_ERROR


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ToolArgumentError("no such city"), "bad_arguments"),
        (ToolFailedError("no such file"), "tool_error"),
        (ToolTimeoutError("no answer within 3 s"), "timeout"),
        (ToolRateLimitedError("too many"), "rate_limited"),
        (ToolInfrastructureError("no network"), "infrastructure"),
    ],
)
async def test_tools_can_say_whose_fault_it_is(error: Exception, kind: str) -> None:
    """A tool classes its failure itself by the error that it raises."""

    async def fails() -> str:
        raise error

    outcome = await outcome_of(tool_of(fails), make_call("f"))
    assert outcome.kind == kind
    assert str(error) in outcome.message["content"]


@pytest.mark.parametrize(
    "result",
    [None, 5, ["a"], (), ("a", 1.0, {}, 1), ("a", "1.0"), ("a", float("nan")), ("a", 1.0, [1]), {"x": {1}}, "\ud800"],
)
async def test_a_wrong_result_is_a_tool_error(result: object) -> None:
    """What is no response is not guessed at: the call is a tool error."""

    async def returns():
        return result

    outcome = await outcome_of(tool_of(returns), make_call("f"))
    assert outcome.kind is OutcomeKind.TOOL_ERROR
    assert outcome.reward == 0.0


async def test_unknown_arguments_of_a_function_are_refused() -> None:
    """An argument that the function does not take is the model's error, not the tool's."""

    async def f(x: int = 0) -> str:
        return str(x)

    outcome = await outcome_of(tool_of(f), make_call("f", {"y": 1}))
    assert outcome.kind is OutcomeKind.BAD_ARGUMENTS
    assert "'y'" in outcome.message["content"]


async def test_media_pass_through_untouched() -> None:
    """Images and videos become content blocks holding the very same objects."""
    image, video = object(), object()

    async def f():
        return ToolResponse(text="look", image=[image], video=[video])

    outcome = await outcome_of(tool_of(f), make_call("f"))
    blocks = outcome.message["content"]
    assert [block["type"] for block in blocks] == ["image", "video", "text"]
    assert blocks[0]["image"] is image
    assert blocks[1]["video"] is video


@pytest.mark.parametrize(
    ("side", "expected"),
    [("left", "(truncated)...789"), ("right", "012...(truncated)"), ("middle", "01...(truncated)...9")],
)
async def test_truncation_names_the_side_that_is_cut(side: str, expected: str) -> None:
    """Three characters of ten are kept, on the sides that are not cut."""

    async def f() -> str:
        return "0123456789"

    assert (await outcome_of(tool_of(f), make_call("f"), max_response_length=3, truncate_side=side)).message[
        "content"
    ] == expected
    assert (await outcome_of(tool_of(f), make_call("f"), max_response_length=10)).message["content"] == "0123456789"
    assert (await outcome_of(tool_of(f), make_call("f"), max_response_length=None)).message["content"] == "0123456789"


async def test_names_select_tools() -> None:
    """A trajectory sees and calls only the tools that its row selects."""
    executor = ToolExecutor(fake_registry())
    async with executor.open("t", names=["echo"]) as tools:
        assert [schema["function"]["name"] for schema in tools.schemas] == ["echo"]
        (outcome,) = await tools.run([make_call("counter")])
        assert outcome.kind is OutcomeKind.UNKNOWN_TOOL
    with pytest.raises(UnknownToolError, match="'nope'"):
        executor.open("t", names=["nope"])


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"nope": {"create_kwargs": {}}}, UnknownToolError),
        ({"counter": {"creat_kwargs": {}}}, ToolConfigError),
        ({"counter": {"create_kwargs": [1]}}, ToolConfigError),
        ({"counter": 1}, ToolConfigError),
        ([1], ToolConfigError),
    ],
)
def test_wrong_tools_kwargs_are_refused(kwargs, error) -> None:
    """A row whose tools_kwargs cannot be meant fails when the tools are opened, naming the cure."""
    with pytest.raises(error, match="; "):
        ToolExecutor(fake_registry()).open("t", kwargs)


@pytest.mark.parametrize(
    "policies",
    [
        {"timeout_s": 0},
        {"timeout_s": float("inf")},
        {"timeout_s": "1"},
        {"max_response_length": 0},
        {"max_response_length": 1.5},
        {"truncate_side": "centre"},
    ],
)
def test_wrong_policies_are_refused(policies: dict) -> None:
    """A policy out of range names itself."""
    with pytest.raises(ToolConfigError, match=next(iter(policies))):
        ToolExecutor(fake_registry(), **policies)


async def test_closed_tools_are_not_run() -> None:
    """Before opening and after release, calling is an error; opening twice is one, too."""
    tools = ToolExecutor(fake_registry()).open("t")
    with pytest.raises(ToolClosedError, match="not opened yet"):
        await tools.run([make_call("counter")])
    async with tools:
        pass
    with pytest.raises(ToolClosedError, match="already released"):
        await tools.run([make_call("counter")])
    with pytest.raises(ToolClosedError):
        await tools.__aenter__()


@pytest.mark.parametrize("plan", ["fail", "hang", "cancel", "exit"])
async def test_a_failing_reward_is_an_error_not_zero(plan: str) -> None:
    """calc_reward that raises, hangs, or gives no number is an error that names the tool."""
    registry = ToolRegistry()
    registry.add_class(MischievousTool, config={"calc_reward": plan}, tool_schema=make_schema("m"))
    async with ToolExecutor(registry, timeout_s=0.5).open("t") as tools:
        await tools.run([make_call("m")])
        with pytest.raises(ToolRewardError, match="calc_reward of m"):
            await tools.calc_rewards()


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("-inf"), None, "1", 10**400, 10**5000],
    ids=["nan", "inf", "none", "text", "huge", "unprintable"],
)
async def test_calc_reward_must_be_a_finite_number(value: object) -> None:
    """NaN, None, text and integers beyond every float are no rewards."""

    class Odd(CounterTool):
        async def calc_reward(self, instance_id, **kwargs):
            return value

    registry = ToolRegistry()
    registry.add_class(Odd)
    async with ToolExecutor(registry).open("t") as tools:
        await tools.run([make_call("counter")])
        with pytest.raises(ToolRewardError, match="finite"):
            await tools.calc_rewards()


async def test_rewards_can_be_asked_for_while_calls_run() -> None:
    """A tool that is used for the first time meanwhile disturbs no reward."""

    class Slow(CounterTool):
        async def calc_reward(self, instance_id, **kwargs):
            asked.set()
            await used.wait()
            return 1.0

    asked, used = asyncio.Event(), asyncio.Event()
    registry = ToolRegistry()
    registry.add_class(Slow, tool_schema=make_schema("slow"))
    registry.add_class(CounterTool, tool_schema=make_schema("late"))
    async with ToolExecutor(registry).open("t") as tools:
        await tools.run([make_call("slow")])
        rewards = asyncio.create_task(tools.calc_rewards())
        await asked.wait()
        await tools.run([make_call("late")])
        used.set()
        assert await rewards == {"slow": 1.0}


class _NoException(BaseException):
    pass


@pytest.mark.parametrize("raised", [_NoException("x"), GeneratorExit(), BaseExceptionGroup("g", [_NoException()])])
@pytest.mark.parametrize("method", ["create", "execute", "release"])
async def test_what_is_no_exception_is_a_failure_all_the_same(raised: BaseException, method: str) -> None:
    """A tool that raises what `except Exception` does not catch fails its own call, and its sibling and release go on."""

    class Odd(CounterTool):
        pass

    async def fail(self, *args, **kwargs):
        raise raised

    setattr(Odd, method, fail)
    registry = fake_registry()
    registry.add_class(Odd, tool_schema=make_schema("odd"))
    tools = ToolExecutor(registry).open("t")
    async with tools:
        odd, sibling = await tools.run([make_call("odd"), make_call("echo", {"text": "hi"})])
    kinds = {"create": OutcomeKind.INFRASTRUCTURE, "execute": OutcomeKind.TOOL_ERROR, "release": OutcomeKind.OK}
    assert (odd.kind, sibling.kind) == (kinds[method], OutcomeKind.OK)
    assert [type(raised).__name__ in failure for failure in tools.release_failures] == [True] * (method == "release")


@pytest.mark.parametrize("raised", [_NoException, GeneratorExit, KeyboardInterrupt, SystemExit, asyncio.CancelledError])
async def test_what_a_thread_raises_stays_its_own(raised: type[BaseException]) -> None:
    """A synchronous function ends neither the loop nor its caller, whatever it raises: no key was pressed in a thread."""

    def function() -> str:
        raise raised

    outcome = await outcome_of(tool_of(function), make_call("f"))
    assert outcome.kind is OutcomeKind.TOOL_ERROR
    assert "Error: f failed" in outcome.message["content"]


async def test_many_trajectories_at_once() -> None:
    """Five hundred trajectories run side by side, each counting for itself."""
    executor = ToolExecutor(fake_registry())

    async def one(index: int) -> str:
        async with executor.open(f"t{index}", {"counter": {"create_kwargs": {"start": index}}}) as tools:
            for _ in range(3):
                (outcome,) = await tools.run([make_call("counter")])
            return outcome.message["content"]

    assert await asyncio.gather(*(one(index) for index in range(500))) == [str(index + 3) for index in range(500)]
    assert executor.stats["counter"].num_calls == 1500


async def test_dict_results_are_json() -> None:
    """A dict reaches the model as JSON with its characters as they are."""

    async def f() -> tuple[dict, None, None]:
        return {"city": "Zürich", "n": 1}, None, None

    outcome = await outcome_of(tool_of(f), make_call("f"))
    assert json.loads(outcome.message["content"]) == {"city": "Zürich", "n": 1}
    assert "Zürich" in outcome.message["content"]
    assert (outcome.reward, outcome.metrics) == (0.0, {})


@pytest.mark.parametrize("calls", [None, "echo", make_call("echo"), [{"name": "echo"}], [make_call("echo"), None]])
async def test_what_are_no_calls_is_refused(calls: object) -> None:
    """One call instead of a list, messages instead of calls, and None are errors that say what to pass."""
    async with ToolExecutor(fake_registry()).open("t") as tools:
        with pytest.raises(ToolConfigError, match=r"calls must be a list of ToolCall, got .*; pass the tool_calls"):
            await tools.run(calls)  # type: ignore[arg-type]


def test_what_is_no_registry_or_no_list_of_names_is_refused() -> None:
    """A list of tools in place of a registry, and one name in place of a list, are errors with the cure."""
    for registry in ([], None, function_tool(schema=make_schema("f"))(lambda: "x")):
        with pytest.raises(ToolConfigError, match=r"registry must be a ToolRegistry, got .*; write ToolRegistry"):
            ToolExecutor(registry)  # type: ignore[arg-type]
        if registry is not None and not isinstance(registry, list):
            with pytest.raises(ToolDefinitionError, match=r"tools must be a list of tools, got FunctionTool; write \["):
                ToolRegistry(registry)  # type: ignore[arg-type]
    with pytest.raises(ToolConfigError, match=r"names must be a list of names, got the text 'echo'; write \['echo'\]"):
        ToolExecutor(fake_registry()).open("t", names="echo")


@pytest.mark.parametrize("method", ["create", "execute", "calc_reward", "release"])
async def test_a_method_that_is_not_asynchronous_is_named(method: str) -> None:
    """A method written with `def` fails with its name and the cure, wherever it is called."""

    class Odd(CounterTool):
        pass

    setattr(Odd, method, lambda self, *args, **kwargs: "x")
    registry = ToolRegistry()
    registry.add_class(Odd)
    tools = ToolExecutor(registry).open("t")
    texts = []
    async with tools:
        (outcome,) = await tools.run([make_call("counter")])
        texts.append(outcome.message["content"])
        try:
            await tools.calc_rewards()
        except ToolRewardError as error:
            texts.append(str(error))
    text = " ".join([*texts, *tools.release_failures])
    assert "must be asynchronous, got str; write `async def`" in text
