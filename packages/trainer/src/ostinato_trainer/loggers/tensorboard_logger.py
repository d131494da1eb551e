"""Metrics to TensorBoard's event files. The only module that imports it; behind the extra `tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torch.utils.tensorboard import SummaryWriter

from ostinato_trainer.config import Config
from ostinato_trainer.config.loading import to_yaml
from ostinato_trainer.errors import LoggerError
from ostinato_trainer.loggers.base import RunEnd
from ostinato_trainer.metrics.generations import GENERATION_COLUMNS

__all__ = ["TENSORBOARD_FOLDER", "TensorboardLogger"]

TENSORBOARD_FOLDER: Final = "tensorboard"


class TensorboardLogger:
    """Event files in `tensorboard/EXPERIMENT_NAME` below `trainer.default_local_dir`; a resumed run adds a file there,
    which takes the place of what earlier ones have of the steps that are done again.

    Args:
        config: Recorded as a text.
        steps_done: Of a run that is taken up again; None begins one.

    Raises:
        LoggerError: the folder cannot be written.
    """

    name = "tensorboard"

    def __init__(self, config: Config, *, steps_done: int | None = None) -> None:
        folder = Path(config.trainer.local_dir) / TENSORBOARD_FOLDER / config.trainer.experiment_name
        try:
            self._writer = SummaryWriter(str(folder), purge_step=None if steps_done is None else steps_done + 1)
            self._writer.add_text("config", f"```yaml\n{to_yaml(config)}```")
        except OSError as error:
            raise LoggerError(
                f"the logger tensorboard must be able to write {folder}, got: {error.strerror or error}; "
                "set trainer.default_local_dir to another folder"
            ) from error

    def describe(self, facts: Mapping[str, str]) -> None:
        """Record the facts as texts."""
        for name, fact in facts.items():
            self._writer.add_text(name, fact)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step and write them out."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), global_step=step)
        self._writer.flush()

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record each sample as a text."""
        for number, row in enumerate(rows):
            parts = [f"**{column}**\n\n```\n{row[column]}\n```" for column in GENERATION_COLUMNS if column in row]
            self._writer.add_text(f"val_generations/{number}", "\n\n".join(parts), global_step=step)

    def close(self, end: RunEnd = RunEnd.FINISHED) -> None:
        """Close the files."""
        self._writer.close()
