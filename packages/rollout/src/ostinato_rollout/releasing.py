"""The end of a conversation: its turn is given up, and replicas free what they kept of it. Knows no place and no counter."""

from __future__ import annotations

import asyncio

from ostinato_rollout.conversation import Conversation, Stage
from ostinato_rollout.diagnostics import ago, log_dump
from ostinato_rollout.placement import Placement
from ostinato_rollout.replica_calls import free_at


async def end_conversation(conversation: Conversation, placement: Placement, limit_s: float) -> None:
    """Give up a conversation's turn, and tell the replicas in service that served it, within the deadline."""
    deadline = asyncio.timeout(limit_s)
    try:
        async with deadline:
            if conversation.is_under_way:
                await conversation.interrupt()
            conversation.enter(Stage.RELEASING)
            current = placement.conversations.get(conversation.request_id, conversation)
            if current is conversation:
                conversation.visited &= placement.servers.keys()
                await _free(conversation, placement)
            else:
                current.visited |= conversation.visited  # whoever goes on under the name will release it
    except TimeoutError:
        if not deadline.expired():
            raise
        replicas = ", ".join(map(str, sorted(conversation.visited))) or "None"
        log_dump(
            f"replica {replicas} must release request {conversation.request_id!r} within {limit_s:g} s, got no answer"
            f" since {ago(conversation.since)}; look at its log"
        )


async def _free(conversation: Conversation, placement: Placement) -> None:
    servers = placement.servers
    if len(conversation.visited) == 1:
        (replica,) = conversation.visited
        await free_at(replica, servers[replica], conversation)
    elif conversation.visited:
        await asyncio.gather(*(free_at(replica, servers[replica], conversation) for replica in conversation.visited))
