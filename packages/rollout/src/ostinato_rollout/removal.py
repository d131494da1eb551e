"""Which failures take a replica out of service, whoever finds them: an operation, its health, or a client.

Invariants: a replica is lost once, however many find it so; what a server failed to do is not held against the one that has
replaced it. Knows no client.
"""

from __future__ import annotations

from collections.abc import Iterable

from ostinato_engines import AsyncServerBase
from ostinato_rollout.failure import Failure, FailureKind
from ostinato_rollout.fleet import Fleet
from ostinato_rollout.pool_operations import Operation, PoolOperations
from ostinato_rollout.replica_state import Replica, ReplicaState
from ostinato_rollout.revival import Revival


class Removal:
    """Takes replicas of one pool out of service.

    Args:
        fleet: Whose replicas.
        operations: How they are asked.
        revival: Ends and restarts those that are lost.
        timeout_s: Longest time that one may take over what it is asked.
    """

    def __init__(self, fleet: Fleet, operations: PoolOperations, revival: Revival, *, timeout_s: float) -> None:
        self._fleet, self._operations, self._revival = fleet, operations, revival
        self._timeout_s = timeout_s

    def begin(self, replica: Replica, failure: Failure) -> None:
        """Take a replica out of service, and let its revival begin; nothing happens to one that is out already."""
        is_out = not replica.is_in_service and replica.state not in (
            ReplicaState.DRAINING,
            ReplicaState.WAITING_FOR_WEIGHTS,
        )
        if is_out or self._revival.is_at_work_on(replica):
            return
        replica.failure = failure
        self._fleet.move(replica, ReplicaState.LOST, f"{failure.where}: {failure.message}")
        self._revival.begin(replica)

    def take_out(self, replica: Replica, purpose: str, error: Exception) -> None:
        """Take a replica out that failed to do what the text says, as in `replica 0 had to wake up`."""
        kind = FailureKind.TIMEOUT if isinstance(error, TimeoutError) else FailureKind.ENGINE
        self.begin(replica, Failure.from_error(error, f"replica {replica.index} had to {purpose}", kind=kind))

    def found_lost(self, server: AsyncServerBase, error: BaseException) -> None:
        """Take the replica out whose server a client has found to have failed."""
        replica = self._fleet.find(server)
        if replica is not None:  # else somebody added it to a client by hand, or it has been replaced
            where = f"replica {replica.index} had to generate"
            self.begin(replica, Failure.from_error(error, where, kind=FailureKind.ENGINE))

    async def ask(self, purpose: str, replicas: Iterable[Replica], operation: Operation) -> None:
        """Run `operation` on all at once, and take out those that fail or overrun the deadline."""
        asked = {replica.index: (replica, replica.server) for replica in replicas}
        failures = await self._operations.on_each(
            purpose, [replica for replica, _ in asked.values()], operation, self._timeout_s
        )
        for index, error in failures.items():
            replica, server = asked[index]
            if replica.server is server:
                self.take_out(replica, purpose, error)
