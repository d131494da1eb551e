"""One request on its way through SGLang: in one leg, or in several where an update of the weights came in between.

Invariant: all tokens of a leg come from one version of the weights, so that spans are exact.
"""

import asyncio
from dataclasses import dataclass, field
from enum import Enum

from ostinato_engines.errors import EngineCrashedError, EngineError
from ostinato_engines.sglang_engine.protocol import Generated, is_only_choice
from ostinato_engines.types import PolicySpan, SamplingParams, StopReason, TokenOutput


class Halt(Enum):
    """Why the adapter has a leg aborted."""

    ABORT = "abort"
    """The request ends with what it has."""
    INTERRUPT = "interrupt"
    """It goes on later, with what it has as part of its prompt."""


@dataclass(slots=True, eq=False)
class Turn:
    """One request."""

    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    """A token's draw depends on seed and position: the next leg goes on with the same numbers."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(start, version) of each leg that brought tokens."""
    num_cached: int | None = None
    num_preempted: int = 0
    version: int = 0
    """That serves now, or served last."""
    rid: str = ""
    """SGLang's name for the leg under way; empty between legs."""
    gate: "asyncio.Future[bool] | None" = None
    """Waits here before a leg: True goes on, False ends aborted."""
    halt: Halt | None = None
    failure: EngineError | None = None
    """What its caller gets instead of tokens."""
    aborted: bool = False
    between: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no leg is under way."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once its caller has the answer; `aborted` is right from then on."""

    def __post_init__(self) -> None:
        self.between.set()

    @property
    def num_left(self) -> int:
        """Tokens that it may still sample."""
        return self.max_tokens - len(self.token_ids)

    def leave_gate(self, outcome: bool | EngineError) -> None:
        """Lets a request that waits at its gate go, if it does."""
        if self.gate is None or self.gate.done():
            return
        if isinstance(outcome, EngineError):
            self.gate.set_exception(outcome)
        else:
            self.gate.set_result(outcome)

    def begin_leg(self, rid: str, version: int) -> None:
        """A leg under way."""
        self.rid, self.version = rid, version
        self.between.clear()

    def end_leg(self) -> None:
        """No leg under way."""
        self.rid = ""
        self.between.set()

    def take(self, answer: Generated) -> StopReason | None:
        """Adds what a leg has brought; why the request ends with it, or None where it goes on.

        Raises:
            EngineCrashedError: SGLang gave the request up.
        """
        finish, meta = answer.meta_info.finish_reason, answer.meta_info
        if finish.type == "abort" and self.halt is None:
            raise EngineCrashedError(
                f"request must end with a stop or a length, got an abort from sglang: {finish.message}; see its log"
            )
        self._add(answer)
        if self.num_cached is None:
            self.num_cached = meta.cached_tokens
        self.num_preempted += meta.num_retractions
        halt, self.halt = self.halt, None
        # Of an aborted leg the last token may be one that ends the turn.
        if self.token_ids and self.token_ids[-1] in self.params.stop_token_ids:
            return StopReason.STOP
        if self.num_left <= 0 or finish.type == "length":
            return StopReason.LENGTH
        if halt is Halt.ABORT:
            return StopReason.ABORTED
        # The model's own end of text stops SGLang, too; it is a token like any other here.
        self.num_preempted += halt is Halt.INTERRUPT
        return None

    def _add(self, answer: Generated) -> None:
        """Tokens and logprobs: of an aborted leg SGLang may have told fewer than it sampled, but a whole beginning."""
        new = answer.output_ids
        if self.params.logprobs:
            told = answer.meta_info.output_token_logprobs
            new = new[: len(told)]
            if any(entry[1] != token_id for entry, token_id in zip(told, new, strict=False)):
                raise EngineCrashedError("logprobs must be those of the tokens, got others from sglang; see its log")
            self.logprobs += [0.0] * len(new) if is_only_choice(self.params) else [e[0] for e in told[: len(new)]]
        if new and (not self.spans or self.spans[-1][1] != self.version):
            self.spans.append((len(self.token_ids), self.version))
        self.token_ids += new

    def output(self, reason: StopReason) -> TokenOutput:
        """What the caller gets."""
        spans = self.spans or [(0, self.version)]
        return TokenOutput(
            self.token_ids,
            self.logprobs if self.params.logprobs else None,
            reason,
            self.token_ids[-1] if reason is StopReason.STOP else None,
            tuple(PolicySpan(start, version) for start, version in spans),
            self.num_cached,
            self.num_preempted,
        )
