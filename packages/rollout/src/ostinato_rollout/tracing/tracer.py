"""`Tracer`: takes spans from an event loop and has them written by a thread of its own.

Invariants: nothing here waits for the backend but `flush` and `close`, and they only until a deadline; every span that was offered is
counted once, as written or as dropped, when the tracer is closed; whatever the backend raises stays in its thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Final, Protocol

import msgspec

from ostinato_rollout.tracing.span import Span, SpanKind, SpanSink, TrajectoryLabels
from ostinato_rollout.tracing.span_queue import SpanQueue, TracerStats
from ostinato_rollout.tracing.trajectory_trace import TrajectoryTrace
from ostinato_rollout.tracing.values import storable, storable_text

logger = logging.getLogger(__name__)

MAX_SHARE: Final = 0.1
"""Most of one processor's time that writing takes from the run, seen over a while: Python runs one thread at a time."""

_BATCH: Final = 32
_MAX_ATTEMPTS: Final = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 30.0
_LOOK_S: Final = 0.02


class Decoder(Protocol):
    """What the tracer needs of a tokenizer; called on the tracer's thread."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        ...


class Tracer:
    """Records what trajectories do. Close it at the end of the run: `close`, or `async with`.

    Args:
        sink: Where spans go; the tracer owns it from now on.
        experiment_name: What every span names as its experiment.
        decoder: Decodes token ids; None: ids only.
        max_samples_per_step: Only rows with a smaller `sample_index` are recorded; None: all.
        rows_per_step: Of a stream, the index is taken modulo this; None: rows come in steps anyway.
        max_queued_spans: Spans that wait to be written; further ones are dropped.
        shutdown_timeout_s: How long `close` waits if it is not told.
    """

    def __init__(
        self,
        sink: SpanSink,
        *,
        experiment_name: str = "",
        decoder: Decoder | None = None,
        max_samples_per_step: int | None = None,
        rows_per_step: int | None = None,
        max_queued_spans: int = 4096,
        shutdown_timeout_s: float = 10.0,
    ) -> None:
        self.experiment_name = experiment_name
        self._sink, self._decoder = sink, decoder
        self._max_samples_per_step, self._rows_per_step = max_samples_per_step, rows_per_step
        self._shutdown_timeout_s = shutdown_timeout_s
        self._queue = SpanQueue(max_queued_spans)
        self._warned_full = self._warned_broken = False
        self._closing, self._abandoned = threading.Event(), threading.Event()
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()
        self._thread = threading.Thread(target=self._run, name="ostinato-tracer", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> Tracer:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def trajectory(self, labels: TrajectoryLabels) -> TrajectoryTrace | None:
        """Begin to record a trajectory; None: its row is not among those that are recorded, the tracer is closed, or there is
        no room: while the backend hangs, a run costs nothing more."""
        if self._closing.is_set() or not self._is_chosen(labels):
            return None
        if self._queue.is_full:
            self._queue.skip()
            self._warn_full()
            return None
        return TrajectoryTrace(self, labels)

    def _is_chosen(self, labels: TrajectoryLabels) -> bool:
        """By the index alone, so that neither time nor the worker decides."""
        if self._max_samples_per_step is None:
            return True
        index = labels.sample_index
        if self._rows_per_step is not None and not labels.validate:
            index %= self._rows_per_step
        return index < self._max_samples_per_step

    def now_ns(self) -> int:
        """Nanoseconds since 1970, on a clock that nobody adjusts."""
        return self._epoch_ns + time.perf_counter_ns()

    def has_room(self) -> bool:
        """Whether a span would be taken now; one that is not worth making is counted as dropped."""
        if not self._queue.is_full:
            return True
        self._queue.refuse()
        self._warn_full()
        return False

    def put(self, span: Span, *, size: int = 0) -> bool:
        """Take a span of so many tokens and characters, without waiting; False: it was dropped."""
        taken = self._queue.put(span, size)
        if not taken:
            self._warn_full()
        return taken

    def _warn_full(self) -> None:
        if not self._warned_full and not self._closing.is_set():
            self._warned_full = True
            logger.warning(
                "the tracer drops spans, since its backend does not keep up; lower max_samples_per_step_per_worker, or look at"
                " the backend"
            )

    @property
    def stats(self) -> TracerStats:
        """What became of the spans so far."""
        return self._queue.stats

    def metrics(self) -> dict[str, float]:
        """The counts since the tracer began, under their metric names."""
        stats = self.stats
        return {
            "trace/written_spans": float(stats.written),
            "trace/dropped_spans": float(stats.dropped),
            "trace/skipped_trajectories": float(stats.skipped_trajectories),
        }

    def flush(self, timeout_s: float) -> bool:
        """Wait until all spans so far are written or dropped; False: the time did not suffice."""
        return self._queue.wait_until_empty(timeout_s)

    async def aclose(self, timeout_s: float | None = None) -> TracerStats:
        """`close`, without holding the event loop up; if it is cancelled, what waits is dropped."""
        deadline = self._begin_to_close(timeout_s)
        try:
            while self._is_ending(deadline):  # noqa: ASYNC110  (no loop is told of a thread's end)
                await asyncio.sleep(_LOOK_S)
        finally:
            stats = self._settle()
        return stats

    def close(self, timeout_s: float | None = None) -> TracerStats:
        """Write what waits, up to a deadline, and end. Says in the log what was dropped. Closing again changes nothing.

        Args:
            timeout_s: The deadline; None: `shutdown_timeout_s`.

        Returns:
            The final counts; nothing waits any more.
        """
        deadline = self._begin_to_close(timeout_s)
        while self._is_ending(deadline):
            self._thread.join(_LOOK_S)
        return self._settle()

    def _begin_to_close(self, timeout_s: float | None) -> float:
        """Take no more spans; return the deadline."""
        self._closing.set()
        self._queue.close()
        return time.monotonic() + (self._shutdown_timeout_s if timeout_s is None else timeout_s)

    def _is_ending(self, deadline: float) -> bool:
        return self._thread.is_alive() and not self._abandoned.is_set() and time.monotonic() < deadline

    def _settle(self) -> TracerStats:
        """Give up what still waits."""
        self._abandoned.set()
        is_first = self._queue.settle()
        stats = self.stats
        if is_first and (stats.dropped or stats.skipped_trajectories):
            logger.warning(
                "the tracer dropped %d of %d spans, and did not record %d trajectories",
                stats.dropped,
                stats.dropped + stats.written,
                stats.skipped_trajectories,
            )
        return stats

    def _run(self) -> None:
        """The thread: batches of spans into the sink, until the tracer is closed and nothing waits."""
        is_open = False
        while not self._abandoned.is_set():
            spans = self._queue.take(_BATCH)
            if not spans:
                break
            began = time.thread_time()
            ready = [span for span in map(self._prepared, spans) if span is not None]
            if ready:
                is_open = self._deliver(ready, is_open)
            self._rest((time.thread_time() - began) * (1 / MAX_SHARE - 1))
        try:
            self._sink.close()
        except Exception:  # the backend's; there is nobody else to tell
            logger.exception("the tracer's backend failed while closing")

    def _deliver(self, spans: list[Span], is_open: bool) -> bool:
        """Hand spans to the sink, again after failures; count them. Returns whether the sink is open."""
        pause_s = _FIRST_PAUSE_S
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            try:
                if not is_open:
                    self._sink.open()
                    is_open = True
                self._sink.write(spans)
            except Exception as error:  # the backend's; the run goes on without these spans
                is_open = False
                if not self._warned_broken:
                    self._warned_broken = True
                    logger.warning("the tracer's backend failed: %s: %s", type(error).__name__, error, exc_info=error)
                if attempt < _MAX_ATTEMPTS and not self._abandoned.is_set():
                    self._rest(pause_s)
                    pause_s = min(10 * pause_s, _LONGEST_PAUSE_S)
            else:
                self._queue.count(written=len(spans))
                return True
        self._queue.count(dropped=len(spans))
        self._rest(pause_s)
        return is_open

    def _rest(self, seconds: float) -> None:
        """Sleep, unless the tracer is closed: then there is no time to lose and no run to slow down."""
        self._closing.wait(min(seconds, _LONGEST_PAUSE_S))

    def _prepared(self, span: Span) -> Span | None:
        """Return the span with its texts, as JSON can hold it; None: that failed."""
        try:
            return self._storable(span)
        except Exception:  # a value of a foreign class, of which more can go wrong than is foreseen
            logger.exception("the span %r of trace %s cannot be recorded", span.name, span.trace_id)
            self._queue.count(dropped=1)
            return None

    def _storable(self, span: Span) -> Span:
        inputs, outputs = storable(span.inputs), storable(span.outputs)
        if self._decoder is not None and span.kind is SpanKind.GENERATION:
            inputs["prompt_text"] = self._text(inputs.get("prompt_ids"))
            outputs["response_text"] = self._text(outputs.get("token_ids"))
        error = span.error
        if error is not None:
            error = msgspec.structs.replace(error, message=storable_text(error.message))
        return msgspec.structs.replace(
            span,
            name=storable_text(span.name),
            experiment_name=storable_text(span.experiment_name),
            labels=msgspec.convert(storable(span.labels), TrajectoryLabels),
            inputs=inputs,
            outputs=outputs,
            attributes=storable(span.attributes),
            error=error,
        )

    def _text(self, token_ids: list[int] | None) -> str | None:
        if not token_ids or self._decoder is None:
            return None
        try:
            return storable_text(self._decoder.decode(token_ids))
        except Exception as error:  # ids that the tokenizer does not know
            return storable_text(f"<cannot be decoded: {type(error).__name__}: {error}>")
