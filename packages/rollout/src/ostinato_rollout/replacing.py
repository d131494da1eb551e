"""A replica's place filled anew because somebody asks for it: what it has ends first, and no budget of restarts is asked.

Invariant: while one is at work on a place, it counts as one that is coming, and nobody else begins there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ostinato_rollout.conversation import num_cancellations
from ostinato_rollout.errors import ReplicaError, SessionStateError
from ostinato_rollout.fleet import Fleet
from ostinato_rollout.replica_state import Replica, ReplicaState
from ostinato_rollout.revival import Revival

_S = ReplicaState


async def fill_anew(fleet: Fleet, revival: Revival, replica: Replica, drain: Callable[[], Awaitable[None]]) -> None:
    """Drain a replica that is in service, and have a new server take its place.

    Args:
        fleet: Whose replica.
        revival: Ends the old server and starts the new one.
        replica: Which: in service, drained or given up.
        drain: Brings it from service to idleness.

    Raises:
        SessionStateError: The fleet sleeps, or the replica is being drained, restarted or replaced already.
        ReplicaError: It was given up, or stopped meanwhile.
    """
    if fleet.sleeping:
        raise SessionStateError("replace must come while the pool is awake, got a pool that sleeps; wake it first")
    is_idle = replica.is_in_service or replica.state in (_S.DRAINED, _S.GIVEN_UP)
    if not is_idle or replica.is_being_replaced or revival.is_at_work_on(replica):
        raise SessionStateError(
            f"replica {replica.index} must be in service, drained or given up to be replaced, got one that is"
            f" {replica.state.value}; see pool.states"
        )
    replica.is_being_replaced = True
    try:
        if replica.is_in_service:
            await drain()
        if replica.state is not _S.STOPPED:
            await revival.replace(replica)
    except asyncio.CancelledError:
        if num_cancellations() or replica.state is not _S.STOPPED:  # else a shutdown has ended the restart
            raise
    finally:
        replica.is_being_replaced = False
        fleet.look_anew()
    if replica.state not in (_S.SERVING, _S.WAITING_FOR_WEIGHTS, _S.UPDATING, _S.ASLEEP):
        raise ReplicaError(f"replica {replica.index} must be replaced, got {replica.state.value}: {replica.cause}")
