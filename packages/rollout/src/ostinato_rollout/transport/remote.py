"""A server of the contract whose replica is served by another process."""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from ostinato_engines import (
    Capabilities,
    EngineClosedError,
    EngineError,
    EngineState,
    Health,
    SamplingParams,
    TokenOutput,
    WeightManifest,
)
from ostinato_engines.engine_status import EngineStatus
from ostinato_engines.forwarding import ForwardingServer
from ostinato_rollout.transport import wire
from ostinato_rollout.transport.errors import NotBegunError, ReplicaLostError, TransportInputError
from ostinato_rollout.transport.link import Link, LinkOptions
from ostinato_rollout.transport.mailbox import checked_key
from ostinato_rollout.transport.prompts import id_bytes
from ostinato_rollout.transport.stats import TransportStats

logger = logging.getLogger(__name__)

T = TypeVar("T")

_END_S = 60.0
MAX_KEPT_BYTES = 256 << 20


class RemoteServer(ForwardingServer):
    """A replica behind a `ReplicaService`, as if it were here.

    A prompt that goes on from the conversation's last one travels without what the replica has. A replica that is lost
    fails what is under way there; the next call connects anew, and sends everything again, as does one that the replica
    has certainly not begun. Another service at the same address, whose policy is not the one that this replica had, is
    another replica: it is not asked, and this one stays lost. `policy_version` is that of the replica's last answer.
    Media do not cross.

    Args:
        address: Of the service: `ReplicaService.address`.
        key: The service's shared key.
        silence_s: A replica that gives no sign of life for so long is lost.
        start_timeout_s: Longest wait in `start` for the service to be there; later ones are as long as `silence_s`.
        max_frame_bytes: Longest message; 4 bytes an id.
        max_kept_bytes: Of the prompts that are kept to find out what is new; those idle for longest are dropped first.

    Raises:
        TransportInputError: An argument cannot be used.
    """

    def __init__(
        self,
        address: str,
        *,
        key: str | bytes | None = None,
        silence_s: float = wire.SILENCE_S,
        start_timeout_s: float = 60.0,
        max_frame_bytes: int = wire.MAX_FRAME_BYTES,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        for name, value in (("silence_s", silence_s), ("start_timeout_s", start_timeout_s)):
            if not 0 < value < float("inf"):
                raise TransportInputError(f"{name} must be positive, got {value!r}; give seconds")
        self._options = LinkOptions(address, checked_key(key), silence_s, max_frame_bytes, max_kept_bytes)
        self._token = secrets.token_hex(16)
        self._start_timeout_s = start_timeout_s
        self._status = EngineStatus()
        self._capabilities = Capabilities(engine="remote")
        self._versions = ""
        self._link: Link | None = None
        self._service: bytes | None = None
        self._connecting: asyncio.Task[Link] | None = None
        self.stats = TransportStats()
        """What has been sent so far."""

    # Life

    async def start(self) -> None:
        """Connects, and starts the replica's server unless it is started; a second call does nothing.

        Raises:
            ReplicaLostError: No service answers, or it refuses.
            EngineError: As the server's own `start`.
        """
        if self._status.closed:
            raise EngineClosedError("server must not be shut down before start, got closed; create a new one")
        if not self._status.loaded:
            await self._connected(self._start_timeout_s)
            self._status.loaded = True

    async def shutdown(self) -> None:
        """Shuts the replica's server and its service down, for all who use it; a replica that is gone is no error."""
        if self._status.closed:
            return
        is_started, self._status.closed = self._status.loaded, True
        try:
            if is_started:
                async with asyncio.timeout(_END_S):
                    link = await self._connected(self._options.silence_s)
                    await link.call("shutdown", None, object)
        except (EngineError, TimeoutError) as error:
            logger.warning("could not shut down the replica at %s: %s", self._options.address, error)
        finally:
            await self._leave("is shut down")

    async def disconnect(self) -> None:
        """Lets go of the replica, which serves others on: it forgets this one's conversations and ends its requests."""
        self._status.closed = True
        await self._leave("has let go of its replica")

    async def _leave(self, what: str) -> None:
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
            await asyncio.wait([connecting])
        if self._link is not None:
            self._link.close(EngineClosedError(f"server must be running, {what}; create a new one"))

    async def health(self) -> Health:
        state, detail = self._status.now()
        if state is not EngineState.READY:
            return Health(state, self.policy_version, detail=detail)
        try:
            return await self._ask("health", None, Health)
        except ReplicaLostError as error:
            return Health(EngineState.FAILED, self.policy_version, detail=str(error))

    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def versions(self) -> str:
        """Of what the engine runs on there; empty before it has started."""
        return self._versions

    @property
    def num_waiting(self) -> int:
        """Calls under way."""
        return 0 if self._link is None else self._link.num_waiting

    @property
    def num_kept(self) -> int:
        """Conversations of which a prompt is kept."""
        return 0 if self._link is None else self._link.num_kept

    # Calls

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams | Mapping[str, Any],
        request_id: str,
        media: Sequence[Any] = (),
    ) -> TokenOutput:
        """Continues a prompt; see `AsyncServerBase.generate`. An `array('i')` travels without being copied first."""
        self.refuse_media(media)
        params = SamplingParams.from_mapping(sampling_params)
        prompt = id_bytes(prompt_ids)
        link = self._link
        if link is None or not link.is_up or self._status.closed:
            prompt = memoryview(bytes(prompt))
            link = await self._reached()
        try:
            return await link.generate(prompt, params, request_id)
        except NotBegunError as error:
            link = await self._reached()
            return await link.generate(memoryview(error.prompt), params, request_id)

    async def update_weights(self, manifest: WeightManifest, weights: Iterable[tuple[str, Any]]) -> None:
        """Streams through shared memory, so that the replica must be on this host; see `AsyncServerBase.update_weights`."""
        self._status.require_loaded()
        await super().update_weights(manifest, weights)

    async def release(self, request_id: str) -> None:
        """The conversation is over. A replica that is gone has nothing to free."""
        link = self._link
        if link is None or not link.is_up:
            return
        link.forget(request_id)
        try:
            await link.call("release", request_id, object)
        except ReplicaLostError as error:
            logger.debug("nothing to release of request %s: %s", request_id, error)

    async def _ask(self, method: str, argument: Any, kind: type[T]) -> T:
        try:
            return await (await self._reached()).call(method, argument, kind)
        except NotBegunError:
            return await (await self._reached()).call(method, argument, kind)

    # Connection

    async def _reached(self) -> Link:
        """The connection of a started server, made anew where it is lost."""
        self._status.require_loaded()
        return await self._connected(self._options.silence_s)

    async def _connected(self, timeout_s: float) -> Link:
        """The connection; all who need a new one wait for the same."""
        if self._link is not None and self._link.is_up:
            return self._link
        if self._connecting is None or self._connecting.get_loop() is not asyncio.get_running_loop():
            self._connecting = asyncio.ensure_future(self._connect(timeout_s))
            self._connecting.add_done_callback(self._note_connected)
        connecting = self._connecting
        try:
            return await asyncio.shield(connecting)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling() or not connecting.cancelled():
                raise
            raise EngineClosedError(
                "server must be running, was let go while it connected; create a new one"
            ) from error

    async def _connect(self, timeout_s: float) -> Link:
        # A copy of this one, forked or pickled, has the same token.
        remote = f"{self._token} {socket.gethostname()} {os.getpid()} {id(self)}".encode()
        known = self.policy_version
        link = Link(self._options, self.stats, self._note_version, remote)
        try:
            await link.open(timeout_s)
            described = await link.call("start", None, wire.Description)
            self._check_same_replica(link, known)
        except BaseException:
            link.close(EngineClosedError("server must be started, got a failure; call start() again"))
            raise
        # What crosses no process is not claimed.
        self._capabilities = replace(described.capabilities, media=False)
        self.max_model_len, self._versions = described.max_model_len, described.versions
        self._link = link
        return link

    def _check_same_replica(self, link: Link, known: int) -> None:
        """Lets a service take the place of the one before it only with the policy that this had: its weights are its own.

        Raises:
            ReplicaLostError: It has another version of the policy.
        """
        if self._service not in (None, link.service):
            self.stats.num_replaced += 1
            found, self.policy_version = self.policy_version, known
            if found != known:
                raise ReplicaLostError(
                    f"replica at {self._options.address} must be the one that was started, with version {known} of the policy, got another "
                    f"service with version {found}: it was restarted without its weights; create a new server and give it the weights"
                )
            logger.warning(
                "the replica at %s was restarted, and has version %d of the policy as before; its conversations begin anew",
                self._options.address,
                known,
            )
        self._service = link.service

    def _note_connected(self, connecting: "asyncio.Task[Link]") -> None:
        if self._connecting is connecting:
            self._connecting = None
        if not connecting.cancelled():
            # Whoever asked for it may have gone.
            connecting.exception()

    def _note_version(self, policy_version: int) -> None:
        self.policy_version = policy_version
