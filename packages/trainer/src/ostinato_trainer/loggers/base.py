"""`MetricsLogger`: what a place for metrics must be able to do; `RunEnd`: what it is told at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, Protocol

__all__ = ["STEP_METRIC", "MetricsLogger", "RunEnd"]

STEP_METRIC: Final = "training/global_step"
"""The metric of every record that is the step."""


class RunEnd(StrEnum):
    """How a run has come to its end."""

    FINISHED = "finished"
    FAILED = "failed"
    KILLED = "killed"
    """By Ctrl-C or SIGTERM."""

    @classmethod
    def of(cls, error: BaseException | None) -> RunEnd:
        """The end that an error is, or none."""
        if error is None:
            return cls.FINISHED
        return (
            cls.FAILED if isinstance(error, Exception) and not isinstance(error, asyncio.CancelledError) else cls.KILLED
        )


class MetricsLogger(Protocol):
    """One place for metrics. One that has a name for the run which a resumed run must know has it as `run_id: str`."""

    name: str
    """What the configuration calls it."""

    def describe(self, facts: Mapping[str, str]) -> None:
        """Record what the run is made with, once, before its first step."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        ...

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record samples of a validation, where texts can be shown; see `ostinato_trainer.metrics.generations`."""
        ...

    def close(self, end: RunEnd = RunEnd.FINISHED) -> None:
        """Write out what is pending, and say how the run has ended where the place can show it."""
        ...
