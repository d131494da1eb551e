"""Metrics to MLflow. The only module that imports it; behind the extra `mlflow`.

Where the tracking server is, MLflow itself decides (`MLFLOW_TRACKING_URI`).
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

import mlflow  # pyright: ignore[reportMissingImports]  (an extra)

from ostinato_rollout.tracing.mlflow_store import open_experiment, resolved_uri
from ostinato_trainer.config import Config
from ostinato_trainer.config.docs import config_rows
from ostinato_trainer.config.loading import flat_values
from ostinato_trainer.errors import LoggerError
from ostinato_trainer.loggers.base import STEP_METRIC, RunEnd

__all__ = ["MlflowLogger", "mlflow_name"]

_NOT_IN_NAMES: Final = re.compile(r"[^\w\-. :/]")
_MAX_NAME_CHARS: Final = 250
_MAX_PARAM_CHARS: Final = 500


class MlflowLogger:
    """One MLflow run in the experiment `trainer.project_name`, named `trainer.experiment_name`.

    Args:
        config: every key is recorded as a parameter.
        run_id: of the run to go on with; None begins one.
        steps_done: of a run that is taken up again. Where steps after it are recorded already, they stay as they are, and a run below that one
            begins: MLflow keeps whatever was recorded of a step beside what is recorded of it later.

    Raises:
        LoggerError: the tracking server cannot be reached or refuses.
    """

    name = "mlflow"

    def __init__(self, config: Config, *, run_id: str | None = None, steps_done: int | None = None) -> None:
        try:
            _, experiment_id = open_experiment(resolved_uri(None), config.trainer.project_name)
            mlflow.set_experiment(experiment_id=experiment_id)
            tags = {}
            if run_id is not None and steps_done is not None and _last_step(run_id) > steps_done:
                tags = {"mlflow.parentRunId": run_id, "continues_after_step": str(steps_done)}
                run_id = None
            self._run = mlflow.start_run(run_id=run_id, run_name=config.trainer.experiment_name, tags=tags)
            values = flat_values(config)
            if run_id is None:  # a parameter is written once
                mlflow.log_params({row.key: str(values[row.key])[:_MAX_PARAM_CHARS] for row in config_rows()})
        except Exception as error:
            raise LoggerError(
                f"the logger mlflow must reach its tracking server, got {type(error).__name__}: {error}; "
                "check MLFLOW_TRACKING_URI, or leave mlflow out of trainer.logger"
            ) from error
        self.run_id = str(self._run.info.run_id)

    def describe(self, facts: Mapping[str, str]) -> None:
        """Record the facts as tags of the run."""
        mlflow.set_tags(dict(facts))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step, under names that MLflow takes; see `mlflow_name`."""
        named = {mlflow_name(key): float(value) for key, value in metrics.items()}
        mlflow.log_metrics(named, step=step, run_id=self._run.info.run_id)

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record samples as a JSON artifact."""
        mlflow.log_dict(
            {"generations": [dict(row) for row in rows]}, f"val_generations/{step}.json", run_id=self.run_id
        )

    def close(self, end: RunEnd = RunEnd.FINISHED) -> None:
        """End the run, with MLflow's status for how it has ended."""
        mlflow.end_run(status=end.value.upper())


def _last_step(run_id: str) -> float:
    """The last step that a run has metrics of; below any where it has none."""
    return mlflow.get_run(run_id).data.metrics.get(mlflow_name(STEP_METRIC), -math.inf)


def mlflow_name(name: str) -> str:
    """A metric's name as MLflow takes it: `@` becomes `_at_`, other characters that it refuses `_`, parts that mean a folder (none, `.`, `..`)
    too; what is too long loses its middle."""
    parts = _NOT_IN_NAMES.sub("_", name.replace("@", "_at_")).split("/")
    joined = "/".join("_" if part in ("", ".", "..") else part for part in parts)
    if len(joined) <= _MAX_NAME_CHARS:
        return joined
    mark = f"-{hashlib.sha256(name.encode('utf-8', 'backslashreplace')).hexdigest()[:8]}-"
    kept = _MAX_NAME_CHARS - len(mark)
    return joined[: kept // 2] + mark + joined[len(joined) - (kept - kept // 2) :]
