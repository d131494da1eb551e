"""Spans as JSON lines: one file for each process, one object for each span."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path

import msgspec

from ostinato_rollout.tracing.span import Span

logger = logging.getLogger(__name__)


class JsonlSink:
    """Appends to a file that no other process writes. It holds whole lines, also after a write that failed.

    Args:
        path: The file; its folder is made.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: FileIO | None = None

    def open(self) -> None:
        """Open the file, once."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = FileIO(self.path, "a")

    def write(self, spans: Sequence[Span]) -> None:
        """Append the spans, all or, with an OSError, none."""
        assert self._file is not None
        lines = b"".join(msgspec.json.encode(span) + b"\n" for span in spans)
        size = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(lines) != len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except BaseException:
            self._file.truncate(size)
            raise

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_spans(path: str | Path) -> Iterator[Span]:
    """Give the spans of a file, or of all `*.jsonl` files of a folder.

    A file may end in the middle of a line, where its process was killed or is writing now: that span is left out, and it is said.

    Raises:
        msgspec.DecodeError: A line is no span; the message has its file and number.
    """
    path = Path(path)
    for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    span = msgspec.json.decode(line, type=Span)
                except msgspec.DecodeError as error:
                    if line.endswith(b"\n"):
                        raise msgspec.DecodeError(f"line {number} of {file} must be a span, got {error}") from error
                    logger.warning("%s ends in the middle of line %d; the span there is left out", file, number)
                    continue
                yield span
