"""Turns a blocking step function into an asyncio loop that runs while there is work, and only then.

Invariant: steps and control operations exclude each other through `lock`, and both belong to one event loop. Steps run
in one worker thread, or inline on the event loop. Knows no requests.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from ostinato_engines.errors import EngineInputError

R = TypeVar("R")
T = TypeVar("T")

_QUIET_TICKS = 16
"""Inline, a batch is closed once so many turns of the event loop brought no request."""
_MAX_TICKS = 256
"""A batch is closed after so many turns in any case."""


class StepLoop(Generic[R]):
    """Runs `step` as long as `prepare` says that there is work.

    Args:
        inline: Run steps on the event loop: what is batched together then depends on the program alone.
        has_work: Whether to start at all.
        prepare: Runs before each step, on the event loop, under the lock; False ends the loop.
        step: The blocking work.
        deliver: Takes the step's result, on the event loop, under the lock; returns whether somebody was answered.
        num_arrived: A count that grows with every arrival.
        crashed: Takes what `step` raised; the loop has ended then.
    """

    def __init__(
        self,
        *,
        inline: bool,
        has_work: Callable[[], bool],
        prepare: Callable[[], bool],
        step: Callable[[], R],
        deliver: Callable[[R], bool],
        num_arrived: Callable[[], int],
        crashed: Callable[[BaseException], None],
    ) -> None:
        self._inline = inline
        self._has_work = has_work
        self._prepare = prepare
        self._step = step
        self._deliver = deliver
        self._num_arrived = num_arrived
        self._crashed = crashed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._task: asyncio.Task[None] | None = None
        self._step_ended = asyncio.Event()
        self._num_wanting = 0
        self._disturbed = False
        self.lock = asyncio.Lock()

    @property
    def undisturbed(self) -> bool:
        """Whether a step in the worker thread may be followed by another without a look at the event loop."""
        return not (self._inline or self._num_wanting or self._disturbed)

    def disturb(self) -> None:
        """Something changed that the next `prepare` must see soon."""
        self._disturbed = True

    @asynccontextmanager
    async def between_steps(self) -> AsyncGenerator[None, None]:
        """Holds the lock, after at most one more step."""
        self._num_wanting += 1
        try:
            await self.lock.acquire()
        finally:
            self._num_wanting -= 1
        try:
            yield
        finally:
            self.lock.release()

    def bind(self) -> None:
        """Belongs to the running event loop from now on; another may take over once the first has no work.

        Raises:
            EngineInputError: Two event loops at a time.
        """
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._loop is not None and not self._loop.is_closed() and self._task is not None and not self._task.done():
            raise EngineInputError("server must be used from one event loop at a time, got a second; await the first")
        self._loop = loop
        self._task = None
        self._step_ended = asyncio.Event()
        self.lock = asyncio.Lock()

    def wake(self) -> None:
        """Starts the loop if there is work and it does not run."""
        if (self._task is None or self._task.done()) and self._has_work():
            self._task = asyncio.get_running_loop().create_task(self._drive(), name="ostinato-engine")

    async def next_step(self) -> None:
        """Waits until the step after this one, or the loop, has ended."""
        await self._step_ended.wait()

    async def run(self, work: Callable[[], T], *, on_cancel: Callable[[], object] | None = None) -> T:
        """Runs blocking work inline or in the worker thread; a cancelled caller still waits until it has ended."""
        if self._inline:
            return work()
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="ostinato-engine")
        future = asyncio.get_running_loop().run_in_executor(self._executor, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if on_cancel is not None:
                on_cancel()
            await asyncio.wait([future])
            future.exception()
            raise

    async def close(self) -> None:
        """Waits for the loop to end, which `prepare` must bring about, and frees the thread."""
        if self._task is not None:
            await asyncio.wait([self._task])
        if self._executor is not None:
            self._executor.shutdown(wait=False)
            self._executor = None

    async def _drive(self) -> None:
        try:
            quiet_ticks = _QUIET_TICKS if self._inline else 1
            while True:
                await self._settle(quiet_ticks)
                async with self.lock:
                    self._disturbed = False
                    if not self._prepare():
                        return
                    answered = self._deliver(await self.run(self._step))
                quiet_ticks = _QUIET_TICKS if self._inline and answered else 1
                self._announce()
        except asyncio.CancelledError:
            raise
        # The boundary of the loop: whoever waits learns of it through `crashed`.
        except BaseException as error:
            self._crashed(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._announce()

    async def _settle(self, quiet_ticks: int) -> None:
        """Lets callers that were just answered, or are about to start, put their requests into this batch."""
        quiet = 0
        for _ in range(_MAX_TICKS):
            if quiet >= quiet_ticks:
                return
            before = self._num_arrived()
            await asyncio.sleep(0)
            if self._num_arrived() != before:
                quiet_ticks, quiet = _QUIET_TICKS if self._inline else 1, 0
            else:
                quiet += 1

    def _announce(self) -> None:
        self._step_ended.set()
        self._step_ended = asyncio.Event()
