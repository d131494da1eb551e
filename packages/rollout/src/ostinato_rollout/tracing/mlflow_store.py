"""Spans in MLflow, and how its store is opened. The only module of this package that imports it; behind the extra `mlflow`.

Spans are written with their own ids and times through MLflow's tracing client, past its global tracer, its current experiment and its
exporter, so a program that uses those keeps them for itself. MLflow's usage reports are off unless `MLFLOW_DISABLE_TELEMETRY` says otherwise.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, Final

import msgspec

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from mlflow import MlflowClient, get_tracking_uri
from mlflow.entities import Span as MlflowSpan
from mlflow.entities import SpanType, TraceInfo, TraceLocation, TraceState
from mlflow.exceptions import MlflowException
from mlflow.tracing.client import TracingClient
from mlflow.version import VERSION

from ostinato_rollout.errors import RequestTimeoutError, TraceStoreError
from ostinato_rollout.tracing.paths import absolute_path
from ostinato_rollout.tracing.span import Span, SpanKind

# Older ones lose the root of a trace whose generations were written before it.
if tuple(map(int, VERSION.split(".")[:2])) < (3, 10):
    raise ImportError(f"mlflow must be at least 3.10, got {VERSION}")

_SQLITE: Final = "sqlite:///"
_BUSY_TIMEOUT_S: Final = 60
_OPENING_TIMEOUT_S: Final = 120.0
_PREVIEW: Final = 500
_TYPES: Final = {
    SpanKind.LOOP: SpanType.AGENT,
    SpanKind.GENERATION: SpanType.LLM,
    SpanKind.TOOL: SpanType.TOOL,
    SpanKind.REWARD: SpanType.EVALUATOR,
}
_opening = threading.Lock()


def resolved_uri(uri: str | None) -> str:
    """Return the store's URI as every process understands it: MLflow's own choice if None, paths of SQLite files absolute."""
    uri = get_tracking_uri() if uri is None else uri
    path = _sqlite_path(uri)
    if path is None:
        return uri
    _, separator, query = uri.partition("?")
    return f"{_SQLITE}{absolute_path(path, 'trace.tracking_uri')}{separator}{query}"


def open_experiment(uri: str, name: str) -> tuple[MlflowClient, str]:
    """Open a store and make sure that it has an experiment; processes that do so at the same time take turns.

    Args:
        uri: As `resolved_uri` gives it.
        name: The experiment's.

    Returns:
        A client of the store, and the experiment's id.

    Raises:
        MlflowException, sqlite3.Error, OSError: The store cannot be opened, or refuses.
        RequestTimeoutError: Another process has been opening it for too long.
    """
    path = _sqlite_path(uri)
    with nullcontext() if path is None else _prepared_file(path):
        client = MlflowClient(tracking_uri=uri if path is None else _patient(uri))
        experiment = client.get_experiment_by_name(name)
        if experiment is not None:
            return client, experiment.experiment_id
        try:
            place = None if path is None else (path.parent / "mlartifacts").as_uri()
            return client, client.create_experiment(name, artifact_location=place)
        except MlflowException:
            experiment = client.get_experiment_by_name(name)  # somebody else was quicker
            if experiment is None:
                raise
            return client, experiment.experiment_id


class MlflowSink:
    """A trace for each trajectory, in one experiment.

    Args:
        uri: The store, as `resolved_uri` gives it.
        experiment: Name of the experiment; made if it is not there.

    Raises:
        TraceStoreError: It is a folder, in which MLflow keeps no spans.
    """

    def __init__(self, uri: str, experiment: str) -> None:
        scheme = uri.partition(":")[0] if ":" in uri else ""
        if scheme in ("", "file") and uri != "databricks":
            raise TraceStoreError(
                f"trace.tracking_uri must name a database or a server, got {uri}, a folder, in which MLflow keeps no spans;"
                " write sqlite:////PATH/mlflow.db"
            )
        self._uri, self._experiment = uri, experiment
        self._client: TracingClient | None = None
        self._experiment_id = ""

    def open(self) -> None:
        """Connect."""
        client, self._experiment_id = open_experiment(self._uri, self._experiment)
        self._client = TracingClient(client.tracking_uri)

    def write(self, spans: Sequence[Span]) -> None:
        """Write spans, and, for each root among them, what MLflow shows of its trace in lists."""
        assert self._client is not None
        self._log([_mlflow_span(span) for span in spans])
        for span in spans:
            if span.parent_id is None:
                self._client.start_trace(self._trace_info(span))

    def _log(self, spans: list[MlflowSpan]) -> None:
        """Write spans all at once; older stores refuse those of several traces together, and get them trace by trace."""
        assert self._client is not None
        try:
            self._client.log_spans(self._experiment_id, spans)
        except MlflowException:
            by_trace: dict[str, list[MlflowSpan]] = {}
            for span in spans:
                by_trace.setdefault(span.trace_id, []).append(span)
            if len(by_trace) == 1:
                raise
            for same_trace in by_trace.values():
                self._client.log_spans(self._experiment_id, same_trace)

    def close(self) -> None:
        """MLflow keeps the connection for the process."""

    def _trace_info(self, root: Span) -> TraceInfo:
        labels = msgspec.structs.asdict(root.labels)
        tags = {"mlflow.traceName": root.name, "experiment_name": root.experiment_name}
        tags |= {name: _text(value) for name, value in labels.items()}
        if root.error is not None:
            tags["failure"] = root.error.kind
        return TraceInfo(
            trace_id=_trace_id(root),
            trace_location=TraceLocation.from_experiment_id(self._experiment_id),
            request_time=root.start_ns // 1_000_000,
            execution_duration=(root.end_ns - root.start_ns) // 1_000_000,
            state=TraceState.OK if root.error is None else TraceState.ERROR,
            request_preview=_preview(root.inputs),
            response_preview=_preview(root.outputs),
            tags={name: value.replace("\0", "")[:_PREVIEW] for name, value in tags.items()},
            trace_metadata={"mlflow.trace_schema.version": "3"},
        )


def _mlflow_span(span: Span) -> MlflowSpan:
    attributes = {
        "mlflow.traceRequestId": _trace_id(span),
        "mlflow.spanType": _TYPES[span.kind],
        "mlflow.spanInputs": span.inputs,
        "mlflow.spanOutputs": span.outputs,
        "experiment_name": span.experiment_name,
        **msgspec.structs.asdict(span.labels),
        **span.attributes,
    }
    if "response_length" in span.attributes:
        given, sampled = span.attributes["prompt_length"], span.attributes["response_length"]
        usage = {"input_tokens": given, "output_tokens": sampled, "total_tokens": given + sampled}
        attributes["mlflow.chat.tokenUsage"] = usage
    status = {"code": "OK", "message": ""}
    if span.error is not None:
        attributes["failure"] = span.error.kind
        status = {"code": "ERROR", "message": span.error.message}
    return MlflowSpan.from_dict(
        {
            "trace_id": _trace_id(span),
            "span_id": span.span_id,
            "parent_span_id": span.parent_id,
            "name": span.name,
            "start_time_unix_nano": span.start_ns,
            "end_time_unix_nano": span.end_ns,
            "attributes": {name: msgspec.json.encode(value).decode() for name, value in attributes.items()},
            "status": status,
            "events": [],
        }
    )


def _trace_id(span: Span) -> str:
    return f"tr-{span.trace_id}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _preview(values: Mapping[str, Any]) -> str:
    """Return the last thing said among them, else all of it, cut."""
    messages = values.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    content = last.get("content") if isinstance(last, dict) else None
    text = content if isinstance(content, str) and content else _text(dict(values))
    return text.replace("\0", "")[:_PREVIEW]


def _sqlite_path(uri: str) -> Path | None:
    """Return the file of a SQLite store; None: it is another kind of store, or one in memory."""
    path = uri.removeprefix(_SQLITE).partition("?")[0]
    return Path(path) if uri.startswith(_SQLITE) and path and path != ":memory:" else None


def _patient(uri: str) -> str:
    """Let SQLite wait for other writers, unless the URI says how long."""
    if "timeout=" in uri:
        return uri
    return f"{uri}{'&' if '?' in uri else '?'}timeout={_BUSY_TIMEOUT_S}"


@contextmanager
def _prepared_file(path: Path) -> Iterator[None]:
    """Hold a lock beside a SQLite file, so that one process makes its tables; let readers and writers not block each other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    if not _opening.acquire(timeout=_OPENING_TIMEOUT_S):
        raise _still_opening(path, "a thread")
    try:
        with path.with_name(f".{path.name}.lock").open("w") as lock:
            _lock_file(lock, path, began + _OPENING_TIMEOUT_S)
            connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S)
            try:
                connection.execute("PRAGMA journal_mode=WAL").fetchone()
            finally:
                connection.close()
            yield
    finally:
        _opening.release()


def _lock_file(lock: IO[str], path: Path, deadline: float) -> None:
    """Wait until no other process holds the lock."""
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise _still_opening(path, "another process") from None
            time.sleep(0.05)


def _still_opening(path: Path, holder: str) -> RequestTimeoutError:
    return RequestTimeoutError(
        f"{path} must be free to be opened within {_OPENING_TIMEOUT_S:g} s, got a lock held by {holder}; look for what hangs"
    )
