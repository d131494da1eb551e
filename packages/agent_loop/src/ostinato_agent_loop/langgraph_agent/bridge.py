"""The way into one event loop from the threads and loops in which a graph may run its parts.

Invariant: a call ends when the bridge is closed, at the latest, and nothing begins afterwards. Knows no graph.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ostinato_agent_loop.errors import GraphStateError

Result = TypeVar("Result")


class LoopBridge:
    """Runs coroutines on the event loop in which it was made."""

    def __init__(self) -> None:
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._calls: dict[asyncio.Future[None], asyncio.Task] = {}  # by their end
        self._is_closed = False

    async def call(self, function: Callable[..., Coroutine[Any, Any, Result]], *arguments: Any) -> Result:
        """Await `function(*arguments)` on the bridge's loop, from there or from another loop.

        Raises:
            GraphStateError: The bridge is closed.
        """
        if asyncio.get_running_loop() is self._loop:
            return await self._run(function, arguments)
        self._check_open()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._run(function, arguments), self._loop))

    def call_blocking(self, function: Callable[..., Coroutine[Any, Any, Result]], *arguments: Any) -> Result:
        """Wait in another thread for `function(*arguments)`, which runs on the bridge's loop.

        Raises:
            GraphStateError: The bridge is closed, or this is the loop's own thread, which would wait for itself.
        """
        if threading.get_ident() == self._thread:
            raise GraphStateError(
                "invoke and stream must be called in a thread beside the event loop, got a call in the loop's own thread,"
                " which would wait for itself; await ainvoke or astream"
            )
        self._check_open()
        return asyncio.run_coroutine_threadsafe(self._run(function, arguments), self._loop).result()

    async def close(self) -> None:
        """Cancel what is under way and wait for its end. Closing again does nothing more.

        What is waited for are the calls, not the tasks that made them: whoever goes on after a cancellation gets no
        further call.
        """
        self._is_closed = True
        for task in self._calls.values():
            task.cancel()
        if self._calls:
            await asyncio.wait(list(self._calls))

    async def _run(self, function: Callable[..., Coroutine[Any, Any, Result]], arguments: tuple) -> Result:
        self._check_open()
        task = asyncio.current_task()
        assert task is not None
        ended = self._loop.create_future()
        self._calls[ended] = task
        try:
            return await function(*arguments)
        finally:
            del self._calls[ended]
            ended.set_result(None)

    def _check_open(self) -> None:
        if self._is_closed:
            raise GraphStateError(
                "a graph's model and tools must be used while its trajectory runs, got a call after its end;"
                " await everything that the graph starts"
            )
