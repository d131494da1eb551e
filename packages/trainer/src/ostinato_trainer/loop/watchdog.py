"""`Watchdog`: says what a run waits for when nothing has happened for a while, and ends it when nothing has happened for too long.

It looks from a thread of its own, so it notices a blocked event loop as well as a wait without end. What trajectories, tools, rewards
and engines wait for has deadlines of its own, after which a trajectory is dropped or a replica replaced; the watchdog is for all
the rest. Knows phases, heartbeats, and what `ostinato_rollout.dump` tells, no trainer.
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
from ostinato_rollout.loop_place import place_of
from ostinato_trainer.config.sampling import WatchdogConfig
from ostinato_trainer.errors import StalledError
from ostinato_trainer.heartbeat import num_beats

__all__ = ["Watchdog"]

logger = logging.getLogger(__name__)

_SAMPLING = ("gen", "testing")
"""Phases in which a trajectory's progress is the run's."""
_MAX_FRAMES = 12
_MAX_SESSIONS = 3
_INTERRUPT_S = 1.0
_MIN_BLOCKED_S = 0.5
"""Seconds in which even an event loop that waits may not get its turn on a busy machine."""
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
        self._blocked_s = max(_MIN_BLOCKED_S, 4 * self._poll_s)
        self._phases: list[_Phase] = []
        self._num_changes = 0
        self._last_beat = time.monotonic()
        self._done = threading.Event()
        self._error: StalledError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[object] | None = None
        self._thread_of_loop = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The run is in this phase, within the one that it was in; from any thread."""
        phase = _Phase(name)
        self._phases.append(phase)
        self._num_changes += 1
        try:
            yield
        finally:
            self._phases.remove(phase)  # not the last one, where a thread that was left behind comes to its end
            self._num_changes += 1

    def progress(self) -> tuple[object, ...]:
        """What changes when something has happened: the phase, a pass through a model, and in sampling what trajectories do."""
        phase = self._phase()
        told = (self._num_changes, phase, num_beats())
        seen = _safe_dump() if phase in _SAMPLING else None
        if seen is None:
            return told
        done = sum(scheduler.num_done for scheduler in seen.schedulers)
        return (*told, done, len(seen.sessions), sum(session.num_tokens for session in seen.sessions))

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
        standstill, warn_after_s = Standstill(longest_look_s=2 * self._poll_s), config.warn_after_s
        while not done.wait(self._poll_s):
            self._ask_for_beat()
            quiet_s = standstill.look(time.monotonic(), self.progress())
            if not quiet_s:
                warn_after_s = config.warn_after_s
                continue
            if config.fail_after_s is not None and quiet_s >= config.fail_after_s:
                self._fail(quiet_s, done)
                return
            if warn_after_s is not None and quiet_s >= warn_after_s:
                warn_after_s *= 2
                logger.warning("%s\n%s", self._sentence(quiet_s), _report())

    def _phase(self) -> str:
        phases = self._phases[-1:]
        return phases[0].name if phases else "no phase"

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
        loop = f"; {self._blocked_text()}" if self._is_blocked() else ""
        where = " in ".join(phase.name for phase in reversed(self._phases)) or "no phase"
        waits_for = _waits_for(is_sampling=self._phase() in _SAMPLING)
        return f"nothing has happened for {quiet_s:.1f} s, since {since}, in {where}{loop}; {waits_for}"

    def _still_s(self) -> float:
        return time.monotonic() - self._last_beat

    def _blocked_text(self) -> str:
        """How long the event loop has stood still, and in what: the task has a trajectory's name where an agent does not suspend."""
        assert self._loop is not None
        place = place_of(self._loop, self._thread_of_loop)
        return f"the event loop has stood still for {self._still_s():.1f} s{f' in {place}' if place else ''}"

    def _is_blocked(self) -> bool:
        """Whether the event loop does not answer."""
        return self._still_s() > self._blocked_s

    def _fail(self, quiet_s: float, done: threading.Event) -> None:
        """End the run: by cancellation, else by an interrupt, else with the process."""
        limit_s = self._config.fail_after_s
        self._error = StalledError(
            f"a run must make progress within trainer.watchdog.fail_after_s={limit_s:g} s, but {self._sentence(quiet_s)}; the log has"
            " the stacks of all threads; find what hangs, or raise the limit"
        )
        logger.error("%s\n%s", self._error, _report())
        assert self._loop is not None
        with suppress(RuntimeError):  # it was closed in this moment, and the run is over
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


class _Phase:
    """One stay in a phase; equal to no other."""

    def __init__(self, name: str) -> None:
        self.name = name


class Standstill:
    """How long there has been no progress, as far as somebody was there to see it.

    Args:
        longest_look_s: What one look may add. The time in which the whole process was stopped, as by Ctrl-Z, is nobody's standstill.
    """

    def __init__(self, *, longest_look_s: float) -> None:
        self._longest_look_s = longest_look_s
        self._last: tuple[object, ...] | None = None
        self._looked, self._quiet_s = 0.0, 0.0

    def look(self, now: float, progress: tuple[object, ...]) -> float:
        """Seconds since the progress was last another one; 0 where it is now, and for the first look."""
        if progress == self._last:
            self._quiet_s += min(now - self._looked, self._longest_look_s)
        else:
            self._last, self._quiet_s = progress, 0.0
        self._looked = now
        return self._quiet_s


def _waits_for(*, is_sampling: bool) -> str:
    """In a few words, what has lasted longest: of engines, and in sampling of trajectories.

    Conversations come last and some at once: one of them may be of an agent that was given up and left behind.
    """
    seen = _safe_dump()
    if seen is None:
        return "what it waits for could not be told"
    waits = [operation.text() for pool in seen.pools for operation in pool.operations[:1]]
    if is_sampling:
        waits += [
            f"item {place} under way for {seconds:.1f} s"
            for scheduler in seen.schedulers
            for place, seconds in sorted(scheduler.under_way.items(), key=lambda item: -item[1])[:1]
        ]
        waits += [session.text() for session in seen.sessions[:_MAX_SESSIONS]]
        if len(seen.sessions) > _MAX_SESSIONS:
            waits.append(f"{len(seen.sessions) - _MAX_SESSIONS} more sessions")
    if waits:
        return f"it waits for: {'; '.join(waits)}"
    return "no trajectory and no engine is waited for" if is_sampling else "no engine is waited for"


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
