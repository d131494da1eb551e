"""Metrics to Trackio. The only module that imports it; behind the extra `trackio`.

Where runs are kept is Trackio's own affair (`TRACKIO_DIR`, `TRACKIO_SPACE_ID`, `TRACKIO_SERVER_URL`); `trackio show --project NAME` shows
them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import trackio  # pyright: ignore[reportMissingImports]  (an extra)

from ostinato_trainer.config import Config
from ostinato_trainer.config.loading import flat_values
from ostinato_trainer.errors import LoggerError
from ostinato_trainer.loggers.base import RunEnd
from ostinato_trainer.metrics.generations import GENERATION_COLUMNS

__all__ = ["TrackioLogger"]


_ALERTS: Final = {
    RunEnd.FAILED: ("The run has failed", trackio.AlertLevel.ERROR),
    RunEnd.KILLED: ("The run was ended by Ctrl-C or SIGTERM", trackio.AlertLevel.WARN),
}
"""Trackio knows no state of a run; alerts are what its dashboard shows and what its webhooks tell."""


class TrackioLogger:
    """One run of the project `trainer.project_name`, named `trainer.experiment_name`.

    Args:
        config: Every key is recorded.
        run_id: Name of the run to go on with; None begins one.
        steps_done: Of a run that is taken up again. Where Trackio has steps after it, here, in a Space or on a server, they stay as they are,
            and a run of another name begins.

    Raises:
        LoggerError: Trackio refuses.
    """

    name = "trackio"

    def __init__(self, config: Config, *, run_id: str | None = None, steps_done: int | None = None) -> None:
        project, name = config.trainer.project_name, run_id or config.trainer.experiment_name
        try:
            self._run = _begun(config, project, name, resume="allow" if run_id else "never")
            if run_id is not None and steps_done is not None and self._run._next_step > steps_done + 1:
                self._run.finish()
                name = _free_name(self._run._existing_runs, f"{run_id}-after-step-{steps_done}")
                self._run = _begun(config, project, name, resume="never")
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
        """Finish the run, with an alert where it did not come to its end."""
        if end in _ALERTS:
            title, level = _ALERTS[end]
            self._run.alert(title, level=level)
        self._run.finish()


def _begun(config: Config, project: str, name: str, *, resume: str) -> Any:
    """Trackio's run; of one that it goes on with, it knows the next step wherever the others are."""
    return trackio.init(
        project=project,
        name=name,
        config={
            key: value if isinstance(value, int | float) else str(value) for key, value in flat_values(config).items()
        },
        resume=resume,
        embed=False,
        auto_log_cpu=False,
        auto_log_gpu=False,
    )


def _free_name(taken: Collection[str], name: str) -> str:
    """The name, or the first with a number behind it that is not taken."""
    return next(
        each for each in (name, *(f"{name}-{number}" for number in range(2, len(taken) + 3))) if each not in taken
    )
