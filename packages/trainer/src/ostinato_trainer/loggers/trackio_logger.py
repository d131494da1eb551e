"""Metrics to Trackio. The only module that imports it; behind the extra `trackio`.

Where runs are kept is Trackio's own affair (`TRACKIO_DIR`, `TRACKIO_SPACE_ID`); `trackio show --project NAME` shows them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import trackio  # pyright: ignore[reportMissingImports]  (an extra)
from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

from ostinato_trainer.config import Config
from ostinato_trainer.config.loading import flat_values
from ostinato_trainer.errors import LoggerError
from ostinato_trainer.loggers.base import RunEnd
from ostinato_trainer.metrics.generations import GENERATION_COLUMNS

__all__ = ["TrackioLogger"]


class TrackioLogger:
    """One run of the project `trainer.project_name`, named `trainer.experiment_name`.

    Args:
        config: Every key is recorded.
        run_id: Name of the run to go on with; None begins one.
        steps_done: Of a run that is taken up again. Where Trackio's database of this machine has steps after it, they stay as they are, and a
            run of another name begins.

    Raises:
        LoggerError: Trackio refuses.
    """

    name = "trackio"

    def __init__(self, config: Config, *, run_id: str | None = None, steps_done: int | None = None) -> None:
        project, name = config.trainer.project_name, run_id or config.trainer.experiment_name
        try:
            if run_id is not None and steps_done is not None and _last_step(project, run_id) > steps_done:
                run_id, name = None, _free_name(project, f"{run_id}-after-step-{steps_done}")
            self._run = trackio.init(
                project=project,
                name=name,
                config={
                    key: value if isinstance(value, int | float) else str(value)
                    for key, value in flat_values(config).items()
                },
                resume="allow" if run_id else "never",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        except Exception as error:
            raise LoggerError(
                f"the logger trackio must be able to begin a run, got {type(error).__name__}: {error}; "
                "check TRACKIO_DIR, or leave trackio out of trainer.logger"
            ) from error
        self.run_id = str(self._run.name)

    def describe(self, facts: Mapping[str, str]) -> None:
        """Record the facts beside the metrics of step 0."""
        self._run.log(dict(facts), step=0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record samples as texts."""
        texts = {
            f"val_generations/{number}/{column}": str(row[column])
            for number, row in enumerate(rows)
            for column in GENERATION_COLUMNS
            if column in row
        }
        self._run.log(texts, step=step)

    def close(self, end: RunEnd = RunEnd.FINISHED) -> None:
        """Finish the run; Trackio shows no end."""
        self._run.finish()


def _last_step(project: str, name: str) -> float:
    """The last step that is recorded of a run; below any where none is, or where the records are on a server."""
    step = SQLiteStorage.get_max_step_for_run(project, name)
    return -math.inf if step is None else step


def _free_name(project: str, name: str) -> str:
    """The name, or the first with a number behind it that no run of the project has."""
    taken = set(SQLiteStorage.get_runs(project))
    return next(
        each for each in (name, *(f"{name}-{number}" for number in range(2, len(taken) + 3))) if each not in taken
    )
