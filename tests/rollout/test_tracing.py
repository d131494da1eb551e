"""What a tracer records, what it never does to a run, and what becomes of values that JSON does not know."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import math
import resource
from array import array
from enum import StrEnum

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato_engines import PolicySpan, SamplingParams, StopReason, TokenOutput
from ostinato_rollout import ChatSession, LLMServerClient, ReplicaError, SessionBudget, SessionConfig
from ostinato_rollout.errors import TraceStoreError
from ostinato_rollout.tracing import (
    JsonlSink,
    Span,
    SpanKind,
    TraceBackend,
    TraceConfig,
    Tracer,
    TrajectoryLabels,
    completed,
    make_tracer,
    read_spans,
)
from ostinato_rollout.tracing.testing import FailingSink, HangingSink, MemorySink
from ostinato_rollout.tracing.values import MAX_TEXT, storable
from ostinato_tokenization import ContinuousTokens
from ostinato_tools import ToolCall, ToolExecutor, ToolRegistry, function_tool, get_parser
from ostinato_tools.testing import echo, failing, hanging, make_schema

DEADLINE_S = 30
LABELS = TrajectoryLabels(sample_index=3, step=7, rollout_n=2, validate=True, group_id="g", trajectory_id="g/2")


@contextlib.contextmanager
def recording(sink=None, **options):
    """A tracer over a sink that keeps spans; closed at the end."""
    sink = MemorySink() if sink is None else sink
    tracer = Tracer(sink, **options)
    try:
        yield tracer, sink
    finally:
        tracer.close(0)


def spans_of(tracer, sink, kind=None):
    """What was written so far, in order of its beginning."""
    assert tracer.flush(DEADLINE_S)
    return sorted((span for span in sink.spans if kind in (None, span.kind)), key=lambda span: span.start_ns)


def offer(tracer, number=1, labels=LABELS):
    """Record so many rewards."""
    trace = tracer.trajectory(labels)
    for score in range(number):
        trace.reward(trace.now_ns(), {"score": float(score)}, source="test")
    return trace


def session_of(client, tokenizer, trace, *, parser="hermes", **config):
    return ChatSession(
        client=client,
        tokens=ContinuousTokens(tokenizer),
        config=SessionConfig(**config),
        budget=SessionBudget(2000, 4000),
        parser=get_parser(parser),
        request_id="r",
        trace=trace,
    )


USER = [{"role": "user", "content": "What is 1+1?"}]
TOOL = [{"role": "tool", "content": "2", "tool_call_id": "call_0_0", "name": "echo"}]
CALL = '<tool_call>\n{"name": "echo", "arguments": {"text": "x"}}\n</tool_call><|im_end|>'


async def test_the_generations_of_a_session_are_its_ledger(scripted, tokenizer):
    """Prompts and turns of the spans, one after the other, are the recorded tokens; messages, log-probabilities and text agree."""
    client, _ = scripted([CALL, "It is 2.<|im_end|>"])
    with recording(decoder=tokenizer) as (tracer, sink):
        trace = tracer.trajectory(LABELS)
        async with session_of(client, tokenizer, trace) as session:
            await session.extend(USER)
            await session.generate(SamplingParams(seed=5))
            await session.extend(TOOL)
            await session.generate(SamplingParams(seed=5))
        first, second = spans_of(tracer, sink)
    ledger = session.ledger
    told = [token for span in (first, second) for token in (*span.inputs["prompt_ids"], *span.outputs["token_ids"])]
    assert told == list(ledger.token_ids)
    assert [span.inputs["messages"] for span in (first, second)] == [USER, TOOL]
    assert [span.outputs["message"] for span in (first, second)] == [session.messages[1], session.messages[3]]
    sampled = [value for value, mask in zip(ledger.response_logprobs, ledger.response_mask, strict=True) if mask]
    assert first.outputs["logprobs"] + second.outputs["logprobs"] == sampled
    assert second.attributes["prompt_offset"] == len(first.inputs["prompt_ids"]) + len(first.outputs["token_ids"])
    assert second.attributes["prompt_length"] + second.attributes["response_length"] == len(ledger.token_ids)
    assert first.inputs["prompt_text"] + first.outputs["response_text"] == tokenizer.decode(
        list(ledger.token_ids)[: second.attributes["prompt_offset"]]
    )
    assert second.outputs["response_text"] == "It is 2.<|im_end|>"
    assert first.error is None
    assert first.end_ns <= second.start_ns


async def test_a_generation_says_who_sampled_it_and_how(stub_server, tokenizer):
    """Policy versions, replica, cached tokens, preemptions, stop reason and sampling parameters are what the replica said."""
    spans = (PolicySpan(0, 4), PolicySpan(1, 5, exact=False))
    output = TokenOutput([10, 99], None, StopReason.LENGTH, None, spans, num_cached_tokens=12, num_preempted=1)
    client = LLMServerClient([stub_server(), stub_server([output])])
    client.remove_server(client._placement.servers[0])
    with recording() as (tracer, sink):
        async with session_of(client, tokenizer, tracer.trajectory(LABELS)) as session:
            await session.extend(USER)
            await session.generate(SamplingParams(temperature=0.5, max_tokens=2, logprobs=False))
        (span,) = spans_of(tracer, sink)
    facts = span.attributes
    assert facts["policy_versions"] == [
        {"start": 0, "version": 4, "exact": True},
        {"start": 1, "version": 5, "exact": False},
    ]
    assert (facts["replica"], facts["num_cached_tokens"], facts["num_preempted"]) == (1, 12, 1)
    assert (facts["stop_reason"], facts["stop_token_id"]) == ("length", None)
    assert (facts["sampling_params"]["temperature"], facts["sampling_params"]["max_tokens"]) == (0.5, 2)
    assert span.outputs["logprobs"] is None
    assert "prompt_text" not in span.inputs


async def test_a_generation_that_fails_is_told_with_its_failure(scripted, tokenizer):
    """A failed turn is a span with the failure's kind and no output; the turn that succeeds after it tells the whole prompt."""
    client, _ = scripted([RuntimeError("the engine is broken"), "Two.<|im_end|>"])
    with recording() as (tracer, sink):
        async with session_of(client, tokenizer, tracer.trajectory(LABELS)) as session:
            await session.extend(USER)
            with pytest.raises(ReplicaError):
                await session.generate(SamplingParams())
            await session.generate(SamplingParams())
        failed, good = spans_of(tracer, sink)
    assert failed.error.kind == "engine"
    assert "the engine is broken" in failed.error.message
    assert failed.outputs == {}
    assert failed.attributes["replica"] == 0
    assert good.error is None
    assert good.inputs["prompt_ids"] + good.outputs["token_ids"] == list(session.ledger.token_ids)


async def test_a_cancelled_generation_is_told(stub_server, tokenizer):
    """A turn that is cancelled under way is a span of the kind cancelled, and the cancellation goes on."""
    begun = asyncio.Event()

    async def answer(*_):
        begun.set()
        await asyncio.Event().wait()

    server = stub_server()
    server.generate = answer
    client = LLMServerClient([server])
    with recording() as (tracer, sink):
        async with session_of(client, tokenizer, tracer.trajectory(LABELS)) as session:
            await session.extend(USER)
            turn = asyncio.ensure_future(session.generate(SamplingParams()))
            await begun.wait()
            turn.cancel()
            with pytest.raises(asyncio.CancelledError):
                await turn
        (span,) = spans_of(tracer, sink)
    assert span.error.kind == "cancelled"


async def test_a_new_segment_tells_its_whole_prompt(scripted, tokenizer, monkeypatch):
    """Where the history cannot be extended, the next span begins a segment and holds all of its prompt."""
    client, _ = scripted(["One.<|im_end|>", "Two.<|im_end|>"])
    from ostinato_tokenization import HistoryRewrittenError

    def refuse(*_):
        raise HistoryRewrittenError("this template rewrites its history")

    with recording() as (tracer, sink):
        async with session_of(client, tokenizer, tracer.trajectory(LABELS)) as session:
            await session.extend(USER)
            await session.generate(SamplingParams())
            monkeypatch.setattr(session._tokens, "merge_context_messages", refuse)
            monkeypatch.setattr(
                session._tokens, "build_initial_tokens", lambda *_: _ledger(tokenizer, "another beginning")
            )
            await session.extend([{"role": "user", "content": "again"}])
            await session.generate(SamplingParams())
        first, second = spans_of(tracer, sink)
    assert [span.attributes["segment"] for span in (first, second)] == [0, 1]
    assert second.attributes["prompt_offset"] == 0
    for span, ledger in zip((first, second), session.segments, strict=True):
        assert span.inputs["prompt_ids"] + span.outputs["token_ids"] == list(ledger.token_ids)


def _ledger(tokenizer, text):
    from ostinato_tokenization import Origin, TokenLedger

    ledger = TokenLedger()
    ledger.append(tokenizer.encode_text(text), Origin.TEMPLATE)
    return ledger


async def test_tool_calls_are_told_one_by_one():
    """Arguments, answer, outcome, reward and seconds of each call are in a span of its own, also of those that fail or hang."""
    executor = ToolExecutor(ToolRegistry([echo, failing, hanging]), timeout_s=0.5)
    calls = [
        ToolCall("echo", {"text": "hello"}, '{"text": "hello"}', "a"),
        ToolCall("failing", {}, "{}", "b"),
        ToolCall("hanging", {}, "{}", "c"),
        ToolCall("missing", {}, "{}", "d"),
        ToolCall("echo", None, "{text", "e", error="not JSON"),
    ]
    with recording() as (tracer, sink):
        trace = tracer.trajectory(LABELS)
        executor.observers["t"] = trace.tool_call
        async with executor, executor.open("t") as tools:
            outcomes = await tools.run(calls)
        spans = {span.attributes["tool_call_id"]: span for span in spans_of(tracer, sink, SpanKind.TOOL)}
    assert sorted(spans) == list("abcde")
    for call, outcome in zip(calls, outcomes, strict=True):
        span = spans[call.id]
        assert span.name == f"execute_tool {call.name}"
        assert span.inputs == {"arguments": call.raw_arguments if call.arguments is None else call.arguments}
        assert span.outputs["answer"] == outcome.message["content"]
        assert span.attributes["outcome"] == outcome.kind
        assert span.attributes["seconds"] == outcome.seconds
        assert (span.error is None) == (outcome.kind == "ok")
        assert span.error is None or span.error.kind == outcome.kind
    assert spans["c"].attributes["outcome"] == "timeout"


async def test_a_tool_call_that_is_cancelled_is_told():
    """A call without an outcome, because its trajectory was cancelled, is a span of the kind cancelled."""
    begun = asyncio.Event()

    @function_tool(schema=make_schema("endless"))
    async def endless() -> str:
        """Never answer."""
        begun.set()
        await asyncio.Event().wait()
        return ""

    executor = ToolExecutor(ToolRegistry([endless]), timeout_s=60)
    with recording() as (tracer, sink):
        executor.observers["t"] = tracer.trajectory(LABELS).tool_call
        async with executor, executor.open("t") as tools:
            running = asyncio.ensure_future(tools.run([ToolCall("endless", {}, "{}", "a")]))
            await begun.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        (span,) = spans_of(tracer, sink)
    assert span.error.kind == "cancelled"


def test_spans_are_a_tree_with_the_same_labels():
    """Every span of a trajectory has its trace, its root as parent, and its labels; times are in order."""
    with recording(experiment_name="e") as (tracer, sink):
        trace = offer(tracer, 2)
        trace.end({"messages": None}, {"reward": 1.0})
        *children, root = sorted(spans_of(tracer, sink), key=lambda span: span.end_ns)
    assert root.kind is SpanKind.LOOP
    assert root.parent_id is None
    for span in (*children, root):
        assert (span.trace_id, span.labels, span.experiment_name) == (trace.trace_id, LABELS, "e")
        assert root.start_ns <= span.start_ns <= span.end_ns <= root.end_ns
    assert {span.parent_id for span in children} == {root.span_id}
    assert len({span.span_id for span in (*children, root)}) == 3


def test_what_comes_after_the_end_of_a_trajectory_is_not_told():
    """A trajectory ends once; what is left running of it records nothing more."""
    with recording() as (tracer, sink):
        trace = offer(tracer, 0)
        trace.end({}, {})
        trace.end({}, {"again": True})
        trace.reward(trace.now_ns(), {}, source="late")
        (root,) = spans_of(tracer, sink)
    assert root.outputs == {}


@pytest.mark.parametrize(("limit", "expected"), [(None, [0, 1, 2, 3]), (2, [0, 1]), (0, [])])
def test_rows_are_chosen_by_their_index_alone(limit, expected):
    """Which rows are recorded does not depend on the order or the time in which their trajectories begin."""
    with recording(max_samples_per_step=limit) as (tracer, _):
        for order in (range(4), reversed(range(4))):
            traced = [index for index in order if tracer.trajectory(_labelled(index)) is not None]
            assert sorted(traced) == expected


def test_a_stream_has_steps_too():
    """Where rows come without end, the first of every so many are recorded; a validation has rows of its own."""
    with recording(max_samples_per_step=1, rows_per_step=4) as (tracer, _):
        train = [msgspec.structs.replace(_labelled(index), validate=False) for index in range(9)]
        assert [labels.sample_index for labels in train if tracer.trajectory(labels) is not None] == [0, 4, 8]
        assert [index for index in range(9) if tracer.trajectory(_labelled(index)) is not None] == [0]


def _labelled(index):
    return msgspec.structs.replace(LABELS, sample_index=index)


def test_a_full_queue_drops_and_counts(caplog):
    """Spans beyond the queue's bound are dropped at once, counted, and said once; the trajectory's root says how many were its own.
    A trajectory that begins while the queue is full is not recorded at all, and counted."""
    sink = HangingSink()
    with recording(sink, max_queued_spans=4) as (tracer, _), caplog.at_level(logging.WARNING):
        offer(tracer)
        assert sink.is_hanging.wait(DEADLINE_S)
        trace = offer(tracer, 10)
        assert tracer.stats.dropped == 6
        assert sum("drops spans" in record.message for record in caplog.records) == 1
        assert tracer.trajectory(LABELS) is None
        assert tracer.metrics() == {
            "trace/written_spans": 0.0,
            "trace/dropped_spans": 6.0,
            "trace/skipped_trajectories": 1.0,
        }
        sink.go_on.set()
        assert tracer.flush(DEADLINE_S)
        trace.end({}, {})
        assert tracer.flush(DEADLINE_S)
        assert sink.spans[-1].attributes == {"num_dropped_spans": 6}
        assert tracer.stats.written == 6


def test_a_queue_is_bounded_in_size_too(monkeypatch):
    """Spans that are large fill the queue before their number does; one span always has room in an empty queue."""
    monkeypatch.setattr("ostinato_rollout.tracing.span_queue.MAX_QUEUED_SIZE", 1000)
    sink = HangingSink()
    with recording(sink) as (tracer, _):
        trace = offer(tracer)
        assert sink.is_hanging.wait(DEADLINE_S)
        for size in (5000, 1):
            trace.record(SpanKind.TOOL, "t", 0, size=size)
        assert tracer.stats.dropped == 1
        sink.go_on.set()


def test_a_backend_that_hangs_does_not_hold_the_end_up(caplog):
    """Closing waits until its deadline, then says what was dropped; what the backend does later is not counted."""
    sink = HangingSink()
    with recording(sink) as (tracer, _), caplog.at_level(logging.WARNING):
        offer(tracer, 5)
        assert sink.is_hanging.wait(DEADLINE_S)
        stats = tracer.close(0.01)
        assert (stats.written, stats.dropped, stats.waiting) == (0, 5, 0)
        assert "dropped 5 of 5 spans" in caplog.text
        assert tracer.trajectory(LABELS) is None
        sink.go_on.set()
        tracer._thread.join(DEADLINE_S)
        assert not tracer._thread.is_alive()
        assert tracer.stats == stats == tracer.close()


def test_a_failing_backend_is_asked_again(caplog):
    """A write that fails once is repeated; nothing is lost, and the failure is in the log."""
    with recording(FailingSink(1)) as (tracer, sink), caplog.at_level(logging.WARNING):
        offer(tracer, 3)
        assert tracer.flush(DEADLINE_S)
        assert sorted(span.outputs["score"] for span in sink.spans) == [0.0, 1.0, 2.0]
        assert "no space left on device" in caplog.text


def test_a_backend_that_is_down_loses_spans_and_nothing_else(caplog):
    """A backend that never takes anything has all spans dropped and counted; it is said once, and closing ends."""
    with recording(FailingSink()) as (tracer, sink), caplog.at_level(logging.WARNING):
        for _ in range(3):
            offer(tracer, 2)
        stats = tracer.close(DEADLINE_S)
        assert (stats.written, stats.dropped) == (0, 6)
        assert sum("backend failed" in record.message for record in caplog.records) == 1
        assert sink.num_closed == 1


def test_a_backend_that_comes_up_late_is_used():
    """Connecting is tried again with the next attempt."""
    with recording(FailingSink(0, failing_opens=2)) as (tracer, sink):
        offer(tracer)
        assert tracer.flush(DEADLINE_S)
        assert (len(sink.spans), sink.num_opened) == (1, 3)


def test_every_span_is_counted_once_whatever_the_backend_does():
    """Written and dropped spans add up to those that were offered, for any mix of failures and a queue that is too small."""
    for failures in (0, 1, 3, 4, None):
        with recording(FailingSink(failures), max_queued_spans=3) as (tracer, sink):
            offer(tracer, 20)
            stats = tracer.close(DEADLINE_S)
            assert stats.written + stats.dropped == 20
            assert stats.written == len(sink.spans)


def test_closing_writes_what_waits():
    """Closing flushes; closing again and offering afterwards change nothing but the count."""
    with recording() as (tracer, sink):
        trace = offer(tracer, 100)
        stats = tracer.close(DEADLINE_S)
        assert (stats.written, stats.dropped, len(sink.spans), sink.num_closed) == (100, 0, 100, 1)
        assert tracer.close() == stats
        trace.reward(trace.now_ns(), {}, source="late")
        assert tracer.stats.dropped == 1


async def test_a_cancelled_close_lets_go():
    """Who is cancelled while closing does not leave a thread behind that waits for the backend."""
    sink = HangingSink()
    with recording(sink) as (tracer, _):
        offer(tracer)
        closing = asyncio.ensure_future(tracer.aclose(3600))
        assert await asyncio.to_thread(tracer._closing.wait, DEADLINE_S)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        sink.go_on.set()


async def test_a_tracer_is_a_context():
    """Leaving `async with` writes everything."""
    sink = MemorySink()
    async with Tracer(sink) as tracer:
        offer(tracer, 3)
    assert len(sink.spans) == 3


class Color(StrEnum):
    RED = "red"


class Point(msgspec.Struct):
    x: float


@dataclasses.dataclass
class Pair:
    left: object
    right: object


class Hostile:
    def __repr__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, "NaN"),
        (-math.inf, "-Infinity"),
        ([0.5, math.nan, math.inf], [0.5, "NaN", "Infinity"]),
        (2**70, "0x400000000000000000"),
        ([1, 2**63], [1, "0x8000000000000000"]),
        (b"ab\xff", "base64:YWL/"),
        ("a\ud800b", "a\\ud800b"),
        ("ü\x00", "ü\x00"),
        ("x" * (MAX_TEXT + 1), "x" * MAX_TEXT + f"... [{MAX_TEXT + 1} in all]"),
        (array("i", [1, 2]), [1, 2]),
        (Color.RED, "red"),
        (Point(math.inf), {"x": "Infinity"}),
        (Pair((1, 2), {3, 2}), {"left": [1, 2], "right": [2, 3]}),
        ({1: "a", "\ud800": None}, {"1": "a", "\\ud800": None}),
        (Hostile(), "<Hostile>"),
        ([True, None, -0.5, "text"], [True, None, -0.5, "text"]),
    ],
)
def test_values_that_json_does_not_know_are_written_in_a_defined_way(value, expected):
    """Each kind of value has one form; it can be encoded."""
    assert storable(value) == expected
    json.loads(msgspec.json.encode(storable(value)))


def test_a_value_that_contains_itself_ends():
    """A cycle is cut at some depth."""
    loop: list = []
    loop.append(loop)
    msgspec.json.encode(storable(loop))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=20,
)  # fmt: skip


@given(JSON)
def test_what_json_knows_stays_as_it_is(value):
    """Values of JSON come back equal."""
    assert json.loads(msgspec.json.encode(storable(value))) == value


@given(
    st.recursive(
        st.binary() | st.floats() | st.integers() | st.text() | st.complex_numbers() | st.dates(),
        lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text() | st.integers(), inner),
        max_leaves=20,
    )
)
def test_anything_can_be_written(value):
    """Whatever Python has, JSON gets something for it."""
    json.loads(msgspec.json.encode(storable(value)))


def test_json_lines_come_back_as_they_were(tmp_path):
    """A file holds the spans, one a line, and a second tracer appends to it."""
    path = tmp_path / "deep" / "spans.jsonl"
    told = []
    for _ in range(2):
        with recording(MemorySink()) as (tracer, sink):
            offer(tracer, 2).end({"messages": [{"role": "user", "content": "ü \ud800"}]}, {"reward": math.nan})
            told += spans_of(tracer, sink)
        written = JsonlSink(path)
        written.open()
        written.write(told[-3:])
        written.close()
    assert list(read_spans(path)) == told
    assert list(read_spans(path.parent)) == told
    assert all(json.loads(line)["labels"]["sample_index"] == 3 for line in path.read_text().splitlines())


def test_a_torn_last_line_is_left_out_and_a_broken_one_is_named(tmp_path, caplog):
    """A file that was cut anywhere in its last span gives those before it and says so, but for a missing line break; a line in its middle that is
    no span is an error with its number."""
    path = tmp_path / "spans.jsonl"
    with recording(MemorySink()) as (tracer, memory):
        offer(tracer, 2)
        first, second = spans_of(tracer, memory)
    sink = JsonlSink(path)
    sink.open()
    sink.write([first, second])
    sink.close()
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1
    for end in (start + 1, (start + len(whole)) // 2, len(whole) - 2):
        caplog.clear()
        path.write_bytes(whole[:end])
        assert list(read_spans(path)) == [first]
        assert "ends in the middle of line 2" in caplog.text
    caplog.clear()
    path.write_bytes(whole[:-1])
    assert list(read_spans(path)) == [first, second]
    assert not caplog.records
    path.write_bytes(b"{}\n" + whole)
    with pytest.raises(msgspec.DecodeError, match=r"line 1 of .*spans\.jsonl must be a span"):
        list(read_spans(path))


def test_a_full_disk_leaves_whole_lines(tmp_path):
    """A write that the disk has no room for raises, and the file is as before; the next one that fits is whole."""
    with recording(MemorySink()) as (tracer, memory):
        offer(tracer, 2)
        first, second = spans_of(tracer, memory)
    sink = JsonlSink(tmp_path / "spans.jsonl")
    sink.open()
    sink.write([first])
    size = sink.path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
    try:
        with pytest.raises(OSError):
            sink.write([second])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(read_spans(sink.path)) == [first]
    sink.write([second])
    assert list(read_spans(sink.path)) == [first, second]
    sink.close()


def test_settings_make_a_tracer_that_writes_json_lines(tmp_path, tokenizer):
    """`trace.backend=jsonl` writes below the run's folder, decodes where it is asked to, and samples per worker."""
    config = TraceConfig(backend=TraceBackend.JSONL, max_samples_per_step_per_worker=2)
    config = completed(config, project_name="p", experiment_name="e", folder=tmp_path)
    tracer = make_tracer(config, decoder=tokenizer, num_workers=2)
    for index in range(6):
        trace = tracer.trajectory(_labelled(index))
        assert (trace is not None) == (index < 4)
        if trace is not None:
            trace.end({}, {})
    assert tracer.close(DEADLINE_S).written == 4
    spans = list(read_spans(tmp_path / "traces"))
    assert [span.labels.sample_index for span in spans] == [0, 1, 2, 3]
    assert {span.experiment_name for span in spans} == {"e"}


def test_traces_in_the_home_of_nobody_are_refused(tmp_path):
    """A path that begins with a home that is not there is named, before anything is traced."""
    config = TraceConfig(backend=TraceBackend.JSONL, path="~nobody-of-this-name/traces")
    with pytest.raises(
        TraceStoreError, match=r"trace.path must begin with the home of a known user .*; write the whole path"
    ):
        completed(config, project_name="p", experiment_name="e", folder=tmp_path)


def test_no_backend_is_no_tracer(tokenizer):
    """Without a backend there is nothing to hand down."""
    config = completed(TraceConfig(), project_name="p", experiment_name="e", folder="nowhere")
    assert config == TraceConfig()
    assert make_tracer(config, decoder=tokenizer) is None


@pytest.mark.parametrize(
    "wrong", [{"max_queued_spans": 0}, {"max_samples_per_step_per_worker": -1}, {"shutdown_timeout_s": math.nan}]
)
def test_settings_out_of_range_are_refused(wrong):
    """A bound that cannot be meant is an error that names it."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TraceConfig(**wrong)


def test_settings_know_which_of_them_have_no_effect():
    """Each backend has settings of its own, and without one there is nothing to set."""
    assert TraceConfig(backend=TraceBackend.MLFLOW).unread == ("path",)
    assert TraceConfig(backend=TraceBackend.JSONL).unread == ("project_name", "tracking_uri")
    assert set(TraceConfig().unread) == set(TraceConfig.__struct_fields__) - {"backend"}


def test_a_span_that_cannot_be_made_costs_only_itself(caplog):
    """A value that defeats the conversion drops its own span; the others of the batch are written."""
    with recording() as (tracer, sink):
        good = offer(tracer)
        bad = msgspec.structs.replace(_span(good), labels=None)
        tracer.put(bad)
        offer(tracer)
        assert tracer.flush(DEADLINE_S)
        assert (tracer.stats.written, tracer.stats.dropped) == (2, 1)
        assert len(sink.spans) == 2


def _span(trace):
    return Span(
        trace_id=trace.trace_id, span_id="0" * 16, parent_id=None, kind=SpanKind.LOOP, name="x", start_ns=0, end_ns=0,
        labels=LABELS, inputs={}, outputs={}, attributes={},
    )  # fmt: skip
