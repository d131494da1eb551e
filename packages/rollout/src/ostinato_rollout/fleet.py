"""The replicas of a pool and the clients that follow it.

Invariants: clients know exactly the replicas in service; whether their turns wait follows from the replicas' states alone. Calls
no server but to ask what it holds.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Sequence
from typing import Protocol

from ostinato_engines import AsyncServerBase
from ostinato_rollout.errors import NoReplicaError
from ostinato_rollout.patience import rest
from ostinato_rollout.replica_state import Replica, ReplicaState, Transition, new_history

logger = logging.getLogger(__name__)

_HOLDING = {
    ReplicaState.STARTING: "replicas are being started",
    ReplicaState.UPDATING: "replicas are given new weights",
    ReplicaState.ASLEEP: "replicas are asleep",
}
_HEARING_S = 10.0
_COMING = frozenset({ReplicaState.BACKING_OFF, ReplicaState.RESTARTING, ReplicaState.WAITING_FOR_WEIGHTS})


class Follower(Protocol):
    """Who is told of every change: an `LLMServerClient`, or what stands for one that is elsewhere."""

    def add_server(self, server: AsyncServerBase) -> int: ...
    def remove_server(self, server: AsyncServerBase, *, reason: str = ..., take_back: bool = False) -> None: ...
    def take_back(self, server: AsyncServerBase) -> int: ...
    async def left(self, server: AsyncServerBase) -> None: ...
    def hold(self, reason: str) -> None: ...
    def proceed(self, why_none: str = "") -> None: ...
    async def heard(self) -> None: ...
    def refresh_capacities(self) -> None: ...


class Fleet:
    """Replicas, their states, and who follows them.

    Args:
        servers: The first ones.
        restarts: Whether a lost replica may come back.
        no_replica_timeout_s: Longest time that turns wait while no replica is in service and one may come back.
    """

    def __init__(self, servers: Sequence[AsyncServerBase], *, restarts: bool, no_replica_timeout_s: float) -> None:
        self.history = new_history()
        self.replicas = [Replica(index, server, self.history) for index, server in enumerate(servers)]
        self.restarts = restarts
        self.sleeping: set[str] = set()
        """Parts of engines that sleep, as `wake_up` names them; empty: all are awake."""
        self._no_replica_timeout_s = no_replica_timeout_s
        self._followers: weakref.WeakKeyDictionary[Follower, None] = weakref.WeakKeyDictionary()  # the first one first
        self._held = ""
        self._patience: asyncio.Task[None] | None = None
        self._is_impatient = False
        self._change: asyncio.Event | None = None

    # Who there is

    def in_service(self) -> list[Replica]:
        """Return the replicas that clients know."""
        return [replica for replica in self.replicas if replica.is_in_service]

    def live(self) -> list[Replica]:
        """Return the replicas that are in service, or will be once they have weights."""
        return [
            replica
            for replica in self.replicas
            if replica.is_in_service or replica.state is ReplicaState.WAITING_FOR_WEIGHTS
        ]

    def find(self, server: AsyncServerBase) -> Replica | None:
        """Return the replica that `server` fills now."""
        return next((replica for replica in self.replicas if replica.server is server), None)

    def transitions(self) -> tuple[Transition, ...]:
        """Return the last changes, in order."""
        return tuple(self.history)

    def causes(self) -> str:
        """Return in words what became of the replicas that are not in service."""
        return "; ".join(
            f"replica {replica.index}: {replica.failure.message if replica.failure else replica.cause}"
            f"{'' if replica.state is ReplicaState.LOST else f' ({replica.state.value})'}"
            for replica in self.replicas
            if not replica.is_in_service
        )

    def no_replica(self, purpose: str) -> NoReplicaError:
        """Build the error of whoever needs a replica in service."""
        return NoReplicaError(
            f"at least one replica must be in service to {purpose}, got none ({self.causes()}); restart them"
        )

    def is_one_coming(self) -> bool:
        """Tell whether a replica that is out of service may come back by itself."""
        return any(
            replica.state in _COMING
            or replica.is_being_replaced
            or (replica.state is ReplicaState.LOST and self.restarts)
            for replica in self.replicas
        )

    # What changes

    def follow(self, follower: Follower, *, knows_them: bool = False) -> None:
        """Tell `follower` of every change from now on, and how things are; `knows_them`: it has the replicas in service."""
        if not knows_them:
            for replica in self.in_service():
                follower.add_server(replica.server)
        if self._held:
            follower.hold(self._held)
        self._followers[follower] = None

    def move(self, replica: Replica, state: ReplicaState, cause: str) -> None:
        """Change a replica's state; clients get to know it, or lose it, and their turns wait or go on."""
        was_known = replica.is_in_service
        replica.move(state, cause)
        if was_known and not replica.is_in_service:
            if not self.in_service():
                self._hold(cause)  # nobody finds none before it is known whether one is coming
            for follower in list(self._followers):
                follower.remove_server(
                    replica.server,
                    reason=f"is {state.value}: {cause}",
                    take_back=state is not ReplicaState.DRAINING,
                )
        elif replica.is_in_service and not was_known:
            for follower in list(self._followers):
                follower.add_server(replica.server)
        elif state in (ReplicaState.LOST, ReplicaState.STOPPED):
            self.take_back(replica.server)
        self._steer()
        self.changed()

    def take_back(self, server: AsyncServerBase) -> int:
        """Let the generations inside of a server begin again."""
        return sum(follower.take_back(server) for follower in list(self._followers))

    async def left(self, server: AsyncServerBase) -> None:
        """Wait until no follower has a generation inside of `server`."""
        await asyncio.gather(*(follower.left(server) for follower in list(self._followers)))

    async def heard(self) -> None:
        """Wait until followers elsewhere know whether turns wait; whoever is silent for long is found out by others."""
        hearing = asyncio.gather(*(each.heard() for each in list(self._followers)), return_exceptions=True)
        try:
            async with asyncio.timeout(_HEARING_S):
                await hearing
        except TimeoutError:
            logger.warning(
                "not all clients have heard in %g s whether turns wait; theirs may fail meanwhile", _HEARING_S
            )

    def refresh_capacities(self) -> None:
        """Let clients ask anew what replicas hold."""
        for follower in list(self._followers):
            follower.refresh_capacities()

    def changed(self) -> None:
        """Wake those who wait for a change."""
        change, self._change = self._change, None
        if change is not None:
            change.set()

    async def change(self) -> None:
        """Wait until something has changed; whoever waits sees to it that this ends."""
        if self._change is None:
            self._change = asyncio.Event()
        await self._change.wait()

    async def any_live(self, purpose: str) -> None:
        """Wait until a replica is live, as long as one may come back.

        Raises:
            NoReplicaError: None will be, or none was within the deadline.
        """
        while not self.live():
            if self._is_impatient or not self.is_one_coming():
                raise self.no_replica(purpose)
            await self.change()

    def woke(self) -> None:
        """Count the wait for a replica from now on: while the fleet slept, none could come."""
        self._is_impatient = False
        self.close()
        self.look_anew()

    def look_anew(self) -> None:
        """Tell whoever waits that a replica on which somebody was at work may not be coming any more."""
        self._steer()
        self.changed()

    def close(self) -> None:
        """End what runs in the background."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    # Whether turns wait

    def _steer(self) -> None:
        in_service = self.in_service()
        if in_service:
            self._is_impatient = False
            self.close()
            reason = next((_HOLDING[replica.state] for replica in in_service if replica.state in _HOLDING), "")
        elif self.is_one_coming() and not self._is_impatient:
            if self._patience is None:
                self._patience = asyncio.get_running_loop().create_task(self._lose_patience())
            reason = f"no replica is in service: {self.causes()}"
        else:
            reason = ""
        if reason:
            self._hold(reason)
        else:
            self._proceed("" if in_service else self.causes())

    def _hold(self, reason: str) -> None:
        self._held = reason
        for follower in list(self._followers):
            follower.hold(reason)

    def _proceed(self, why_none: str) -> None:
        if not self._held and not why_none:
            return
        self._held = ""
        for follower in list(self._followers):
            follower.proceed(why_none)

    async def _lose_patience(self) -> None:
        await rest(self._no_replica_timeout_s)
        self._patience, self._is_impatient = None, True
        logger.error(
            "no replica was in service for %g s; turns fail until one is: %s", self._no_replica_timeout_s, self.causes()
        )
        self._steer()
        self.changed()
