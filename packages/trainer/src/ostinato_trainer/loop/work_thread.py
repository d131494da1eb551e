"""`WorkThread`: computing beside the event loop, one call at a time, in one thread for the whole run.

Invariant: no two calls overlap. A call whose wait is cancelled is interrupted between two steps of the interpreter, as Ctrl-C does
it to a program without an event loop, and has ended before the cancellation goes on; one that cannot be interrupted is left behind
after a while, and nothing else is let into the thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ostinato_trainer.errors import BackendError

__all__ = ["WorkThread"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_NOT_STARTED, _RUNNING, _ENDED = range(3)


class _Call:
    """One call, and who waits for it."""

    def __init__(self, function: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self.function, self.loop, self.context = function, loop, contextvars.copy_context()
        self.num_host_threads = torch.get_num_threads()
        self.outcome: asyncio.Future[Any] = loop.create_future()
        self.stage = _NOT_STARTED

    def settle(self, result: Any, error: BaseException | None) -> None:
        """Tell who waits; from any thread."""

        def tell() -> None:
            if self.outcome.done():
                return
            if error is None:
                self.outcome.set_result(result)
            elif isinstance(error, StopIteration):
                self.outcome.set_exception(RuntimeError(f"a call in the training thread raised {error!r}"))
            else:
                self.outcome.set_exception(error)
                self.outcome.exception()  # it counts as seen where nobody waits any more

        try:
            self.loop.call_soon_threadsafe(tell)
        except RuntimeError:
            logger.debug("a call of the training thread ended after its event loop")


class WorkThread:
    """A daemon thread, started with the first call: what cannot be interrupted does not keep the process from ending.

    Args:
        name: Of the thread, for stacks.
        interrupt_grace_s: Seconds that a call may go on after it was interrupted; a step of a library is not interrupted within.
    """

    def __init__(self, name: str = "training", *, interrupt_grace_s: float = 30.0) -> None:
        self._name, self._interrupt_grace_s = name, interrupt_grace_s
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._current: _Call | None = None
        self._is_closed = False

    async def run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call `function` in the thread, in a copy of this context and with as many of torch's host threads, and return what it returns.

        Raises:
            BackendError: Another call is under way, or the thread is closed.
            Exception: What the function raised.
        """
        if self._is_closed or (self._current is not None and not self._current.outcome.done()):
            state = "is closed" if self._is_closed else "still computes something else"
            raise BackendError(f"the training thread must be free, but it {state}; wait for one call before the next")
        call = _Call(lambda: function(*arguments), asyncio.get_running_loop())
        self._current = call
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._calls.put(call)
        try:
            return await asyncio.shield(call.outcome)
        except BaseException:
            if not call.outcome.done():
                await self._interrupt(call)
            raise

    def close(self) -> None:
        """Let the thread end with the call that it is at; no further one is taken."""
        self._is_closed = True
        self._calls.put(None)

    async def _interrupt(self, call: _Call) -> None:
        """Interrupt a call and wait for its end, so long as it may take."""
        with self._lock:
            if call.stage == _NOT_STARTED:
                call.stage = _ENDED
            elif call.stage == _RUNNING:
                _raise_in(self._thread, KeyboardInterrupt)
        if call.stage == _ENDED and not call.outcome.done():
            call.outcome.cancel()
            return
        await asyncio.wait([call.outcome], timeout=self._interrupt_grace_s)
        if not call.outcome.done():
            logger.error(
                "the training thread could not be interrupted within %g s and is left behind; it computes in a library",
                self._interrupt_grace_s,
            )

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                self._do(call)
            except KeyboardInterrupt as error:  # it came when the call was at its end already
                self._finish(call)
                call.settle(None, error)

    def _do(self, call: _Call) -> None:
        with self._lock:
            if call.stage == _ENDED:
                return
            call.stage = _RUNNING
        result, error = None, None
        try:
            torch.set_num_threads(call.num_host_threads)  # libraries below torch count for each thread on its own
            result = call.context.run(call.function)
        except BaseException as raised:
            error = raised
        self._finish(call)
        call.settle(result, error)

    def _finish(self, call: _Call) -> None:
        with self._lock:
            call.stage = _ENDED


def _raise_in(thread: threading.Thread | None, kind: type[BaseException]) -> None:
    """Raise an exception in another thread, before its next step in the interpreter."""
    assert thread is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(kind))
