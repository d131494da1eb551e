"""`LoggerThread`: a logger with a thread of its own, so that the run neither waits for it nor ends with it.

Invariant: telling it something takes no longer than putting it into a bounded queue. What the logger raises is raised again by the
next call, for `Loggers` to report; what does not fit into the queue is dropped and counted. A logger that does not end in time is given up,
and with `end_in_time` the process does not wait for it either.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ostinato_trainer.errors import LoggerError
from ostinato_trainer.loggers.base import MetricsLogger, RunEnd

__all__ = ["LoggerThread", "end_in_time"]

logger = logging.getLogger(__name__)

_Task = Callable[[MetricsLogger], None]
_QUEUE_SIZE: Final = 1000
_OPEN_TIMEOUT_S: Final = 120.0
_CLOSE_TIMEOUT_S: Final = 60.0
_END_TIMEOUT_S: Final = 30.0

_given_up: list[threading.Thread] = []
"""Of loggers that were not closed in time; their libraries may wait for them once more while the process ends."""


class LoggerThread:
    """A logger that is opened, told and closed in one thread.

    Args:
        name: What the configuration calls the logger.
        open_logger: Makes it.
        queue_size: Steps that may wait for it.
        open_timeout_s: Seconds that making it may take.
        close_timeout_s: Seconds that it gets at the end to write out what waits.

    Raises:
        LoggerError: It cannot be made, or not in time.
    """

    def __init__(
        self,
        name: str,
        open_logger: Callable[[], MetricsLogger],
        *,
        queue_size: int = _QUEUE_SIZE,
        open_timeout_s: float = _OPEN_TIMEOUT_S,
        close_timeout_s: float = _CLOSE_TIMEOUT_S,
    ) -> None:
        self.name = name
        self.run_id: str | None = None
        self.num_dropped = 0
        """Steps that were not recorded, since too many waited."""
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._queue_size = queue_size
        self._is_given_up = False
        self._end = RunEnd.FAILED  # where nobody says how the run ends, as where the logger is ready too late
        self._error: BaseException | None = None
        self._close_timeout_s = close_timeout_s
        self._is_open = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(open_logger,), name=f"logger-{name}", daemon=True)
        self._thread.start()
        is_open = False
        try:
            is_open = self._is_open.wait(open_timeout_s)
        finally:
            if not is_open:
                self._tasks.put(None)  # should it be made after all, it is closed
        if not is_open:
            raise LoggerError(
                f"the logger {name} must be ready within {open_timeout_s:g} s, but is not; "
                f"check its server and network, or leave {name} out of trainer.logger"
            )
        self._raise_error()

    def describe(self, facts: Mapping[str, str]) -> None:
        """Put what describes the run into the queue."""
        kept = dict(facts)
        self._put(lambda inner: inner.describe(kept))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Put the metrics of a step into the queue."""
        kept = dict(metrics)
        self._put(lambda inner: inner.log(step, kept))

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Put samples of a validation into the queue."""
        kept = [dict(row) for row in rows]
        self._put(lambda inner: inner.log_generations(step, kept))

    def close(self, end: RunEnd = RunEnd.FINISHED) -> None:
        """Wait, up to the deadline, until everything is written out.

        Raises:
            LoggerError: Time was up; what waited is not recorded.
            Exception: What the logger raised.
        """
        if self.num_dropped:
            logger.warning("the logger %s has not got %d records, since too many waited", self.name, self.num_dropped)
        self._end = end
        self._tasks.put(None)
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            self._is_given_up = True
            _given_up.append(self._thread)
            num_waiting = max(0, self._tasks.qsize() - 1)  # the last only ends it
            raise LoggerError(
                f"the logger {self.name} must write out its last metrics within {self._close_timeout_s:g} s, but works on one record while"
                f" {num_waiting} more wait; they are lost there, metrics.jsonl has them where jsonl is in trainer.logger"
            )
        self._raise_error()

    def _put(self, task: _Task) -> None:
        self._raise_error()
        if self._tasks.qsize() < self._queue_size:
            self._tasks.put(task)
            return
        self.num_dropped += 1
        if self.num_dropped == 1:
            logger.warning(
                "the logger %s is slower than the run: %d records wait, further ones are dropped",
                self.name,
                self._queue_size,
            )

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self, open_logger: Callable[[], MetricsLogger]) -> None:
        inner = None
        try:
            inner = open_logger()
            self.run_id = getattr(inner, "run_id", None)
            self._is_open.set()
            while (task := self._tasks.get()) is not None and not self._is_given_up:
                task(inner)
        except BaseException as error:  # the boundary to a library's code: `Loggers` reports it
            self._error = error
        finally:
            self._is_open.set()
            if inner is not None:
                try:
                    inner.close(self._end)
                except BaseException as error:
                    self._error = self._error or error


def end_in_time(status: int, *, timeout_s: float = _END_TIMEOUT_S) -> None:
    """Where a logger was given up, see to it that the process ends within a time, whatever that logger's library still waits for.

    Args:
        status: The exit status that the process is about to end with.
        timeout_s: Seconds that ending in the usual way may take.
    """
    if not any(thread.is_alive() for thread in _given_up):
        return

    def end() -> None:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
