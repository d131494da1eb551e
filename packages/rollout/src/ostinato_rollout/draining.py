"""Taking a replica out of service without hurting anybody: what it has ends there, or goes on elsewhere."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ostinato_engines import UnsupportedError
from ostinato_rollout.errors import ReplicaError, SessionStateError
from ostinato_rollout.fleet import Fleet
from ostinato_rollout.patience import GRACE_S, DeadlinePassedError, result_within
from ostinato_rollout.replica_state import Replica, ReplicaState

logger = logging.getLogger(__name__)

_DRAINABLE = frozenset({ReplicaState.NEW, ReplicaState.SERVING, ReplicaState.ASLEEP})


async def drain(
    fleet: Fleet, replica: Replica, take_out: Callable[[Replica, str, Exception], None], *, timeout_s: float
) -> None:
    """Bring a replica from service to idleness; whoever is cancelled has put it back.

    Args:
        fleet: Whose replica.
        replica: Which.
        take_out: Takes a replica out that does not let go.
        timeout_s: After so many seconds, generations that still run are aborted.

    Raises:
        SessionStateError: It is not in service.
        ReplicaError: It failed meanwhile, or does not let go of its generations.
    """
    before = replica.state
    if before not in _DRAINABLE:
        raise SessionStateError(
            f"replica {replica.index} must be in service to be drained, got one that is {before.value}; see pool.states"
        )
    fleet.move(replica, ReplicaState.DRAINING, f"it is drained within {timeout_s:g} s")
    try:
        is_left = await _is_left(fleet, replica, timeout_s) or await _is_emptied(fleet, replica)
    except asyncio.CancelledError:
        if replica.state is ReplicaState.DRAINING:
            back = ReplicaState.ASLEEP if before is ReplicaState.ASLEEP else ReplicaState.SERVING
            fleet.move(replica, back, "its draining was cancelled")
        raise
    if replica.state is ReplicaState.DRAINING and not is_left:
        take_out(replica, "let go of its generations", ReplicaError("it goes on with them", replica=replica.index))
    if replica.state is not ReplicaState.DRAINING:
        raise ReplicaError(
            f"replica {replica.index} must end its generations, got {replica.state.value}: {replica.cause}",
            replica=replica.index,
        )
    fleet.move(replica, ReplicaState.DRAINED, "it is idle")


async def _is_emptied(fleet: Fleet, replica: Replica) -> bool:
    """Abort what runs, so that it goes on elsewhere with what it has; what cannot be aborted is begun again elsewhere."""
    try:
        num_aborted = await result_within(replica.server.abort(), GRACE_S)
        logger.info("replica %d: %d generations were aborted, and go on elsewhere", replica.index, num_aborted)
        if await _is_left(fleet, replica, GRACE_S):
            return True
    except UnsupportedError:
        pass
    # It is on its way out; what is inside is taken back below.
    except Exception as error:
        logger.warning("replica %d failed to abort: %s: %s", replica.index, type(error).__name__, error)
    fleet.take_back(replica.server)
    return await _is_left(fleet, replica, GRACE_S)


async def _is_left(fleet: Fleet, replica: Replica, limit_s: float) -> bool:
    """Wait until nothing is inside of a replica; False: something still is."""
    try:
        await result_within(fleet.left(replica.server), limit_s)
    except DeadlinePassedError:
        return False
    return True
