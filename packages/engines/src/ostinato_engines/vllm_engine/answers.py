"""What vLLM returns for a request, in the contract's words."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ostinato_engines.errors import EngineCrashedError, EngineError
from ostinato_engines.request import until_answered
from ostinato_engines.types import PolicySpan, SamplingParams, StopReason, TokenOutput
from ostinato_engines.vllm_engine.held import HeldAnswer

_ANSWER_S = 30.0
_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORTED}


@dataclass(slots=True, eq=False)
class Conversing:
    """One request under way in vLLM."""

    engine_id: str
    """Its name there: never used twice."""
    versions: list[int]
    """The versions that served while it was under way, the oldest first."""
    gate: "asyncio.Future[bool] | None" = None
    """Waits here while the server is paused, before vLLM knows it: True goes on, False ends aborted."""
    failure: EngineError | None = None
    """What its caller gets instead of the tokens so far."""
    num_preempted: int = 0
    aborted: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once its caller has the answer; `aborted` is right from then on."""

    def leave_gate(self, outcome: bool | EngineError) -> None:
        """Lets a request that waits at its gate go, if it does."""
        if self.gate is None or self.gate.done():
            return
        if isinstance(outcome, EngineError):
            self.gate.set_exception(outcome)
        else:
            self.gate.set_result(outcome)


async def until_gone(requests: Iterable[Conversing]) -> None:
    """Returns once those who wait for these requests have their answers: vLLM has queued them already.

    Raises:
        EngineCrashedError: It has not.
    """
    await until_answered((request.gone for request in requests), limit_s=_ANSWER_S)


def nothing_sampled(params: SamplingParams, reason: StopReason, version: int) -> TokenOutput:
    """The output of a request that vLLM never saw."""
    return TokenOutput([], [] if params.logprobs else None, reason, None, (PolicySpan(0, version),), 0)


def to_token_output(
    result: Any, params: SamplingParams, request: Conversing, *, exact: bool, answer: HeldAnswer | None = None
) -> TokenOutput:
    """The one output of a finished request.

    Args:
        result: vLLM's RequestOutput.
        params: As asked.
        request: As it went.
        exact: Whether vLLM says which tokens came from which weights.
        answer: What the engine core held of it: everything that was sampled, which `result` then lacks.

    Raises:
        EngineCrashedError: vLLM gave the request up, or lost logprobs.
    """
    completion = result.outputs[0]
    reason = _REASONS.get(completion.finish_reason)
    if reason is None:
        raise EngineCrashedError(
            f"request must end with a stop, a length or an abort, got {completion.finish_reason!r} from vllm; see its log"
        )
    if answer is None:
        token_ids = list(completion.token_ids)
        logprobs = _logprobs(completion, len(token_ids)) if params.logprobs else None
        spans = _spans(completion, request, len(token_ids), exact=exact)
        num_cached = result.num_cached_tokens
    else:
        token_ids, logprobs = answer.to_lists()
        spans = tuple(PolicySpan(*span) for span in answer.versions) or _spans(completion, request, 0, exact=True)
        num_cached = answer.num_cached_tokens
    if logprobs is not None and len(logprobs) != len(token_ids):
        raise EngineCrashedError(
            f"request must have a logprob for each of its {len(token_ids)} tokens, got {len(logprobs)} from vllm; see its log"
        )
    stopped = reason is StopReason.STOP and bool(token_ids)
    stop_token_id = token_ids[-1] if stopped else None
    return TokenOutput(token_ids, logprobs, reason, stop_token_id, spans, num_cached, request.num_preempted)


def _logprobs(completion: Any, num_tokens: int) -> list[float]:
    """One per token: without alternatives the flat form holds nothing else."""
    flat = completion.logprobs
    return list(flat.logprobs) if flat is not None and num_tokens else []


def _spans(completion: Any, request: Conversing, num_tokens: int, *, exact: bool) -> tuple[PolicySpan, ...]:
    if exact and num_tokens and completion.weight_versions:
        return tuple(PolicySpan(span.start, int(span.version)) for span in completion.weight_versions)
    if not num_tokens:
        return (PolicySpan(0, request.versions[-1]),)
    return (PolicySpan(0, request.versions[0], exact=len(request.versions) == 1),)
