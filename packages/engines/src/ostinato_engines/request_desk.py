"""The requests of the embedded engine between their arrival and their answer: who waits, who runs, who went away.

Everything here happens on the event loop; what touches the batch is called between two steps. Knows no asyncio loop
and no engine state.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from ostinato_engines.batcher import Batcher, Ended
from ostinato_engines.errors import EngineError
from ostinato_engines.request import Request, refuse_double
from ostinato_engines.types import StopReason


class RequestDesk:
    """Every request is answered once: with an output, or with an error that names it."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self._waiting: deque[Request] = deque()
        self._in_flight: dict[str, Request] = {}
        self._abandoned: list[Request] = []
        self._released: list[str] = []
        self.num_arrived = 0

    @property
    def has_waiting(self) -> bool:
        """Whether a request may be without a row."""
        return bool(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Requests without a row that somebody waits for."""
        return sum(not request.ended for request in self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with a row that somebody waits for."""
        return min(self._batcher.num_running, len(self._in_flight))

    def refuse_double(self, request_id: str) -> None:
        """Raises `EngineInputError` if the conversation has a turn in flight."""
        refuse_double(request_id, self._in_flight)

    def arrive(self, request: Request) -> None:
        """Takes a request in, to be admitted at one of the next steps."""
        self._in_flight[request.request_id] = request
        self._waiting.append(request)
        self.num_arrived += 1

    def depart(self, request: Request) -> bool:
        """The caller is gone, answered or not; returns whether the request was still under way."""
        if self._in_flight.get(request.request_id) is request:
            del self._in_flight[request.request_id]
        if request.ended:
            return False
        request.ended = True
        self._abandoned.append(request)
        return True

    def release(self, request_id: str) -> None:
        """Notes that a conversation is over; `tidy` frees its state."""
        self._released.append(request_id)

    def in_flight(self, request_ids: Sequence[str] | None = None) -> list[Request]:
        """The requests under way: all, or those of these ids."""
        names = list(self._in_flight) if request_ids is None else request_ids
        found = (self._in_flight.get(name) for name in names)
        return [request for request in found if request is not None and not request.ended]

    # Between two steps only

    def admit(self) -> None:
        """Gives rows to those who wait, as far as there are any."""
        self._batcher.admit(self._waiting)

    def tidy(self) -> None:
        """Takes out requests whose callers went away, and frees conversations that are over."""
        for request in self._abandoned:
            if request.row >= 0 and request in self._batcher.table.requests:
                self._batcher.abort(request)
        self._abandoned.clear()
        for request_id in self._released:
            self._batcher.release(request_id)
        self._released.clear()

    def deliver(self, ended: Iterable[Ended]) -> bool:
        """Answers those whom a step has finished; returns whether there were any."""
        any_ended = False
        for request, outcome in ended:
            any_ended = True
            if not request.ended:
                request.resolve(outcome)
        return any_ended

    def abort(self, requests: Iterable[Request]) -> int:
        """Ends requests with what they have; returns how many were still under way."""
        count = 0
        for request in requests:
            if request.ended:
                continue
            count += 1
            if request.row >= 0:
                request.resolve(self._batcher.abort(request))
            else:
                request.serve_under(self._batcher.policy_version, 0)
                request.resolve(request.output([], [], StopReason.ABORTED))
        return count

    def fail_all(self, error_for: Callable[[Request], EngineError]) -> None:
        """Answers everybody with an error and forgets all state."""
        for request in self.in_flight():
            request.resolve(error_for(request))
        self._waiting.clear()
        self._abandoned.clear()
        self._batcher.drop()
