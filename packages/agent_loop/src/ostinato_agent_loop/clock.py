"""The deadline of a trajectory, which does not run while one of its conversations waits for a place."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class TrajectoryClock:
    """Bounds what happens within `deadline`; the time within `stopped` does not count.

    How long a wait for a place may take is the business of admission, which has a deadline of its own.

    Args:
        timeout_s: Seconds, counted from now.
    """

    def __init__(self, timeout_s: float) -> None:
        self.deadline = asyncio.timeout(timeout_s)
        """To be entered once; TimeoutError is raised where it ends."""
        self._num_waiting = 0
        self._stopped_at = self._left = 0.0

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let no time pass. Several may be entered at once, and one may be left after the deadline has ended."""
        if not self._num_waiting:
            self._stop()
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                self._go_on()

    def _stop(self) -> None:
        when = self.deadline.when()
        assert when is not None
        self._left = when - asyncio.get_running_loop().time()
        self._reschedule(None)

    def _go_on(self) -> None:
        self._reschedule(asyncio.get_running_loop().time() + self._left)

    def _reschedule(self, when: float | None) -> None:
        try:
            self.deadline.reschedule(when)
        except RuntimeError:  # it has ended, by its time or because all is done
            return
