"""One update along routes: those who have weights send them to the workers of all replicas at once, and none passes through here.

Invariant: whoever waits along a route hears of it when the other end will not come. A replica that has not got the weights this way is as
`AsyncServerBase.update_weights` leaves it after an error: another way may be tried. Knows no states.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from ostinato_engines import ManifestError, WeightManifest, WeightPlace, WeightRoute
from ostinato_rollout.errors import ReplicaError
from ostinato_rollout.patience import to_its_end
from ostinato_rollout.pool_operations import PoolOperations
from ostinato_rollout.replica_state import Replica
from ostinato_rollout.route_choice import RoutePlan, choose_routes

logger = logging.getLogger(__name__)


@runtime_checkable
class WeightSource(Protocol):
    """Weights that may also be sent along routes. Its methods block, and are called from threads."""

    def __call__(self) -> Iterable[tuple[str, Any]]:
        """The tensors in this process, for a replica that has no route."""
        ...

    @property
    def places(self) -> Sequence[WeightPlace]:
        """Where the ranks have them."""
        ...

    def open(self, plan: RoutePlan, processes: Sequence[int]) -> dict[int, WeightRoute]:
        """The routes of a plan, by replica; somebody waits at each from then on, until `send` or `decline`.

        Args:
            plan: Of one update.
            processes: Tell apart what stands in the place of the members of a broadcast from what stood there before.
        """
        ...

    def send(self, manifest: WeightManifest, plan: RoutePlan) -> dict[int, str]:
        """Sends what the manifest names along the routes that are open; why it failed, by replica. A replica's failure is nobody else's."""
        ...

    def decline(self, route: WeightRoute, why: str) -> None:
        """A replica will not come along its route, or has gone. May be called while `send` runs."""
        ...


class RoutedUpdate:
    """One update; made for it, and used once.

    Args:
        operations: How replicas are asked.
        timeout_s: Longest time of each replica.
    """

    def __init__(self, operations: PoolOperations, *, timeout_s: float) -> None:
        self._operations, self._timeout_s = operations, timeout_s
        self.begun: set[int] = set()
        """Replicas, by index, to which a route has been open: they may have some of the weights, unless they refused them whole."""
        self.done: set[int] = set()
        """Those of them that have the new version."""
        self._declining: set[asyncio.Future[None]] = set()

    async def run(self, replicas: Iterable[Replica], manifest: WeightManifest, source: WeightSource) -> None:
        """Bring the replicas that have a route to `manifest.version`; `begun` and `done` say how far that went, also where it raises.

        Raises:
            Exception: What the source raised: nobody else will get these weights either.
        """
        by_index = {replica.index: replica for replica in replicas}
        able = {index: each.server.capabilities() for index, each in by_index.items()}
        workers = {index: found.weight_workers for index, found in able.items() if found.weight_workers}
        if not workers:
            return
        plan = choose_routes(source.places, workers)
        part = manifest.partial() if all(able[index].partial_updates for index in plan.replicas) else None
        for sent in (part, manifest):
            if sent is None or not plan.replicas:
                continue
            logger.info("Weights of version %d go %s", manifest.version, plan.text())
            failures = await self._send([by_index[index] for index in plan.replicas], sent, plan, source)
            arrived = sorted(self.done & set(plan.replicas))
            if sent is part and arrived:
                text = "Replica(s) %s got %d of %d tensors: the rest cannot have changed"
                logger.info(text, ", ".join(map(str, arrived)), len(sent.tensors), len(manifest.tensors))
            lacking = [index for index, error in failures.items() if sent is part and isinstance(error, ManifestError)]
            self.begun.difference_update(lacking)
            for index, error in failures.items():
                self._tell(index, error, is_lacking=index in lacking)
            plan = plan.without([index for index in plan.replicas if index not in lacking])

    async def _send(
        self, replicas: Sequence[Replica], manifest: WeightManifest, plan: RoutePlan, source: WeightSource
    ) -> dict[int, Exception]:
        """One round; errors by replica."""
        processes = [id(replica.server) for replica in replicas]
        routes = await asyncio.to_thread(source.open, plan, processes)
        self.begun.update(plan.replicas)
        sending = asyncio.ensure_future(asyncio.to_thread(source.send, manifest, plan))

        async def receive(replica: Replica) -> None:
            try:
                await replica.server.receive_weights(manifest, routes[replica.index])
            except BaseException as error:
                self._decline(
                    source, routes[replica.index], f"replica {replica.index}: {type(error).__name__}: {error}"
                )
                raise
            if replica.server.policy_version != manifest.version:
                raise ReplicaError(
                    f"policy_version must be {manifest.version} after the update, got {replica.server.policy_version};"
                    " that server ignored the weights"
                )
            self.done.add(replica.index)

        purpose = f"fetch weights of version {manifest.version}"
        receiving = asyncio.ensure_future(self._operations.on_each(purpose, replicas, receive, self._timeout_s))
        try:
            await asyncio.wait([sending, receiving], return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done() and sending.exception() is not None:
                receiving.cancel()  # nobody sends any more
            await asyncio.wait([receiving])
        except asyncio.CancelledError:
            receiving.cancel()
            raise
        finally:
            await to_its_end(self._ended(sending, receiving))
        told, failures = sending.result(), receiving.result()
        for index, error in failures.items():
            error.add_note(f"the sender: {told.get(index) or 'nothing went wrong there'}")
        return failures

    def _decline(self, source: WeightSource, route: WeightRoute, why: str) -> None:
        task = asyncio.ensure_future(asyncio.to_thread(source.decline, route, why))
        self._declining.add(task)
        task.add_done_callback(self._declining.discard)

    async def _ended(self, *tasks: asyncio.Future[Any]) -> None:
        """Waits for both ends and for what they are told; every wait in them has a deadline."""
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.exception()
        if self._declining:
            await asyncio.wait(self._declining)

    @staticmethod
    def _tell(index: int, error: Exception, *, is_lacking: bool) -> None:
        if is_lacking:
            logger.info("Replica %d gets all tensors: %s", index, error)
            return
        notes = "; ".join(getattr(error, "__notes__", ()))
        logger.warning(
            "Replica %d did not get the weights along its route, and is sent them through this process: %s: %s (%s)",
            index,
            type(error).__name__,
            error,
            notes,
        )
