"""What the tracer is told of trajectories by workers and agents, in every mode, and what a backend in trouble does to them: nothing."""

import asyncio
from collections import Counter

import pytest

from ostinato_agent_loop import AgentLoopBase, AgentLoopOutput, TrajectoryEnd, register
from ostinato_rollout.tracing import SpanKind, TraceBackend, TraceConfig, Tracer, completed, read_spans
from ostinato_rollout.tracing.testing import FailingSink, HangingSink, MemorySink

DEADLINE_S = 30
PROMPT = [{"role": "user", "content": "Please."}]


@pytest.fixture
def memory():
    return MemorySink()


@pytest.fixture
def tracer(memory):
    tracer = Tracer(memory, experiment_name="e")
    yield tracer
    tracer.close(0)


def told(tracer, memory):
    """Traces by trajectory: a list of spans each, in order of their beginning, the root first."""
    assert tracer.flush(DEADLINE_S)
    assert tracer.stats.dropped == 0
    traces: dict[str, list] = {}
    for span in sorted(memory.spans, key=lambda span: (span.start_ns, span.parent_id is not None)):
        traces.setdefault(span.labels.trajectory_id, []).append(span)
    return traces


def of_kind(spans, kind):
    return [span for span in spans if span.kind is kind]


async def test_a_batch_is_told_as_it_happened(world, call, tracer, memory):
    """Every trajectory of a batch is one tree: its generations are its tokens, its calls their answers, its reward its score."""
    replies = [
        call(("echo", f'{{"text": "say {number}"}}')) if number % 2 else "Done.<|im_end|>" for number in range(60)
    ]
    manager = world.build(replies, tracer=tracer, max_parallel_calls=2)
    rows = [{"raw_prompt": PROMPT, "index": index} for index in range(3)]
    batch = await manager.generate_sequences(rows, n=2, step=5)
    traces = told(tracer, memory)
    assert len(traces) == len(batch.trajectories) == 6
    for place, trajectory in enumerate(batch.trajectories):
        root, *rest = traces[trajectory.trajectory_id]
        (segment,) = trajectory.segments
        labels = root.labels
        assert (labels.step, labels.sample_index, labels.rollout_n, labels.validate) == (
            5,
            place // 2,
            place % 2,
            False,
        )
        assert (labels.group_id, labels.agent) == (trajectory.group_id, "tool_agent")
        assert (root.kind, root.parent_id, root.error) == (SpanKind.LOOP, None, None)
        assert all(span.parent_id == root.span_id and span.trace_id == root.trace_id for span in rest)
        assert all(root.start_ns <= span.start_ns <= span.end_ns <= root.end_ns for span in rest)
        generations = of_kind(rest, SpanKind.GENERATION)
        ids = [token for span in generations for token in (*span.inputs["prompt_ids"], *span.outputs["token_ids"])]
        assert ids == segment.prompt_ids + segment.response_ids
        calls = of_kind(rest, SpanKind.TOOL)
        assert len(calls) == segment.metrics.num_tool_calls == len(generations) - 1
        answers = [message["content"] for message in segment.extra_fields["messages"] if message["role"] == "tool"]
        assert [span.outputs["answer"] for span in calls] == answers
        assert [span.inputs["arguments"]["text"] for span in calls] == answers
        (reward,) = of_kind(rest, SpanKind.REWARD)
        assert reward.outputs == {"score": 1.0, "extra": {"row": place // 2}}
        assert root.inputs == {"messages": PROMPT, "row": {"index": place // 2}}
        assert root.outputs["reward"] == 1.0
        assert root.outputs["stop_reason"] == "no_tool_call"
        assert root.outputs["messages"] == segment.extra_fields["messages"]
        assert root.outputs["segments"][0]["response_length"] == len(segment.response_ids)
    assert batch.metrics["trace/dropped_spans"] == 0.0
    assert not world.manager._workers[0]._context.tools.observers


async def test_validation_and_single_turns_are_told(world, tracer, memory):
    """A validation's spans say so; an agent without tools is told as well."""
    manager = world.build(["One.<|im_end|>"] * 2, agent="single_turn_agent", tracer=tracer)
    await manager.generate_sequences([{"raw_prompt": PROMPT}], n=1, step=2, validate=True)
    ((root, *rest),) = told(tracer, memory).values()
    assert (root.labels.validate, root.labels.step, root.labels.agent) == (True, 2, "single_turn_agent")
    assert [span.kind for span in rest] == [SpanKind.GENERATION, SpanKind.REWARD]


async def test_calls_that_do_not_run_are_told(world, call, tracer, memory):
    """Calls beyond the limit, malformed ones and those of unknown tools are spans with what the model was answered."""
    turn = call(("echo", '{"text": "a"}'), ("echo", '{"text": "b"}'), ("nothing", "{}"), ("echo", "[1]"))
    world.build([turn, "Done.<|im_end|>"], tracer=tracer)
    batch = await world.manager.generate_sequences([{"raw_prompt": PROMPT}], n=1, step=0)
    ((_, *rest),) = told(tracer, memory).values()
    calls = of_kind(rest, SpanKind.TOOL)
    (segment,) = batch.trajectories[0].segments
    assert Counter(span.attributes["outcome"] for span in calls) == segment.metrics.tool_outcomes
    answers = {m["tool_call_id"]: m["content"] for m in segment.extra_fields["messages"] if m["role"] == "tool"}
    assert {span.attributes["tool_call_id"]: span.outputs["answer"] for span in calls} == answers
    assert [span.error is None for span in calls].count(True) == 1


async def test_a_failed_trajectory_is_told_with_its_failure(world, call, tracer, memory):
    """The root of a failed trajectory has the failure's kind and words; what was done before it is there."""
    world.build([call(("echo", '{"text": "a"}')), RuntimeError("the engine is broken")], tracer=tracer)
    batch = await world.manager.generate_sequences([{"raw_prompt": PROMPT}], n=1, step=0)
    failure = batch.trajectories[0].failure
    ((root, *rest),) = told(tracer, memory).values()
    assert (root.error.kind, root.error.message) == ("engine", failure.message)
    assert [span.error is None for span in rest] == [True, True, False]
    assert rest[-1].error.kind == "engine"


async def test_a_trajectory_past_its_deadline_is_told_with_what_hung(world, call, tracer, memory):
    """The tool call that hung when the trajectory was given up is a span of its own."""
    world.build(
        [call(("hanging", "{}"))], tracer=tracer, agent_options={"trajectory_timeout_s": 0.2}, timeout_s=60.0
    )  # fmt: skip
    await world.manager.generate_sequences([{"raw_prompt": PROMPT}], n=1, step=0)
    ((root, *rest),) = told(tracer, memory).values()
    assert root.error.kind == "timeout"
    (hung,) = of_kind(rest, SpanKind.TOOL)
    assert (hung.attributes["tool"], hung.error.kind) == ("hanging", "cancelled")


async def test_a_reward_that_fails_is_told(world, tracer, memory):
    """A reward function that raises is a failed span, and so is its trajectory."""

    async def broken(row, outputs):
        raise KeyError("x")

    world.build(["One.<|im_end|>"], tracer=tracer, reward_fn=broken)
    await world.manager.generate_sequences([{"raw_prompt": PROMPT}], n=1, step=0)
    ((root, *rest),) = told(tracer, memory).values()
    assert rest[-1].kind is SpanKind.REWARD
    assert rest[-1].error.kind == root.error.kind == "reward"


async def test_an_agent_of_one_s_own_is_told(world, tracer, memory):
    """Sessions and tools that any agent opens are told, several of a trajectory too; its own score has the agent as source."""

    @register("test_tracing_agent")
    class Own(AgentLoopBase):
        async def run(self, sampling_params, **row):
            outputs = []
            for name in ("one", "two"):
                async with self.context.open_session(row) as session:
                    await session.extend([{"role": "user", "content": name}])
                    await session.generate(sampling_params)
                ledger = session.ledger
                outputs.append(
                    AgentLoopOutput(
                        prompt_ids=ledger.prompt_ids,
                        response_ids=ledger.response_ids,
                        response_mask=ledger.response_mask,
                        stop_reason=TrajectoryEnd.STOP,
                        reward_score=0.25,
                    )
                )
            return outputs

    world.build(["One.<|im_end|>", "Two.<|im_end|>"], agent="test_tracing_agent", tracer=tracer)
    batch = await world.manager.generate_sequences([{"raw_prompt": PROMPT}], n=1, step=0)
    ((_, first, second, reward),) = told(tracer, memory).values()
    for span, segment in zip((first, second), batch.trajectories[0].segments, strict=True):
        assert span.inputs["prompt_ids"] + span.outputs["token_ids"] == segment.prompt_ids + segment.response_ids
    assert first.attributes["request_id"] != second.attributes["request_id"]
    assert (reward.outputs["score"], reward.attributes["source"]) == (0.25, "agent")


async def test_what_cannot_be_told_costs_the_span_only(world, tracer, memory):
    """Outputs of a shape that nobody expects leave the trajectory as it is; the other spans are there."""

    @register("test_tracing_odd_agent")
    class Odd(AgentLoopBase):
        async def run(self, sampling_params, **row):
            async with self.context.open_session(row) as session:
                await session.extend(PROMPT)
                await session.generate(sampling_params)
            ledger = session.ledger
            return AgentLoopOutput(
                prompt_ids=ledger.prompt_ids,
                response_ids=ledger.response_ids,
                response_mask=ledger.response_mask,
                extra_fields=["no", "mapping"],
            )

    world.build(["One.<|im_end|>"], agent="test_tracing_odd_agent", tracer=tracer)
    batch = await world.manager.generate_sequences([{"raw_prompt": PROMPT}], n=1, step=0)
    assert batch.trajectories[0].failure is None
    (spans,) = told(tracer, memory).values()
    assert [span.kind for span in spans] == [SpanKind.GENERATION, SpanKind.REWARD]


async def test_a_cancelled_batch_is_told(world, call, tracer, memory):
    """Trajectories that are cancelled from outside end as spans of the kind cancelled, and the cancellation goes on."""
    world.build([call(("hanging", "{}"))], tracer=tracer, timeout_s=60.0)
    running = asyncio.ensure_future(world.manager.generate_sequences([{"raw_prompt": PROMPT}], n=1, step=0))
    context = world.manager._workers[0]._context
    async with asyncio.timeout(DEADLINE_S):
        while not world.server.requests or world.client.num_in_flight[0] or not context.tools.num_open:  # noqa: ASYNC110
            await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    ((root, *_),) = told(tracer, memory).values()
    assert root.error.kind == "cancelled"
    assert not context.tools.observers


async def test_rows_beyond_the_sample_are_not_told(world, memory):
    """With a limit, the first rows of each step are recorded with all their trajectories, and no others."""
    tracer = Tracer(memory, max_samples_per_step=2)
    world.build(["One.<|im_end|>"] * 24, tracer=tracer)
    for step in (1, 2):
        await world.manager.generate_sequences([{"raw_prompt": PROMPT}] * 4, n=3, step=step)
    await world.manager.close()
    roots = Counter((span.labels.step, span.labels.sample_index) for span in of_kind(memory.spans, SpanKind.LOOP))
    assert roots == {(1, 0): 3, (1, 1): 3, (2, 0): 3, (2, 1): 3}


async def test_a_stream_is_told(world, memory):
    """Trajectories of a stream are told as those of a batch; the first rows of every step of it, whatever finishes first."""
    tracer = Tracer(memory, max_samples_per_step=1, rows_per_step=2)
    manager = world.build(["One.<|im_end|>"] * 12, tracer=tracer)
    rows = [{"raw_prompt": PROMPT, "index": index} for index in range(6)]
    async with manager.stream(rows, n=2, step=3) as stream:
        batch = await stream.take_batch(6)
    assert batch.metrics["trace/dropped_spans"] == 0.0
    traces = told(tracer, memory)
    assert {root.inputs["row"]["index"] for root, *_ in traces.values()} == {0, 2, 4}
    assert {(root.labels.step, root.labels.rollout_n) for root, *_ in traces.values()} == {(3, 0), (3, 1)}
    by_id = {trajectory.trajectory_id: trajectory for trajectory in batch.trajectories}
    for name, (_, generation, reward) in traces.items():
        (segment,) = by_id[name].segments
        ids = generation.inputs["prompt_ids"] + generation.outputs["token_ids"]
        assert ids == segment.prompt_ids + segment.response_ids
        assert reward.outputs["score"] == by_id[name].reward.score
    await manager.close()


@pytest.mark.parametrize("sink", [HangingSink(), FailingSink()], ids=["hangs", "is down"])
async def test_a_run_goes_on_and_ends_whatever_the_backend_does(world, call, sink):
    """With a backend that hangs or is down, a batch is the same as without; then everything is counted as dropped."""
    replies = [call(("echo", '{"text": "a"}')), "Done.<|im_end|>"]
    plain = await world.build(replies * 8).generate_sequences([{"raw_prompt": PROMPT}] * 4, n=2, step=0)
    tracer = Tracer(sink)
    manager = world.build(replies * 8, tracer=tracer)
    batch = await manager.generate_sequences([{"raw_prompt": PROMPT}] * 4, n=2, step=0)
    for traced, same in zip(batch.trajectories, plain.trajectories, strict=True):
        assert traced.segments[0].response_ids == same.segments[0].response_ids
        assert traced.failure is None
    stats = await tracer.aclose(0.05)
    roles = Counter(
        message["role"] for each in plain.trajectories for message in each.segments[0].extra_fields["messages"]
    )
    num_spans = 2 * 8 + roles["assistant"] + roles["tool"]  # loops and rewards, generations, calls
    assert (stats.written, stats.dropped) == (0, num_spans)
    assert batch.metrics["trace/written_spans"] == 0.0
    if isinstance(sink, HangingSink):
        sink.go_on.set()


async def test_a_full_queue_costs_no_trajectory(world, memory):
    """Where the queue has no room, trajectories run unrecorded, and are counted; those under way lose spans only."""
    sink = HangingSink()
    tracer = Tracer(sink, max_queued_spans=2)
    world.build(["One.<|im_end|>"] * 40, tracer=tracer)
    for step in range(4):  # the first two fill the queue, before and after the tracer's thread has taken from it
        batch = await world.manager.generate_sequences([{"raw_prompt": PROMPT}] * 10, n=1, step=step)
        assert batch.metrics["agent_loop/failures"] == 0
        assert await asyncio.to_thread(sink.is_hanging.wait, 60)
    assert batch.metrics["trace/skipped_trajectories"] >= 20
    assert batch.metrics["trace/dropped_spans"] > 0
    await tracer.aclose(0)
    sink.go_on.set()


async def test_settings_alone_make_the_manager_record(world, tmp_path):
    """`rollout.trace` is all that it takes: the manager makes the tracer, and closing the manager writes what waits."""
    trace = TraceConfig(backend=TraceBackend.JSONL, token2text=True)
    trace = completed(trace, project_name="p", experiment_name="e", folder=tmp_path)
    manager = world.build(["One.<|im_end|>"], trace=trace)
    await manager.generate_sequences([{"raw_prompt": PROMPT}], n=1, step=0)
    await manager.close()
    await manager.close()
    spans = list(read_spans(tmp_path / "traces"))
    assert {span.kind for span in spans} == {SpanKind.LOOP, SpanKind.GENERATION, SpanKind.REWARD}
    assert [span.outputs["response_text"] for span in of_kind(spans, SpanKind.GENERATION)] == ["One.<|im_end|>"]
