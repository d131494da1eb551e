"""How the conformance checks ask a server: prompts, ids, and what must hold. Knows no single check."""

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ostinato_engines.errors import ConformanceError, EngineInputError
from ostinato_engines.server import AsyncServerBase
from ostinato_engines.types import SamplingParams, StopReason, TokenOutput, WeightManifest, as_token_output

if TYPE_CHECKING:
    from torch import Tensor

Forward = Callable[[Sequence[int]], np.ndarray]
"""Ids [n] to logits [n, vocab] of a plain forward."""


@dataclass(frozen=True)
class WeightUpdate:
    """New weights to try: they must change the greedy output."""

    manifest: WeightManifest
    make_weights: "Callable[[], Iterable[tuple[str, Tensor]]]"
    forward: Forward | None = None
    """Of the new weights."""


class Skip(Exception):
    """This check does not apply; the text says why."""


def require(condition: bool, message: str) -> None:
    """Fails the check unless the condition holds."""
    if not condition:
        raise ConformanceError(message)


def need(condition: bool, reason: str) -> None:
    """Skips the check unless the condition holds."""
    if not condition:
        raise Skip(reason)


def cut(output: TokenOutput, length: int) -> TokenOutput:
    """The first tokens of an output."""
    return TokenOutput(output.token_ids[:length], None, StopReason.LENGTH)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A server under test and what is known of it; see `check_server`."""

    server: AsyncServerBase
    vocab_size: int
    forward: Forward | None
    weight_update: WeightUpdate | None
    num_concurrent: int
    long_prompt_tokens: int
    tolerance: float
    thorough: bool
    """Whether checks may take as long as the server's longest prompts do."""


class Asker:
    """Asks one server; the checks derive from it."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.server = subject.server
        self.vocab_size = subject.vocab_size
        self.forward = subject.forward
        self.tolerance = subject.tolerance
        self.can = subject.server.capabilities()
        self.random = random.Random(0)
        self.count = 0

    def prompt(self, length: int) -> list[int]:
        return [self.random.randrange(self.vocab_size) for _ in range(length)]

    def new_id(self) -> str:
        self.count += 1
        return f"check-{self.count}"

    async def ask(self, prompt: Sequence[int], request_id: str | None = None, **params: Any) -> TokenOutput:
        own = request_id is None
        name = self.new_id() if request_id is None else request_id
        raw = await self.server.generate(prompt, SamplingParams(**params), name)
        if own:
            await self.server.release(name)
        return as_token_output(raw)

    def start(self, prompt: Sequence[int], request_id: str, **params: Any) -> "asyncio.Task[TokenOutput]":
        return asyncio.ensure_future(self.ask(prompt, request_id, **params))

    async def refused(self, what: str, prompt: Any, params: Any, kind: type[Exception] = EngineInputError) -> None:
        try:
            await self.server.generate(prompt, params, self.new_id())
        except kind:
            return
        except Exception as error:
            raise ConformanceError(f"{what} must raise {kind.__name__}, got {type(error).__name__}: {error}") from error
        raise ConformanceError(f"{what} must raise {kind.__name__}, got an answer")

    def same(self, what: str, prompt: Sequence[int], got: TokenOutput, wanted: TokenOutput) -> None:
        """Greedy outputs of one prompt must be equal; they may part at a token where rounding decides."""
        pairs = zip(got.token_ids, wanted.token_ids, strict=False)
        place = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
        if place is None:
            equal = len(got.token_ids) == len(wanted.token_ids)
        else:
            equal = self.is_tie([*prompt, *got.token_ids[:place]], got.token_ids[place], wanted.token_ids[place])
        require(equal, f"{what} must give {wanted.token_ids}, got {got.token_ids}")

    def is_tie(self, ids: Sequence[int], one: int, other: int) -> bool:
        """Whether two next tokens are equally probable but for rounding; without a forward none are."""
        if self.forward is None:
            return False
        logits = self.forward(ids)[-1]
        return abs(float(logits[one] - logits[other])) <= 2 * self.tolerance

    async def until_running(self, request_id: str) -> None:
        """Gives a request the chance to sample something."""
        for _ in range(1000):
            await asyncio.sleep(0)
            if (await self.server.health()).num_running:
                break
        for _ in range(20):
            await asyncio.sleep(0)

    async def nothing_in_flight(self) -> None:
        health = await self.server.health()
        for _ in range(1000):
            if not health.num_running and not health.num_waiting:
                return
            await asyncio.sleep(0.001)
            health = await self.server.health()
        raise ConformanceError(
            f"nothing may be in flight, got {health.num_running} running, {health.num_waiting} waiting"
        )
