"""The spans of one trajectory, as they are made: a root, and below it generations, tool calls and the reward.

Runs on the event loop, so it only gathers what is there; copies, texts and JSON are the tracer's thread's. Knows no backend.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ostinato_engines import SamplingParams, TokenOutput
from ostinato_rollout.tracing.span import (
    Span,
    SpanError,
    SpanIds,
    SpanKind,
    TrajectoryLabels,
)
from ostinato_rollout.types import Reply
from ostinato_tools import OutcomeKind, ToolCall, ToolOutcome

if TYPE_CHECKING:
    from ostinato_rollout.tracing.tracer import Tracer


class TrajectoryTrace:
    """Records one trajectory; made by `Tracer.trajectory`, handed to its sessions and tools, ended once.

    Args:
        tracer: Takes the spans.
        labels: Which trajectory it is.
    """

    def __init__(self, tracer: Tracer, labels: TrajectoryLabels) -> None:
        self._ids = SpanIds()
        self.trace_id = self._ids.trace_id
        self.labels = labels
        self._tracer = tracer
        self._root_id = self._ids.next()
        self._start_ns = tracer.now_ns()
        self._num_dropped = 0
        self._is_ended = False

    def now_ns(self) -> int:
        """Nanoseconds since 1970."""
        return self._tracer.now_ns()

    def session(self, request_id: str) -> SessionTrace:
        """Begin to record the generations of one conversation."""
        return SessionTrace(self, request_id)

    async def tool_call(self, call: ToolCall, run: Callable[[ToolCall], Awaitable[ToolOutcome]]) -> ToolOutcome:
        """Run a call and record it; what is raised is recorded and raised."""
        start_ns = self.now_ns()
        try:
            outcome = await run(call)
        except BaseException as error:
            self._tool_call(call, start_ns, {}, {}, SpanError.of(error))
            raise
        answer = outcome.message.get("content")
        failed = outcome.kind is not OutcomeKind.OK
        self._tool_call(
            call,
            start_ns,
            {"answer": answer, "reward": outcome.reward, "metrics": outcome.metrics},
            {"outcome": outcome.kind.value, "seconds": outcome.seconds, "terminate": outcome.terminate},
            SpanError(outcome.kind.value, answer if isinstance(answer, str) else repr(answer)) if failed else None,
        )
        return outcome

    def tool_call_not_run(self, call: ToolCall, answer: str) -> None:
        """Record a call that was answered without being run."""
        self._tool_call(
            call,
            self.now_ns(),
            {"answer": answer},
            {"outcome": "not_run", "seconds": 0.0},
            SpanError("not_run", answer),
        )

    def _tool_call(
        self,
        call: ToolCall,
        start_ns: int,
        outputs: dict[str, Any],
        attributes: dict[str, Any],
        error: SpanError | None,
    ) -> None:
        inputs = {"arguments": call.raw_arguments if call.arguments is None else call.arguments}
        self.record(
            SpanKind.TOOL,
            f"execute_tool {call.name}",
            start_ns,
            inputs=inputs,
            outputs=outputs,
            attributes={"tool": call.name, "tool_call_id": call.id, **attributes},
            error=error,
            size=len(call.raw_arguments) + len(outputs.get("answer") or ""),
        )

    def reward(self, start_ns: int, outputs: dict[str, Any], *, source: str, error: SpanError | None = None) -> None:
        """Record the reward; `source` says who gave it."""
        self.record(
            SpanKind.REWARD, "compute_score", start_ns, outputs=outputs, attributes={"source": source}, error=error
        )

    def end(self, inputs: dict[str, Any], outputs: dict[str, Any], error: SpanError | None = None) -> None:
        """Record the trajectory itself; what comes later is recorded no more, and ending again does nothing."""
        if self._is_ended:
            return
        attributes = {"num_dropped_spans": self._num_dropped} if self._num_dropped else {}
        self.record(
            SpanKind.LOOP,
            "agent_loop",
            self._start_ns,
            inputs=inputs,
            outputs=outputs,
            attributes=attributes,
            error=error,
            size=1000,
        )
        self._is_ended = True

    def record(
        self,
        kind: SpanKind,
        name: str,
        start_ns: int,
        *,
        inputs: dict[str, Any] | None = None,
        outputs: dict[str, Any] | None = None,
        attributes: dict[str, Any] | None = None,
        error: SpanError | None = None,
        size: int = 100,
    ) -> None:
        """Record something that began at `start_ns` and ends now; `size` estimates its tokens and characters."""
        if self._is_ended:
            return
        if not self._tracer.has_room():
            self._num_dropped += 1
            return
        is_root = kind is SpanKind.LOOP
        span = Span(
            trace_id=self.trace_id,
            span_id=self._root_id if is_root else self._ids.next(),
            parent_id=None if is_root else self._root_id,
            kind=kind,
            name=name,
            start_ns=start_ns,
            end_ns=self.now_ns(),
            experiment_name=self._tracer.experiment_name,
            labels=self.labels,
            inputs=inputs or {},
            outputs=outputs or {},
            attributes=attributes or {},
            error=error,
        )
        self._num_dropped += not self._tracer.put(span, size=size)


class SessionTrace:
    """Records the generations of one conversation.

    A prompt is recorded once: each span holds what its prompt has beyond the generation before it. So the `prompt_ids` and
    `token_ids` of a segment's spans, one after the other, are the segment.

    Args:
        trace: The trajectory that the conversation belongs to.
        request_id: The conversation's name.
    """

    def __init__(self, trace: TrajectoryTrace, request_id: str) -> None:
        self.trace, self.request_id = trace, request_id
        self.num_shown = self.segment = 0

    def generation(
        self, prompt: Sequence[int], messages: Sequence[dict], params: SamplingParams, *, turn: int, segment: int
    ) -> GenerationTrace:
        """Begin to record a generation, to be used as a context manager.

        Args:
            prompt: The whole context.
            messages: What was said since the turn before.
            params: How it is sampled.
            turn: Turns of the conversation before it.
            segment: Segments of the conversation before its own.
        """
        if segment != self.segment:
            self.num_shown, self.segment = 0, segment
        return GenerationTrace(self, prompt, messages, params, turn)


class GenerationTrace:
    """One generation; records itself when its context is left. Made by `SessionTrace.generation`."""

    def __init__(
        self, session: SessionTrace, prompt: Sequence[int], messages: Sequence[dict], params: SamplingParams, turn: int
    ) -> None:
        self.replica: int | None = None
        """Who sampled it, or tried to last."""
        self._output: TokenOutput | None = None
        self._reply: Reply | None = None
        self._admission_s = 0.0
        self._session, self._params, self._turn = session, params, turn
        self._prompt_length, self._offset = len(prompt), session.num_shown
        self._prompt_ids = prompt[session.num_shown :]
        self._messages = [dict(message) for message in messages]

    def sampled(self, output: TokenOutput, *, admission_s: float) -> None:
        """Note what was sampled, and the seconds of it spent waiting for a place."""
        self._output, self._admission_s = output, admission_s

    def read(self, reply: Reply) -> None:
        """Note how it was read; it is in the ledger now."""
        self._reply = reply
        self._session.num_shown = self._prompt_length + reply.num_tokens

    def __enter__(self) -> GenerationTrace:
        self._start_ns = self._session.trace.now_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        output = self._output
        self._session.trace.record(
            SpanKind.GENERATION,
            "generate",
            self._start_ns,
            inputs={"messages": self._messages, "prompt_ids": self._prompt_ids},
            outputs={} if output is None else self._outputs(output),
            attributes=self._attributes(output),
            error=None if error is None else SpanError.of(error),
            size=len(self._prompt_ids) + (0 if output is None else 4 * len(output.token_ids)),
        )

    def _outputs(self, output: TokenOutput) -> dict[str, Any]:
        return {
            "message": None if self._reply is None else dict(self._reply.message),
            "token_ids": output.token_ids,
            "logprobs": output.logprobs,
        }

    def _attributes(self, output: TokenOutput | None) -> dict[str, Any]:
        attributes = {
            "request_id": self._session.request_id,
            "turn": self._turn,
            "segment": self._session.segment,
            "prompt_offset": self._offset,
            "prompt_length": self._prompt_length,
            "sampling_params": self._params,
            "admission_s": self._admission_s,
            "replica": self.replica,
        }
        if output is not None:
            attributes |= {
                "stop_reason": output.stop_reason,
                "stop_token_id": output.stop_token_id,
                "policy_versions": output.policy_versions,
                "num_cached_tokens": output.num_cached_tokens,
                "num_preempted": output.num_preempted,
                "response_length": len(output.token_ids),
            }
        return attributes
