"""One change of policy over all replicas: pause, update, check, resume.

Invariant: however it ends, no replica in service has another version than the others, and none is left paused. Knows replicas and
their states, no restart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import suppress
from typing import Any

from ostinato_engines import EngineState, ManifestError, PauseMode, UnsupportedError, WeightManifest
from ostinato_engines.engine_status import WEIGHTS
from ostinato_rollout.errors import ReplicaError
from ostinato_rollout.fleet import Fleet
from ostinato_rollout.patience import to_its_end
from ostinato_rollout.pool_operations import Operation, PoolOperations
from ostinato_rollout.replica_state import Replica, ReplicaState
from ostinato_rollout.routed_update import RoutedUpdate, WeightSource

logger = logging.getLogger(__name__)

MakeWeights = Callable[[], Iterable[tuple[str, Any]]]

_S = ReplicaState


async def give_weights(replica: Replica, manifest: WeightManifest, make_weights: MakeWeights) -> None:
    """Bring one replica to `manifest.version`; where it has what cannot have changed, by the rest alone.

    Raises:
        ReplicaError: It says that it has another version afterwards.
    """
    if not await _give_part(replica, manifest, make_weights):
        await replica.server.update_weights(manifest, make_weights())
    if replica.server.policy_version != manifest.version:
        raise ReplicaError(
            f"policy_version must be {manifest.version} after the update, got {replica.server.policy_version};"
            " that server ignored the weights"
        )


async def _give_part(replica: Replica, manifest: WeightManifest, make_weights: MakeWeights) -> bool:
    """Whether the tensors that may have changed were enough."""
    part = manifest.partial() if replica.server.capabilities().partial_updates else None
    if part is None:
        return False
    try:
        await replica.server.update_weights(part, _chosen(make_weights, set(part.changing)))
    except ManifestError as error:  # it was started anew, or slept
        logger.info("Replica %d gets all %d tensors: %s", replica.index, len(manifest.tensors), error)
        return False
    logger.info(
        "Replica %d got %d of %d tensors: the rest cannot have changed",
        replica.index,
        len(part.tensors),
        len(manifest.tensors),
    )
    return True


def _chosen(make_weights: MakeWeights, names: Container[str]) -> Iterator[tuple[str, Any]]:
    """Those of the tensors; none is made before the first is asked for, and none is held while the next is."""
    for name, tensor in make_weights():
        if name in names:
            yield name, tensor
        del tensor


class _Source:
    """The weights for one replica. What fails where they are made is its error, and no failure of the replica."""

    def __init__(self, make_weights: MakeWeights) -> None:
        self._make_weights = make_weights
        self.error: Exception | None = None
        self.has_given = False
        """Whether a tensor has been read, so that the replica may have some of it."""

    def __call__(self) -> Iterator[tuple[str, Any]]:
        self.error = None
        try:
            return self._read(iter(self._make_weights()))
        except Exception as error:
            self.error = error
            raise

    def _read(self, stream: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        while True:
            try:
                pair = next(stream)
            except StopIteration:
                return
            except Exception as error:
                self.error = error
                raise
            self.has_given = True
            yield pair
            del pair


class WeightSync:
    """One update; made for it, and used once.

    Args:
        fleet: Whose replicas.
        operations: How they are asked.
        take_out: Takes a replica out of service that failed to do what the text says.
        timeout_s: Longest time of each of its steps,
        update_timeout_s: but of that in which a replica takes the weights.
    """

    def __init__(
        self,
        fleet: Fleet,
        operations: PoolOperations,
        take_out: Callable[[Replica, str, Exception], None],
        *,
        timeout_s: float,
        update_timeout_s: float,
    ) -> None:
        self._fleet, self._operations, self._take_out = fleet, operations, take_out
        self._timeout_s, self._update_timeout_s = timeout_s, update_timeout_s
        self._asleep: set[int] = set()
        self._begun: set[int] = set()
        self._done: set[int] = set()
        self._sources: dict[int, _Source] = {}

    @property
    def has_changed_any(self) -> bool:
        """Whether a replica has the new version."""
        return bool(self._done)

    async def run(self, manifest: WeightManifest, make_weights: MakeWeights, mode: PauseMode) -> None:
        """Bring all live replicas to `manifest.version`, those that wait for weights too; what fails is taken out.

        Raises:
            Exception: What `make_weights` raised. A replica that has none of the weights then goes on with the old ones, where all have
                these; one that may have some waits for the next update.
        """
        fleet, version = self._fleet, manifest.version
        members = fleet.live()
        updating = [replica for replica in members if replica.is_in_service]
        self._asleep = {replica.index for replica in updating if replica.state is _S.ASLEEP}
        for replica in updating:
            fleet.move(replica, _S.UPDATING, f"weights of version {version} have come")

        async def pause(replica: Replica) -> None:
            await self._pause(replica, mode)

        async def wake(replica: Replica) -> None:
            await replica.server.wake_up([WEIGHTS])

        async def update(replica: Replica) -> None:
            self._begun.add(replica.index)
            source = self._sources[replica.index] = _Source(make_weights)
            await give_weights(replica, manifest, source)
            source.error = None
            self._done.add(replica.index)

        def taking() -> list[Replica]:
            states = (_S.UPDATING, _S.WAITING_FOR_WEIGHTS)
            return [each for each in members if each.state in states and each.index not in self._done]

        try:
            await fleet.heard()
            await self._on_each("pause", self._awake(updating), pause)
            # Some engines give up their weights' memory, too, however they sleep.
            asleep = [each for each in taking() if each.index in self._asleep or self._waits_asleep(each)]
            await self._on_each("wake up for weights", asleep, wake)
            if isinstance(make_weights, WeightSource):
                await self._send_along_routes(taking(), manifest, make_weights)
            purpose, limit_s = f"take weights of version {version}", self._update_timeout_s
            await self._on_each(purpose, taking(), update, limit_s=limit_s, excused=self._without_weights)
            await self._leave_untouched(members)
        finally:
            await to_its_end(self._settle(members, version))
        if missing := self._without_weights():
            logger.warning("Weights of version %d could not be made for replicas %s", version, sorted(missing))
            raise next(source.error for source in self._sources.values() if source.error is not None)

    async def _send_along_routes(
        self, replicas: Iterable[Replica], manifest: WeightManifest, source: WeightSource
    ) -> None:
        along = RoutedUpdate(self._operations, timeout_s=self._update_timeout_s)
        try:
            await along.run(replicas, manifest, source)
        finally:
            self._begun |= along.begun
            self._done |= along.done

    async def _leave_untouched(self, members: Iterable[Replica]) -> None:
        """Counts replicas for which no tensor was made as not begun, if they say that they have what they had."""

        async def ask(replica: Replica) -> None:
            if (await replica.server.health()).state in (EngineState.READY, EngineState.PAUSED, EngineState.ASLEEP):
                self._begun.discard(replica.index)

        untouched = {index for index in self._without_weights() if not self._sources[index].has_given}
        # One that does not even say how it is waits for the next update, or is found out before.
        asked = [replica for replica in members if replica.index in untouched and replica.state is _S.UPDATING]
        await self._operations.on_each("tell how it is", asked, ask, self._timeout_s)

    def _waits_asleep(self, replica: Replica) -> bool:
        """Whether it waits for weights in a pool that sleeps, and does so, too."""
        waits = replica.state is _S.WAITING_FOR_WEIGHTS
        return waits and bool(self._fleet.sleeping) and not replica.stays_awake

    def _awake(self, replicas: Iterable[Replica]) -> list[Replica]:
        """Those that are still to be paused or resumed: nothing runs in one that sleeps."""
        return [replica for replica in replicas if replica.state is _S.UPDATING and replica.index not in self._asleep]

    def _without_weights(self) -> set[int]:
        """Replicas whose weights could not be made."""
        return {index for index, source in self._sources.items() if source.error is not None}

    async def _on_each(
        self,
        purpose: str,
        replicas: Iterable[Replica],
        operation: Operation,
        *,
        limit_s: float | None = None,
        excused: Callable[[], Container[int]] = frozenset,
    ) -> None:
        """Takes out those that fail, but for those that are not to blame."""
        by_index = {replica.index: replica for replica in replicas}
        failures = await self._operations.on_each(purpose, by_index.values(), operation, limit_s or self._timeout_s)
        for index, error in failures.items():
            self._done.discard(index)
            if index not in excused():
                self._take_out(by_index[index], purpose, error)

    async def _pause(self, replica: Replica, mode: PauseMode) -> None:
        """Pause an engine, or bring about the same from outside where it cannot: clients hold back what is new."""
        server = replica.server
        for tried in dict.fromkeys((mode, PauseMode.ABORT) if mode is PauseMode.KEEP else (mode,)):
            with suppress(UnsupportedError):
                return await server.pause(tried)
        if mode is not PauseMode.WAIT:
            try:
                await server.abort()
            except UnsupportedError:
                self._fleet.take_back(server)
        return await self._fleet.left(server)

    async def _settle(self, members: list[Replica], version: int) -> None:
        """Let all go on that may, and leave out those whose weights are not what the others have."""

        async def resume(replica: Replica) -> None:
            await replica.server.resume()

        await self._on_each("go on after a pause", self._awake(members), resume)
        for replica in members:
            if replica.state is _S.UPDATING:
                into = _S.ASLEEP if replica.index in self._asleep else _S.SERVING
                if replica.index in self._done:
                    self._fleet.move(replica, into, f"has version {version}")
                elif replica.index in self._begun or self._done:
                    self._fleet.move(replica, _S.WAITING_FOR_WEIGHTS, f"the update to version {version} was given up")
                else:
                    self._fleet.move(replica, into, f"the update to version {version} was given up before it began")
            elif replica.state is _S.WAITING_FOR_WEIGHTS and replica.index in self._done:
                into = _S.ASLEEP if self._waits_asleep(replica) else _S.SERVING
                self._fleet.move(replica, into, f"has version {version}")
