"""Host-side state of the rows: whose conversation, which tokens, how far computed, how sampled.

The invariant: rows [0, num_decoding) are decoding and form one block, so that a decode step reads the cache without
copying; the others are prefilling, idle or free. Knows numpy, not torch.
"""

from collections.abc import Callable
from enum import IntEnum

import numpy as np

from ostinato_engines.request import Request

CAPACITY_BLOCK = 64
"""Token capacity grows in multiples of this."""
FIRST_ROWS = 8
MAX_STOP_IDS_AT_FIRST = 4
_SMALLEST = float(np.finfo(np.float32).tiny)


class RowState(IntEnum):
    """What a row is doing."""

    FREE = 0
    IDLE = 1
    PREFILLING = 2
    DECODING = 3


class RowTable:
    """Parallel arrays with one entry per row. A row's tokens are known up to `num_tokens`, computed up to `num_computed`."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.num_decoding = 0
        self.requests: list[Request | None] = []
        self.owners: list[str | None] = []
        self.row_of: dict[str, int] = {}
        self._tick = 0
        self.tokens = np.zeros((0, 0), np.int64)
        self.logprobs = np.zeros((0, 0), np.float32)
        self.stops = np.zeros((0, MAX_STOP_IDS_AT_FIRST), np.int64)
        self.state = np.zeros(0, np.int8)
        self.num_tokens = np.zeros(0, np.int64)
        self.num_computed = np.zeros(0, np.int64)
        self.limit = np.zeros(0, np.int64)
        self.last_used = np.zeros(0, np.int64)
        self.keys = np.zeros(0, np.uint64)
        self.temperature = np.zeros(0, np.float32)
        self.filtered = np.zeros(0, np.bool_)
        self.penalized = np.zeros(0, np.bool_)
        self.top_k = np.zeros(0, np.int64)
        self.top_p = np.zeros(0, np.float64)
        self.min_p = np.zeros(0, np.float64)

    _ARRAYS = (
        "filtered",
        "keys",
        "last_used",
        "limit",
        "logprobs",
        "min_p",
        "num_computed",
        "num_tokens",
        "penalized",
        "state",
        "stops",
        "temperature",
        "tokens",
        "top_k",
        "top_p",
    )

    @property
    def num_rows(self) -> int:
        """Rows allocated."""
        return len(self.requests)

    @property
    def capacity(self) -> int:
        """Tokens that fit a row."""
        return self.tokens.shape[1]

    def reserve(self, rows: int, capacity: int) -> bool:
        """Grows to at least so many rows and tokens, geometrically; returns whether anything changed."""
        rows = self.num_rows if rows <= self.num_rows else min(self.max_rows, max(rows, 2 * self.num_rows, FIRST_ROWS))
        if capacity > self.capacity:
            wanted = max(capacity, self.capacity + self.capacity // 4)
            capacity = -(-wanted // CAPACITY_BLOCK) * CAPACITY_BLOCK
        else:
            capacity = self.capacity
        if rows == self.num_rows and capacity == self.capacity:
            return False
        extra = rows - self.num_rows
        for name in self._ARRAYS:
            old: np.ndarray = getattr(self, name)
            width = {"tokens": capacity, "logprobs": capacity}.get(name, old.shape[1] if old.ndim == 2 else None)
            grown = np.zeros((rows,) if width is None else (rows, width), old.dtype)
            if width is None:
                grown[: len(old)] = old
            else:
                grown[: len(old), : old.shape[1]] = old
            setattr(self, name, grown)
        self.requests.extend([None] * extra)
        self.owners.extend([None] * extra)
        return True

    def clear(self) -> None:
        """Forgets everything and frees the memory."""
        self.__init__(self.max_rows)

    def find_row(self, request_id: str) -> int | None:
        """The row for a conversation: its own, a free one, or that of the longest idle; None if all are in use."""
        if (own := self.row_of.get(request_id)) is not None:
            return own if self.state[own] == RowState.IDLE else None
        waiting = self.state <= RowState.IDLE
        if not waiting.any():
            return None
        # A free row has last_used 0 and every used one more, so the oldest is free where any is.
        return int(np.where(waiting, self.last_used, np.iinfo(np.int64).max).argmin())

    def place(self, request: Request, row: int) -> int:
        """Gives a row to a request; returns how many of its tokens are computed already."""
        prompt = request.prompt
        num_cached = self._common_prefix(prompt, row) if self.owners[row] == request.request_id else 0
        self.free(row)
        self._tick += 1
        self.owners[row] = request.request_id
        self.row_of[request.request_id] = row
        self.requests[row] = request
        request.row = row
        params = request.params
        self.tokens[row, : len(prompt)] = prompt
        self.num_tokens[row] = len(prompt)
        self.num_computed[row] = num_cached
        self.limit[row] = request.limit
        self.state[row] = RowState.PREFILLING
        self.last_used[row] = self._tick
        self.keys[row] = request.stream_key
        # A temperature too small for float32 is not greedy: its logprobs are those of the one token that is left.
        self.temperature[row] = params.temperature and max(params.temperature, _SMALLEST)
        self.filtered[row] = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        self.penalized[row] = params.repetition_penalty != 1.0
        self.top_k[row] = max(params.top_k, 0)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        stops = params.stop_token_ids
        if len(stops) > self.stops.shape[1]:
            self.stops = np.pad(self.stops, ((0, 0), (0, len(stops) - self.stops.shape[1])), constant_values=-1)
        self.stops[row] = -1
        self.stops[row, : len(stops)] = stops
        return num_cached

    def _common_prefix(self, prompt: np.ndarray, row: int) -> int:
        """Tokens of the prompt whose state the row holds; at least one is left to compute, for its logits."""
        length = int(min(self.num_computed[row], len(prompt) - 1))
        different = np.flatnonzero(self.tokens[row, :length] != prompt[:length])
        return int(different[0]) if len(different) else length

    def free(self, row: int) -> None:
        """The row belongs to nobody and holds nothing."""
        owner = self.owners[row]
        if owner is not None:
            del self.row_of[owner]
        self.owners[row] = None
        self.requests[row] = None
        self.state[row] = RowState.FREE
        self.num_tokens[row] = self.num_computed[row] = self.last_used[row] = 0

    def vacate(self, row: int) -> None:
        """The row's request has ended; its conversation's state stays for a later turn."""
        self._tick += 1
        self.requests[row] = None
        self.state[row] = RowState.IDLE
        self.last_used[row] = self._tick

    def free_idle(self) -> None:
        """Frees every row that no request is using."""
        for row in np.flatnonzero(self.state == RowState.IDLE):
            self.free(int(row))

    def swap(self, first: int, second: int, exchange_states: Callable[[int, int, int, int], None]) -> None:
        """Swaps two rows here and, through the callback (rows, then their computed lengths), in the cache."""
        if first == second:
            return
        exchange_states(first, second, int(self.num_computed[first]), int(self.num_computed[second]))
        for name in self._ARRAYS:
            array = getattr(self, name)
            kept = array[first].copy()
            array[first] = array[second]
            array[second] = kept
        self.requests[first], self.requests[second] = self.requests[second], self.requests[first]
        self.owners[first], self.owners[second] = self.owners[second], self.owners[first]
        for row in (first, second):
            if (owner := self.owners[row]) is not None:
                self.row_of[owner] = row
            if (request := self.requests[row]) is not None:
                request.row = row
