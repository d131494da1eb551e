"""What a worker tells the tracer: of a trajectory and of its reward. Generations and tool calls tell of themselves.

The trace is an object that is handed down, from the worker to the context and on to sessions and tools: sessions are also driven by
the tasks of servers and by threads, which no context variable reaches.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Mapping
from typing import Any

from ostinato_agent_loop.trajectory import Trajectory
from ostinato_rollout import Failure
from ostinato_rollout.tracing import SpanError, TrajectoryTrace
from ostinato_tools import ToolExecutor

logger = logging.getLogger(__name__)

_PROMPTS = ("raw_prompt", "prompt")


async def traced_trajectory(
    trace: TrajectoryTrace,
    running: Awaitable[Trajectory],
    *,
    row: Mapping[str, Any],
    trajectory_id: str,
    tools: ToolExecutor,
) -> Trajectory:
    """Await a trajectory, and record it with the calls of its tools, however it ends.

    Args:
        trace: Records it.
        running: Runs it.
        row: What it was given.
        trajectory_id: Whose tools are watched.
        tools: Run them.
    """
    tools.observers[trajectory_id] = trace.tool_call
    try:
        trajectory = await running
    except BaseException as error:  # a cancellation, most of all
        _end(trace, row, None, SpanError.of(error))
        raise
    finally:
        tools.observers.pop(trajectory_id, None)
    _end(trace, row, trajectory, _error(trajectory.failure))
    return trajectory


async def traced_reward(trace: TrajectoryTrace, trajectory: Trajectory, scoring: Awaitable[None]) -> None:
    """Await the scoring of a trajectory, and record what came of it; nothing if nobody scores."""
    own = any(output.reward_score is not None for output in trajectory.segments)
    source = "agent" if own else "reward_fn"
    start_ns = trace.now_ns()
    try:
        await scoring
    except BaseException as error:  # a cancellation from outside
        trace.reward(start_ns, {}, source=source, error=SpanError.of(error))
        raise
    reward = trajectory.reward
    if reward is not None:
        trace.reward(start_ns, {"score": reward.score, "extra": reward.extra}, source=source)
    elif trajectory.failure is not None:
        trace.reward(start_ns, {}, source=source, error=_error(trajectory.failure))


def _end(
    trace: TrajectoryTrace, row: Mapping[str, Any], trajectory: Trajectory | None, error: SpanError | None
) -> None:
    """Record the trajectory; rows and outputs of foreign shapes cost the span, never the trajectory."""
    try:
        trace.end(_inputs(row), {} if trajectory is None else _outputs(trajectory), error)
    except Exception:
        logger.exception("trajectory %s cannot be recorded", trace.labels.trajectory_id)


def _inputs(row: Mapping[str, Any]) -> dict[str, Any]:
    messages = next((row[name] for name in _PROMPTS if row.get(name) is not None), None)
    return {"messages": messages, "row": {name: value for name, value in row.items() if name not in _PROMPTS}}


def _outputs(trajectory: Trajectory) -> dict[str, Any]:
    if not trajectory.segments:
        return {}
    last, reward = trajectory.segments[-1], trajectory.reward
    segments = [
        {
            "prompt_length": len(output.prompt_ids),
            "response_length": len(output.response_ids),
            "policy_versions": output.policy_versions,
        }
        for output in trajectory.segments
    ]
    return {
        **last.extra_fields,
        "reward": None if reward is None else reward.score,
        "stop_reason": last.stop_reason,
        "num_turns": last.num_turns,
        "segments": segments,
    }


def _error(failure: Failure | None) -> SpanError | None:
    return None if failure is None else SpanError(failure.kind.value, failure.message)
