"""What a replica may answer to `generate`, checked before anything is made of it: replicas may be anybody's.

Everything above relies on it. Knows no vocabulary: whether an id is a token, the tokenizer says.
"""

from __future__ import annotations

import math
from array import array
from typing import Any

import msgspec

from ostinato_engines import EngineInputError, PolicySpan, SamplingParams, StopReason, TokenOutput, as_token_output
from ostinato_rollout.errors import ReplicaError

_MAX_ID = 2**31 - 1
_ROUNDING = 1e-3
"""How far above 0 a logprob may come by rounding."""


def checked_output(raw: Any, params: SamplingParams, replica: int) -> TokenOutput:
    """Return an answer in the form in which it is recorded.

    Versions that sampled nothing are left out, and one that was aborted on a token that ends the turn has ended.

    Raises:
        ReplicaError: It breaks the contract.
    """
    try:
        output = as_token_output(raw)
    except EngineInputError as error:
        # Its cause would be what the replica raised, and this is not.
        message = f"replica {replica} must answer by its contract, got that {error}"
        raise ReplicaError(message, replica=replica) from None
    fault = _fault(output, params)
    if fault:
        raise ReplicaError(f"{fault} from replica {replica}; correct that server", replica=replica)
    token_ids, spans = output.token_ids, _spans_with_tokens(output)
    if len(spans) != len(output.policy_versions):
        output = msgspec.structs.replace(output, policy_versions=spans)
    if output.stop_reason is StopReason.ABORTED and token_ids and token_ids[-1] in params.stop_token_ids:
        return msgspec.structs.replace(output, stop_reason=StopReason.STOP, stop_token_id=token_ids[-1])
    return output


def _fault(output: TokenOutput, params: SamplingParams) -> str:
    """Return what the first field that is not what it must be must be; empty: all are."""
    token_ids, logprobs = output.token_ids, output.logprobs
    if not _are_ids(token_ids):
        return f"token_ids must be a list of integers from 0 to 2**31 - 1, got {token_ids!r:.200}"
    if params.max_tokens is not None and len(token_ids) > params.max_tokens:
        return f"token_ids must hold at most max_tokens ({params.max_tokens}), got {len(token_ids)}"
    if not set(params.stop_token_ids).isdisjoint(token_ids[:-1]):
        first = next(token for token in token_ids if token in params.stop_token_ids)
        return f"token_ids must end with the first stop token, got tokens after {first} in {token_ids!r:.200}"
    if logprobs is not None:
        if not _are_logprobs(logprobs):
            return f"logprobs must be None or a list of finite numbers of at most 0, got {logprobs!r:.200}"
        if len(logprobs) != len(token_ids):
            return f"logprobs must be as long as token_ids ({len(token_ids)}), got {len(logprobs)}"
    if not isinstance(output.stop_reason, StopReason):
        return f"stop_reason must be a StopReason, got {output.stop_reason!r:.80}"
    if not _are_spans(output.policy_versions):
        return (
            "policy_versions must be PolicySpans, sorted by start, the first at 0, with versions from 0 on,"
            f" got {output.policy_versions!r:.200}"
        )
    for name in ("num_cached_tokens", "num_preempted"):
        value = getattr(output, name)
        if not (_is_count(value) or (value is None and name == "num_cached_tokens")):
            return f"{name} must be a number of at least 0, got {value!r:.80}"
    return ""


def _are_ids(token_ids: Any) -> bool:
    try:
        return (
            isinstance(token_ids, list | tuple)
            and len(array("I", token_ids)) == len(token_ids)  # it takes nothing but integers of at least 0
            and (not token_ids or max(token_ids) <= _MAX_ID)
            and bool not in set(map(type, token_ids))
        )
    except (TypeError, OverflowError):
        return False


def _are_logprobs(logprobs: Any) -> bool:
    try:
        return (
            isinstance(logprobs, list | tuple)
            and (math.isfinite(sum(logprobs)) or all(map(math.isfinite, logprobs)))  # a finite sum has finite parts
            and (not logprobs or max(logprobs) <= _ROUNDING)
            and bool not in set(map(type, logprobs))
        )
    except (TypeError, OverflowError):
        return False


def _are_spans(spans: Any) -> bool:
    if not isinstance(spans, list | tuple) or not spans:
        return False
    last = 0
    for span in spans:
        if not (isinstance(span, PolicySpan) and _is_count(span.start) and _is_count(span.version)):
            return False
        if span.start < last:
            return False
        last = span.start
    return spans[0].start == 0


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _spans_with_tokens(output: TokenOutput) -> tuple[PolicySpan, ...]:
    """Return the spans that hold a token; of an answer without tokens, the first one."""
    spans = output.policy_versions
    if len(spans) == 1:
        return tuple(spans)
    ends = [*(span.start for span in spans[1:]), len(output.token_ids)]
    return tuple(span for span, end in zip(spans, ends, strict=True) if span.start < end) or tuple(spans[:1])
