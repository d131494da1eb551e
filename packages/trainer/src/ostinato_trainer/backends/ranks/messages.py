"""What a rank's process and its controller send each other. Errors arrive as what they were where they can travel."""

from __future__ import annotations

import logging
import pickle
import traceback
from dataclasses import dataclass
from typing import Any

from ostinato_trainer.errors import BackendError


@dataclass(frozen=True)
class Answer:
    """What a call returned."""

    value: Any


@dataclass(frozen=True)
class Failure:
    """What a call raised."""

    error: Exception
    traceback: str


@dataclass(frozen=True)
class LogLine:
    """A message of a rank's logger."""

    logger: str
    level: int
    text: str


def failure_of(error: Exception) -> Failure:
    """The error as it can travel: itself, or a `BackendError` with its text where it cannot be pickled and read again."""
    lines = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # errors of others may refuse in any way
        error = BackendError(f"{type(error).__name__}: {error}")
    else:
        error = error.with_traceback(None)
    return Failure(error, lines)


def replay(line: LogLine) -> None:
    """Shows a rank's message as one of this process."""
    logger = logging.getLogger(line.logger)
    if logger.isEnabledFor(line.level):
        logger.log(line.level, "%s", line.text)
