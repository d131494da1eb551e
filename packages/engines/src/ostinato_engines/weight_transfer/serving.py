"""A transfer seen from an event loop: an engine that follows a sender, and a sender that an engine's proxy awaits."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from torch import Tensor

from ostinato_engines.server import AsyncServerBase
from ostinato_engines.types import WeightManifest
from ostinato_engines.weight_transfer.receiver import WeightReceiver
from ostinato_engines.weight_transfer.sender import WeightSender

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def serve_weight_updates(server: AsyncServerBase, receiver: WeightReceiver) -> None:
    """Gives a server every update that a sender offers, until the sender says goodbye.

    An update that fails is logged and reported to the sender; the server then waits for a complete one, as its contract
    says. Cancelling this ends the conversation and an update that is under way. The receiver is closed at the end.

    Raises:
        WeightPeerLostError: The sender is gone, or stands still.
    """
    try:
        while (update := await or_abort(asyncio.to_thread(receiver.next_update), receiver.abort)) is not None:
            try:
                # A server that waits for the stream in a thread learns of a cancellation by its end.
                await or_abort(server.update_weights(update.manifest, update), receiver.abort, cancel=True)
                update.finish()
            # The boundary between two processes: the sender is told, and raises.
            except Exception as error:
                logger.warning("update to version %d failed: %s", update.manifest.version, error)
                update.fail(error)
    finally:
        receiver.close()


async def send_weights(sender: WeightSender, manifest: WeightManifest, weights: Iterable[tuple[str, Tensor]]) -> None:
    """`WeightSender.send` in a thread; cancelling it ends the conversation, so that the engine learns of it, too.

    Raises:
        EngineError: As `WeightSender.send`.
    """
    await or_abort(asyncio.to_thread(sender.send, manifest, weights), sender.abort)


async def or_abort(work: Coroutine[Any, Any, T], abort: Callable[[], None], *, cancel: bool = False) -> T:
    """Awaits work that blocks on a channel; a cancelled caller aborts the channel, and waits until the work has ended."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        abort()
        if cancel:
            task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()
        raise
