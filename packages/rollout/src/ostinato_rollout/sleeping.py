"""The sleep of a pool: all replicas of a kind that sleeps do so together, and wake together.

Invariant: no replica that sleeps is in a state in which turns go to it, and none sleeps beside one that serves but for engines
that never sleep.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from ostinato_engines import UnsupportedError
from ostinato_engines.engine_status import SLEEP_TAGS
from ostinato_rollout.fleet import Fleet
from ostinato_rollout.pool_operations import Operation
from ostinato_rollout.replica_state import Replica, ReplicaState

logger = logging.getLogger(__name__)

AskOrTakeOut = Callable[[str, Iterable[Replica], Operation], Awaitable[None]]


async def put_to_sleep(fleet: Fleet, ask: AskOrTakeOut, level: int) -> None:
    """Let all live replicas sleep; whatever comes in between, the fleet then sleeps until `wake` succeeds."""

    async def sleep(replica: Replica) -> None:
        replica.stays_awake = False
        try:
            await replica.server.sleep(level)
        except UnsupportedError as error:
            logger.debug("replica %d stays awake: %s", replica.index, error)
            replica.stays_awake = True
            if replica.state is ReplicaState.ASLEEP:
                fleet.move(replica, ReplicaState.SERVING, "it never sleeps")

    fleet.sleeping |= set(SLEEP_TAGS[:level])
    for replica in fleet.in_service():
        if replica.state is not ReplicaState.ASLEEP:
            fleet.move(replica, ReplicaState.ASLEEP, f"the pool sleeps at level {level}")
    await fleet.heard()
    await ask("go to sleep", fleet.live(), sleep)
    live = fleet.live()
    if live and all(replica.stays_awake for replica in live):
        fleet.sleeping.clear()


async def wake(fleet: Fleet, ask: AskOrTakeOut, awake: set[str], tags: Sequence[str] | None) -> None:
    """Wake all live replicas.

    Args:
        fleet: Whose.
        ask: Asks replicas, and takes out those that fail.
        awake: The parts that are awake afterwards.
        tags: As engines are told.
    """

    async def wake_up(replica: Replica) -> None:
        await replica.server.wake_up(tags)

    await ask("wake up", fleet.live(), wake_up)
    has_slept = bool(fleet.sleeping)
    fleet.sleeping -= awake
    if not fleet.sleeping:
        for replica in fleet.in_service():
            if replica.state in (ReplicaState.ASLEEP, ReplicaState.NEW):
                fleet.move(replica, ReplicaState.SERVING, "it is awake")
        if has_slept:
            fleet.woke()
