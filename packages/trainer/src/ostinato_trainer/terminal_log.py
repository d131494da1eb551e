"""Log records as lines for a person at a terminal: no traceback, no flood.

Libraries log what they caught with its traceback, every time. A command shows the last words of the cause and where it was raised, and
repeats a kind of message a few times only.
"""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.text import Text

__all__ = ["MOST_ALIKE", "TerminalHandler", "logging_to_terminal"]

MOST_ALIKE: Final = 3
"""Records that come from one line of code and are shown; then it is said that there are more."""

_STYLES: Final = {"WARNING": "yellow", "ERROR": "bold red", "CRITICAL": "bold red"}


class TerminalHandler(logging.Handler):
    """Prints records to the standard error as it is when they come, so that a progress bar may stand in between."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._counts: Counter[tuple[str, int]] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line, or nothing where enough of its kind were shown."""
        place = (record.pathname, record.lineno)
        self._counts[place] += 1
        if self._counts[place] > MOST_ALIKE:
            return
        try:
            message = record.getMessage()
            if record.exc_info and record.exc_info[1] is not None:
                message = f"{message}: {_last_words(record.exc_info[1])}"
            if self._counts[place] == MOST_ALIKE:
                message += " (further messages like this one are not shown)"
            line = Text.assemble((record.levelname.lower(), _STYLES.get(record.levelname, "")), ": ", message)
            Console(stderr=True).print(line, soft_wrap=True, highlight=False)
        except Exception:  # what logging asks of every handler: a record that cannot be shown harms no run
            self.handleError(record)


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
    """The error as one line, with the place at which its first cause was raised."""
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    frames = traceback.extract_tb(first.__traceback__)
    place = f" (raised at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"
