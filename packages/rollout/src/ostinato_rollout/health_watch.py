"""Asks replicas for their health on a clock, so that one that died unasked is found, and its requests go on elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from ostinato_rollout.errors import ReplicaError
from ostinato_rollout.fleet import Fleet
from ostinato_rollout.patience import rest
from ostinato_rollout.pool_operations import PoolOperations
from ostinato_rollout.replica_calls import GONE
from ostinato_rollout.replica_state import Replica, ReplicaState
from ostinato_rollout.revival import Revival

PURPOSE = "be healthy"

_WATCHED = frozenset({ReplicaState.SERVING, ReplicaState.ASLEEP, ReplicaState.WAITING_FOR_WEIGHTS})


async def watch(
    fleet: Fleet,
    operations: PoolOperations,
    revival: Revival,
    take_out: Callable[[Replica, str, Exception], None],
    *,
    interval_s: float,
    timeout_s: float,
) -> None:
    """Take out, for ever, replicas that do not answer, have failed, or serve another policy than the pool."""

    async def ask(replica: Replica) -> None:
        server, since = replica.server, replica.since
        health = await server.health()
        if health.state in GONE:
            raise ReplicaError(
                f"its engine must be ready, got {health.state.value}: {health.detail or 'it says no more'}"
            )
        unchanged = replica.server is server and replica.since == since and replica.state is ReplicaState.SERVING
        # A server elsewhere knows by now what its replica has answered.
        if unchanged and revival.version is not None and server.policy_version != revival.version:
            raise ReplicaError(f"its policy version must be {revival.version}, got {server.policy_version}")

    while True:
        await rest(interval_s)
        watched = {
            replica.index: (replica, replica.server, replica.since)
            for replica in fleet.replicas
            if replica.state in _WATCHED and not revival.is_at_work_on(replica)
        }
        replicas = [replica for replica, _, _ in watched.values()]
        for index, error in (await operations.on_each(PURPOSE, replicas, ask, timeout_s)).items():
            replica, server, since = watched[index]
            # What has changed meanwhile is asked again next time.
            if replica.server is server and replica.since == since:
                take_out(replica, PURPOSE, error)
