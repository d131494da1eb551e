"""Metrics to Weights & Biases. The only module that imports it; behind the extra `wandb`.

Where runs go and whether they go there at once is wandb's own affair (`WANDB_MODE`, `WANDB_BASE_URL`, `WANDB_API_KEY`); its files are below
`trainer.default_local_dir`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import wandb  # pyright: ignore[reportMissingImports]  (an extra)

from ostinato_trainer.config import Config
from ostinato_trainer.config.loading import flat_values
from ostinato_trainer.errors import LoggerError
from ostinato_trainer.loggers.base import RunEnd
from ostinato_trainer.metrics.generations import GENERATION_COLUMNS

__all__ = ["WandbLogger"]

_EXIT_CODES: Final = {RunEnd.FINISHED: 0, RunEnd.FAILED: 1, RunEnd.KILLED: 255}
"""As wandb has them itself, 255 for Ctrl-C."""


class WandbLogger:
    """One run of the project `trainer.project_name`, named `trainer.experiment_name`.

    Args:
        config: Every key is recorded.
        run_id: Of the run to go on with; None begins one.
        steps_done: Not read: of steps that are done again wandb itself keeps what was recorded first.

    Raises:
        LoggerError: wandb refuses, without an account for example.
    """

    name = "wandb"

    def __init__(self, config: Config, *, run_id: str | None = None, steps_done: int | None = None) -> None:
        folder = Path(config.trainer.local_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                project=config.trainer.project_name,
                name=config.trainer.experiment_name,
                config=flat_values(config),
                dir=str(folder),
                id=run_id,
                resume="allow" if run_id else None,
                allow_val_change=True,
                reinit="create_new",
                settings=wandb.Settings(console="off", silent=True),
            )
        except Exception as error:
            raise LoggerError(
                f"the logger wandb must be able to begin a run, got {type(error).__name__}: {error}; "
                "run `wandb login`, set WANDB_MODE=offline, or leave wandb out of trainer.logger"
            ) from error
        self.run_id = str(self._run.id)

    def describe(self, facts: Mapping[str, str]) -> None:
        """Record the facts in the run's configuration."""
        self._run.config.update(dict(facts), allow_val_change=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record samples as a table."""
        data: list[Any] = [[str(row.get(column, "")) for column in GENERATION_COLUMNS] for row in rows]
        self._run.log({"val/generations": wandb.Table(columns=list(GENERATION_COLUMNS), data=data)}, step=step)

    def close(self, end: RunEnd = RunEnd.FINISHED) -> None:
        """Finish the run; one that has failed has an exit code, by which wandb shows it as such."""
        self._run.finish(exit_code=_EXIT_CODES[end])
