"""What a replica of a pool is doing, and how that may change.

Invariant: a state changes in `Replica.move` only, along `TRANSITIONS`; every change is logged and remembered with its time and
cause. Knows no client and calls no server.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec

from ostinato_engines import AsyncServerBase
from ostinato_rollout.activity import ReplicaLife
from ostinato_rollout.failure import Failure

logger = logging.getLogger(__name__)

_MAX_HISTORY = 1000


class ReplicaState(StrEnum):
    """What a replica is doing, in words that complete `replica 0 is ...`."""

    NEW = "new"
    """Not started by this pool; a server that needs no start serves all the same."""
    STARTING = "starting"
    """Started for the first time; turns wait."""
    SERVING = "serving"
    UPDATING = "updating"
    """Paused or given new weights; turns wait."""
    ASLEEP = "asleep"
    DRAINING = "draining"
    """Ends what it has; nothing new goes there."""
    DRAINED = "drained"
    """Idle, until it is replaced."""
    LOST = "lost"
    """Failed; it is shut down, and then restarted if it can be."""
    BACKING_OFF = "backing off"
    """Waits for its restart."""
    RESTARTING = "restarting"
    """A new server is made and started in its place."""
    WAITING_FOR_WEIGHTS = "waiting for weights"
    """Started, but without the policy that is served."""
    GIVEN_UP = "given up"
    """Was restarted too often."""
    STOPPED = "stopped"


_S = ReplicaState

IN_SERVICE: Final = frozenset({_S.NEW, _S.STARTING, _S.SERVING, _S.UPDATING, _S.ASLEEP})
"""Clients know exactly the replicas in these states."""

TRANSITIONS: Final[Mapping[ReplicaState, frozenset[ReplicaState]]] = {
    _S.NEW: frozenset({_S.STARTING, _S.SERVING, _S.UPDATING, _S.ASLEEP, _S.DRAINING, _S.LOST, _S.STOPPED}),
    _S.STARTING: frozenset({_S.SERVING, _S.LOST, _S.STOPPED}),
    _S.SERVING: frozenset({_S.UPDATING, _S.ASLEEP, _S.DRAINING, _S.LOST, _S.STOPPED}),
    _S.UPDATING: frozenset({_S.SERVING, _S.ASLEEP, _S.WAITING_FOR_WEIGHTS, _S.LOST, _S.STOPPED}),
    _S.ASLEEP: frozenset({_S.SERVING, _S.UPDATING, _S.DRAINING, _S.LOST, _S.STOPPED}),
    _S.DRAINING: frozenset({_S.DRAINED, _S.SERVING, _S.ASLEEP, _S.LOST, _S.STOPPED}),
    _S.DRAINED: frozenset({_S.RESTARTING, _S.STOPPED}),
    _S.LOST: frozenset({_S.BACKING_OFF, _S.RESTARTING, _S.GIVEN_UP, _S.STOPPED}),
    _S.BACKING_OFF: frozenset({_S.RESTARTING, _S.STOPPED}),
    _S.RESTARTING: frozenset({_S.SERVING, _S.WAITING_FOR_WEIGHTS, _S.BACKING_OFF, _S.LOST, _S.STOPPED}),
    _S.WAITING_FOR_WEIGHTS: frozenset({_S.SERVING, _S.ASLEEP, _S.LOST, _S.STOPPED}),
    _S.GIVEN_UP: frozenset({_S.RESTARTING, _S.STOPPED}),
    _S.STOPPED: frozenset(),
}
"""Where each state may lead."""


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """One change of one replica's state."""

    at: float
    """Seconds since 1970."""
    replica: int
    """Its index in the pool."""
    before: ReplicaState
    after: ReplicaState
    cause: str


History = deque[Transition]


def new_history() -> History:
    """Return a history that keeps the last thousand changes."""
    return deque(maxlen=_MAX_HISTORY)


class Replica:
    """One place in a pool, and the server that fills it now.

    Args:
        index: In the pool; it stays the same over restarts.
        server: The first server.
        history: Takes every change of state; shared by the replicas of a pool.
    """

    def __init__(self, index: int, server: AsyncServerBase, history: History) -> None:
        self.index, self.server = index, server
        self.state = ReplicaState.NEW
        self.since = time.monotonic()
        """When the state began."""
        self.cause = ""
        """Of the last change."""
        self.failure: Failure | None = None
        """Why it is out of service; None: it is not, or it was drained."""
        self.stays_awake = False
        """Its server was asked to sleep last, and is of a kind that never does."""
        self.is_being_replaced = False
        """Somebody drains it in order to fill its place anew."""
        self.num_restarts = 0
        self.restart_at: float | None = None
        """Moment of `time.monotonic` of its next restart, while it waits for that."""
        self._history = history

    @property
    def is_in_service(self) -> bool:
        """Whether clients know it."""
        return self.state in IN_SERVICE

    def move(self, state: ReplicaState, cause: str) -> None:
        """Change the state; log and remember it."""
        before = self.state
        assert state in TRANSITIONS[before], f"replica {self.index} cannot go from {before} to {state} ({cause})"
        self.state, self.since, self.cause = state, time.monotonic(), cause
        if state in IN_SERVICE:
            self.failure = None
        if state is not ReplicaState.BACKING_OFF:
            self.restart_at = None
        change = Transition(at=time.time(), replica=self.index, before=before, after=state, cause=cause)
        self._history.append(change)
        level = logging.ERROR if state in (ReplicaState.LOST, ReplicaState.GIVEN_UP) else logging.INFO
        logger.log(level, "replica %d is %s, was %s: %s", self.index, state.value, before.value, cause)

    def activity(self) -> ReplicaLife:
        """Return what it is doing now."""
        now = time.monotonic()
        return ReplicaLife(
            replica=self.index,
            state=self.state.value,
            since_s=now - self.since,
            cause=self.cause,
            num_restarts=self.num_restarts,
            next_restart_in_s=None if self.restart_at is None else max(0.0, self.restart_at - now),
        )
