"""Continuous batching: which rows compute what in the next step, and what became of the tokens they sampled.

A step is one prefill forward (some prompts, or chunks of long ones, right-padded) and one decode forward (every decoding
row, one token each). Work per step is vectorised over rows; Python runs per row only where a request begins or ends.
Knows no asyncio: the server calls it between or inside steps, never both at once.
"""

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ostinato_engines.errors import NonFiniteLogitsError
from ostinato_engines.model_runner import ModelRunner
from ostinato_engines.request import Request
from ostinato_engines.rows import RowState, RowTable
from ostinato_engines.types import StopReason, TokenOutput

if TYPE_CHECKING:
    from torch import Tensor


class Ended(NamedTuple):
    """A request and what its caller gets."""

    request: Request
    outcome: TokenOutput | BaseException


class Batcher:
    """Owns the rows and drives the model."""

    def __init__(self, runner: ModelRunner, *, max_rows: int, prefill_tokens: int) -> None:
        self._runner = runner
        self._prefill_tokens = prefill_tokens
        self._prefilling: deque[Request] = deque()
        self.table = RowTable(max_rows)
        self.policy_version = 0

    @property
    def vocab_size(self) -> int:
        """Ids below are valid."""
        return self._runner.vocab_size

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return self.table.num_decoding + len(self._prefilling)

    def admit(self, waiting: deque[Request]) -> None:
        """Gives rows to waiting requests, first come first served, as far as there are any."""
        while waiting:
            request = waiting[0]
            if not request.ended:
                row = self._row_for(request, len(waiting))
                if row is None:
                    return
                self._reserve(0, len(request.prompt) + 1)
                request.num_cached = self.table.place(request, row)
                request.serve_under(self.policy_version, 0)
                self._prefilling.append(request)
            waiting.popleft()

    def _row_for(self, request: Request, num_waiting: int) -> int | None:
        table = self.table
        if request.request_id not in table.row_of and not (table.state == RowState.FREE).any():
            self._reserve(min(table.max_rows, table.num_rows + num_waiting), 0)
        return table.find_row(request.request_id)

    def _reserve(self, rows: int, capacity: int) -> None:
        if self.table.reserve(rows, capacity):
            self._runner.cache.reserve(self.table.num_rows, self.table.capacity)

    def step(self) -> list[Ended]:
        """Computes one prefill chunk and one token for every decoding row; returns the requests that ended."""
        ended: list[Ended] = []
        if self._prefilling:
            self._prefill(ended)
        if self.table.num_decoding:
            self._decode(ended)
        return ended

    def _prefill(self, ended: list[Ended]) -> None:
        table = self.table
        group, width = self._prefill_group()
        rows = np.array([request.row for request in group])
        starts = table.num_computed[rows]
        counts = np.minimum(table.num_tokens[rows] - starts, width)
        self._reserve(0, int(starts.max()) + width)
        offsets = np.arange(width)
        columns = starts[:, None] + offsets
        last = counts - 1
        # Padding repeats the last real position, so that no position embedding is asked for one that it lacks.
        positions = starts[:, None] + np.minimum(offsets, last[:, None])
        logits = self._runner.forward(
            np.take_along_axis(table.tokens[rows], positions, 1),
            positions,
            columns,
            rows,
            int(columns[:, -1].max()) + 1,
            last,
        )
        table.num_computed[rows] += counts
        complete = np.flatnonzero(table.num_computed[rows] == table.num_tokens[rows])
        if not len(complete):
            return
        done = [group[i] for i in complete]
        finished = set(map(id, done))
        self._prefilling = deque(request for request in self._prefilling if id(request) not in finished)
        for request in done:
            table.state[request.row] = RowState.DECODING
            table.swap(request.row, table.num_decoding, self._runner.cache_exchange)
            table.num_decoding += 1
        picked = logits if len(complete) == len(rows) else logits[complete]
        self._sample(picked, np.array([request.row for request in done]), ended)

    def _prefill_group(self) -> tuple[list[Request], int]:
        """The oldest request and others that pad well beside it, within the budget of tokens."""
        table = self.table
        group: list[Request] = []
        width = 0
        for request in self._prefilling:
            missing = int(table.num_tokens[request.row] - table.num_computed[request.row])
            if not group:
                width = min(missing, self._prefill_tokens)
            elif (len(group) + 1) * width > self._prefill_tokens:
                break
            elif 4 * missing < width:
                continue
            group.append(request)
        return group, width

    def _decode(self, ended: list[Ended]) -> None:
        table = self.table
        count = table.num_decoding
        positions = table.num_computed[:count]
        length = int(positions.max()) + 1
        self._reserve(0, length + 1)
        columns = positions[:, None].copy()
        logits = self._runner.forward(
            np.take_along_axis(table.tokens[:count], columns, 1), columns, columns, slice(0, count), length, None
        )
        table.num_computed[:count] += 1
        self._sample(logits, slice(0, count), ended)

    def _sample(self, logits: "Tensor", rows: np.ndarray | slice, ended: list[Ended]) -> None:
        table = self.table
        indices = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        places = table.num_tokens[indices]
        token_ids, logprobs = self._runner.sample(logits, table, rows)
        table.tokens[indices, places] = token_ids
        table.logprobs[indices, places] = logprobs
        table.num_tokens[rows] += 1
        stopped = (table.stops[rows] == token_ids[:, None]).any(1)
        over = stopped | (table.num_tokens[rows] >= table.limit[rows]) | ~np.isfinite(logprobs)
        if over.any():
            # From the last row down, so that moving a row out of the decoding block moves none that is still to come.
            for index in sorted(np.flatnonzero(over), key=lambda index: -indices[index]):
                self._end(int(indices[index]), bool(stopped[index]), bool(np.isfinite(logprobs[index])), ended)

    def _end(self, row: int, stopped: bool, finite: bool, ended: list[Ended]) -> None:
        request = self.table.requests[row]
        assert request is not None
        if not finite:
            outcome: TokenOutput | BaseException = NonFiniteLogitsError(
                f"logits must be finite, got NaN or infinity for {request}; check the last weight update"
            )
            request.release_at_end = True
            self._runner.cache.wipe(row)
        else:
            outcome = self._output(request, StopReason.STOP if stopped else StopReason.LENGTH)
        self._leave(request)
        ended.append(Ended(request, outcome))

    def _output(self, request: Request, reason: StopReason) -> TokenOutput:
        table, row = self.table, request.row
        sampled = slice(len(request.prompt), int(table.num_tokens[row]))
        token_ids = table.tokens[row, sampled].tolist()
        stop_token_id = token_ids[-1] if reason is StopReason.STOP else None
        return request.output(token_ids, table.logprobs[row, sampled].tolist(), reason, stop_token_id)

    def _leave(self, request: Request) -> None:
        """Takes a request out of its row, which stays with the conversation unless that is over."""
        table = self.table
        if table.state[request.row] == RowState.DECODING:
            table.num_decoding -= 1
            table.swap(request.row, table.num_decoding, self._runner.cache_exchange)
        else:
            self._prefilling.remove(request)
        if request.release_at_end:
            table.free(request.row)
        else:
            table.vacate(request.row)

    def abort(self, request: Request) -> TokenOutput:
        """Ends a running request with what it has."""
        output = self._output(request, StopReason.ABORTED)
        self._leave(request)
        return output

    def running(self) -> list[Request]:
        """The requests that hold a row."""
        return [request for request in self.table.requests if request is not None]

    def weights_changed(self, version: int) -> None:
        """Nothing computed so far counts any more; running requests are computed anew under the new weights."""
        table = self.table
        self.policy_version = version
        table.free_idle()
        self._runner.cache.wipe()
        self._prefilling = deque(sorted(self.running(), key=lambda request: int(table.last_used[request.row])))
        table.num_decoding = 0
        for request in self._prefilling:
            table.state[request.row] = RowState.PREFILLING
            table.num_computed[request.row] = 0
            num_generated = int(table.num_tokens[request.row]) - len(request.prompt)
            request.serve_under(version, num_generated)
            request.num_preempted += 1
            request.num_cached = 0

    def release(self, request_id: str) -> None:
        """Frees a conversation's row, at the latest when its request in flight ends."""
        row = self.table.row_of.get(request_id)
        if row is None:
            return
        request = self.table.requests[row]
        if request is None:
            self.table.free(row)
        else:
            request.release_at_end = True

    def drop(self) -> None:
        """Frees all rows and memory; requests that still run have been answered."""
        self._prefilling.clear()
        self.table.clear()
        self._runner.cache.drop()
