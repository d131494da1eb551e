"""`MetricsLogger`: what a place for metrics must be able to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

__all__ = ["MetricsLogger"]


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

    def close(self) -> None:
        """Write out what is pending."""
        ...
