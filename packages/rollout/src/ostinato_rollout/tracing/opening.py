"""From settings to a tracer."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

import msgspec

from ostinato_rollout.errors import TracingUnavailableError
from ostinato_rollout.tracing.config import TraceBackend, TraceConfig
from ostinato_rollout.tracing.jsonl import JsonlSink
from ostinato_rollout.tracing.paths import absolute_path
from ostinato_rollout.tracing.span import SpanSink
from ostinato_rollout.tracing.tracer import Decoder, Tracer


def completed(
    config: TraceConfig,
    *,
    project_name: str,
    experiment_name: str,
    folder: str | Path,
    rows_per_step: int | None = None,
) -> TraceConfig:
    """Return the settings with nothing left open, so that they mean the same in every process.

    Args:
        config: The settings.
        project_name: For `project_name` if that is not set.
        experiment_name: For `experiment_name` if that is not set.
        folder: The run's folder.
        rows_per_step: For `rows_per_step` if that is not set.

    Raises:
        TracingUnavailableError: MLflow is asked for and not installed.
        TraceStoreError: A path begins with a home that is not there.
    """
    if config.backend is None:
        return config
    path = Path(folder) / "traces" if config.path is None else Path(config.path)
    uri = config.tracking_uri
    if config.backend is TraceBackend.MLFLOW:
        uri = _mlflow().resolved_uri(uri)
    return msgspec.structs.replace(
        config,
        project_name=project_name if config.project_name is None else config.project_name,
        experiment_name=experiment_name if config.experiment_name is None else config.experiment_name,
        rows_per_step=rows_per_step if config.rows_per_step is None else config.rows_per_step,
        tracking_uri=uri,
        path=str(absolute_path(path, "trace.path")),
    )


def make_tracer(config: TraceConfig, *, decoder: Decoder, num_workers: int = 1) -> Tracer | None:
    """Return the tracer that the settings ask for, running; None: they ask for none.

    Args:
        config: As `completed` gives it.
        decoder: The tokenizer.
        num_workers: How many workers share a step's rows.

    Raises:
        TracingUnavailableError: MLflow is asked for and not installed.
    """
    if config.backend is None:
        return None
    limit = config.max_samples_per_step_per_worker
    return Tracer(
        _sink(config),
        experiment_name=config.experiment_name or "",
        decoder=decoder if config.token2text else None,
        max_samples_per_step=None if limit is None else limit * num_workers,
        rows_per_step=config.rows_per_step,
        max_queued_spans=config.max_queued_spans,
        shutdown_timeout_s=config.shutdown_timeout_s,
    )


def _sink(config: TraceConfig) -> SpanSink:
    if config.backend is TraceBackend.MLFLOW:
        mlflow = _mlflow()
        return mlflow.MlflowSink(mlflow.resolved_uri(config.tracking_uri), config.project_name or "Default")
    name = f"spans-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}.jsonl"
    return JsonlSink(Path(config.path or "traces") / name)


def _mlflow():
    try:
        from ostinato_rollout.tracing import mlflow_store
    except ImportError as error:
        raise TracingUnavailableError(
            f"trace.backend=mlflow must have MLflow, got: {error}; run: pip install 'ostinato-rollout[mlflow]',"
            " or write trace.backend=jsonl"
        ) from error
    return mlflow_store
