"""What trajectories did, as spans: a tree for each, with generations, tool calls and the reward, in MLflow or as JSON lines.

What it is: `Tracer` (never waits for its backend), `TrajectoryTrace` (handed to sessions and tools), `make_tracer` (from settings).
What it is not: it decides nothing, and nothing is trained from it; a span may be dropped, a token of a ledger never.
"""

from ostinato_rollout.tracing.config import TraceBackend, TraceConfig
from ostinato_rollout.tracing.jsonl import JsonlSink, read_spans
from ostinato_rollout.tracing.opening import completed, make_tracer
from ostinato_rollout.tracing.span import Span, SpanError, SpanKind, SpanSink, TrajectoryLabels
from ostinato_rollout.tracing.span_queue import TracerStats
from ostinato_rollout.tracing.tracer import Decoder, Tracer
from ostinato_rollout.tracing.trajectory_trace import TrajectoryTrace

__all__ = [
    "Decoder",
    "JsonlSink",
    "Span",
    "SpanError",
    "SpanKind",
    "SpanSink",
    "TraceBackend",
    "TraceConfig",
    "Tracer",
    "TracerStats",
    "TrajectoryLabels",
    "TrajectoryTrace",
    "completed",
    "make_tracer",
    "read_spans",
]
