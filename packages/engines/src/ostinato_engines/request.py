"""One request inside the embedded engine, from arrival to its output."""

import asyncio
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ostinato_engines.errors import EngineCrashedError, EngineInputError
from ostinato_engines.types import PolicySpan, SamplingParams, StopReason, TokenOutput


@dataclass(slots=True, eq=False)
class Request:
    """A prompt on its way to an output. `row` follows the row table's swaps."""

    request_id: str
    prompt: np.ndarray
    """int64 [prompt length]."""
    params: SamplingParams
    limit: int
    """Tokens in all, prompt included, at which it ends."""
    stream_key: int
    """Of its uniform numbers."""
    future: "asyncio.Future[TokenOutput]"
    row: int = -1
    num_cached: int = 0
    num_preempted: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(output tokens before the switch, version)."""
    ended: bool = False
    """Nobody waits for it any more: cancelled, aborted or answered."""
    release_at_end: bool = False

    def __str__(self) -> str:
        return f"request {self.request_id!r}"

    def serve_under(self, version: int, num_generated: int) -> None:
        """Notes that tokens from here on come from this policy version."""
        if self.spans and self.spans[-1][0] == num_generated:
            self.spans.pop()
        if not self.spans or self.spans[-1][1] != version:
            self.spans.append((num_generated, version))

    def output(
        self, token_ids: list[int], logprobs: list[float], stop_reason: StopReason, stop_token_id: int | None = None
    ) -> TokenOutput:
        """What the caller gets."""
        spans = tuple(
            PolicySpan(start, version) for start, version in self.spans if start < len(token_ids) or start == 0
        )
        return TokenOutput(
            token_ids,
            logprobs if self.params.logprobs else None,
            stop_reason,
            stop_token_id,
            spans,
            self.num_cached,
            self.num_preempted,
        )

    def resolve(self, outcome: TokenOutput | BaseException) -> None:
        """Answers the caller, unless it is gone."""
        self.ended = True
        if self.future.done():
            return
        if isinstance(outcome, BaseException):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


def refuse_double(request_id: str, in_flight: Container[str]) -> None:
    """Raises `EngineInputError` if the conversation has a turn in flight."""
    if request_id in in_flight:
        raise EngineInputError(
            f"request_id must not be in flight, got {request_id!r}; await its turn, or use another id per sample"
        )


def checked_prompt(prompt_ids: Sequence[int], *, vocab_size: int, max_model_len: int) -> np.ndarray:
    """The prompt as an int64 array of its own.

    Raises:
        EngineInputError: Empty, not flat, not integers, ids outside the vocabulary, or longer than the model.
    """
    try:
        prompt = np.asarray(prompt_ids)
    except (ValueError, OverflowError) as error:
        raise EngineInputError(f"prompt_ids must be a sequence of integers, got {error}; pass token ids") from error
    if prompt.ndim != 1 or not len(prompt):
        raise EngineInputError(
            f"prompt_ids must be a non-empty flat sequence, got shape {prompt.shape}; pass token ids"
        )
    if prompt.dtype.kind not in "iu":
        raise EngineInputError(f"prompt_ids must be integers, got {prompt.dtype}; pass token ids")
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= vocab_size:
        raise EngineInputError(
            f"prompt_ids must be in [0, {vocab_size}), got {low if low < 0 else high}; use the tokenizer of this model"
        )
    if len(prompt) > max_model_len:
        raise EngineInputError(
            f"prompt_ids must hold at most max_model_len={max_model_len} ids, got {len(prompt)}; shorten the prompt"
        )
    return prompt.astype(np.int64, copy=True)


async def until_answered(answered: Iterable[asyncio.Event], *, limit_s: float) -> None:
    """Returns once all of these are set, each of which says that a request's caller has the answer.

    Raises:
        EngineCrashedError: That took longer.
    """
    try:
        async with asyncio.timeout(limit_s):
            for event in list(answered):
                await event.wait()
    except TimeoutError as error:
        raise EngineCrashedError(f"requests must be answered within {limit_s:g} s, got no answer; restart") from error
