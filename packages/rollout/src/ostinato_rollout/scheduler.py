"""Work under bounded concurrency, results in the order of the items. Knows no agent, no reward and no server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from ostinato_rollout.errors import SessionInputError
from ostinato_rollout.failure import Failure, FailureKind

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")


class RolloutScheduler:
    """Runs one coroutine per item, at most `concurrency` at a time.

    Items are taken one by one as places get free, each in a task (and context) of its own. An item that raises becomes
    a Failure in its place, with the traceback logged once; the others go on. Cancelling `run` cancels what is under way.
    """

    async def run(
        self, items: Iterable[Item], run_one: Callable[[Item], Awaitable[Result]], *, concurrency: int
    ) -> list[Result | Failure]:
        """Return the result of `run_one` for each item, in the order of the items, whatever finishes first.

        Raises:
            SessionInputError: `concurrency` is not positive.
        """
        if concurrency < 1:
            raise SessionInputError(f"concurrency must be at least 1, got {concurrency}; 1 runs one after the other")
        results: list[Result | Failure] = []
        places = asyncio.Semaphore(concurrency)

        async def one(index: int, item: Item) -> None:
            try:
                results[index] = await run_one(item)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                results[index] = Failure.from_error(error, f"item {index}", kind=FailureKind.CANCELLED)
            except Exception as error:
                logger.exception("item %d failed", index)
                results[index] = Failure.from_error(error, f"item {index}")

        async with asyncio.TaskGroup() as group:
            for index, item in enumerate(items):
                await places.acquire()
                results.append(Failure(f"item {index}", FailureKind.CANCELLED, "its task was cancelled"))
                group.create_task(one(index, item)).add_done_callback(lambda _: places.release())
        return results
