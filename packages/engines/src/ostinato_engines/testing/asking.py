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


class Asker:
    """Asks one server; the checks derive from it."""

    def __init__(
        self,
        server: AsyncServerBase,
        vocab_size: int,
        forward: Forward | None,
        weight_update: WeightUpdate | None,
        num_concurrent: int,
        long_prompt_tokens: int,
        logprob_tolerance: float,
    ) -> None:
        self.server = server
        self.vocab_size = vocab_size
        self.forward = forward
        self.weight_update = weight_update
        self.num_concurrent = num_concurrent
        self.long_prompt_tokens = long_prompt_tokens
        self.tolerance = logprob_tolerance
        self.can = server.capabilities()
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

    def same(self, what: str, got: TokenOutput, wanted: TokenOutput) -> None:
        require(got.token_ids == wanted.token_ids, f"{what} must give {wanted.token_ids}, got {got.token_ids}")

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
