"""What is known of each request in vLLM's batch, by its row. Knows no vLLM."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

Known = TypeVar("Known")


class BatchRows(Generic[Known]):
    """Follows requests that come to vLLM's batch, go and move within it.

    Args:
        known_of: What is to be known of a request with these sampling parameters of vLLM; None for nothing.
    """

    def __init__(self, known_of: Callable[[Any], Known | None]) -> None:
        self._known_of = known_of
        self.by_row: dict[int, Known] = {}
        """Rows of which something is known."""

    def follow(self, batch_update: Any) -> None:
        """Takes over one of vLLM's BatchUpdates, in the order that it asks for: removed, added, moved."""
        rows = self.by_row
        for row in batch_update.removed:
            rows.pop(row, None)
        for row, params, _prompt, _output in batch_update.added:
            rows.pop(row, None)
            known = self._known_of(params)
            if known is not None:
                rows[row] = known
        for source, target, direction in batch_update.moved:
            moved, replaced = rows.pop(source, None), rows.pop(target, None)
            if moved is not None:
                rows[target] = moved
            if replaced is not None and direction.name == "SWAP":
                rows[source] = replaced
