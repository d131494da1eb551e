"""A queue from an event loop to a thread: putting never waits, and there is a bound on count and size."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from ostinato_rollout.tracing.span import Span

MAX_QUEUED_SIZE: Final = 16_000_000
"""Tokens and characters, more or less, that wait at the same time; at most some hundred megabytes."""


class SpanQueue:
    """What waits to be written.

    Args:
        max_spans: Most spans that wait.
    """

    def __init__(self, max_spans: int) -> None:
        self._max_spans = max_spans
        self._spans: deque[tuple[Span, int]] = deque()
        self._size = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._spans)

    def put(self, span: Span, size: int) -> bool:
        """Append a span of so many tokens and characters; False: there is no room, or it is closed."""
        with self._changed:
            if (
                self._is_closed
                or len(self._spans) >= self._max_spans
                or (self._spans and self._size + size > MAX_QUEUED_SIZE)
            ):
                return False
            self._spans.append((span, size))
            self._size += size
            self._changed.notify()
        return True

    def take(self, most: int) -> list[Span]:
        """Wait for spans and remove up to `most`; closed and empty: an empty list."""
        with self._changed:
            while not self._spans and not self._is_closed:
                self._changed.wait()
            taken = [self._spans.popleft() for _ in range(min(most, len(self._spans)))]
            self._size -= sum(size for _, size in taken)
        return [span for span, _ in taken]

    def close(self) -> None:
        """Take no more; what is there may still be removed."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
