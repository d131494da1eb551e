"""Threads for synchronous tools: a hung tool costs one thread, never the event loop and never the end of the process.

The standard pool joins its threads at interpreter exit and is small on small machines; both would let one hung tool hold
up everything. These threads are daemons, start on demand and are used again.
"""

import asyncio
import contextvars
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ostinato_tools.deadline import ToolGone

MAX_THREADS = 512

_Job = tuple[Future, Callable[[], Any]]
_END: _Job = (Future(), lambda: None)
"""What a thread ends at."""


class DaemonThreads:
    """Runs functions in at most `max_threads` daemon threads; what comes beyond waits in order."""

    def __init__(self, max_threads: int = MAX_THREADS) -> None:
        self._max_threads = max_threads
        self._queue: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._num_threads = 0
        self._is_closed = False

    async def run(self, function: Callable[[], Any]) -> Any:
        """Run `function()` in a thread that sees the caller's context variables.

        Cancelling leaves a function that has begun to its thread and forgets its result; one that waits never begins.

        Raises:
            ToolGone: the function raised KeyboardInterrupt, which in a thread is nobody's key.
            RuntimeError: the threads are closed.
            BaseException: what else it raised.
        """
        if self._is_closed:
            raise RuntimeError("threads must be open to run something, got closed ones; make others")
        context = contextvars.copy_context()
        future: Future = Future()
        self._queue.put((future, lambda: _capture(context, function)))
        self._grow()
        value, error = await asyncio.wrap_future(future)
        if isinstance(error, KeyboardInterrupt):
            raise ToolGone("it raised KeyboardInterrupt, which is no Exception") from error
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """Let each thread end once the calls before this have ended; one that hangs stays."""
        with self._lock:
            self._is_closed = True
            num_threads, self._num_threads = self._num_threads, 0
        for _ in range(num_threads):
            self._queue.put(_END)

    def _grow(self) -> None:
        if self._idle.acquire(blocking=False):
            return
        with self._lock:
            if self._num_threads >= self._max_threads:
                return
            self._num_threads += 1
            number = self._num_threads
        threading.Thread(target=self._work, name=f"ostinato-tool-{number}", daemon=True).start()

    def _work(self) -> None:
        job = self._next()
        while (job := job or self._queue.get()) is not _END:
            future, function = job
            is_wanted = future.set_running_or_notify_cancel()
            result = function() if is_wanted else None
            del function
            # Before the result is known: a call that follows it finds this thread idle rather than starting another.
            job = self._next()
            if is_wanted:
                future.set_result(result)
            del future, result  # hold nothing of a finished call while waiting for the next

    def _next(self) -> _Job | None:
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            self._idle.release()
            return None


def _capture(context: contextvars.Context, function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    # As a value: a StopIteration set as a future's exception would leave its waiter waiting for ever.
    try:
        return context.run(function), None
    except BaseException as error:
        return None, error


_THREADS = DaemonThreads()


def _start_anew() -> None:
    global _THREADS
    _THREADS = DaemonThreads()


if hasattr(os, "register_at_fork"):  # threads do not survive a fork, a count of them would
    os.register_at_fork(after_in_child=_start_anew)


async def run_in_thread(function: Callable[[], Any]) -> Any:
    """Run `function()` in the process-wide threads for synchronous tools; see `DaemonThreads.run`."""
    return await _THREADS.run(function)
