"""Sinks for tests: one that keeps spans, and ones that behave as backends in trouble do."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ostinato_rollout.tracing.span import Span


class MemorySink:
    """Keeps spans in a list."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        """In the order in which they were written."""
        self.num_opened = self.num_closed = 0

    def open(self) -> None:
        """Count."""
        self.num_opened += 1

    def write(self, spans: Sequence[Span]) -> None:
        """Keep the spans."""
        self.spans += spans

    def close(self) -> None:
        """Count."""
        self.num_closed += 1


class FailingSink(MemorySink):
    """Refuses the first writes.

    Args:
        failures: How many; None: all.
        failing_opens: The same for attempts to connect.
    """

    def __init__(self, failures: int | None = None, *, failing_opens: int = 0) -> None:
        super().__init__()
        self.num_attempts = 0
        self._failures, self._failing_opens = failures, failing_opens

    def open(self) -> None:
        """Refuse, as often as told."""
        super().open()
        if self.num_opened <= self._failing_opens:
            raise ConnectionError("nobody is there")

    def write(self, spans: Sequence[Span]) -> None:
        """Refuse, as often as told."""
        self.num_attempts += 1
        if self._failures is None or self.num_attempts <= self._failures:
            raise OSError("no space left on device")
        super().write(spans)


class HangingSink(MemorySink):
    """Does not return from its first write until `go_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_hanging = threading.Event()
        """Set once the tracer's thread is caught."""
        self.go_on = threading.Event()
        """Set it to let the thread go."""

    def write(self, spans: Sequence[Span]) -> None:
        """Hang."""
        self.is_hanging.set()
        self.go_on.wait()
        super().write(spans)
