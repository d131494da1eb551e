"""One event loop in a thread of its own, in which all connections to servers live.

A connection must be entered and left by the same task, outlives the trajectory that first needed it, and is wanted by
`load_tools`, which is synchronous, as much as by event loops that come and go: so it belongs to none of them. Cancelling the
caller cancels the coroutine here. The thread starts on first use and ends with the process.
"""

import asyncio
import atexit
import concurrent.futures
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from ostinato_tools.errors import ToolInfrastructureError

_T = TypeVar("_T")
_EXIT_TIMEOUT_S = 10.0

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_loop_pid = 0
_exiting = False
_closers: list[Callable[[], Awaitable[None]]] = []


def on_exit(closer: Callable[[], Awaitable[None]]) -> None:
    """Have `closer` awaited in the loop when the process ends."""
    _closers.append(closer)


async def run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Await `coroutine` in the background loop; cancelling this cancels it."""
    return await asyncio.wrap_future(_submit(coroutine))


def run_blocking(coroutine: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
    """Run `coroutine` in the background loop and block this thread until it ends.

    Raises:
        TimeoutError: it did not end within `timeout_s` seconds; it has been cancelled.
    """
    future = _submit(coroutine)
    try:
        return future.result(timeout_s)
    finally:
        future.cancel()  # on a timeout, or when this thread is interrupted; changes nothing once it has ended


def post(callback: Callable[[], object]) -> None:
    """Call `callback` in the background loop soon; nothing happens where there is no loop (any more)."""
    if running() and _loop is not None:
        _loop.call_soon_threadsafe(callback)


def running() -> bool:
    """Whether this process has the loop."""
    return _loop is not None and _loop_pid == os.getpid() and not _exiting


def _submit(coroutine: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
    try:
        return asyncio.run_coroutine_threadsafe(coroutine, _running_loop())
    except BaseException:
        coroutine.close()
        raise


def _running_loop() -> asyncio.AbstractEventLoop:
    global _loop, _loop_pid
    with _lock:
        if _exiting:
            raise ToolInfrastructureError("MCP servers must be used before the process ends, got a call at its exit")
        if _loop is None or _loop_pid != os.getpid():  # threads do not survive a fork
            if _loop is None:
                atexit.register(_exit)
            _loop, _loop_pid = asyncio.new_event_loop(), os.getpid()
            threading.Thread(target=_serve, args=(_loop,), name="ostinato-mcp", daemon=True).start()
        return _loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()


def _exit() -> None:
    global _exiting
    if _loop is None or _loop_pid != os.getpid():
        return
    for closer in _closers:
        try:
            run_blocking(_await(closer), _EXIT_TIMEOUT_S)
        except (TimeoutError, concurrent.futures.CancelledError):
            continue  # what must not outlive the process is killed by hooks that wait for nobody
    _exiting = True
    _loop.call_soon_threadsafe(_loop.stop)


async def _await(closer: Callable[[], Awaitable[None]]) -> None:
    await closer()


def _forget_after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # it may have been held by a thread that does not exist here


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
