"""Work under bounded concurrency, results in the order of the items. Knows no agent, no reward and no server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from ostinato_rollout.activity import SchedulerActivity
from ostinato_rollout.diagnostics import ago, discard, log_dump, register
from ostinato_rollout.errors import RequestTimeoutError, SessionInputError
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
        self,
        items: Iterable[Item],
        run_one: Callable[[Item], Awaitable[Result]],
        *,
        concurrency: int,
        item_timeout_s: float | None = None,
    ) -> list[Result | Failure]:
        """Return the result of `run_one` for each item, in the order of the items, whatever finishes first.

        Args:
            items: What there is to do.
            run_one: Does it for one item.
            concurrency: Items that are under way at a time, at most.
            item_timeout_s: Longest time that one item may take; a longer one is cancelled and becomes a Failure. None: what
                `run_one` does has deadlines of its own.

        Raises:
            SessionInputError: `concurrency` or `item_timeout_s` is not positive.
        """
        if concurrency < 1:
            raise SessionInputError(f"concurrency must be at least 1, got {concurrency}; 1 runs one after the other")
        if item_timeout_s is not None and not item_timeout_s > 0:
            raise SessionInputError(f"item_timeout_s must be positive, got {item_timeout_s}; None sets no deadline")
        results: list[Result | Failure] = []
        places = asyncio.Semaphore(concurrency)
        progress = _Progress()

        async def one(index: int, item: Item) -> None:
            try:
                results[index] = await _within(item_timeout_s, run_one(item), f"item {index}", progress)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                results[index] = Failure.from_error(error, f"item {index}", kind=FailureKind.CANCELLED)
            except Exception as error:
                logger.exception("item %d failed", index)
                results[index] = Failure.from_error(error, f"item {index}")

        def ended(index: int) -> None:
            progress.end(index)
            places.release()

        register(progress)
        try:
            async with asyncio.TaskGroup() as group:
                for index, item in enumerate(items):
                    await places.acquire()
                    results.append(Failure(f"item {index}", FailureKind.CANCELLED, "its task was cancelled"))
                    progress.begin(index)
                    group.create_task(one(index, item)).add_done_callback(lambda _, index=index: ended(index))
        finally:
            discard(progress)
        return results


class _Progress:
    """What one run is doing."""

    def __init__(self) -> None:
        self.num_done = 0
        self.last_end = time.monotonic()
        self._began: dict[int, float] = {}

    def begin(self, index: int) -> None:
        self._began[index] = time.monotonic()

    def end(self, index: int) -> None:
        del self._began[index]
        self.num_done += 1
        self.last_end = time.monotonic()

    def activity(self) -> SchedulerActivity:
        now = time.monotonic()
        return SchedulerActivity(
            num_done=self.num_done,
            under_way={index: now - began for index, began in list(self._began.items())},
            idle_s=now - self.last_end,
        )


async def _within(timeout_s: float | None, work: Awaitable[Result], what: str, progress: _Progress) -> Result:
    """Await `work`, within a deadline if there is one."""
    if timeout_s is None:
        return await work
    began, deadline = time.monotonic(), asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await work
    except TimeoutError as error:
        if not deadline.expired():
            raise
        message = (
            f"{what} must end within {timeout_s:g} s, got no result; it began {ago(began)}, last progress: {progress.num_done}"
            f" other items ended, the last one {ago(progress.last_end)}; raise the limit or find what hangs"
        )
        log_dump(message)
        raise RequestTimeoutError(message) from error
