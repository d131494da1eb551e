"""Log records as lines for a person at a terminal: no traceback, no flood.

Libraries log what they caught with its traceback, every time. A command shows the last words of each cause once, with the user's line that raised
it, and of other messages that are alike the first few. All are warnings here: the one error of a command is what ends it.
"""

from __future__ import annotations

import logging
import sysconfig
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

__all__ = ["MOST_ALIKE", "TerminalHandler", "logging_to_terminal"]

MOST_ALIKE: Final = 3
"""Records from one line of code that are shown; with the last of them it is said that there may be more."""

_INSTALLED: Final = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


class TerminalHandler(logging.Handler):
    """Prints records to the standard error as it is when they come, so that a progress bar may stand in between."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._counts: Counter[tuple[str, int]] = Counter()
        self._causes: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line, or nothing where enough of its kind were shown."""
        try:
            line = self._line(record)
            if line is not None:
                text = Text.assemble(("warning", "yellow"), ": ", line)
                Console(stderr=True).print(text, soft_wrap=True, highlight=False)
        except Exception:  # what logging asks of every handler: a record that cannot be shown harms no run
            self.handleError(record)

    def _line(self, record: logging.LogRecord) -> str | None:
        message, place = record.getMessage(), (record.pathname, record.lineno)
        if record.exc_info and record.exc_info[1] is not None:
            cause = _last_words(record.exc_info[1])
            if cause in self._causes:
                return None
            self._causes.add(cause)
            message = f"{message}: {cause}"
        self._counts[place] += 1
        if self._counts[place] > MOST_ALIKE:
            return None
        return message + " (further messages like this one are not shown)" * (self._counts[place] == MOST_ALIKE)


@contextmanager
def logging_to_terminal() -> Iterator[None]:
    """Show warnings of every logger in this way within the block."""
    handler = TerminalHandler()
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


def _last_words(error: BaseException) -> str:
    """The error as one line, with the line of the user's own code at which it began, if it did there."""
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    frames = [frame for frame in traceback.extract_tb(first.__traceback__) if _is_users(frame.filename)]
    place = f" (raised at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def _is_users(filename: str) -> bool:
    """Whether a file is neither ours nor installed."""
    is_ours = any(part.startswith("ostinato_") for part in Path(filename).parts)
    return not is_ours and not filename.startswith((*_INSTALLED, "<"))
