"""What the aborted parts of one generation have brought so far.

Invariant: parts stand in the order in which they were sampled, each token with its log-probability and the version of the
policy that sampled it. Knows no replica.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ostinato_engines import PolicySpan, SamplingParams, StopReason, TokenOutput
from ostinato_rollout.seeds import derive_seed


class PartialGeneration:
    """Collects the parts of a generation that is resumed until it ends otherwise than by an abort.

    Args:
        prompt_ids: What is continued.
        params: How, over all parts together.
    """

    def __init__(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self._prompt_ids, self._params = prompt_ids, params
        self._token_ids: list[int] = []
        self._logprobs: list[float] | None = []
        self._spans: list[PolicySpan] = []
        self._num_cached: int | None = None
        self._num_preempted = 0

    def __len__(self) -> int:
        """Return the number of tokens so far."""
        return len(self._token_ids)

    @property
    def is_full(self) -> bool:
        """Whether nothing may be sampled any more."""
        return self._params.max_tokens is not None and len(self) >= self._params.max_tokens

    def add(self, output: TokenOutput) -> None:
        """Append a part."""
        if output.num_cached_tokens is not None and self._num_cached is None:
            self._num_cached = output.num_cached_tokens
        self._num_preempted += output.num_preempted
        if not output.token_ids:
            return
        offset = len(self)
        for span in output.policy_versions:
            last = self._spans[-1] if self._spans else None
            if last is None or (last.version, last.exact) != (span.version, span.exact):
                self._spans.append(PolicySpan(span.start + offset, span.version, span.exact))
        self._token_ids.extend(output.token_ids)
        if output.logprobs is None:
            self._logprobs = None
        elif self._logprobs is not None:
            self._logprobs.extend(output.logprobs)

    def rest(self, number: int) -> tuple[list[int], SamplingParams]:
        """Return what to ask for next, as attempt `number` (from 1): the prompt with all so far, and what is left.

        A seed is replaced by one derived from it: the same one would draw again what it drew before.
        """
        params = self._params
        left = None if params.max_tokens is None else params.max_tokens - len(self)
        seed = None if params.seed is None else derive_seed(params.seed, number)
        return [*self._prompt_ids, *self._token_ids], msgspec.structs.replace(params, max_tokens=left, seed=seed)

    def merged(self, stop_reason: StopReason, stop_token_id: int | None, version: int) -> TokenOutput:
        """Return all parts as one output; `version` is that of one without tokens."""
        return TokenOutput(
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            stop_reason=stop_reason,
            stop_token_id=stop_token_id,
            policy_versions=tuple(self._spans) or (PolicySpan(0, version),),
            num_cached_tokens=self._num_cached,
            num_preempted=self._num_preempted,
        )
