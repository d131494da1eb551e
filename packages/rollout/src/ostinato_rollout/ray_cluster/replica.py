"""A replica whose engine is in an actor: Ray gives it a process, the transport carries what is asked of it.

Invariant: a process that has been lost once serves nobody through here again, even if it was only away for a while: it is
ended, and the replica has failed for good. Whoever keeps replicas makes a new one.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ostinato_engines import (
    EngineClosedError,
    EngineInputError,
    EngineStartError,
    WeightManifest,
)
from ostinato_engines.loading import construct_server, server_class_of
from ostinato_rollout.errors import ClusterError
from ostinato_rollout.ray_cluster.actors import (
    ActorBody,
    ActorPlace,
    ActorPlacement,
    ActorProcess,
    num_nodes,
    own_node,
    show_devices,
)
from ostinato_rollout.ray_cluster.weights_beyond import WeightTaker, send_to_other_host
from ostinato_rollout.transport import RemoteServer, ReplicaLostError, ReplicaService
from ostinato_rollout.transport.link import Link
from ostinato_rollout.transport.wire import SILENCE_S

logger = logging.getLogger(__name__)


class ReplicaEndpoint(msgspec.Struct, frozen=True):
    """Where one process of a replica is reached; a new process has a new one."""

    address: str
    key: str | None = None
    """Shared by those who may call; None on one host."""
    silence_s: float = SILENCE_S
    """After how much silence it counts as lost."""

    def __repr__(self) -> str:
        return f"ReplicaEndpoint({self.address!r})"  # logs keep no key

    def connect(self) -> RemoteServer:
        """A server of the contract, not started, that is this replica."""
        return RemoteServer(self.address, key=self.key, silence_s=self.silence_s, start_timeout_s=self.silence_s)


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica's service has; all but the callers are zero when nothing is under way."""

    num_callers: int
    """Connections."""
    num_calls: int
    """Under way."""
    num_conversations: int
    """Not released."""
    num_kept_bytes: int
    """Of prompts."""


class _Build(msgspec.Struct, frozen=True):
    """Which engine, and with what."""

    engine: str
    model: str
    settings: dict[str, Any]
    required: tuple[str, ...]


class _ReplicaBody(WeightTaker):
    """The process of a replica."""

    def __init__(self) -> None:
        super().__init__()
        self._service: ReplicaService | None = None

    async def serve(self, build: _Build, endpoint: ReplicaEndpoint, devices: tuple[str, ...]) -> str:
        """Makes the engine, which starts when it is asked to, and listens; the address with its port."""
        own = (await self.where()).devices
        if devices != own and not show_devices(own, devices):
            raise EngineStartError(
                f"the devices {', '.join(devices)} of all bundles must be visible to one process, got no variable that shows"
                f" it {', '.join(own) or 'any'}; let Ray set it, or give the actor one bundle with all devices"
            )
        server = construct_server(server_class_of(build.engine), build.model, build.settings, required=build.required)
        self._service = ReplicaService(server, endpoint.address, key=endpoint.key, silence_s=endpoint.silence_s)
        await self._service.start()
        return self._service.address

    async def report(self) -> ReplicaReport:
        """What its service has."""
        service = self._service
        if service is None:
            return ReplicaReport(num_callers=0, num_calls=0, num_conversations=0, num_kept_bytes=0)
        return ReplicaReport(
            num_callers=service.num_callers,
            num_calls=service.num_calls,
            num_conversations=service.num_conversations,
            num_kept_bytes=service.num_kept_bytes,
        )


class _HolderBody(ActorBody):
    """Keeps a bundle for the actor whose engine uses its devices."""


class RayReplica(RemoteServer):
    """A server of the contract whose engine is in an actor of its own, or in one for all bundles of a tensor-parallel group.

    It fails for good, and its process is ended, when Ray tells of the process's end or the process falls silent.

    Args:
        engine: One of ours by name ("vllm", "transformers"), or a class: `module:Class`, `file.py:Class`.
        model: Path of a checkpoint, on the node.
        settings: What the class takes by name beside the model; plain values. It gets those that it names.
        required: Names of settings without which it must not start.
        placement: Where the actor goes. Of several bundles, the engine sees the devices of all.
        beyond_host: Listen where other hosts reach it, encrypted under a key of its own; None: if the cluster has several.
        silence_s: A process that gives no sign of life for so long is lost.
        start_timeout_s: Longest wait in `start`, for a place and for the engine.

    Raises:
        EngineInputError: The settings are not plain values.
        TransportInputError: A time is not positive.
    """

    def __init__(
        self,
        engine: str,
        model: str | Path,
        *,
        settings: Mapping[str, Any] | None = None,
        required: Collection[str] = (),
        placement: ActorPlacement | None = None,
        beyond_host: bool | None = None,
        silence_s: float = SILENCE_S,
        start_timeout_s: float = 900.0,
    ) -> None:
        super().__init__("", silence_s=silence_s, start_timeout_s=start_timeout_s)
        self._build = _Build(engine, str(model), dict(settings or {}), tuple(required))
        try:
            msgspec.msgpack.encode(self._build)
        except TypeError as error:
            raise EngineInputError(
                f"settings must be plain values, got {error}; give numbers, texts and lists"
            ) from error
        self._placement = ActorPlacement() if placement is None else placement
        self._beyond_host = beyond_host
        self._starting = asyncio.Lock()
        self._actor = ActorProcess(_ReplicaBody, self._placement, on_lost=self._note_end)
        self._holders = [ActorProcess(_HolderBody, part, on_lost=self._note_end) for part in self._placement.holders()]
        self._ending: asyncio.Task[None] | None = None
        self._key: str | None = None
        self._told_of_failure: list[Callable[[RayReplica, ReplicaLostError], None]] = []
        self.endpoint: ReplicaEndpoint | None = None
        """Where others reach it; None before it has started, and once it has ended."""

    @property
    def place(self) -> ActorPlace | None:
        """Node and process; once it has started."""
        return self._actor.place

    async def report(self) -> ReplicaReport:
        """What its service has, of all its callers; goes through Ray, not the transport.

        Raises:
            ClusterError: The process is not there.
        """
        async with asyncio.timeout(self._options.silence_s):
            return await self._actor.ask("report")

    # Life

    async def start(self) -> None:
        """Places the actor, and starts the engine in it; a second call does nothing.

        Raises:
            EngineStartError: No room in the cluster, the process has ended meanwhile, or the deadline has passed.
            EngineError: As the engine's own constructor and `start`.
        """
        async with self._starting:
            if self._status.closed:
                raise EngineClosedError("server must not be shut down before start, got closed; create a new one")
            if self._status.loaded:
                return
            deadline = asyncio.timeout(self._start_timeout_s)
            try:
                async with deadline:
                    await self._launch()
                    await super().start()
            except BaseException as error:
                explained = self._start_error(error, is_late=deadline.expired())
                # Nothing that has failed to start is tried again: its actor is gone.
                failed = ReplicaLostError(f"replica must start, got {type(error).__name__}: {error}")
                self._fail(failed, is_told=not isinstance(error, asyncio.CancelledError))
                await self._ended()
                if explained is not None:
                    raise explained from error
                raise
            self.endpoint = ReplicaEndpoint(self._options.address, self._key, self._options.silence_s)

    def _start_error(self, error: BaseException, *, is_late: bool) -> Exception | None:
        """An error that says more; None where there is no more to say."""
        wanted = f"{self._build.engine} must start in an actor"
        if isinstance(error, TimeoutError) and is_late:
            missing = [process.unplaced() for process in (self._actor, *self._holders) if process.place is None]
            told = missing[0] if missing else "no answer; see Ray's log of it"
            return EngineStartError(f"{wanted} within {self._start_timeout_s:g} s, got {told}")
        failure = self._status.failure
        if isinstance(error, ClusterError | EngineClosedError | ReplicaLostError):
            return EngineStartError(f"{wanted}, got {error if failure is None else failure}")
        return None

    async def _launch(self) -> None:
        """The actor, listening, and what holds the other bundles."""
        places = await _all_of([process.start() for process in (self._actor, *self._holders)])
        if len({place.node_id for place in places}) > 1:
            raise EngineStartError(
                f"bundles {', '.join(map(str, self._placement.bundles))} must be on one node, got"
                f" {', '.join(place.host for place in places)}; make the placement group with strategy STRICT_PACK"
            )
        beyond_host = num_nodes() > 1 if self._beyond_host is None else self._beyond_host
        self._key = secrets.token_urlsafe() if beyond_host else None
        host = places[0].host if beyond_host else "127.0.0.1"
        host = f"[{host}]" if ":" in host else host
        endpoint = ReplicaEndpoint(f"tcp://{host}:*", self._key, self._options.silence_s)
        devices = tuple(dict.fromkeys(name for place in places for name in place.devices))
        address = await self._actor.ask("serve", self._build, endpoint, devices)
        self._options = msgspec.structs.replace(
            self._options, address=address, key=None if self._key is None else self._key.encode()
        )

    async def shutdown(self) -> None:
        """Shuts the engine down and ends the actor's process, with all that it has started; a second call waits for that."""
        self.endpoint = None
        try:
            if self._status.failure is None:
                await super().shutdown()
        finally:
            self._status.closed = True
            self._end_later()
            await self._ended()

    async def disconnect(self) -> None:
        """Ends the actor as `shutdown` does, without waiting for the engine: nobody else owns it."""
        self.endpoint = None
        await super().disconnect()
        self._end_later()
        await self._ended()

    def when_failed(self, call: "Callable[[RayReplica, ReplicaLostError], None]") -> None:
        """Has `call` called, soon after the replica has failed for good, and not before it had started."""
        self._told_of_failure.append(call)

    def _note_end(self, why: str) -> None:
        """Ray tells that a process has ended."""
        if not self._status.closed:
            self._fail(ReplicaLostError(f"replica's process must go on, got its end: {why}"))

    def _fail(self, error: ReplicaLostError, *, is_told: bool = True) -> None:
        """The replica has failed for good: what waits there fails, nothing connects anew, and its process is ended; the log tells, if asked."""
        if self._status.failure is not None or self._status.closed:
            return
        self._status.failure = error
        self.endpoint = None
        if is_told:
            logger.warning("%s", error)
        if self._connecting is not None:
            self._connecting.cancel()
        if self._link is not None:
            self._link.fail(error, lambda number, call: ReplicaLostError(f"{error}; waited for {call.what}"))
        for call in self._told_of_failure if self._status.loaded else ():
            asyncio.get_running_loop().call_soon(call, self, error)
        self._end_later()

    def _end_later(self) -> None:
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end_processes())

    async def _end_processes(self) -> None:
        await asyncio.gather(*(process.end() for process in (self._actor, *self._holders)))

    async def _ended(self) -> None:
        if self._ending is not None:
            await asyncio.shield(self._ending)

    # Calls

    async def _connected(self, timeout_s: float) -> Link:
        """The connection; once it is lost, the replica is."""
        if self._link is not None and not self._link.is_up and not self._status.closed:
            lost = ReplicaLostError(f"replica must stay in touch, got that the {self._link.lost}")
            self._fail(lost)
            raise lost
        return await super()._connected(timeout_s)

    async def update_weights(self, manifest: WeightManifest, weights: "Iterable[tuple[str, Any]]") -> None:
        """Streams through shared memory to a replica of this host, and over the network, some tensors at a time, to one of another; see
        `AsyncServerBase.update_weights`."""
        endpoint = self.endpoint
        if self.place is None or endpoint is None or self.place.node_id == own_node():
            await super().update_weights(manifest, weights)
            return
        await send_to_other_host(self._actor, endpoint.address, endpoint.key, manifest, weights)
        await self.health()  # whose answer has the version


async def _all_of(starts: Sequence[Any]) -> list[Any]:
    """The results of all; the first error ends the wait for the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(start) for start in starts]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]
