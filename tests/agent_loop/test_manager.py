"""Batches: order, groups, seeds, failures, rewards, metrics, and the pool around them."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest

from ostinato_agent_loop import (
    AgentConfigError,
    AgentLoopBase,
    AgentLoopManager,
    AgentLoopOutput,
    AgentRowError,
    MultiTurnConfig,
    RewardResult,
    RolloutConfig,
    TrajectoryEnd,
    UnknownAgentError,
    make_parser,
    make_tool_executor,
    register,
)
from ostinato_engines import EngineNotReadyError
from ostinato_rollout import Failure, FailureKind, NoReplicaError, SessionBudget
from ostinato_tokenization import ChatTokenizer
from ostinato_tokenization.testing import tiny_chat_tokenizer, tiny_tokenizer
from ostinato_tools import TruncateUnit, UnknownParserError

DONE = "done<|im_end|>"


def rows(count, **fields):
    """Rows with a prompt and an index."""
    return [{"raw_prompt": [{"role": "user", "content": f"row {i}"}], "index": i, **fields} for i in range(count)]


@register("manager_test_failing")
class FailingAgent(AgentLoopBase):
    """Fails in the ways that its row names, after its first turn."""

    async def run(self, sampling_params, *, raw_prompt, how="no", **row):
        session = self.context.open_session(row)
        await session.extend(raw_prompt)
        await session.generate(sampling_params)
        if how == "raise":
            raise LookupError("lost my way")
        if how == "hang":
            await asyncio.Event().wait()
        if how == "nonsense":
            return {"prompt_ids": [1]}
        if how == "nothing":
            return []
        if how == "exit":
            raise SystemExit(3)
        if how == "cancel":
            raise asyncio.CancelledError
        if how == "declare":
            failure = Failure("my agent", FailureKind.AGENT, "declared")
            return AgentLoopOutput(prompt_ids=[], response_ids=[], response_mask=[], failure=failure)
        if how == "corrupt":
            output = AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1])
            output.response_mask.append(1)
            return output
        if how == "floats":
            return AgentLoopOutput(prompt_ids=[1], response_ids=[2.0], response_mask=[1])
        if how == "score":
            return [
                AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], reward_score=score)
                for score in (None, 0.25)
            ]
        return AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], num_turns=2)


async def test_trajectories_stand_in_the_order_of_rows_and_groups(world):
    """n trajectories per row side by side, in the order of the rows, over any number of workers, each with its row, its
    group and an id of its own."""
    for num_workers in (1, 2, 3, 8):
        manager = world.build(lambda request: DONE, num_workers=num_workers)
        batch = await manager.generate_sequences(rows(5), n=3, step=7)
        assert [trajectory.row["index"] for trajectory in batch.trajectories] == [i for i in range(5) for _ in range(3)]
        assert [trajectory.group_id for trajectory in batch.trajectories] == [
            f"train-7-{i}" for i in range(5) for _ in range(3)
        ]
        assert len({trajectory.trajectory_id for trajectory in batch.trajectories}) == 15
        segment = batch.trajectories[4].segments[0]
        assert (segment.group_id, segment.trajectory_id) == ("train-7-1", "train-7-1/1")
        assert (segment.segment_index, segment.reward_score) == (0, 1.0)


async def test_seeds_are_those_of_row_and_number_whatever_the_workers(world):
    """Seed, step, row, number and phase decide a trajectory's seed; the number of workers does not."""

    async def seeds(*, seed=0, step=0, validate=False, num_workers=1):
        manager = world.build(lambda request: DONE, num_workers=num_workers, seed=seed)
        await manager.generate_sequences(rows(3), n=2, step=step, validate=validate)
        return {request.request_id: request.params.seed for request in world.server.requests}

    first = await seeds()
    assert len(set(first.values())) == 6
    assert await seeds(num_workers=3) == first
    for change in ({"seed": 1}, {"step": 1}, {"validate": True}):
        assert not set((await seeds(**change)).values()) & set(first.values())


async def test_one_failing_trajectory_touches_no_other(world, caplog):
    """Of four rows the second raises: three normal trajectories in their places, one failure with where and why, no reward
    for it, its traceback logged once."""
    manager = world.build(lambda request: DONE, agent="manager_test_failing")
    batch = await manager.generate_sequences(
        [{**row, "how": "raise" if i == 1 else "no"} for i, row in enumerate(rows(4))], n=1, step=0
    )
    assert [trajectory.failure is None for trajectory in batch.trajectories] == [True, False, True, True]
    failed = batch.trajectories[1]
    assert failed.failure == Failure(
        "trajectory train-0-1/0, agent manager_test_failing", FailureKind.AGENT, "LookupError: lost my way"
    )
    assert (failed.segments, failed.reward) == ([], None)
    assert len([record for record in caplog.records if "lost my way" in (record.exc_text or "")]) == 1
    assert batch.metrics["agent_loop/failures"] == 1
    assert batch.metrics["agent_loop/failures/agent"] == 1
    assert len(world.rewarded) == 3
    assert world.client.num_sticky == 0


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("hang", FailureKind.TIMEOUT, "must end within 0.2 s"),
        ("nonsense", FailureKind.AGENT, "must return an AgentLoopOutput"),
        ("nothing", FailureKind.AGENT, "at least one"),
        ("exit", FailureKind.AGENT, "must return or raise, got exit(3)"),
        ("cancel", FailureKind.CANCELLED, "CancelledError"),
        ("declare", FailureKind.AGENT, "declared"),
        ("corrupt", FailureKind.AGENT, "response_mask must be as long"),
        ("floats", FailureKind.AGENT, "response_ids must hold integers"),
    ],
)
async def test_every_kind_of_misbehaviour_is_a_recorded_failure(world, how, kind, text):
    """Agents that hang, answer nonsense, cancel themselves or declare a failure are data; sessions they left open are closed."""
    manager = world.build(
        lambda request: DONE, agent="manager_test_failing", agent_options={"trajectory_timeout_s": 0.2}
    )
    batch = await manager.generate_sequences([{**rows(1)[0], "how": how}, *rows(1)], n=1, step=0)
    failed, sibling = batch.trajectories
    assert failed.failure.kind is kind
    assert text in failed.failure.message
    assert failed.reward is None
    assert sibling.reward.score == 1.0
    assert len(world.server.released) == 2
    assert world.client.num_sticky == 0


@register("manager_test_not_async")
class NotAsyncAgent(AgentLoopBase):
    """Forgets that `run` is a coroutine function."""

    def run(self, sampling_params, **row):
        return []


@register("manager_test_without_fields")
class WithoutFieldsAgent(AgentLoopBase):
    """Does not take what a row may have."""

    async def run(self, sampling_params, raw_prompt):
        return []


@register("manager_test_type_error")
class TypeErrorAgent(AgentLoopBase):
    """Is declared well, and fails by itself before it awaits anything."""

    def run(self, sampling_params, **row):
        raise TypeError("of its own")


@pytest.mark.parametrize(
    ("agent", "text"),
    [
        ("manager_test_not_async", "run must be a coroutine function, got [] of it; write `async def run`"),
        (
            "manager_test_without_fields",
            "unexpected keyword argument 'index'; write `async def run(self, sampling_params",
        ),
        ("manager_test_type_error", "TypeError: of its own"),
    ],
)
async def test_an_agent_that_is_declared_wrongly_is_told_how(world, agent, text):
    """A `run` that cannot be awaited, or does not take the row's fields, is a failure that says how it is written; its own errors stay."""
    manager = world.build(lambda request: DONE, agent=agent)
    (trajectory,) = (await manager.generate_sequences(rows(1), n=1, step=0)).trajectories
    assert trajectory.failure.kind is FailureKind.AGENT
    assert text in trajectory.failure.message


async def test_a_cancellation_from_outside_propagates_and_frees_everything(world):
    """Cancelling the batch cancels every trajectory; no counter and no conversation is left, the pool is asleep."""
    all_asked = asyncio.Event()

    def reply(request):
        if len(world.server.requests) == 8:
            all_asked.set()
        return DONE

    manager = world.build(reply, agent="manager_test_failing", colocated=True)
    slept = []
    world.pool.sleep = lambda: _note(slept)
    task = asyncio.create_task(manager.generate_sequences(rows(4, how="hang"), n=2, step=0))
    await asyncio.wait_for(all_asked.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert set(world.client.num_in_flight.values()) == {0}
    assert (world.client.num_sticky, len(world.server.released)) == (0, 8)
    assert slept == ["called"]


async def _note(log):
    log.append("called")


async def test_the_reward_comes_as_soon_as_a_trajectory_ends(world):
    """The reward of a trajectory that ended is called while another is still under way, and its time is measured."""
    gate, scored = asyncio.Event(), asyncio.Event()

    @register("manager_test_gated")
    class Gated(FailingAgent):
        async def run(self, sampling_params, **row):
            if row["index"] == 1:
                await gate.wait()
            return await super().run(sampling_params, **row)

    async def reward(row, outputs):
        scored.set()
        return RewardResult(float(row["index"]))

    manager = world.build(lambda request: DONE, agent="manager_test_gated", reward_fn=reward, num_workers=1)
    task = asyncio.create_task(manager.generate_sequences(rows(2), n=1, step=0))
    await asyncio.wait_for(scored.wait(), 5)
    assert not task.done()
    gate.set()
    batch = await task
    assert [trajectory.reward.score for trajectory in batch.trajectories] == [0.0, 1.0]
    assert [trajectory.segments[0].reward_score for trajectory in batch.trajectories] == [0.0, 1.0]
    assert batch.trajectories[0].segments[0].metrics.compute_score > 0


@pytest.mark.parametrize(
    ("result", "kind", "text"),
    [
        (ZeroDivisionError("oh"), FailureKind.REWARD, "ZeroDivisionError: oh"),
        (0.5, FailureKind.REWARD, "must return a RewardResult, got 0.5"),
        (float("nan"), FailureKind.REWARD, "finite number, got nan"),
        ("no extra", FailureKind.REWARD, "extra must be a dict of named values, got None"),
        ("hang", FailureKind.TIMEOUT, "within 0.1 s"),
        (TimeoutError("the judge is busy"), FailureKind.TIMEOUT, "the judge is busy"),
        (asyncio.CancelledError(), FailureKind.REWARD, "CancelledError"),
        (SystemExit(3), FailureKind.REWARD, "must return or raise, got exit(3)"),
    ],
)
async def test_a_reward_that_fails_is_a_failure_not_a_zero(world, result, kind, text):
    """A reward function that raises, hangs or answers nonsense gives no score; the tokens are kept for a look."""

    async def reward(row, outputs):
        if result == "hang":
            await asyncio.Event().wait()
        if result == "no extra":
            return RewardResult(1.0, None)
        if isinstance(result, BaseException):
            raise result
        return RewardResult(result) if result != result else result

    manager = world.build(
        lambda request: DONE, reward_fn=reward, agent_options={"reward_timeout_s": 0.1}, agent="manager_test_failing"
    )
    (trajectory,) = (await manager.generate_sequences(rows(1), n=1, step=0)).trajectories
    assert trajectory.failure.kind is kind
    assert text in trajectory.failure.message
    assert trajectory.reward is None
    assert trajectory.segments[0].reward_score is None


@pytest.mark.parametrize("first", [0, 1, 2])
async def test_what_rewards_found_out_may_differ_from_row_to_row(world, first):
    """Whichever row comes first, each trajectory keeps its own extras, agents of two kinds in one batch."""
    extras = [{"acc": 1}, {"acc": 0, "pred": "x"}, {}]

    async def reward(row, outputs):
        return RewardResult(0.5, extras[row["index"]])

    batch_rows = rows(3)
    batch_rows[1]["agent_name"] = "tool_agent"
    manager = world.build(lambda request: DONE, reward_fn=reward, agent="single_turn_agent")
    batch = await manager.generate_sequences(batch_rows[first:] + batch_rows[:first], n=1, step=0)
    found = [trajectory.reward.extra for trajectory in batch.trajectories]
    assert found == extras[first:] + extras[:first]


async def test_an_agents_own_score_is_the_reward(world):
    """A score that the agent gave stands for the whole trajectory, and the reward function is not asked."""
    manager = world.build(lambda request: DONE, agent="manager_test_failing")
    (trajectory,) = (await manager.generate_sequences(rows(1, how="score"), n=1, step=0)).trajectories
    assert trajectory.reward.score == 0.25
    assert [(output.reward_score, output.segment_index) for output in trajectory.segments] == [(0.25, 0), (0.25, 1)]
    assert world.rewarded == []


async def test_metrics_count_each_trajectory_once(world, call):
    """The batch's metrics have the field's names; turns, calls and outcomes are those of the trajectories."""
    replies = {"train-0-0/0": [call(("echo", '{"text": "a"}')), call(("failing", "{}")), DONE], "train-0-1/0": [DONE]}
    manager = world.build(lambda request: replies[request.request_id].pop(0))
    metrics = (await manager.generate_sequences(rows(2), n=1, step=0)).metrics
    for name in ("generate_sequences", "tool_calls", "compute_score"):
        for spread in ("min", "max", "mean"):
            assert metrics[f"agent_loop/{name}/{spread}"] >= 0
    assert (metrics["num_turns/min"], metrics["num_turns/max"], metrics["num_turns/mean"]) == (2, 6, 4)
    assert (metrics["tool_call_counts/max"], metrics["tool_call_counts/mean"]) == (2, 1)
    assert metrics["agent_loop/tool_outcomes/ok"] == 1
    assert metrics["agent_loop/tool_outcomes/tool_error"] == 1
    assert metrics["agent_loop/slowest/num_turns"] in (2, 6)
    assert metrics["agent_loop/slowest/total"] >= metrics["agent_loop/slowest/tool_calls"]
    assert metrics["agent_loop/failures"] == 0
    assert metrics["agent_loop/tokenization_mismatches"] == 0


async def test_a_colocated_pool_is_awake_during_a_batch_only(world):
    """The pool wakes before the batch and sleeps after it; batches that overlap share one waking."""
    log = []
    manager = world.build(lambda request: log.append("generate") or DONE, colocated=True)
    world.pool.wake_up, world.pool.sleep = lambda: _record(log, "wake"), lambda: _record(log, "sleep")
    await manager.generate_sequences(rows(1), n=1, step=0)
    assert log == ["wake", "generate", "sleep"]
    log.clear()
    await asyncio.gather(*(manager.generate_sequences(rows(2), n=1, step=step) for step in (1, 2)))
    assert (log[0], log[-1], log.count("wake"), log.count("sleep")) == ("wake", "sleep", 1, 1)


async def _record(log, what):
    log.append(what)


async def test_a_pool_that_cannot_wake_fails_the_batch_clearly(world):
    """If no replica wakes, the batch raises, and a later one may try again."""
    manager = world.build(lambda request: DONE, colocated=True)
    original = world.server.wake_up

    async def broken(tags=None):
        raise EngineNotReadyError("no memory")

    world.server.wake_up = broken
    with pytest.raises(NoReplicaError, match="no memory"):
        await manager.generate_sequences(rows(1), n=1, step=0)
    assert world.server.requests == []
    world.server.wake_up = original
    with pytest.raises(NoReplicaError):
        await manager.generate_sequences(rows(1), n=1, step=0)


async def test_names_are_checked_before_anything_runs(world):
    """An unknown default agent fails at start, an unknown agent of a row before the batch, each listing those known."""
    with pytest.raises(UnknownAgentError, match="single_turn_agent"):
        world.build([], agent="nobody")
    manager = world.build(lambda request: DONE)
    with pytest.raises(UnknownAgentError, match=r"rows\[2\].*tool_agent.*'nobody'"):
        await manager.generate_sequences([*rows(2), {**rows(1)[0], "agent_name": "nobody"}], n=1, step=0)
    with pytest.raises(AgentRowError, match=r"rows\[0\]: agent_name must be a text, got 3"):
        await manager.generate_sequences(rows(1, agent_name=3), n=1, step=0)
    with pytest.raises(AgentRowError, match=r"rows\[0\] must be a mapping"):
        await manager.generate_sequences(["row"], n=1, step=0)
    with pytest.raises(AgentConfigError, match="n must be at least 1, got 0"):
        await manager.generate_sequences(rows(1), n=0, step=0)
    assert world.server.requests == []


async def test_agents_with_tools_need_multi_turn_enable(world):
    """While multi_turn.enable is false, an agent that uses tools is refused at start or before the batch, with the cure."""
    with pytest.raises(AgentConfigError, match=r"multi_turn\.enable must be true for agent 'tool_agent'"):
        world.build([], enable=False)
    manager = world.build(lambda request: DONE, agent="single_turn_agent", enable=False)
    with pytest.raises(AgentConfigError, match=r"actor_rollout_ref\.rollout\.multi_turn\.enable=true"):
        await manager.generate_sequences(rows(1, agent_name="tool_agent"), n=1, step=0)
    manager.check_agents(["single_turn_agent"])
    assert (await manager.generate_sequences(rows(1), n=1, step=0)).trajectories[0].failure is None


async def test_rows_choose_their_agent(world):
    """agent_name decides, else the default; both kinds run in one batch."""
    manager = world.build(lambda request: DONE, agent="single_turn_agent")
    batch = await manager.generate_sequences(
        [*rows(1), *rows(1, agent_name="tool_agent"), *rows(1, agent_name=None)], n=1, step=0
    )
    ends = [trajectory.segments[0].stop_reason for trajectory in batch.trajectories]
    assert ends == [TrajectoryEnd.STOP, TrajectoryEnd.NO_TOOL_CALL, TrajectoryEnd.STOP]


async def test_validation_uses_its_own_settings(world):
    """validate takes n and sampling from val_kwargs unless they are given."""
    manager = world.build(lambda request: DONE, agent="single_turn_agent")
    batch = await manager.generate_sequences(rows(2), step=0, validate=True)
    assert len(batch.trajectories) == 2
    assert {request.params.temperature for request in world.server.requests} == {0.0}
    assert batch.trajectories[0].group_id.startswith("val-")
    await manager.generate_sequences(rows(1), step=0, sampling_params={"temperature": 0.3})
    assert world.server.requests[-1].params.temperature == 0.3


async def test_an_empty_batch_is_an_empty_result(world):
    """No rows give no trajectories, and counts of zero."""
    batch = await world.build([]).generate_sequences([], n=2, step=0)
    assert batch.trajectories == []
    assert batch.metrics["agent_loop/failures"] == 0
    assert "num_turns/mean" not in batch.metrics


async def test_no_more_trajectories_than_allowed_run_at_once(world):
    """A worker has at most max_concurrency trajectories under way."""
    running = peak = 0

    @register("manager_test_counting")
    class Counting(FailingAgent):
        async def run(self, sampling_params, **row):
            nonlocal running, peak
            running += 1
            peak = max(peak, running)
            await asyncio.sleep(0)
            try:
                return await super().run(sampling_params, **row)
            finally:
                running -= 1

    manager = world.build(
        lambda request: DONE, agent="manager_test_counting", num_workers=2, agent_options={"max_concurrency": 3}
    )
    await manager.generate_sequences(rows(10), n=2, step=0)
    assert 3 < peak <= 6


async def test_tools_come_from_the_files_that_the_configuration_names(world, tmp_path):
    """function_tool_path and the limits of tool answers take effect; without enable there are no tools."""
    path = tmp_path / "my_tools.py"
    path.write_text(
        "from ostinato_tools import function_tool\n"
        "from ostinato_tools.testing import make_schema\n\n"
        '@function_tool(schema=make_schema("shout", {"text": {"type": "string"}}))\n'
        "async def shout(text: str) -> str:\n"
        "    return text.upper() * 50\n"
    )
    from ostinato_tokenization import ContinuousTokens

    world.build([])
    multi_turn = MultiTurnConfig(
        enable=True, function_tool_path=str(path), max_tool_response_length=10, tool_response_truncate_side="right"
    )
    for enable, names in ((True, ("shout",)), (False, ())):
        config = RolloutConfig(multi_turn=msgspec.structs.replace(multi_turn, enable=enable))
        manager = AgentLoopManager(
            config, tokens=ContinuousTokens(world.tokenizer), budget=SessionBudget(100, 100), client=world.client
        )
        executor = manager._workers[0]._context.tools
        assert executor.registry.names == names
        assert (executor.max_response_length, executor.truncate_side) == (10, "right")


def test_enable_without_tools_is_said(world, caplog):
    """multi_turn.enable without any tool is no silent single turn: a warning says so."""
    from ostinato_tokenization import ContinuousTokens

    world.build([])
    with caplog.at_level(logging.WARNING):
        AgentLoopManager(
            RolloutConfig(multi_turn=MultiTurnConfig(enable=True)),
            tokens=ContinuousTokens(world.tokenizer),
            budget=SessionBudget(10, 10),
            client=world.client,
        )
    assert "there are no tools" in caplog.text


def test_a_manager_whose_engines_are_colocated_needs_a_pool(world):
    """Without a pool nothing could wake them."""
    with pytest.raises(AgentConfigError, match="pool must be given"):
        AgentLoopManager(RolloutConfig(), tokens=None, budget=SessionBudget(1, 1), client=world.client, colocated=True)


def test_the_parser_is_the_named_one_or_the_one_that_the_template_tells():
    """`format` names a parser; `auto` takes the chat template's, and says so where that tells none."""
    tokenizer = tiny_chat_tokenizer()
    assert make_parser(MultiTurnConfig(format="glm"), tokenizer).name == "glm"
    assert make_parser(MultiTurnConfig(format="auto"), tokenizer).name == "hermes"
    silent = ChatTokenizer(tiny_tokenizer(), "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    with pytest.raises(UnknownParserError, match=r"^multi_turn\.format: parser must be one of .*hermes.*got 'Hermes'"):
        make_parser(MultiTurnConfig(format="Hermes"), tokenizer)
    with pytest.raises(UnknownParserError, match="template must tell one format"):
        make_parser(MultiTurnConfig(format="auto"), silent)


async def test_answers_of_tools_are_cut_by_tokens_where_that_is_asked_for():
    """`tool_response_truncate_unit` decides whether the limit counts characters or the tokenizer's tokens."""
    tokenizer = tiny_chat_tokenizer()
    text = "word " * 100
    for unit in TruncateUnit:
        config = MultiTurnConfig(
            max_tool_response_length=20, tool_response_truncate_side="right", tool_response_truncate_unit=unit
        )
        shortened = make_tool_executor(config, tokenizer).shorten(text)
        kept = shortened[: next(i for i, (a, b) in enumerate(zip(shortened, text, strict=False)) if a != b)]
        size = len(kept) if unit is TruncateUnit.CHARACTERS else len(tokenizer.encode_text(kept))
        assert size in range(15, 21)
