"""Weights for a replica of another host: Ray carries them there, some at a time, and on that host they go the way they always go.

Invariants: few tensors are on the way at a time, so that no host holds the model once more; and whichever end fails, the other one learns of it
and nothing waits for what will not come.
"""

import asyncio
import queue
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from ostinato_engines import WeightManifest, WeightUpdateError
from ostinato_engines.weight_routes import LOADING_S
from ostinato_rollout.errors import ClusterError
from ostinato_rollout.ray_cluster.actors import ActorBody, ActorProcess
from ostinato_rollout.transport import RemoteServer

_PART_BYTES = 64 << 20
_PARTS_KEPT = 2
_POLL_S = 0.01
_BREAK_OFF_S = 10.0
_SILENCE_S = LOADING_S - 60.0
"""Longest wait for the next part, on the host of the replica: its engine waits for longer, and hears why nothing comes."""

Part = list[tuple[str, Any]]


class WeightTaker(ActorBody):
    """The end beside the replica: a caller of it like any other, which is fed."""

    def __init__(self) -> None:
        self._parts: queue.Queue[Part | str | None] | None = None

    async def begin_weights(self) -> None:
        """From now on `feed` has somewhere to put parts."""
        self._parts = queue.Queue(_PARTS_KEPT)

    async def take_weights(self, address: str, key: str | None, manifest: WeightManifest) -> None:
        """Brings the replica at an address of this host to what `feed` gives; after `begin_weights`.

        Raises:
            EngineError: As `AsyncServerBase.update_weights`; the parts ended early, or none came.
        """
        parts, remote = self._parts, RemoteServer(address, key=key)
        assert parts is not None
        try:
            await remote.start()
            await remote.update_weights(manifest, _arriving(parts))
        finally:
            if self._parts is parts:
                self._parts = None
            await remote.disconnect()

    async def feed(self, part: Part | None) -> None:
        """The next tensors, as soon as there is room; None after the last."""
        parts = self._parts
        while parts is not None and parts is self._parts:
            with suppress(queue.Full):
                parts.put_nowait(part)
                return
            await asyncio.sleep(_POLL_S)

    async def break_off(self, why: str) -> None:
        """There will be no more."""
        parts, self._parts = self._parts, None
        if parts is not None:
            with suppress(queue.Empty):
                while True:
                    parts.get_nowait()
            parts.put_nowait(why)


def _arriving(parts: "queue.Queue[Part | str | None]") -> Iterator[tuple[str, Any]]:
    """The tensors, read by a thread that may wait."""
    while True:
        try:
            part = parts.get(timeout=_SILENCE_S)
        except queue.Empty as error:
            raise WeightUpdateError(f"weights must go on within {_SILENCE_S:g} s, got none; see the trainer") from error
        if part is None:
            return
        if isinstance(part, str):
            raise WeightUpdateError(f"weights must come to their end, got {part}; send them again")
        yield from part


async def send_to_other_host(
    actor: ActorProcess, address: str, key: str | None, manifest: WeightManifest, weights: Iterable[tuple[str, Any]]
) -> None:
    """Sends weights to a replica beside which `actor` is.

    Args:
        actor: Its body is a `WeightTaker`.
        address: Of the replica, as its own host reaches it.
        key: Of those who may call it.
        manifest: Names, shapes and types.
        weights: Tensors, of any device of this host.

    Raises:
        EngineError: As `AsyncServerBase.update_weights`.
        ClusterError: The process has gone.
    """
    await actor.ask("begin_weights")
    taking = asyncio.ensure_future(actor.ask("take_weights", address, key, manifest))
    stream = iter(weights)
    try:
        while True:
            part = await asyncio.to_thread(_next_part, stream)
            feeding = asyncio.ensure_future(actor.ask("feed", part or None))
            await asyncio.wait([taking, feeding], return_when=asyncio.FIRST_COMPLETED)
            if taking.done():
                feeding.cancel()
                break
            await feeding
            if not part:
                break
        await taking
    except BaseException as error:
        taking.cancel()
        with suppress(ClusterError, TimeoutError):
            async with asyncio.timeout(_BREAK_OFF_S):
                await actor.ask("break_off", f"{type(error).__name__}: {error}")
        raise


def _next_part(stream: Iterator[tuple[str, Any]]) -> Part:
    """Some tensors in the host's memory; empty at the end."""
    part: Part = []
    size = 0
    for name, tensor in stream:
        part.append((name, tensor.detach().cpu().clone()))  # the stream may use its memory again
        size += tensor.nbytes
        if size >= _PART_BYTES:
            break
    return part
