"""From bytes to lines of bounded length, in linear time and bounded memory."""

import msgspec

_HEAD_BYTES = 4096


class Oversized(msgspec.Struct, frozen=True):
    """A line that was too long to keep."""

    head: bytes
    """Its first bytes."""


class LineSplitter:
    """Splits a stream of bytes at newlines; of a line over the limit only the head is kept, and it is reported at once."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self.num_discarded = 0
        """Bytes of the present line that were thrown away; 0 while it is within the limit."""

    def feed(self, chunk: bytes) -> list[bytes | Oversized]:
        """Take a chunk.

        Args:
            chunk: Any bytes, cut anywhere.

        Returns:
            The lines that it completes, without newlines, and what went over the limit.
        """
        found: list[bytes | Oversized] = []
        *complete, rest = chunk.split(b"\n")
        for part in complete:
            found.extend(self._take(part))
            if not self.num_discarded:
                found.append(b"".join(self._parts))
            self._parts, self._num_bytes, self.num_discarded = [], 0, 0
        found.extend(self._take(rest))
        return found

    def _take(self, part: bytes) -> list[Oversized]:
        if self.num_discarded:
            self.num_discarded += len(part)
            return []
        if part:
            self._parts.append(part)
            self._num_bytes += len(part)
        if self._num_bytes <= self._max_bytes:
            return []
        head = b""
        for kept in self._parts:
            head += kept[: _HEAD_BYTES - len(head)]
            if len(head) >= _HEAD_BYTES:
                break
        self.num_discarded, self._parts = self._num_bytes, []
        return [Oversized(head)]
