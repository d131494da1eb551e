"""Which replica serves a request: policies are small objects behind one Protocol.

This module knows ids and counts, no server.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Protocol


class ReplicaPolicy(Protocol):
    """Chooses the replica of one generation. Called on the event loop; must not block."""

    def choose(self, request_id: str, in_flight: Mapping[int, int], previous: int | None) -> int:
        """Return a key of `in_flight`.

        Args:
            request_id: The conversation.
            in_flight: Generations under way by replica id; never empty.
            previous: The replica that served this conversation's last turn and is still in service, if any.
        """
        ...


class LeastInFlight:
    """A conversation stays where its prefix is cached; a new one goes where least is under way, ties by a seeded draw."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, request_id: str, in_flight: Mapping[int, int], previous: int | None) -> int:
        """See ReplicaPolicy."""
        if previous is not None:
            return previous
        least = min(in_flight.values())
        best = [replica for replica, count in in_flight.items() if count == least]
        return best[0] if len(best) == 1 else self._random.choice(best)
