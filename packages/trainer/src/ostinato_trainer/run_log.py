"""`run.log`: what the packages tell of a run as it goes, such as the ways that weights go, where actors are and what was restarted.

What is told before the run holds its folder waits; nothing is written where it never does.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TextIO

__all__ = ["RUN_LOG", "run_log"]

RUN_LOG: Final = "run.log"
_PACKAGES: Final = tuple(
    f"ostinato_{name}" for name in ("tokenization", "tools", "engines", "rollout", "agent_loop", "trainer")
)
_MOST_WAITING: Final = 1000


@contextmanager
def run_log(folder: Path, *, is_held: Callable[[], bool]) -> Iterator[None]:
    """Appends what the packages log in the block, from INFO on, to a file of the folder.

    Args:
        folder: Of the run.
        is_held: Whether it is this run's, so that it may be written to.
    """
    handler, root = _FileHandler(folder / RUN_LOG, is_held), logging.getLogger()
    loggers = [logging.getLogger(name) for name in _PACKAGES]
    levels = [logger.level for logger in loggers]
    root.addHandler(handler)
    for logger in loggers:
        if logger.getEffectiveLevel() > logging.INFO:
            logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        root.removeHandler(handler)
        handler.close()


class _FileHandler(logging.Handler):
    def __init__(self, path: Path, is_held: Callable[[], bool]) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._path, self._is_held = path, is_held
        self._waiting: deque[str] = deque(maxlen=_MOST_WAITING)
        self._file: TextIO | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, at once where the folder is held."""
        try:
            self._waiting.append(self.format(record))
            self._write()
        except OSError:  # a full disk: whoever writes what the run needs says so
            self._waiting.clear()
        except Exception:  # what logging asks of every handler: a record that cannot be written harms no run
            self.handleError(record)

    def _write(self) -> None:
        if self._file is None:
            if not self._is_held():
                return
            self._file = self._path.open("a", encoding="utf-8", errors="backslashreplace")
        self._file.write("".join(f"{line}\n" for line in self._waiting))
        self._file.flush()
        self._waiting.clear()

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
        super().close()
