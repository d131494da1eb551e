"""A span: one thing that a trajectory did, with its own beginning and end. Knows no backend."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from ostinato_rollout.failure import classify


class SpanKind(StrEnum):
    """What a span is about; the closed set that backends translate."""

    LOOP = "loop"
    """A whole trajectory: the root of its spans."""
    GENERATION = "generation"
    TOOL = "tool"
    REWARD = "reward"


class SpanError(msgspec.Struct, frozen=True):
    """Why what a span is about did not succeed."""

    kind: str
    """A FailureKind, a tool's OutcomeKind, or `not_run`."""
    message: str
    """In words."""

    @classmethod
    def of(cls, error: BaseException) -> SpanError:
        """Return an exception as it is recorded."""
        return cls(classify(error).value, f"{type(error).__name__}: {error}")


class TrajectoryLabels(msgspec.Struct, frozen=True, kw_only=True):
    """Which trajectory spans belong to; every one of them carries it."""

    sample_index: int
    """Place of the dataset row in its step."""
    step: int
    """The training step."""
    rollout_n: int
    """Number of the trajectory among those of its row, from 0."""
    validate: bool
    """Whether it validates."""
    group_id: str = ""
    """The row's group."""
    trajectory_id: str = ""
    """Unique within the run."""
    agent: str = ""
    """The agent's name."""


class Span(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One thing that was done. Times are nanoseconds since 1970; within a process no clock adjustment moves them."""

    trace_id: str
    """32 hexadecimal digits; the same for all spans of a trajectory."""
    span_id: str
    """16 hexadecimal digits."""
    parent_id: str | None
    """None: the root."""
    kind: SpanKind
    """What it is about."""
    name: str
    """For people to read."""
    start_ns: int
    """When it began."""
    end_ns: int
    """When it ended."""
    experiment_name: str = ""
    """The run that it belongs to."""
    labels: TrajectoryLabels
    """The trajectory that it belongs to."""
    inputs: dict[str, Any]
    """What it was given."""
    outputs: dict[str, Any]
    """What came of it."""
    attributes: dict[str, Any]
    """Facts about it."""
    error: SpanError | None = None
    """Why it did not succeed; None: it did."""


class SpanSink(Protocol):
    """Where a tracer writes. Its methods run on the tracer's thread and may take as long as they like."""

    def open(self) -> None:
        """Connect, or see whether the connection still holds; asked again after a failure."""
        ...

    def write(self, spans: Sequence[Span]) -> None:
        """Keep the spans. After a failure the same spans may come again; their ids tell."""
        ...

    def close(self) -> None:
        """Let go of what `open` took, if anything; called once, at the end."""
        ...


class SpanIds:
    """Draws the ids of one trajectory: its trace's at random, and from a random one on those of its spans."""

    def __init__(self) -> None:
        self.trace_id = secrets.token_hex(16)
        self._last = secrets.randbits(63)

    def next(self) -> str:
        """Return another span's id."""
        self._last += 1
        return f"{self._last:016x}"
