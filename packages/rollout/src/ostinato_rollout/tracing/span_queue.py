"""A queue from an event loop to a thread, and the account of what became of its spans.

Invariants: putting never waits for whoever takes; count and size are bounded; every span that was offered is counted once, as waiting,
written or dropped.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

import msgspec

from ostinato_rollout.tracing.span import Span

MAX_QUEUED_SIZE: Final = 16_000_000
"""Tokens and characters, more or less, that wait at the same time; at most some hundred megabytes."""


class TracerStats(msgspec.Struct, frozen=True):
    """What became of what was offered so far."""

    written: int = 0
    """Spans that the backend took."""
    dropped: int = 0
    """Spans that it did not get or did not take."""
    waiting: int = 0
    """Spans that wait, or are being written."""
    skipped_trajectories: int = 0
    """Trajectories of which nothing was recorded, since there was no room when they began."""


class SpanQueue:
    """What waits to be written.

    Args:
        max_spans: Most spans that wait.
    """

    def __init__(self, max_spans: int) -> None:
        self._max_spans = max_spans
        self._spans: deque[tuple[Span, int]] = deque()
        self._size = 0
        self._offered = self._written = self._dropped = self._skipped = 0
        self._is_closed = self._is_settled = False
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    @property
    def is_full(self) -> bool:
        """Whether a span would be dropped now."""
        return len(self._spans) >= self._max_spans or self._size >= MAX_QUEUED_SIZE

    @property
    def stats(self) -> TracerStats:
        """The account so far."""
        with self._lock:
            waiting = self._offered - self._written - self._dropped
            return TracerStats(self._written, self._dropped, waiting, self._skipped)

    def put(self, span: Span, size: int) -> bool:
        """Append a span of so many tokens and characters; False: it is dropped, since there is no room or the queue is closed."""
        with self._lock:
            self._offered += 1
            if self._is_closed or self.is_full:
                self._dropped += 1
                return False
            self._spans.append((span, size))
            self._size += size
            if len(self._spans) == 1:
                self._changed.notify_all()
            return True

    def refuse(self) -> None:
        """Count a span that was not even made, since there is no room."""
        with self._lock:
            self._offered += 1
            self._dropped += 1

    def skip(self) -> None:
        """Count a trajectory that is not recorded, since there is no room."""
        with self._lock:
            self._skipped += 1

    def take(self, most: int) -> list[Span]:
        """Wait for spans and remove up to `most`; closed and empty: an empty list."""
        with self._lock:
            while not self._spans and not self._is_closed:
                self._changed.wait()
            taken = [self._spans.popleft() for _ in range(min(most, len(self._spans)))]
            self._size -= sum(size for _, size in taken)
        return [span for span, _ in taken]

    def count(self, *, written: int = 0, dropped: int = 0) -> None:
        """Note what became of spans that were taken; after `settle`, that is known already."""
        with self._lock:
            if not self._is_settled:
                self._written += written
                self._dropped += dropped
                self._changed.notify_all()

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Wait until nothing waits to be written or is being written; False: the time did not suffice."""
        with self._lock:
            return self._changed.wait_for(lambda: self._offered == self._written + self._dropped, timeout_s)

    def close(self) -> None:
        """Take no more; what is there may still be removed."""
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()

    def settle(self) -> bool:
        """Count what still waits as dropped; False: that was done before."""
        with self._lock:
            was_settled, self._is_settled = self._is_settled, True
            self._dropped = self._offered - self._written
            self._changed.notify_all()
        return not was_settled
