"""How much conversations are still going to add. Knows counts only."""

from __future__ import annotations

_MEMORY = 1024
_PRIOR = 32


class ExpectedGrowth:
    """Expects the same of every conversation, however long it is: what all added, for each one that has ended.

    What those under way have added counts as well. The first ones to end are the short ones, and their average would be too
    little for the others. Until many have ended, it is as if 32 had, after half of what they might add; later on, about the
    last thousand count.
    """

    def __init__(self) -> None:
        self._num_added = self._num_ended = 0.0

    def added(self, num_tokens: int) -> None:
        """Take in that a conversation has grown by so many tokens."""
        self._num_added += num_tokens

    def ended(self) -> None:
        """Take in that a conversation has ended."""
        self._num_ended += 1
        if self._num_ended > _MEMORY:
            kept = _MEMORY / self._num_ended
            self._num_added, self._num_ended = self._num_added * kept, _MEMORY

    def rest(self, max_growth: int | None) -> float:
        """Return how many tokens a conversation is going to add; `max_growth`: what it may add over its whole life."""
        if max_growth is None:
            return self._num_added / self._num_ended if self._num_ended else 0.0
        return (self._num_added + _PRIOR * max_growth / 2) / (self._num_ended + _PRIOR)
