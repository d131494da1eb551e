"""Policies at work: retries, checks of results, limits, budgets, memory and the breaker, each as the model and the counts see it."""

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato_tools import (
    OutcomeKind,
    ToolArgumentError,
    ToolExecutor,
    ToolFailedError,
    ToolInfrastructureError,
    ToolPolicy,
    ToolRateLimitedError,
    ToolRegistry,
    ToolResponse,
    function_tool,
)
from ostinato_tools.guards import _Rate
from ostinato_tools.testing import MischievousTool, make_call, make_schema


class Clock:
    """A clock that a test sets, in place of the one that guards read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("ostinato_tools.guards.time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock at 1000 seconds."""
    return Clock(monkeypatch)


class Script:
    """A tool that does what a list says, call by call: returns a value or raises an error, and then "end" for ever."""

    def __init__(self, *steps: object) -> None:
        self.steps = list(steps)
        self.num_calls = 0

    async def __call__(self, x: int = 0) -> object:
        self.num_calls += 1
        await asyncio.sleep(0)
        step = self.steps.pop(0) if self.steps else "end"
        if isinstance(step, BaseException):
            raise step
        return step


def executor_of(function, **policy) -> ToolExecutor:
    """An executor of one function tool `f` under a policy."""
    schema = make_schema("f", {"x": {"type": ["integer", "number", "boolean"]}}, required=[])
    return ToolExecutor(ToolRegistry([function_tool(schema=schema, policy=ToolPolicy(**policy))(function)]))


async def outcomes_of(executor: ToolExecutor, *arguments: dict, trajectory: str = "t") -> list:
    """The outcomes of calls of `f`, made one after the other by one trajectory."""
    async with executor.open(trajectory) as tools:
        return [(await tools.run([make_call("f", item)]))[0] for item in arguments]


@pytest.mark.parametrize(
    "error",
    [RuntimeError("a"), ToolFailedError("b"), ToolRateLimitedError("c"), ToolInfrastructureError("d"), TimeoutError()],
)
async def test_failures_are_tried_again(error: Exception) -> None:
    """An idempotent tool that fails twice and then works is ok, and the two further attempts are counted."""
    script = Script(error, error, "good")
    executor = executor_of(script, idempotent=True, max_retries=2, backoff_s=0)
    (outcome,) = await outcomes_of(executor, {})
    assert (outcome.kind, outcome.message["content"], script.num_calls) == ("ok", "good", 3)
    assert executor.stats["f"].num_retries == 2
    assert executor.stats["f"].outcomes == {OutcomeKind.OK: 1}


async def test_attempts_have_an_end_and_mistakes_of_the_model_are_not_repeated() -> None:
    """After the last attempt its failure is the outcome; bad arguments end the call at once."""
    script = Script(*[RuntimeError(str(index)) for index in range(9)])
    (outcome,) = await outcomes_of(executor_of(script, idempotent=True, max_retries=2, backoff_s=0), {})
    assert (outcome.kind, script.num_calls) == ("tool_error", 3)
    assert "RuntimeError: 2" in outcome.message["content"]
    script = Script(ToolArgumentError("no"), "good")
    (outcome,) = await outcomes_of(executor_of(script, pure=True, max_retries=2, backoff_s=0), {})
    assert (outcome.kind, script.num_calls) == ("bad_arguments", 1)


async def test_a_late_attempt_is_tried_again() -> None:
    """A deadline is for one attempt: the next one has its own."""
    waits = [True, False]

    async def f(x: int = 0) -> str:
        if waits.pop(0):
            await asyncio.Event().wait()
        return "good"

    executor = executor_of(f, timeout_s=0.3, idempotent=True, max_retries=1, backoff_s=0)
    (outcome,) = await outcomes_of(executor, {})
    assert outcome.kind is OutcomeKind.OK
    assert "within" not in outcome.message["content"]


async def test_the_tools_own_deadline_goes_before_the_executors() -> None:
    """`timeout_s` of the policy holds for that tool alone."""

    async def hangs(x: int = 0) -> str:
        await asyncio.Event().wait()
        return ""

    (outcome,) = await outcomes_of(executor_of(hangs, timeout_s=0.01), {})
    assert outcome.kind is OutcomeKind.TIMEOUT
    assert "0.01 s" in outcome.message["content"]


async def test_attempts_of_a_stateful_tool_are_not_overtaken() -> None:
    """Calls of one stateful tool stay in order although the first needs three attempts, on one instance."""
    journal: list = []
    registry = ToolRegistry()
    config = {"journal": journal, "execute": ["fail", "fail"]}
    policy = ToolPolicy(idempotent=True, max_retries=2, backoff_s=0.001)
    registry.add_class(MischievousTool, config=config, tool_schema=make_schema("m"), policy=policy)
    async with ToolExecutor(registry).open("t") as tools:
        outcomes = await tools.run([make_call("m", id="a"), make_call("m", id="b")])
    assert [item.message["content"] for item in outcomes] == ["3", "4"]
    assert [event for event, _ in journal] == ["create", *["execute"] * 4, "release"]


async def test_arguments_are_fresh_for_each_attempt() -> None:
    """An attempt that changes its arguments does not change those of the next."""
    seen = []

    async def f(x: list) -> str:
        seen.append(list(x))
        x.append(1)
        if len(seen) < 2:
            raise RuntimeError
        return ""

    schema = make_schema("f", {"x": {"type": "array"}})
    tool = function_tool(schema=schema, policy=ToolPolicy(idempotent=True, max_retries=1, backoff_s=0))(f)
    await outcomes_of(ToolExecutor(ToolRegistry([tool])), {"x": [0]})
    assert seen == [[0], [0]]


NUMBERS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("result", "said"),
    [({"n": 1}, None), ('{"n": 2}', None), ({"n": "1"}, "not of type 'integer'"), ({}, "'n'"), ("text", "no JSON")],
)
async def test_a_result_must_fit_its_schema(result: object, said: str | None) -> None:
    """A result that does not fit is a tool error that says why; one that fits passes."""
    (outcome,) = await outcomes_of(executor_of(Script(result), result_schema=NUMBERS), {})
    assert (outcome.kind is OutcomeKind.OK) == (said is None)
    assert said is None or said in outcome.message["content"]


async def test_an_invalid_result_is_answered_with_the_fallback() -> None:
    """The model reads the fallback, the outcome stays a tool error without reward, and both are counted."""
    executor = executor_of(Script(("bad", 5.0)), result_schema=NUMBERS, fallback={"n": None})
    (outcome,) = await outcomes_of(executor, {})
    assert (outcome.kind, outcome.message["content"], outcome.reward) == ("tool_error", '{"n": null}', 0.0)
    assert executor.stats["f"].num_fallbacks == 1


async def test_the_fallback_waits_for_the_last_attempt() -> None:
    """An invalid result is tried again before the fallback is used, and other failures do not use it."""
    policy = {"validate_result": lambda response: response.text == "good", "fallback": "none", "idempotent": True}
    executor = executor_of(Script("bad", "good"), **policy, max_retries=1, backoff_s=0)
    assert (await outcomes_of(executor, {}))[0].message["content"] == "good"
    assert executor.stats["f"].num_fallbacks == 0
    (outcome,) = await outcomes_of(executor_of(Script(RuntimeError("x")), **policy), {})
    assert "RuntimeError" in outcome.message["content"]


@pytest.mark.parametrize("check", [lambda response: False, lambda response: None, lambda response: 1 / 0])
async def test_only_true_vouches_for_a_result(check) -> None:
    """A check that says no, forgets to answer or raises is a no."""
    (outcome,) = await outcomes_of(executor_of(Script("x"), validate_result=check), {})
    assert outcome.kind is OutcomeKind.TOOL_ERROR


async def test_the_rate_is_kept_over_trajectories(clock: Clock) -> None:
    """Two calls at once and then one a second: the third, from whatever trajectory, is refused with the time to wait."""
    script = Script()
    executor = executor_of(script, max_calls_per_s=1, burst=2, max_wait_s=0)
    outcomes = await outcomes_of(executor, {}, {}) + await outcomes_of(executor, {}, trajectory="u")
    assert [item.kind for item in outcomes] == ["ok", "ok", "rate_limited"]
    assert "try again in 1 s" in outcomes[2].message["content"]
    assert script.num_calls == 2
    clock.now += 1
    outcomes = await outcomes_of(executor, {}, {})
    assert [item.kind for item in outcomes] == ["ok", "rate_limited"]


async def test_a_call_waits_for_its_turn() -> None:
    """Under a rate, calls of one turn wait rather than fail where they may."""
    executor = executor_of(Script(), max_calls_per_s=500, max_wait_s=30)
    async with executor.open("t") as tools:
        outcomes = await tools.run([make_call("f", {})] * 8)
    assert [item.kind for item in outcomes] == ["ok"] * 8


@given(
    st.floats(0.1, 100),
    st.integers(1, 5),
    st.lists(st.tuples(st.floats(0, 2), st.floats(0, 3)), max_size=40),
)
def test_no_second_sees_more_calls_than_it_may(per_s: float, burst: int, arrivals: list[tuple[float, float]]) -> None:
    """In no stretch of time do more attempts start than the burst and the rate allow, whoever gives up waiting."""
    now = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ostinato_tools.guards.time", SimpleNamespace(monotonic=lambda: now))
        rate = _Rate(per_s, burst)
        starts = []
        for pause, max_wait in arrivals:
            now += pause
            wait = rate.reserve(max_wait)
            if wait <= max_wait:
                starts.append(now + wait)
    starts.sort()
    for first in range(len(starts)):
        for last in range(first, len(starts)):
            assert last - first + 1 <= burst + per_s * (starts[last] - starts[first]) + 1e-6


async def test_the_concurrency_limit_is_kept() -> None:
    """Over all trajectories at most two run at once, and all run."""
    running, most = 0, 0

    async def f(x: int = 0) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return ""

    executor = executor_of(f, max_concurrency=2)
    outcomes = await asyncio.gather(*(outcomes_of(executor, {}, {}, trajectory=str(index)) for index in range(10)))
    assert {item.kind for items in outcomes for item in items} == {OutcomeKind.OK}
    assert most == 2


async def test_a_busy_tool_is_not_waited_for_for_ever() -> None:
    """A call that gets no turn in `max_wait_s` is rate limited; a cancelled one gives its place back."""
    go_on = asyncio.Event()

    async def f(x: int = 0) -> str:
        await go_on.wait()
        return ""

    executor = executor_of(f, max_concurrency=1, max_wait_s=0.01)
    first = asyncio.ensure_future(outcomes_of(executor, {}))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    (second,) = await outcomes_of(executor, {}, trajectory="u")
    assert second.kind is OutcomeKind.RATE_LIMITED
    assert "busy" in second.message["content"]
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    go_on.set()
    (third,) = await outcomes_of(executor, {}, trajectory="v")
    assert third.kind is OutcomeKind.OK


def test_limits_outlive_a_loop() -> None:
    """An executor may be used in one event loop after the other, under every policy."""
    executor = executor_of(Script(), max_concurrency=1, max_calls_per_s=1000, max_wait_s=30, breaker_failures=3)

    async def main() -> list:
        return await asyncio.gather(*(outcomes_of(executor, {}, trajectory=str(index)) for index in range(4)))

    for _ in range(2):
        assert {item.kind for items in asyncio.run(main()) for item in items} == {OutcomeKind.OK}


async def test_the_budget_is_each_trajectorys_own() -> None:
    """A trajectory may make two calls with valid arguments; the third is refused, and another trajectory has its own two."""
    script = Script()
    executor = executor_of(script, max_calls_per_trajectory=2)
    outcomes = await outcomes_of(executor, {}, {"x": "no"}, {}, {})
    assert [item.kind for item in outcomes] == ["ok", "bad_arguments", "ok", "rate_limited"]
    assert "may be called 2 times" in outcomes[3].message["content"]
    assert [item.kind for item in await outcomes_of(executor, {}, trajectory="u")] == ["ok"]
    assert script.num_calls == 3


async def test_results_of_pure_tools_are_remembered() -> None:
    """Equal arguments are answered from memory, for every trajectory; 1, 1.0 and true are not equal; failures are not kept."""
    script = Script("a", RuntimeError("b"), "c", "d", "e")
    executor = executor_of(script, pure=True, cache_size=10)
    outcomes = await outcomes_of(executor, {"x": 1}, {"x": 2}, {"x": 1})
    outcomes += await outcomes_of(executor, {"x": 1}, {"x": 1.0}, {"x": True}, {"x": 2}, {"x": 2}, trajectory="u")
    texts = [item.message["content"] for item in outcomes]
    assert [texts[0], *texts[2:]] == ["a", "a", "a", "c", "d", "e", "e"]
    assert outcomes[1].kind is OutcomeKind.TOOL_ERROR
    assert executor.stats["f"].num_cached == 3
    assert executor.stats["f"].num_calls == 8


async def test_memory_forgets_what_was_longest_unused() -> None:
    """Two results are kept; using one saves it from being the next to go."""
    script = Script()
    executor = executor_of(script, pure=True, cache_size=2)
    await outcomes_of(executor, *({"x": value} for value in (1, 2, 1, 3)))
    assert script.num_calls == 3
    await outcomes_of(executor, {"x": 1}, {"x": 3})
    assert script.num_calls == 3
    await outcomes_of(executor, {"x": 2})
    assert script.num_calls == 4


async def test_what_is_remembered_cannot_be_changed() -> None:
    """Changing the metrics or the media list of an outcome changes no later one; the media are the same objects."""
    image = object()
    executor = executor_of(Script((ToolResponse(text="a", image=[image]), 1.0, {"n": [1]})), pure=True, cache_size=1)
    first, second = await outcomes_of(executor, {}, {})
    first.metrics["more"] = 1
    first.message["content"].clear()
    (third,) = await outcomes_of(executor, {})
    assert (second.metrics, third.metrics) == ({"n": [1]}, {"n": [1]})
    assert third.message["content"][0]["image"] is image
    assert third.reward == 1.0


async def test_the_breaker_opens_probes_and_closes(clock: Clock) -> None:
    """Two failures in a row stop the calls; after the pause one call probes: it fails and the pause begins anew, or works."""
    script = Script(RuntimeError(), "ok", RuntimeError(), RuntimeError(), RuntimeError(), "ok")
    executor = executor_of(script, breaker_failures=2, breaker_reset_s=30)
    outcomes = await outcomes_of(executor, {}, {}, {}, {}, {}, {})
    assert [item.kind for item in outcomes] == ["tool_error", "ok", "tool_error", "tool_error"] + 2 * ["infrastructure"]
    assert "2 failures in a row" in outcomes[4].message["content"]
    assert "try again in 30 s" in outcomes[4].message["content"]
    clock.now += 31
    outcomes = await outcomes_of(executor, {}, {})
    assert [item.kind for item in outcomes] == ["tool_error", "infrastructure"]
    clock.now += 31
    outcomes = await outcomes_of(executor, {}, {})
    assert [item.kind for item in outcomes] == ["ok", "ok"]
    assert script.num_calls == 7


async def test_only_one_call_probes(clock: Clock) -> None:
    """While one call finds out whether the tool works, others are refused; a cancelled probe leaves room for the next."""
    script = Script(RuntimeError())
    executor = executor_of(script, breaker_failures=1, breaker_reset_s=30)
    await outcomes_of(executor, {})
    clock.now += 31
    async with executor.open("t") as tools:
        outcomes = await tools.run([make_call("f", {})] * 3)
    assert sorted(item.kind for item in outcomes) == ["infrastructure", "infrastructure", "ok"]

    async def hangs(x: int = 0) -> str:
        if not hung:
            hung.append(True)
            raise RuntimeError
        await asyncio.Event().wait()
        return ""

    hung: list = []
    executor = executor_of(hangs, breaker_failures=1, breaker_reset_s=30, timeout_s=0.01)
    await outcomes_of(executor, {})
    clock.now += 31
    probe = asyncio.ensure_future(outcomes_of(executor, {}))
    for _ in range(5):
        await asyncio.sleep(0)
    probe.cancel()
    with pytest.raises(asyncio.CancelledError):
        await probe
    (outcome,) = await outcomes_of(executor, {})
    assert outcome.kind is OutcomeKind.TIMEOUT


async def test_mistakes_of_the_model_do_not_open_the_breaker() -> None:
    """Bad arguments say nothing about the tool: they neither count as failures nor as successes."""
    script = Script(RuntimeError(), ToolArgumentError("x"), RuntimeError(), "unreached")
    outcomes = await outcomes_of(executor_of(script, breaker_failures=2), {}, {}, {}, {})
    assert [item.kind for item in outcomes] == ["tool_error", "bad_arguments", "tool_error", "infrastructure"]


async def test_an_open_breaker_ends_the_attempts() -> None:
    """Retries stop where the breaker opens: nothing more is attempted."""
    script = Script(*[RuntimeError()] * 9)
    executor = executor_of(script, breaker_failures=2, idempotent=True, max_retries=5, backoff_s=0)
    (outcome,) = await outcomes_of(executor, {})
    assert (outcome.kind, script.num_calls) == ("infrastructure", 2)


async def test_closing_ends_a_call_between_two_attempts() -> None:
    """A call that waits for its next attempt while everything is closed is answered, and attempts nothing more."""
    script = Script(RuntimeError())
    executor = executor_of(script, idempotent=True, max_retries=1, backoff_s=0.01)
    tools = executor.open("t")
    await tools.__aenter__()
    run = asyncio.ensure_future(tools.run([make_call("f", {})]))
    while executor.stats["f"].num_retries == 0:  # noqa: ASYNC110 - the count is a plain number
        await asyncio.sleep(0)
    await executor.close()
    (outcome,) = await run
    assert (outcome.kind, script.num_calls) == ("infrastructure", 1)
