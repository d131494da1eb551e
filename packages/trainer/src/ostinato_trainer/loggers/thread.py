"""`LoggerThread`: a logger with a thread of its own, so that the run neither waits for it nor ends with it.

Invariant: telling it something takes no longer than putting it into a bounded queue. What the logger raises is raised again by the
next call, for `Loggers` to report; what does not fit into the queue is dropped and counted.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ostinato_trainer.errors import LoggerError
from ostinato_trainer.loggers.base import MetricsLogger

__all__ = ["LoggerThread"]

logger = logging.getLogger(__name__)

_Task = Callable[[MetricsLogger], None]
_QUEUE_SIZE: Final = 1000
_OPEN_TIMEOUT_S: Final = 120.0
_CLOSE_TIMEOUT_S: Final = 60.0


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
        self._tasks: queue.Queue[_Task | None] = queue.Queue(queue_size)
        self._error: BaseException | None = None
        self._close_timeout_s = close_timeout_s
        self._is_open = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(open_logger,), name=f"logger-{name}", daemon=True)
        self._thread.start()
        if not self._is_open.wait(open_timeout_s):
            self._tasks.put(None)  # should it be made after all, it is closed
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

    def close(self) -> None:
        """Wait, up to the deadline, until everything is written out.

        Raises:
            LoggerError: Time was up; what waited is not recorded.
            Exception: What the logger raised.
        """
        end = time.monotonic() + self._close_timeout_s
        if self.num_dropped:
            logger.warning("the logger %s has not got %d records, since too many waited", self.name, self.num_dropped)
        with contextlib.suppress(queue.Full):
            self._tasks.put(None, timeout=self._close_timeout_s)
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            raise LoggerError(
                f"the logger {self.name} must write out its last metrics within {self._close_timeout_s:g} s, but {self._tasks.qsize()}"
                " records wait; they are lost there, metrics.jsonl has them where jsonl is in trainer.logger"
            )
        self._raise_error()

    def _put(self, task: _Task) -> None:
        self._raise_error()
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            self.num_dropped += 1
            if self.num_dropped == 1:
                logger.warning(
                    "the logger %s is slower than the run: %d records wait, further ones are dropped",
                    self.name,
                    self._tasks.qsize(),
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
            while (task := self._tasks.get()) is not None:
                task(inner)
        except BaseException as error:  # the boundary to a library's code: `Loggers` reports it
            self._error = error
        finally:
            self._is_open.set()
            if inner is not None:
                try:
                    inner.close()
                except BaseException as error:
                    self._error = self._error or error
