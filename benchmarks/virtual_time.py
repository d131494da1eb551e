"""An event loop whose clock stands still while anything can run, and jumps to the next timer when nothing can.

All that asyncio times (sleeps, deadlines, calls at a time) then takes no time at all, in the same order as always. For programs that
wait for nothing else: no sockets, threads or processes.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class NothingLeftError(RuntimeError):
    """The program waits, and no timer will ever wake it."""


class _Clock(selectors.SelectSelector):
    """Lets the time that it should wait pass at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingLeftError(
                f"something must be able to happen, got only waits at {self.now:g} s; who forgot whom?"
            )
        self.now += max(timeout, 0.0)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Begins at 0 s."""

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        """Return the virtual time, in seconds."""
        return self._clock.now


def run_in_virtual_time(program: Coroutine[Any, Any, Result]) -> Result:
    """Run a program to its end, as `asyncio.run` does.

    Raises:
        NothingLeftError: It waits for what never comes.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(program)
