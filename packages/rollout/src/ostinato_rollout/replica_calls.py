"""Calls to one replica whose failure is an answer: whether it is gone, and that a conversation is over or has moved."""

from __future__ import annotations

import asyncio
import logging

from ostinato_engines import AsyncServerBase, EngineState
from ostinato_rollout.conversation import Conversation, num_cancellations
from ostinato_rollout.patience import result_within

logger = logging.getLogger(__name__)

_HEALTH_TIMEOUT_S = 30.0
_LEAVING_TIMEOUT_S = 5.0
GONE = (EngineState.FAILED, EngineState.CLOSED)
"""States that an engine does not come back from."""


async def is_gone(replica: int, server: AsyncServerBase) -> bool:
    """Tell whether a replica has failed for good; one that does not tell its health has."""
    try:
        return (await result_within(server.health(), _HEALTH_TIMEOUT_S)).state in GONE
    # Whatever a replica does instead of telling its health, it is not there.
    except (Exception, asyncio.CancelledError) as silence:
        if isinstance(silence, asyncio.CancelledError) and num_cancellations():
            raise
        logger.warning("replica %d does not tell its health: %s: %s", replica, type(silence).__name__, silence)
        return True


async def free_at(replica: int, server: AsyncServerBase, conversation: Conversation) -> None:
    """Tell one replica that a conversation is over; what goes wrong there is logged."""
    request_id = conversation.request_id
    try:
        await server.release(request_id)
    except (Exception, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and num_cancellations():
            raise
        why = f"{type(error).__name__}: {error}"
        logger.warning("replica %s failed to release request %s: %s", replica, request_id, why)
    conversation.visited.discard(replica)


async def leave(replica: int, server: AsyncServerBase, conversation: Conversation) -> None:
    """Have a replica free what it keeps of a conversation that moves on; one that does not answer is told again at the end."""
    deadline = asyncio.timeout(_LEAVING_TIMEOUT_S)
    try:
        async with deadline:
            await free_at(replica, server, conversation)
    except TimeoutError:
        if not deadline.expired():
            raise
        logger.warning(
            "replica %d must release request %s within %g s, got no answer; the conversation goes on elsewhere",
            replica,
            conversation.request_id,
            _LEAVING_TIMEOUT_S,
        )
