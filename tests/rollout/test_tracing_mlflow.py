"""Real MLflow over a real SQLite file: what is read back through its own interface is what happened."""

import json
import math
import os
import sqlite3
import subprocess
import sys
from contextlib import closing

import msgspec
import pytest

from ostinato_engines import SamplingParams
from ostinato_rollout import ChatSession, RolloutError, SessionBudget, SessionConfig
from ostinato_rollout.tracing import (
    SpanKind,
    TraceBackend,
    TraceConfig,
    Tracer,
    TrajectoryLabels,
    completed,
    make_tracer,
)
from ostinato_rollout.tracing.testing import MemorySink
from ostinato_tokenization import ContinuousTokens
from ostinato_tools import ToolCall, ToolExecutor, ToolRegistry, get_parser
from ostinato_tools.testing import echo

pytest.importorskip("mlflow")

from mlflow import MlflowClient
from mlflow.entities import SpanType
from mlflow.exceptions import MlflowException
from mlflow.tracing.client import TracingClient

from ostinato_rollout.tracing import mlflow_store
from ostinato_rollout.tracing.mlflow_store import MlflowSink, open_experiment, resolved_uri

DEADLINE_S = 120
LABELS = TrajectoryLabels(
    sample_index=3, step=7, rollout_n=2, validate=True, group_id="g", trajectory_id="g/2", agent="tool_agent"
)


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    """A store, whose tables are made once; each test has an experiment of its own."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/traces.db"


@pytest.fixture
def traces(uri):
    """Reads an experiment's traces back through MLflow, the oldest first."""

    def read(experiment):
        client = MlflowClient(tracking_uri=uri)
        found = client.get_experiment_by_name(experiment)
        assert found is not None
        return client.search_traces(locations=[found.experiment_id], order_by=["timestamp_ms ASC"])

    return read


class Both(MemorySink):
    """Writes to MLflow, and keeps what it has written."""

    def __init__(self, uri, experiment):
        super().__init__()
        self._mlflow = MlflowSink(uri, experiment)

    def open(self):
        self._mlflow.open()

    def write(self, spans):
        self._mlflow.write(spans)
        super().write(spans)


async def test_a_trajectory_is_read_back_as_it_happened(uri, traces, scripted, tokenizer):
    """Ids, text, log-probabilities, versions, tool answers, reward, labels, times and parents in MLflow are those of the trajectory."""
    turn = '<tool_call>\n{"name": "echo", "arguments": {"text": "two"}}\n</tool_call><|im_end|>'
    client, server = scripted([turn, "It is 2.<|im_end|>"])
    server.policy_version = 4
    tools = ToolExecutor(ToolRegistry([echo]))
    user, sink = [{"role": "user", "content": "1+1? ü"}], Both(uri, "whole")
    tracer = Tracer(sink, experiment_name="e", decoder=tokenizer)
    trace = tracer.trajectory(LABELS)
    session = ChatSession(
        client=client,
        tokens=ContinuousTokens(tokenizer),
        config=SessionConfig(),
        budget=SessionBudget(1000, 1000),
        parser=get_parser("hermes"),
        trace=trace,
    )
    tools.observers["t"] = trace.tool_call
    async with session, tools.open("t") as opened:
        await session.extend(user)
        reply = await session.generate(SamplingParams())
        (outcome,) = await opened.run(reply.tool_calls)
        await session.extend([outcome.message])
        await session.generate(SamplingParams())
    trace.reward(trace.now_ns(), {"score": 0.5, "extra": {"acc": True}}, source="reward_fn")
    trace.end({"messages": user, "row": {}}, {"messages": session.messages, "reward": 0.5})
    assert tracer.close(DEADLINE_S).dropped == 0

    (found,) = traces("whole")
    assert found.info.tags["mlflow.traceName"] == "agent_loop"
    assert {name: found.info.tags[name] for name in ("sample_index", "step", "rollout_n", "validate")} == {
        "sample_index": "3", "step": "7", "rollout_n": "2", "validate": "true",
    }  # fmt: skip
    assert (found.info.tags["experiment_name"], found.info.tags["trajectory_id"]) == ("e", "g/2")
    assert found.info.state.value == "OK"
    assert (found.info.request_preview, found.info.response_preview) == ("1+1? ü", "It is 2.")

    spans = sorted(found.data.spans, key=lambda span: span.start_time_ns)
    assert [(span.name, span.span_type) for span in spans] == [
        ("agent_loop", SpanType.AGENT),
        ("generate", SpanType.LLM),
        ("execute_tool echo", SpanType.TOOL),
        ("generate", SpanType.LLM),
        ("compute_score", SpanType.EVALUATOR),
    ]
    root, first, tool, second, reward = spans
    assert root.parent_id is None
    assert all(span.parent_id == root.span_id for span in spans[1:])
    assert all(root.start_time_ns <= span.start_time_ns <= span.end_time_ns <= root.end_time_ns for span in spans)
    assert found.info.request_time == root.start_time_ns // 1_000_000
    assert found.info.execution_duration == (root.end_time_ns - root.start_time_ns) // 1_000_000

    ledger = session.ledger
    told = [token for span in (first, second) for token in (*span.inputs["prompt_ids"], *span.outputs["token_ids"])]
    assert told == list(ledger.token_ids)
    sampled = [value for value, mask in zip(ledger.response_logprobs, ledger.response_mask, strict=True) if mask]
    assert first.outputs["logprobs"] + second.outputs["logprobs"] == sampled
    assert first.inputs["messages"] == user
    assert second.outputs["message"] == session.messages[-1]
    assert second.outputs["response_text"] == "It is 2.<|im_end|>"
    for span in (first, second):
        assert span.attributes["policy_versions"] == [{"start": 0, "version": 4, "exact": True}]
        assert (span.attributes["replica"], span.attributes["stop_reason"]) == (0, "stop")
        assert (span.attributes["sample_index"], span.attributes["validate"]) == (3, True)
    assert tool.inputs == {"arguments": {"text": "two"}}
    assert (tool.outputs["answer"], tool.attributes["outcome"]) == ("two", "ok")
    assert reward.outputs == {"score": 0.5, "extra": {"acc": True}}
    assert root.outputs["reward"] == 0.5

    # What MLflow gives back is what it was given.
    for ours, theirs in zip(sorted(sink.spans, key=lambda span: span.start_ns), spans, strict=True):
        assert (theirs.inputs or {}, theirs.outputs or {}) == (ours.inputs, ours.outputs)
        assert {name: theirs.attributes.get(name) for name in ours.attributes} == ours.attributes
        assert (theirs.start_time_ns, theirs.end_time_ns) == (ours.start_ns, ours.end_ns)


def test_failures_are_shown_as_errors(uri, traces):
    """A failed span has MLflow's status ERROR with kind and message, and so has its trace."""
    tracer = Tracer(MlflowSink(uri, "failures"))
    trace = tracer.trajectory(LABELS)
    trace.tool_call_not_run(ToolCall("echo", {}, "{}", "a"), "Not run: too many.")
    trace.reward(trace.now_ns(), {}, source="reward_fn", error=_error("reward", "KeyError: 'x'"))
    trace.end({"messages": None}, {}, _error("timeout", "too \ud800 late"))
    assert tracer.close(DEADLINE_S).dropped == 0
    (found,) = traces("failures")
    assert (found.info.state.value, found.info.tags["failure"]) == ("ERROR", "timeout")
    told = {
        span.name: (span.status.status_code.value, span.attributes["failure"], span.status.description)
        for span in found.data.spans
    }
    assert told == {
        "agent_loop": ("ERROR", "timeout", "too \\ud800 late"),
        "execute_tool echo": ("ERROR", "not_run", "Not run: too many."),
        "compute_score": ("ERROR", "reward", "KeyError: 'x'"),
    }


def _error(kind, message):
    from ostinato_rollout.tracing import SpanError

    return SpanError(kind, message)


def test_values_that_mlflow_cannot_hold_are_written_in_a_defined_way(uri, traces):
    """NaN, bytes, lone surrogates, NUL, huge text and huge numbers come back in the form that is documented, as valid JSON."""
    tracer = Tracer(MlflowSink(uri, "values"), experiment_name="a\0b")
    trace = tracer.trajectory(msgspec.structs.replace(LABELS, trajectory_id="x\ud800\0y" + "z" * 9000))
    outputs = {
        "logprobs": [-0.5, math.nan],
        "bytes": b"\xff",
        "surrogate": "\udc00",
        "nul": "a\0b",
        "huge": "x" * 1_000_000,
        "number": 10**5000,
    }
    trace.end({}, outputs)
    assert tracer.close(DEADLINE_S).dropped == 0
    (found,) = traces("values")
    (root,) = found.data.spans
    assert root.outputs["logprobs"] == [-0.5, "NaN"]
    assert (root.outputs["bytes"], root.outputs["surrogate"], root.outputs["nul"]) == ("base64:/w==", "\\udc00", "a\0b")
    assert root.outputs["huge"].endswith("... [1000000 in all]")
    assert int(root.outputs["number"], 16) == 10**5000
    connection = sqlite3.connect(uri.removeprefix("sqlite:///"))
    for (content,) in connection.execute("select content from spans"):
        json.loads(content, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    connection.close()


def test_a_trace_that_has_not_ended_is_seen(uri, traces):
    """Spans of a trajectory that is under way are there before its end, and its tags come with it."""
    tracer = Tracer(MlflowSink(uri, "under way"))
    trace = tracer.trajectory(LABELS)
    trace.reward(trace.now_ns(), {"score": 1.0}, source="agent")
    assert tracer.flush(DEADLINE_S)
    (found,) = traces("under way")
    assert found.info.state.value == "IN_PROGRESS"
    trace.end({}, {})
    assert tracer.close(DEADLINE_S).dropped == 0
    (found,) = traces("under way")
    assert (found.info.state.value, found.info.tags["sample_index"]) == ("OK", "3")
    assert len(found.data.spans) == 2


def test_spans_that_come_twice_are_there_once(uri, traces):
    """A write that is repeated after a failure changes nothing."""
    memory, sink = MemorySink(), MlflowSink(uri, "twice")
    tracer = Tracer(memory)
    trace = tracer.trajectory(LABELS)
    trace.reward(trace.now_ns(), {"score": 1.0}, source="agent")
    trace.end({}, {"reward": 1.0})
    tracer.close(DEADLINE_S)
    sink.open()
    sink.write(memory.spans)
    sink.open()
    sink.write(memory.spans)
    (found,) = traces("twice")
    assert len(found.data.spans) == 2


def two_trajectories():
    """Spans of two trajectories, in turns as they come."""
    memory = MemorySink()
    with closing(Tracer(memory)) as tracer:
        both = [tracer.trajectory(LABELS), tracer.trajectory(LABELS)]
        for trace in both:
            trace.reward(trace.now_ns(), {"score": 1.0}, source="agent")
        for trace in both:
            trace.end({}, {"reward": 1.0})
    return memory.spans


def test_a_store_that_takes_one_trace_at_a_time_gets_all_of_them(uri, traces, monkeypatch):
    """Before MLflow 3.12 spans of several traces are refused together; they are written trace by trace, and none is lost."""
    log_spans = TracingClient.log_spans

    def one_trace_only(self, location, spans):
        if len({span.trace_id for span in spans}) > 1:
            raise MlflowException("All spans must belong to the same trace")
        return log_spans(self, location, spans)

    monkeypatch.setattr(TracingClient, "log_spans", one_trace_only)
    sink = MlflowSink(uri, "one at a time")
    sink.open()
    sink.write(two_trajectories())
    assert [len(trace.data.spans) for trace in traces("one at a time")] == [2, 2]


def test_a_store_that_refuses_every_trace_is_a_failure(uri, monkeypatch):
    """What the store says to single traces is raised, so that it is tried again and counted."""

    def refuse(self, location, spans):
        raise MlflowException("not today")

    monkeypatch.setattr(TracingClient, "log_spans", refuse)
    sink = MlflowSink(uri, "refused")
    sink.open()
    for spans in (two_trajectories(), two_trajectories()[:1]):
        with pytest.raises(MlflowException, match="not today"):
            sink.write(spans)


_WRITER = """
import sys
from ostinato_rollout.tracing import Tracer, TrajectoryLabels
from ostinato_rollout.tracing.mlflow_store import MlflowSink

uri, writer = sys.argv[1], int(sys.argv[2])
tracer = Tracer(MlflowSink(uri, "together"))
for index in range(10):
    trace = tracer.trajectory(TrajectoryLabels(sample_index=index, step=writer, rollout_n=0, validate=False))
    trace.reward(trace.now_ns(), {"score": 1.0}, source="agent")
    trace.end({}, {})
stats = tracer.close(100)
assert (stats.written, stats.dropped) == (20, 0), stats

from mlflow.telemetry.utils import is_telemetry_disabled
assert is_telemetry_disabled()
"""


@pytest.mark.slow
def test_several_processes_write_to_one_new_file(tmp_path):
    """Processes that open the same SQLite file at the same moment, before it has tables, all get everything written;
    none of them reports its use to MLflow's makers."""
    uri = f"sqlite:///{tmp_path}/new/traces.db"
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW", "DO_NOT", "PYTEST"))}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER, uri, str(number)], env=plain, stderr=subprocess.PIPE, text=True
        )
        for number in range(2)
    ]
    for writer in writers:
        _, errors = writer.communicate(timeout=DEADLINE_S)
        assert writer.returncode == 0, errors
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("together")
    found = client.search_traces(locations=[experiment.experiment_id], max_results=100)
    assert sorted((trace.info.tags["step"], trace.info.tags["sample_index"]) for trace in found) == sorted(
        (str(writer), str(index)) for writer in range(2) for index in range(10)
    )
    assert all(len(trace.data.spans) == 2 for trace in found)


def test_a_locked_store_holds_nothing_up(uri):
    """While another program holds the file locked, the run's end waits for its own deadline only, and the spans are counted."""
    path = uri.removeprefix("sqlite:///")
    open_experiment(uri, "locked")
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN EXCLUSIVE")
    try:
        tracer = Tracer(MlflowSink(uri, "locked"))
        trace = tracer.trajectory(LABELS)
        trace.end({}, {})
        stats = tracer.close(0.2)
    finally:
        blocker.rollback()
        blocker.close()
    assert (stats.written, stats.dropped) == (0, 1)
    tracer._thread.join(DEADLINE_S)
    assert not tracer._thread.is_alive()


def test_a_store_that_cannot_be_opened_stops_nothing(tmp_path, caplog):
    """A file that cannot be made is in the log, and the spans are counted as dropped."""
    (tmp_path / "file").write_text("")
    tracer = Tracer(MlflowSink(f"sqlite:///{tmp_path}/file/traces.db", "x"))
    tracer.trajectory(LABELS).end({}, {})
    assert tracer.close(DEADLINE_S).dropped == 1
    assert "the tracer's backend failed" in caplog.text


def test_mlflow_s_global_state_is_left_alone(uri, tmp_path, monkeypatch):
    """Where MLflow itself looks, and its current experiment, run and trace, are what they were."""
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/own.db")
    before = (mlflow.get_tracking_uri(), mlflow.active_run(), mlflow.get_last_active_trace_id())
    tracer = Tracer(MlflowSink(uri, "alone"))
    tracer.trajectory(LABELS).end({}, {})
    assert tracer.close(DEADLINE_S).written == 1
    assert (mlflow.get_tracking_uri(), mlflow.active_run(), mlflow.get_last_active_trace_id()) == before
    assert not (tmp_path / "own.db").exists()


def test_the_store_s_place_means_the_same_everywhere(tmp_path, monkeypatch):
    """Relative files become absolute, other stores stay what they are, and MLflow's own choice stands where none is given."""
    monkeypatch.chdir(tmp_path)
    assert resolved_uri("sqlite:///a/b.db?timeout=1") == f"sqlite:///{tmp_path}/a/b.db?timeout=1"
    assert resolved_uri("sqlite:////c/d.db") == "sqlite:////c/d.db"
    assert resolved_uri("http://tracking:5000") == "http://tracking:5000"
    config = completed(
        TraceConfig(backend=TraceBackend.MLFLOW, tracking_uri="sqlite:///m.db"), project_name="p", experiment_name="e",
        folder="run",
    )  # fmt: skip
    assert config.tracking_uri == f"sqlite:///{tmp_path}/m.db"
    assert (config.project_name, config.experiment_name) == ("p", "e")


def test_settings_make_a_tracer_that_writes_to_mlflow(uri, traces, tokenizer):
    """`trace.backend=mlflow` writes to the store and experiment that the settings name."""
    config = TraceConfig(
        backend=TraceBackend.MLFLOW, tracking_uri=uri, project_name="settings", experiment_name="run 1"
    )
    tracer = make_tracer(config, decoder=tokenizer)
    tracer.trajectory(LABELS).end({}, {})
    assert tracer.close(DEADLINE_S).written == 1
    (found,) = traces("settings")
    assert found.info.tags["experiment_name"] == "run 1"


def test_a_missing_extra_is_an_error_with_its_cure(monkeypatch):
    """Without MLflow, or with one that is too old, the settings are refused when they are read, with the line that installs it."""
    config = TraceConfig(backend=TraceBackend.MLFLOW)
    monkeypatch.setattr("mlflow.version.VERSION", "3.5.1")
    monkeypatch.delitem(sys.modules, "ostinato_rollout.tracing.mlflow_store")
    monkeypatch.delattr("ostinato_rollout.tracing.mlflow_store")
    with pytest.raises(ImportError, match=r"mlflow must be at least 3.10, got 3.5.1; run: pip install"):
        completed(config, project_name="p", experiment_name="e", folder="run")
    monkeypatch.setitem(sys.modules, "ostinato_rollout.tracing.mlflow_store", None)
    with pytest.raises(RolloutError, match=r"pip install 'ostinato-rollout\[mlflow\]'"):
        completed(TraceConfig(backend=TraceBackend.MLFLOW), project_name="p", experiment_name="e", folder="run")


@pytest.mark.parametrize("place", ["./mlruns", "file:///data/mlruns"])
def test_a_folder_is_refused(place, tokenizer):
    """A store that holds no spans is an error before anything starts, with what to write instead."""
    config = TraceConfig(backend=TraceBackend.MLFLOW, tracking_uri=place)
    with pytest.raises(ValueError, match="sqlite:////PATH"):
        make_tracer(config, decoder=tokenizer)


def test_all_kinds_have_a_type():
    """Each kind of span is shown as one of MLflow's."""
    assert set(mlflow_store._TYPES) == set(SpanKind)
