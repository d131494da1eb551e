"""What becomes of a replica that is lost: it is shut down, and a new server in its place is brought to the policy of the others.

Invariants: nothing of the old server is left when the new one is started, as far as it can be ended; a new one serves only with
the policy that is served. Knows no client.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from ostinato_engines import AsyncServerBase, WeightManifest
from ostinato_rollout.errors import ReplicaError, SessionInputError
from ostinato_rollout.failure import Failure, FailureKind
from ostinato_rollout.fleet import Fleet
from ostinato_rollout.patience import end
from ostinato_rollout.pool_operations import PoolOperations
from ostinato_rollout.replica_state import Replica, ReplicaState
from ostinato_rollout.restarts import RestartBudget
from ostinato_rollout.weight_sync import MakeWeights, give_weights

logger = logging.getLogger(__name__)

MakeServer = Callable[[int], AsyncServerBase]

_S = ReplicaState


class Revival:
    """Ends and restarts the replicas of one pool.

    Args:
        fleet: Whose replicas.
        operations: How they are asked.
        alone: Held by whoever changes weights or sleep of all replicas.
        make_server: Makes the server for a place, not started; None: lost replicas are shut down only.
        budget: How often, and after which wait.
        update_timeout_s: Longest time that new weights may take.
        start_timeout_s: Longest time that a start may take.
        shutdown_timeout_s: Longest time that a shutdown may take.
    """

    def __init__(
        self,
        fleet: Fleet,
        operations: PoolOperations,
        alone: asyncio.Lock,
        *,
        make_server: MakeServer | None,
        budget: RestartBudget,
        update_timeout_s: float,
        start_timeout_s: float,
        shutdown_timeout_s: float,
    ) -> None:
        self._fleet, self._operations, self._alone = fleet, operations, alone
        self._make_server, self._budget = make_server, budget
        self._update_timeout_s, self._start_timeout_s, self._shutdown_timeout_s = (
            update_timeout_s,
            start_timeout_s,
            shutdown_timeout_s,
        )
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._replaying: dict[asyncio.Task[None], None] = {}  # in the order in which they were begun
        self.not_ended: list[Replica] = []
        """Servers that did not shut down within their deadline, each as the replica that it was."""
        self.version: int | None = None
        """Of the last update; None: engines serve what they start with."""
        self._weights: tuple[WeightManifest, MakeWeights] | None = None
        self.note_start()

    def is_at_work_on(self, replica: Replica) -> bool:
        """Tell whether a replica is being ended or restarted."""
        return replica.index in self._tasks

    def note_start(self) -> None:
        """Note the version that engines start with."""
        self._first_version = min(replica.server.policy_version for replica in self._fleet.replicas)

    def note_update(self, manifest: WeightManifest, make_weights: MakeWeights | None) -> None:
        """Note what is served from now on; None: its weights cannot be had again."""
        self.version = manifest.version
        self._weights = None if make_weights is None else (manifest, make_weights)

    async def withdraw_weights(self) -> None:
        """Give the last update's weights to nobody any more; whoever takes them now waits for the next update."""
        self._weights = None
        await asyncio.gather(*(end(replaying) for replaying in list(self._replaying)))

    def begin(self, replica: Replica) -> None:
        """End a replica that was lost, and restart it as often as the budget allows."""
        self._spawn(replica, self._revive(replica))

    async def replace(self, replica: Replica) -> None:
        """End a replica that is out of service, and restart it at once, whatever the budget; wait for what becomes of it.

        A caller who is cancelled leaves it to go on.
        """
        task = self._spawn(replica, self._revive(replica, is_asked_for=True))
        await asyncio.shield(task)

    def _spawn(self, replica: Replica, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=f"ostinato-replica-{replica.index}")
        self._tasks[replica.index] = task
        task.add_done_callback(lambda task: self._forget(replica, task))
        return task

    def _forget(self, replica: Replica, task: asyncio.Task[None]) -> None:
        if self._tasks.get(replica.index) is task:
            del self._tasks[replica.index]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the restart of replica %d broke", replica.index, exc_info=error)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """What is under way; cancelled, it leaves replicas as they are."""
        return list(self._tasks.values())

    # One replica

    async def _revive(self, replica: Replica, *, is_asked_for: bool = False) -> None:
        await self._shut_down(replica)
        if self._make_server is None:
            return
        cause = "it is replaced" if is_asked_for else ""
        while cause or (cause := await self._wait_for_turn(replica)):
            await self._wake_of_pool()
            self._fleet.move(replica, _S.RESTARTING, cause)
            try:
                await self._restart(replica, self._make_server)
                if replica.state is not _S.BACKING_OFF:
                    return
            # The new server failed like the old one did.
            except Exception as error:
                kind = FailureKind.TIMEOUT if isinstance(error, TimeoutError) else FailureKind.ENGINE
                replica.failure = Failure.from_error(error, f"replica {replica.index} had to restart", kind=kind)
                self._fleet.move(replica, _S.LOST, f"its restart failed: {replica.failure.message}")
                await self._shut_down(replica)
                cause = ""

    async def _wait_for_turn(self, replica: Replica) -> str:
        """Wait before a restart; return its cause, or nothing if there is to be none."""
        why = replica.cause
        wait_s = self._budget.take(replica.index, time.monotonic())
        if isinstance(wait_s, str):
            self._fleet.move(replica, _S.GIVEN_UP, f"{wait_s}; at last {why}")
            return ""
        self._fleet.move(replica, _S.BACKING_OFF, why)
        replica.restart_at = time.monotonic() + wait_s
        await asyncio.sleep(wait_s)
        return why

    async def _wake_of_pool(self) -> None:
        """Wait until the others are awake: while they sleep, their memory belongs to somebody else."""
        while self._fleet.sleeping:
            await self._fleet.change()

    async def _restart(self, replica: Replica, make_server: MakeServer) -> None:
        replica.num_restarts += 1
        server = make_server(replica.index)
        if not isinstance(server, AsyncServerBase) or self._fleet.find(server) is not None:
            raise SessionInputError(
                f"make_server must return a new AsyncServerBase, got {server!r}; make one for each call"
            )
        replica.server, replica.stays_awake = server, False
        await self._operations.on_one(
            "start again", replica, lambda replica: replica.server.start(), self._start_timeout_s
        )
        async with self._alone:
            await self._join(replica)

    async def _join(self, replica: Replica) -> None:
        """Put a started server into service, or let it wait for what it lacks."""
        if self._fleet.sleeping:
            # The others fell asleep meanwhile. It is started again when they wake.
            await self._shut_down(replica)
            self._fleet.move(replica, _S.BACKING_OFF, "the pool sleeps")
            return
        version = replica.server.policy_version
        if self.version is None:
            if version != self._first_version:
                raise ReplicaError(
                    f"policy_version must be {self._first_version} as that of the others, got {version};"
                    " make_server must make servers of one policy"
                )
            self._serve(replica)
            return
        self._fleet.move(replica, _S.WAITING_FOR_WEIGHTS, f"starts with version {version}, not {self.version}")
        if self._weights is not None and await self._replay(replica, *self._weights):
            self._serve(replica)
        self._tasks.pop(replica.index, None)

    def _serve(self, replica: Replica) -> None:
        self._fleet.move(replica, _S.SERVING, f"was restarted, and has version {replica.server.policy_version}")
        self._tasks.pop(replica.index, None)  # from now on it can be lost again

    async def _replay(self, replica: Replica, manifest: WeightManifest, make_weights: MakeWeights) -> bool:
        """Give a replica the weights that the others have; False: they were withdrawn meanwhile."""
        source = self._weights

        def until_withdrawn(weights: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, Any]]:
            for weight in weights:
                if self._weights is not source:
                    raise ReplicaError(
                        f"weights of version {manifest.version} must be read before they are withdrawn, got a later read;"
                        f" replica {replica.index} waits for the next ones"
                    )
                yield weight

        replaying = asyncio.ensure_future(
            self._operations.on_one(
                f"take weights of version {manifest.version}",
                replica,
                lambda replica: give_weights(replica, manifest, lambda: until_withdrawn(make_weights())),
                self._update_timeout_s,
            )
        )
        self._replaying[replaying] = None
        try:
            await asyncio.wait([replaying])
        finally:
            del self._replaying[replaying]
            if not replaying.done():
                await end(replaying)
        if self._weights is not source:
            if not replaying.cancelled():
                replaying.exception()
            return False
        replaying.result()
        return True

    async def _shut_down(self, replica: Replica) -> None:
        """End a replica's server; what does not end in time is kept in mind, and told."""
        ended = Replica(replica.index, replica.server, self._fleet.history)
        try:
            await self._operations.on_one(
                "shut down", ended, lambda ended: ended.server.shutdown(), self._shutdown_timeout_s
            )
        # It is out of service whatever it does.
        except Exception as error:
            self.not_ended.append(ended)
            logger.error(
                "replica %d may be left running, its shutdown failed: %s: %s",
                replica.index,
                type(error).__name__,
                error,
            )
