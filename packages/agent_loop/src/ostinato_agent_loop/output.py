"""What an agent hands to training: token ids, which of them were sampled, and why the trajectory ended.

Invariant: the parts of an `AgentLoopOutput` agree from the moment it exists; contradictions are errors, never padding.
This module knows sessions and ledgers, no tokenizer and no reward.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Any

import msgspec

from ostinato_agent_loop.errors import AgentLoopOutputError
from ostinato_engines import PolicySpan
from ostinato_rollout import ChatSession, Failure


class TrajectoryEnd(StrEnum):
    """Why a trajectory ended."""

    STOP = "stop"
    """The model ended its only turn."""
    NO_TOOL_CALL = "no_tool_call"
    """The model ended a turn without calling a tool: its answer."""
    RESPONSE_LENGTH = "response_length"
    """The response, or the model's context, is full."""
    TURN_LENGTH = "turn_length"
    """A turn was cut at its own limit before it held a complete call."""
    TOOL_RESPONSE_LENGTH = "tool_response_length"
    """The answer of the tools left no room to go on; it is not part of the output."""
    MAX_ASSISTANT_TURNS = "max_assistant_turns"
    """The model has had as many turns as it may."""
    MAX_USER_TURNS = "max_user_turns"
    """Tools have answered as often as they may."""
    TOOL_TERMINATED = "tool_terminated"
    """A tool said that the trajectory is over."""
    MALFORMED_CALLS = "malformed_calls"
    """Too many turns in a row held only calls that could not be read."""
    MAX_SEGMENTS = "max_segments"
    """A program has begun as many conversations as it may."""
    PROGRAM_ENDED = "program_ended"
    """The agent's program came to its end."""
    NOTHING_GENERATED = "nothing_generated"
    """A turn came back without a token."""
    GRAPH_END = "graph_end"
    """A graph came to its end."""
    RECURSION_LIMIT = "recursion_limit"
    """A graph took as many steps as it may."""
    FAILED = "failed"
    """The trajectory failed; see its failure."""


class AgentLoopMetrics(msgspec.Struct):
    """What a trajectory cost. All its segments share one object: count it once per trajectory."""

    generate_sequences: float = 0.0
    """Seconds spent waiting for generations."""
    admission: float = 0.0
    """Seconds spent waiting for a place on a replica, before the first turn."""
    tool_calls: float = 0.0
    """Seconds spent waiting for tools."""
    compute_score: float = 0.0
    """Seconds spent on the reward."""
    num_preempted: int = -1
    """How often the engine put a generation aside; -1: not known."""
    num_cached_tokens: int = 0
    """Prompt tokens that replicas did not compute again."""
    num_tokenization_mismatches: int = 0
    """Segments that the sanity check found different from a fresh render."""
    num_tool_calls: int = 0
    """Calls that the model made, whether they ran or not."""
    tool_outcomes: dict[str, int] = {}
    """Calls by outcome (`ok`, `timeout`, ...); `not_run` counts those beyond `max_parallel_calls`, and those in a turn that
    the response's limit cut."""
    num_release_failures: int = 0
    """Tool instances whose release raised."""
    num_continuations: int = 0
    """Requests of a program that brought earlier turns of the model."""
    num_exact_continuations: int = 0
    """Of these, those that went on in a conversation as its tokens are; the others were rendered anew, as segments of their own."""

    def count_calls(self, outcomes: Sequence[str]) -> None:
        """Count calls of a turn by what became of them."""
        self.num_tool_calls += len(outcomes)
        for outcome in outcomes:
            self.tool_outcomes[outcome] = self.tool_outcomes.get(outcome, 0) + 1


class AgentLoopOutput(msgspec.Struct, kw_only=True):
    """One segment of a trajectory, ready for training; most trajectories have one."""

    prompt_ids: list[int]
    """What stood before the first sampled token."""
    response_ids: list[int]
    """From the first sampled token on: what was sampled, and what tools and users said between."""
    response_mask: list[int]
    """1 where the policy sampled the token, else 0; as long as `response_ids`."""
    response_logprobs: list[float] | None = None
    """Log-probabilities of the sampled tokens under the policy that sampled them, 0.0 elsewhere; NaN where a turn
    has none, None if all lack them."""
    num_turns: int = 0
    """Messages of the conversation, those that come together counted as one."""
    stop_reason: TrajectoryEnd = TrajectoryEnd.STOP
    """Why the trajectory ended."""
    policy_versions: tuple[PolicySpan, ...] = ()
    """Which policy sampled from which offset in `response_ids` on; sorted, the first at 0. Empty: nothing is known."""
    multi_modal_data: dict | None = None
    """Media that the token ids have places for."""
    position_ids: list[int] | None = None
    """Positions of prompt and response where they are not 0, 1, 2, ..."""
    reward_score: float | None = None
    """The trajectory's score, if it has one; the same on every segment."""
    metrics: AgentLoopMetrics = msgspec.field(default_factory=AgentLoopMetrics)
    """What the trajectory cost."""
    extra_fields: dict[str, Any] = {}
    """`turn_scores`, `tool_rewards`, `messages`, `reward_extra` (named values beside the agent's own score), and what an agent adds."""
    failure: Failure | None = None
    """Set where the agent itself declares its trajectory failed."""
    group_id: str = ""
    """Which row's group it belongs to; filled in by the worker."""
    trajectory_id: str = ""
    """Which trajectory it belongs to; filled in by the worker."""
    segment_index: int = 0
    """Its place among the trajectory's segments; filled in by the worker."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise AgentLoopOutputError if the parts contradict each other."""
        _check_integers("prompt_ids", self.prompt_ids)
        _check_integers("response_ids", self.response_ids)
        _check_mask(self.response_mask)
        if self.position_ids is not None:
            _check_integers("position_ids", self.position_ids)
        length = len(self.response_ids)
        if not self.prompt_ids and self.failure is None:
            raise AgentLoopOutputError(
                "prompt_ids must hold at least one token, got none; the first sampled token needs something before it"
            )
        if len(self.response_mask) != length:
            raise AgentLoopOutputError(
                f"response_mask must be as long as response_ids ({length}), got {len(self.response_mask)};"
                " extend both together"
            )
        if self.response_logprobs is not None:
            _check_numbers("response_logprobs", self.response_logprobs)
            if len(self.response_logprobs) != length:
                raise AgentLoopOutputError(
                    f"response_logprobs must be as long as response_ids ({length}), got {len(self.response_logprobs)};"
                    " give None where the engine reports none"
                )
        total = len(self.prompt_ids) + length
        if self.position_ids is not None and len(self.position_ids) != total:
            raise AgentLoopOutputError(
                f"position_ids must cover prompt and response ({total}), got {len(self.position_ids)}; or give None"
            )
        if self.num_turns < 0:
            raise AgentLoopOutputError(f"num_turns must not be negative, got {self.num_turns}; count messages")
        self._check_versions(length)

    def _check_versions(self, length: int) -> None:
        starts = [span.start for span in self.policy_versions]
        if not starts:
            return
        if starts[0] != 0 or any(a >= b for a, b in pairwise(starts)) or starts[-1] >= max(length, 1):
            raise AgentLoopOutputError(
                f"policy_versions must start at 0, rise, and stay within the {length} response tokens, got starts {starts}"
                "; give offsets into response_ids"
            )


def _check_integers(name: str, value: Any) -> None:
    """Raise unless it is a list of integers from 0 on, as a training batch takes them."""
    if not isinstance(value, list):
        raise AgentLoopOutputError(f"{name} must be a list of ints, got {type(value).__name__}; convert it")
    try:
        array("I", value)
    except (TypeError, OverflowError) as error:
        raise AgentLoopOutputError(
            f"{name} must hold integers from 0 on, got {value!r:.80} ({error}); convert them"
        ) from error


def _check_mask(mask: Any) -> None:
    """Raise unless it is a list of 0 and 1."""
    if not isinstance(mask, list):
        raise AgentLoopOutputError(f"response_mask must be a list of ints, got {type(mask).__name__}; convert it")
    try:
        known = not bytes(mask).translate(None, b"\x00\x01")
    except (TypeError, ValueError):
        known = False
    if not known:
        wrong = next((value for value in mask if type(value) is not int or value not in (0, 1)), mask)
        raise AgentLoopOutputError(f"response_mask must hold 0 and 1 only, got {wrong!r:.80}; 1 marks sampled tokens")


def _check_numbers(name: str, value: Any) -> None:
    """Raise unless it is a list of finite numbers, or NaN for those that are not known."""
    try:
        # A finite sum has finite parts only, and is quick to make.
        wrong = not isinstance(value, list) or not (math.isfinite(sum(value)) or not any(map(math.isinf, value)))
    except (TypeError, OverflowError):
        wrong = True
    if wrong:
        raise AgentLoopOutputError(f"{name} must be a list of finite numbers or NaN, got {value!r:.80}; convert them")


def outputs_from_session(
    session: ChatSession,
    *,
    num_turns: int | None = None,
    stop_reason: TrajectoryEnd = TrajectoryEnd.STOP,
    metrics: AgentLoopMetrics | None = None,
    extra_fields: dict[str, Any] | None = None,
) -> list[AgentLoopOutput]:
    """Return the segments of a closed session as outputs.

    Args:
        session: The conversation.
        num_turns: Of the trajectory; None: of this conversation.
        stop_reason: Why the trajectory ended.
        metrics: What the agent has counted; what the session measured is added to it. None: nothing.
        extra_fields: What the reward reads beside it; None: the conversation, as `messages`.

    Raises:
        AgentLoopOutputError: The session was never extended.
    """
    if not session.segments:
        raise AgentLoopOutputError("the session must have a prompt, got none; extend it before asking for its outputs")
    metrics, measured = AgentLoopMetrics() if metrics is None else metrics, session.metrics
    metrics.generate_sequences += measured.generate_s
    metrics.admission += measured.admission_s
    metrics.num_preempted = max(metrics.num_preempted, 0) + measured.num_preempted
    metrics.num_cached_tokens += measured.num_cached_tokens
    metrics.num_tokenization_mismatches += measured.num_mismatches
    extra = {"messages": session.messages} if extra_fields is None else extra_fields
    outputs = []
    for index, ledger in enumerate(session.segments):
        spans = ledger.policy_versions
        outputs.append(
            AgentLoopOutput(
                prompt_ids=ledger.prompt_ids,
                response_ids=ledger.response_ids,
                response_mask=ledger.response_mask,
                response_logprobs=ledger.response_logprobs,
                num_turns=session.num_turns if num_turns is None else num_turns,
                stop_reason=stop_reason,
                policy_versions=tuple(
                    PolicySpan(start, version, version not in session.inexact_versions) for start, version in spans
                ),
                metrics=metrics,
                extra_fields=extra,
                segment_index=index,
            )
        )
    return outputs
