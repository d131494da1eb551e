"""From trajectories to one flat mapping of metrics. Each trajectory counts once, however many segments it has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ostinato_agent_loop.trajectory import Trajectory
from ostinato_rollout import FailureKind
from ostinato_tools import OutcomeKind

_DURATIONS = ("generate_sequences", "tool_calls", "compute_score")


def batch_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the metrics of a batch.

    `{min,max,mean}` are over the trajectories that have segments and absent if there is none; `agent_loop/slowest/*`
    describes the one that took longest over generation, tools and reward together; `failures/<kind>` and
    `tool_outcomes/<kind>` are counts, present for every kind; `exact_continuations` is the share of the requests with
    earlier turns in them that went on from the tokens of those turns, absent where no agent makes such requests.
    """
    metrics: dict[str, float] = {}
    done = [trajectory.segments for trajectory in trajectories if trajectory.segments]
    costs = [segments[0].metrics for segments in done]
    for name in _DURATIONS:
        add_spread(metrics, f"agent_loop/{name}", [getattr(cost, name) for cost in costs])
    add_spread(metrics, "agent_loop/admission", [cost.admission for cost in costs])
    add_spread(metrics, "num_turns", [segments[-1].num_turns for segments in done])
    add_spread(metrics, "tool_call_counts", [cost.num_tool_calls for cost in costs])
    preempted = [cost.num_preempted for cost in costs if cost.num_preempted >= 0]
    add_spread(metrics, "agent_loop/num_preempted", preempted)
    if done:
        totals = [sum(getattr(cost, name) for name in _DURATIONS) for cost in costs]
        slowest = max(range(len(totals)), key=totals.__getitem__)
        for name in _DURATIONS:
            metrics[f"agent_loop/slowest/{name}"] = getattr(costs[slowest], name)
        metrics["agent_loop/slowest/total"] = totals[slowest]
        metrics["agent_loop/slowest/num_turns"] = done[slowest][-1].num_turns
        metrics["agent_loop/slowest/prompt_length"] = len(done[slowest][0].prompt_ids)
        metrics["agent_loop/slowest/response_length"] = sum(len(output.response_ids) for output in done[slowest])
    metrics["agent_loop/num_segments"] = sum(len(segments) for segments in done)
    metrics["agent_loop/num_cached_tokens"] = sum(cost.num_cached_tokens for cost in costs)
    metrics["agent_loop/tokenization_mismatches"] = sum(cost.num_tokenization_mismatches for cost in costs)
    metrics["agent_loop/release_failures"] = sum(cost.num_release_failures for cost in costs)
    if num_continuations := sum(cost.num_continuations for cost in costs):
        num_exact = sum(cost.num_exact_continuations for cost in costs)
        metrics["agent_loop/exact_continuations"] = num_exact / num_continuations
    for kind in (*(kind.value for kind in OutcomeKind), "not_run"):
        metrics[f"agent_loop/tool_outcomes/{kind}"] = sum(cost.tool_outcomes.get(kind, 0) for cost in costs)
    failures = [trajectory.failure.kind for trajectory in trajectories if trajectory.failure is not None]
    metrics["agent_loop/failures"] = len(failures)
    for kind in FailureKind:
        metrics[f"agent_loop/failures/{kind.value}"] = failures.count(kind)
    return metrics


def add_spread(metrics: dict[str, float], name: str, values: Iterable[float]) -> None:
    """Add `name/{min,max,mean}`; nothing where there are no values."""
    known = list(values)
    if known:
        metrics[f"{name}/min"] = min(known)
        metrics[f"{name}/max"] = max(known)
        metrics[f"{name}/mean"] = sum(known) / len(known)
