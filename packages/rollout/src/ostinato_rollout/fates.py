"""What became of a stream's groups: counted, and the last ones remembered."""

from __future__ import annotations

from collections import Counter, deque

from ostinato_rollout.errors import StreamStalledError
from ostinato_rollout.failure import Failure
from ostinato_rollout.stream_types import DroppedGroup, GroupFate

_MAX_REMEMBERED = 1000
_MAX_REASONS = 100
"""Reasons that are counted one by one; texts with figures in them would be without number."""


class Fates:
    """Counts groups by their fate.

    Args:
        max_dropped_in_row: Groups without one that was kept between them before `stalled` says so.
    """

    def __init__(self, max_dropped_in_row: int) -> None:
        self._max_dropped_in_row = max_dropped_in_row
        self._num_dropped_in_row = 0
        self.counts: Counter[GroupFate] = Counter()
        self.filtered: Counter[str] = Counter()
        """By reason."""
        self.dropped: deque[DroppedGroup] = deque(maxlen=_MAX_REMEMBERED)

    def wanted(self) -> None:
        """Note that a group was found good; whether it is taken is yet to be seen."""
        self._num_dropped_in_row = 0

    def took(self, num_groups: int) -> None:
        """Count groups that the consumer got."""
        self.counts[GroupFate.KEPT] += num_groups

    def drop(self, index: int, fate: GroupFate, reason: str, failure: Failure | None) -> None:
        """Count a group that nobody gets."""
        self.counts[fate] += 1
        self.dropped.append(DroppedGroup(index=index, fate=fate, reason=reason, failure=failure))
        if fate is GroupFate.FILTERED:
            self.filtered[reason if reason in self.filtered or len(self.filtered) < _MAX_REASONS else "other"] += 1
        if fate is not GroupFate.CANCELLED:
            self._num_dropped_in_row += 1

    def stalled(self) -> StreamStalledError | None:
        """Return the error that says that there is no end to the dropping; None while it may go on."""
        if self._num_dropped_in_row < self._max_dropped_in_row:
            return None
        kinds = ", ".join(
            f"{self.counts[fate]} {fate.value}" for fate in (GroupFate.FILTERED, GroupFate.FAILED, GroupFate.STALE)
        )
        last = self.dropped[-1]
        why = last.reason if last.failure is None else f"{last.reason}: {last.failure.message}"
        return StreamStalledError(
            f"of max_dropped_in_row={self._max_dropped_in_row} groups one must be kept, got none; all in all {kinds}, the last"
            f" one for: {why:.300}; mend the cause, or raise the limit"
        )
