"""Rows that were left out because of `data.skip_bad_rows`: what is said of them in the log and kept in a file."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from ostinato_trainer.errors import DatasetError

__all__ = ["BadRow", "log_bad_rows", "write_bad_rows"]

logger = logging.getLogger(__name__)

_NUM_LISTED = 10
"""Rows that are listed in the log."""


class BadRow(Struct, frozen=True):
    """A row that was left out."""

    place: str
    """File and row."""
    problem: str
    """Field, what it must be, what it was."""


def log_bad_rows(rows: Sequence[BadRow]) -> None:
    """Their number and the first of them as one warning; nothing where there are none."""
    if not rows:
        return
    listed = "\n".join(f"  {bad.place}: {bad.problem}" for bad in rows[:_NUM_LISTED])
    more = len(rows) - _NUM_LISTED
    rest = f"\n  and {more} more" if more > 0 else ""
    logger.warning("left out %d bad rows:\n%s%s", len(rows), listed, rest)


def write_bad_rows(rows: Sequence[BadRow], path: Path) -> None:
    """All of them as JSON lines of place and problem; without any, a list of an earlier run is removed.

    Raises:
        DatasetError: The file cannot be written.
    """
    try:
        if not rows:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    except OSError as error:
        raise DatasetError(f"{path} must be writable, got {error.strerror or error}; free the place") from error
    logger.warning("all %d bad rows that were left out are listed in %s", len(rows), path)
