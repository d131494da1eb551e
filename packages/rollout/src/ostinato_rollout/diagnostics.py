"""What everybody in this process is doing: on request, on a signal, and in the log when a deadline has passed.

Clients, pools, schedulers and sessions register themselves and are listed while they live.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from ostinato_rollout.activity import ClientActivity, Dump, PoolActivity, SchedulerActivity, SessionActivity

logger = logging.getLogger(__name__)

_QUIET_S = 30.0


class Reporter(Protocol):
    """Somebody who can say what it is doing."""

    def activity(self) -> PoolActivity | ClientActivity | SchedulerActivity | SessionActivity:
        """Return what it is doing now."""
        ...


_reporters: weakref.WeakSet[Reporter] = weakref.WeakSet()
_last_logged = -_QUIET_S


def register(reporter: Reporter) -> None:
    """Include `reporter` in dumps while it lives, or until it is discarded."""
    _reporters.add(reporter)


def discard(reporter: Reporter) -> None:
    """Leave `reporter` out of dumps."""
    _reporters.discard(reporter)


def dump() -> Dump:
    """Return what every pool, client, scheduler and session of this process is doing now."""
    result = Dump(at=time.time(), pools=[], clients=[], schedulers=[], sessions=[])
    for reporter in list(_reporters):
        match reporter.activity():
            case PoolActivity() as pool:
                result.pools.append(pool)
            case ClientActivity() as client:
                result.clients.append(client)
            case SchedulerActivity() as scheduler:
                result.schedulers.append(scheduler)
            case SessionActivity() as session:
                result.sessions.append(session)
    result.sessions.sort(key=lambda session: -session.since_s)
    return result


def log_dump(reason: str) -> None:
    """Log `reason` as an error, with what everybody is doing; when many deadlines pass at once, only with the first."""
    global _last_logged
    if time.monotonic() - _last_logged < _QUIET_S:
        logger.error("%s", reason)
        return
    _last_logged = time.monotonic()
    logger.error("%s\n%s", reason, dump().text())


@contextmanager
def dumps_on_signal(number: int | None = None) -> Iterator[None]:
    """Within this context, log a dump whenever the process gets a signal, as from `kill -USR1 PID`.

    Args:
        number: Which; SIGUSR1 where there is one. Elsewhere, and in other threads than the main one, nothing happens.
    """
    chosen = number if number is not None else getattr(signal, "SIGUSR1", None)
    if chosen is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(chosen, _log_on_signal)
    try:
        yield
    finally:
        signal.signal(chosen, before)


def _log_on_signal(*_: object) -> None:
    """Log a dump in the midst of whatever runs, which goes on as if nothing had been."""
    try:
        logger.warning("what everybody is doing\n%s", dump().text())
    # It would be raised in the midst of anything; somebody may have been interrupted with his books half written.
    except Exception:
        logger.exception("a dump failed; ask again")


def ago(moment: float) -> str:
    """Return a moment of `time.monotonic` for people: the time of day, and how long ago that is."""
    seconds = time.monotonic() - moment
    return f"{time.strftime('%H:%M:%S', time.localtime(time.time() - seconds))} ({seconds:.1f} s ago)"
