"""The first start of a pool: all replicas together, and all of them or none."""

from __future__ import annotations

from ostinato_rollout.errors import ReplicaError
from ostinato_rollout.fleet import Fleet
from ostinato_rollout.pool_operations import PoolOperations
from ostinato_rollout.replica_state import Replica, ReplicaState


async def start_new(fleet: Fleet, operations: PoolOperations, limit_s: float) -> None:
    """Start the replicas that were not started yet, each within the deadline; then they serve.

    Raises:
        ReplicaError: Some failed, the first of which is its cause; those that are started are the caller's to end.
    """
    replicas = [replica for replica in fleet.replicas if replica.state is ReplicaState.NEW]
    for replica in replicas:
        fleet.move(replica, ReplicaState.STARTING, "the pool is started")

    async def start(replica: Replica) -> None:
        await replica.server.start()

    failures = await operations.on_each("start", replicas, start, limit_s)
    if failures:
        raise _start_error(failures, len(fleet.replicas))
    fleet.refresh_capacities()
    for replica in replicas:
        if replica.state is ReplicaState.STARTING:
            fleet.move(replica, ReplicaState.SERVING, "it is started")


def _start_error(failures: dict[int, Exception], num_replicas: int) -> ReplicaError:
    replica, error = next(iter(failures.items()))
    told = f"{type(error).__name__}: {error}"
    message = f"the engine must start, got {told}"
    if num_replicas > 1:
        message = f"all {num_replicas} replicas must start, got {len(failures)} failures; the first, replica {replica}: {told}"
    failed = ReplicaError(message, replica=replica)
    failed.__cause__ = error
    return failed
