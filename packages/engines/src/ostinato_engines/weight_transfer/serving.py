"""A transfer seen from an event loop: an engine that follows a sender, and a sender that an engine's proxy awaits."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

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
    says. Cancelling this ends the conversation and an update that is under way.

    Raises:
        WeightPeerLostError: The sender is gone, or stands still.
    """
    while (update := await _in_thread(receiver.next_update, receiver.abort)) is not None:
        applying = asyncio.ensure_future(server.update_weights(update.manifest, update))
        try:
            await asyncio.shield(applying)
            update.finish()
        except asyncio.CancelledError:
            receiver.abort()
            applying.cancel()
            await asyncio.wait([applying])
            raise
        # The boundary between two processes: the sender is told, and raises.
        except Exception as error:
            logger.warning("update to version %d failed: %s", update.manifest.version, error)
            update.fail(error)


async def send_weights(sender: WeightSender, manifest: WeightManifest, weights: Iterable[tuple[str, Tensor]]) -> None:
    """`WeightSender.send` in a thread; cancelling it ends the conversation, so that the engine learns of it, too.

    Raises:
        EngineError: As `WeightSender.send`.
    """
    await _in_thread(lambda: sender.send(manifest, weights), sender.abort)


async def _in_thread(work: Callable[[], T], abort: Callable[[], None]) -> T:
    """Blocking work on a socket; a cancelled caller aborts it and waits until it has ended."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        abort()
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()
        raise
