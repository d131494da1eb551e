"""`Watchdog`: says what a run waits for when nothing has happened for a while, and ends it when nothing has happened for too long.

It looks from a thread of its own, so it notices a blocked event loop as well as a wait without end. What trajectories, tools, rewards
and engines wait for has deadlines of its own, after which a trajectory is dropped or a replica replaced; the watchdog is for all
the rest. Knows phases and what `ostinato_rollout.dump` tells, no trainer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import NoReturn

from ostinato_rollout import dump
from ostinato_rollout.activity import Dump
from ostinato_trainer.config.sampling import WatchdogConfig
from ostinato_trainer.errors import StalledError

__all__ = ["Watchdog"]

logger = logging.getLogger(__name__)

_SAMPLING = ("gen", "testing")
"""Phases in which a trajectory's progress is the run's."""
_MAX_FRAMES = 12
_INTERRUPT_S = 1.0
_EXIT_STATUS = 70


class Watchdog:
    """Watches one run.

    Args:
        config: After how many seconds it does what.
        graces_s: Seconds that the run gets to end by itself once it is cancelled, where the event loop is not blocked, and then once it is
            interrupted, before the process ends.
    """

    def __init__(self, config: WatchdogConfig, *, graces_s: tuple[float, float] = (60.0, 300.0)) -> None:
        self._config, self._graces_s = config, graces_s
        limits = [limit for limit in (config.warn_after_s, config.fail_after_s) if limit is not None]
        self._poll_s = min(1.0, min(limits, default=1.0) / 4)
        self._phases: list[str] = []
        self._num_changes = 0
        self._since = self._last_beat = time.monotonic()
        self._done = threading.Event()
        self._error: StalledError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[object] | None = None
        self._thread_of_loop = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The run is in this phase, within the one that it was in."""
        self._phases.append(name)
        self._num_changes += 1
        try:
            yield
        finally:
            self._phases.pop()
            self._num_changes += 1

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch what is done within; one thing after the other may be.

        Raises:
            StalledError: Nothing happened for `fail_after_s`.
        """
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._thread_of_loop = threading.get_ident()
        self._done, self._error, self._last_beat = threading.Event(), None, time.monotonic()
        threading.Thread(target=self._watch, args=(self._done,), name="watchdog", daemon=True).start()
        try:
            yield
            if self._error is not None:  # the end has come before the cancellation
                raise self._error
        except BaseException as error:
            if self._error is None or error is self._error:
                raise
            raise self._error from (None if isinstance(error, asyncio.CancelledError | KeyboardInterrupt) else error)
        finally:
            self._done.set()
            if self._error is not None:
                await self._take_back_cancellations()

    async def _take_back_cancellations(self) -> None:
        assert self._task is not None
        with suppress(asyncio.CancelledError):  # one that was asked for and has not come yet comes here
            await asyncio.sleep(0)
        while self._task.cancelling():
            self._task.uncancel()

    def _watch(self, done: threading.Event) -> None:
        config = self._config
        last, self._since, warn_after_s = self._progress(), time.monotonic(), config.warn_after_s
        while not done.wait(self._poll_s):
            self._ask_for_beat()
            now, progress = time.monotonic(), self._progress()
            if progress != last:
                last, self._since, warn_after_s = progress, now, config.warn_after_s
                continue
            quiet_s = now - self._since
            if config.fail_after_s is not None and quiet_s >= config.fail_after_s:
                self._fail(quiet_s, done)
                return
            if warn_after_s is not None and quiet_s >= warn_after_s:
                warn_after_s *= 2
                logger.warning("%s\n%s", self._sentence(quiet_s), _report())

    def _progress(self) -> tuple[object, ...]:
        """What changes when something has happened."""
        phase = self._phase()
        if phase not in _SAMPLING:
            return (self._num_changes, phase)
        seen = _safe_dump()
        if seen is None:
            return (self._num_changes, phase)
        done = sum(scheduler.num_done for scheduler in seen.schedulers)
        return (
            self._num_changes,
            phase,
            done,
            len(seen.sessions),
            sum(session.num_tokens for session in seen.sessions),
        )

    def _phase(self) -> str:
        phases = self._phases[-1:]
        return phases[0] if phases else "no phase"

    def _ask_for_beat(self) -> None:
        """The event loop says that it is alive, as soon as it is."""

        def beat() -> None:
            self._last_beat = time.monotonic()

        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(beat)
        except RuntimeError:  # it is closed, and the run over
            self._done.set()

    def _sentence(self, quiet_s: float) -> str:
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - quiet_s))
        loop = f"; the event loop has stood still for {self._still_s():.1f} s" if self._is_blocked() else ""
        where = " in ".join(reversed(self._phases)) or "no phase"
        return f"nothing has happened for {quiet_s:.1f} s, since {since}, in {where}{loop}; {_waits_for()}"

    def _still_s(self) -> float:
        return time.monotonic() - self._last_beat

    def _is_blocked(self) -> bool:
        """Whether the event loop does not answer."""
        return self._still_s() > 4 * self._poll_s

    def _fail(self, quiet_s: float, done: threading.Event) -> None:
        """End the run: by cancellation, else by an interrupt, else with the process."""
        limit_s = self._config.fail_after_s
        self._error = StalledError(
            f"a run must make progress within trainer.watchdog.fail_after_s={limit_s:g} s, but {self._sentence(quiet_s)}; the log has"
            " the stacks of all threads; find what hangs, or raise the limit"
        )
        logger.error("%s\n%s", self._error, _report())
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._cancel, done)
        if done.wait(min(_INTERRUPT_S, self._graces_s[0]) if self._is_blocked() else self._graces_s[0]):
            return
        logger.error("the run was cancelled and has not ended; it is interrupted\n%s", _stacks())
        self._interrupt(done)
        if not done.wait(self._graces_s[1]):
            _end_process()

    def _interrupt(self, done: threading.Event) -> None:
        """As Ctrl-C; again where the event loop still stands still, since the first one may have asked for a cancellation only."""
        if self._thread_of_loop != threading.main_thread().ident or not hasattr(signal, "pthread_kill"):
            return
        for _ in range(2):
            asked = time.monotonic()
            self._ask_for_beat()
            signal.pthread_kill(self._thread_of_loop, signal.SIGINT)
            if done.wait(_INTERRUPT_S) or self._last_beat >= asked:
                return

    def _cancel(self, done: threading.Event) -> None:
        if self._task is not None and not done.is_set():
            self._task.cancel()


def _waits_for() -> str:
    """In a few words, what has lasted longest."""
    seen = _safe_dump()
    if seen is None:
        return "what it waits for could not be told"
    waits = [operation.text() for pool in seen.pools for operation in pool.operations[:1]]
    waits += [session.text() for session in seen.sessions[:1]]
    waits += [
        f"item {place} under way for {seconds:.1f} s"
        for scheduler in seen.schedulers
        for place, seconds in sorted(scheduler.under_way.items(), key=lambda item: -item[1])[:1]
    ]
    return f"it waits for: {'; '.join(waits)}" if waits else "no trajectory and no engine is waited for"


def _safe_dump() -> Dump | None:
    """A dump from beside the event loop, which may change what is being read: then it is tried again."""
    for _ in range(3):
        try:
            return dump()
        except RuntimeError:
            continue
    return None


def _report() -> str:
    seen = _safe_dump()
    return f"{'' if seen is None else seen.text()}\n{_stacks()}"


def _stacks() -> str:
    """Where each thread is; the innermost frames of it."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident != own:
            lines = traceback.format_stack(frame)[-_MAX_FRAMES:]
            parts.append(f"thread {names.get(ident, ident)}:\n{''.join(lines)}")
    return "\n".join(parts)


def _end_process() -> NoReturn:
    """Nothing else is left: a call into a library that neither ends nor can be interrupted would keep the process for ever."""
    logger.critical("the run could not be interrupted; the process ends with status %d", _EXIT_STATUS)
    logging.shutdown()
    os._exit(_EXIT_STATUS)
