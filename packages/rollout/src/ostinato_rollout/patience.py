"""Deadlines that hold whatever the other side makes of a cancellation, and that a standing event loop does not use up.

A trainer that computes on the event loop lets it stand for minutes; answers that arrived meanwhile are read only afterwards.
So a wait is made of slices: while the loop stands, no more than one of them passes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from ostinato_rollout.errors import RolloutError

T = TypeVar("T")

_NUM_SLICES = 10
GRACE_S = 10.0
"""For what was cancelled to end; after that it is left to itself."""


class DeadlinePassedError(RolloutError, TimeoutError):
    """Work has not ended within its deadline; no TimeoutError that the work itself may raise is of this class."""


async def done_within(task: asyncio.Future[Any], limit_s: float) -> bool:
    """Wait until `task` is done; False: it is not, after `limit_s` seconds in which the event loop ran."""
    for _ in range(_NUM_SLICES):
        done, _ = await asyncio.wait([task], timeout=limit_s / _NUM_SLICES)
        if done:
            return True
    return False


async def rest(seconds: float) -> None:
    """Sleep for so many seconds in which the event loop runs."""
    for _ in range(_NUM_SLICES):
        await asyncio.sleep(seconds / _NUM_SLICES)


async def result_within(work: Awaitable[T], limit_s: float) -> T:
    """Return what `work` returns; it is cancelled at the deadline, or with the caller, and then has a while to end.

    Raises:
        DeadlinePassedError: The deadline has passed; `work` may go on, if it makes nothing of being cancelled.
        CancelledError: The caller was cancelled, or `work` cancelled itself.
    """
    task = asyncio.ensure_future(work)
    try:
        if await done_within(task, limit_s):
            return task.result()
    except asyncio.CancelledError:
        if not task.done():
            await end(task)
        raise
    await end(task)
    raise DeadlinePassedError(f"work must end within {limit_s:g} s, got no end; raise the deadline")


async def end(task: asyncio.Future[Any]) -> bool:
    """Cancel `task` and give it a while to end; False: it goes on, and nobody will look at what becomes of it."""
    task.cancel()
    task.add_done_callback(_look_at)
    return bool((await asyncio.wait([task], timeout=GRACE_S))[0])


async def to_its_end(work: Awaitable[T]) -> T:
    """Return what `work` returns; a caller who is cancelled once waits for it all the same."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await asyncio.wait([task])
        _look_at(task)
        raise


def _look_at(task: asyncio.Future[Any]) -> None:
    """Take notice of a failure that nobody waits for."""
    if not task.cancelled():
        task.exception()
