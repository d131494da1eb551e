"""The workers' end of a route: whatever it is, one update with a manifest, a stream, and an end that the sender hears of."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

from torch import Tensor

from ostinato_engines.errors import WeightPeerLostError, WeightUpdateError
from ostinato_engines.types import WeightManifest
from ostinato_engines.weight_routes import SENDING_S, CollectiveRoute, WeightRoute
from ostinato_engines.weight_transfer.broadcast import IncomingBroadcast, KeptGroup
from ostinato_engines.weight_transfer.group import give_up
from ostinato_engines.weight_transfer.receiver import IncomingUpdate, WeightReceiver
from ostinato_engines.weight_transfer.rendezvous import connect
from ostinato_engines.weight_transfer.serving import or_abort

_DECLINE_S = 1.0


class RouteUpdate(Protocol):
    """One update that comes along a route."""

    @property
    def manifest(self) -> WeightManifest:
        """What comes."""
        ...

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors, once; each is valid until the next one is taken."""
        ...

    def finish(self) -> None:
        """The new weights serve. Raises `WeightUpdateError` where not all have been read."""
        ...

    def fail(self, error: BaseException) -> None:
        """They do not, and why."""
        ...

    def abort(self) -> None:
        """Ends it at once, from any thread."""
        ...

    def close(self) -> None:
        """Frees what it took; to be called at the end, from the thread that has read."""
        ...


class RouteFollower:
    """A worker's end, which keeps what serves from update to update.

    Args:
        device: Where the worker has its weights.
    """

    def __init__(self, device: str) -> None:
        self._kept = KeptGroup(device)

    def open(self, route: WeightRoute, manifest: WeightManifest, *, worker: int = 0) -> RouteUpdate:
        """The update that comes along a route; waits until the sender offers it.

        Args:
            route: Where.
            manifest: What was announced.
            worker: Rank of this worker in its engine.

        Raises:
            WeightPeerLostError: Nobody is there.
            WeightUpdateTimeoutError: The sender is silent.
            WeightUpdateError: It offers something else.
        """
        if isinstance(route, CollectiveRoute):
            return IncomingBroadcast(route, manifest, worker, self._kept)
        if worker >= len(route.paths):
            raise WeightUpdateError(
                f"route must have a path for each worker, got {len(route.paths)} for worker {worker}"
            )
        return _SocketUpdate(route.paths[worker], manifest)

    def close(self) -> None:
        """Frees what was kept."""
        self._kept.close()


class _SocketUpdate:
    """See `RouteUpdate`."""

    def __init__(self, path: str, manifest: WeightManifest) -> None:
        self._receiver = WeightReceiver(connect(path), timeout_s=SENDING_S)
        try:
            update = self._receiver.next_update(forever=False)
            if update is None:
                raise WeightPeerLostError("sender of weights must offer an update, got its goodbye; see its log")
            self._update: IncomingUpdate = update
            if update.manifest != manifest:
                error = WeightUpdateError("manifest must be the one that is sent, got another; send the update again")
                update.fail(error)
                raise error
        except BaseException:
            self._receiver.close()
            raise

    @property
    def manifest(self) -> WeightManifest:
        return self._update.manifest

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._update)

    def finish(self) -> None:
        self._update.finish()

    def fail(self, error: BaseException) -> None:
        with contextlib.suppress(WeightUpdateError):  # the sender may be gone
            self._update.fail(error)

    def abort(self) -> None:
        self._receiver.abort()

    def close(self) -> None:
        with contextlib.suppress(WeightUpdateError):
            self._receiver.next_update(forever=False)  # its goodbye: it must read first what became of the update
        self._receiver.close()


async def follow_route(
    update_weights: Callable[[WeightManifest, RouteUpdate], Awaitable[None]],
    follower: RouteFollower,
    manifest: WeightManifest,
    route: WeightRoute,
) -> None:
    """Gives an engine of this process, which is its own only worker, the update that comes along a route.

    Args:
        update_weights: Of the engine.
        follower: This process's end.
        manifest: What was announced.
        route: Where.

    Raises:
        EngineError: As `AsyncServerBase.receive_weights`.
    """
    update = await asyncio.to_thread(follower.open, route, manifest)
    try:
        # An engine that waits for the stream in a thread learns of a cancellation by its end.
        await or_abort(_awaited(update_weights(manifest, update)), update.abort, cancel=True)
        update.finish()
    except BaseException as error:
        update.fail(error)
        raise
    finally:
        await asyncio.to_thread(update.close)


async def _awaited(work: Awaitable[None]) -> None:
    await work


def decline(route: WeightRoute, why: str) -> None:
    """Tells whoever waits for workers along a route that they will not come; those that have come are not disturbed on sockets."""
    if isinstance(route, CollectiveRoute):
        give_up(route, why)
        return
    for path in route.paths:
        with contextlib.suppress(WeightPeerLostError):
            connect(path, timeout_s=_DECLINE_S).close()
