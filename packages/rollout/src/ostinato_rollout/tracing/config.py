"""The configuration node of the tracer."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class TraceBackend(StrEnum):
    """Where spans are kept."""

    MLFLOW = "mlflow"
    JSONL = "jsonl"


class TraceConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`actor_rollout_ref.rollout.trace`: what trajectories did, kept to be looked at."""

    backend: TraceBackend | None = None
    """`mlflow` or `jsonl`; null: nothing is recorded."""
    token2text: bool = False
    """Also record prompts and turns as text, control tokens included; it is decoded beside the run."""
    max_samples_per_step_per_worker: int | None = None
    """Dataset rows recorded per step and worker, with all their trajectories; those are the first rows of the step. Null: all."""
    rows_per_step: int | None = None
    """Rows of a training step, to tell steps apart in an endless stream of rows; null: `data.train_batch_size`."""
    project_name: str | None = None
    """MLflow's experiment; null: `trainer.project_name`."""
    experiment_name: str | None = None
    """What every span names as its experiment; null: `trainer.experiment_name`."""
    tracking_uri: str | None = None
    """MLflow's store, such as `sqlite:////data/traces.db`; null: `MLFLOW_TRACKING_URI`, or else `mlflow.db` in the working folder."""
    path: str | None = None
    """Folder of the JSONL files, one for each process; null: `traces` in the run's folder."""
    max_queued_spans: int = 4096
    """Spans that wait to be written; where the backend is slower, further ones are dropped and counted."""
    shutdown_timeout_s: float = 10.0
    """Seconds that the end of a run waits for spans to be written."""

    @property
    def unread(self) -> tuple[str, ...]:
        """Names of the settings that have no effect with this backend."""
        if self.backend is None:
            return tuple(name for name in self.__struct_fields__ if name != "backend")
        return ("path",) if self.backend is TraceBackend.MLFLOW else ("project_name", "tracking_uri")

    def __post_init__(self) -> None:
        for name, minimum in (("max_samples_per_step_per_worker", 0), ("rows_per_step", 1), ("max_queued_spans", 1)):
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ValueError(f"{name} must be at least {minimum}, got {value}; leave it out for its default")
        if not 0 <= self.shutdown_timeout_s < float("inf"):
            raise ValueError(
                f"shutdown_timeout_s must be seconds from 0 on, got {self.shutdown_timeout_s}; give seconds"
            )
