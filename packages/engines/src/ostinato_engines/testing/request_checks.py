"""Conformance checks of single requests: limits, stop ids, determinism, true logprobs, turns."""

import asyncio
import math
from typing import Any

import numpy as np

from ostinato_engines.errors import ConformanceError, EngineInputError
from ostinato_engines.server import UNKNOWN_MAX_MODEL_LEN
from ostinato_engines.testing.asking import Asker, Forward, Skip, cut, need, require
from ostinato_engines.testing.reference import logprob_bounds
from ostinato_engines.types import SamplingParams, StopReason, TokenOutput

_SHORT = 4096
"""A server with a max_model_len beyond it is asked for prompts of that length in the full scope only."""

_LONG_TURN = 160


class RequestChecks(Asker):
    """One method per check; each raises `ConformanceError` or `Skip`."""

    async def shape(self) -> None:
        out = await self.ask(self.prompt(5), max_tokens=6)
        require(1 <= len(out.token_ids) <= 6, f"max_tokens=6 must give 1 to 6 tokens, got {len(out.token_ids)}")
        require(
            all(0 <= t < self.vocab_size for t in out.token_ids),
            f"tokens must be in the vocabulary, got {out.token_ids}",
        )
        spans = out.policy_versions
        require(bool(spans) and spans[0].start == 0, f"policy_versions must start at 0, got {spans}")
        require(
            list(spans) == sorted(spans, key=lambda span: span.start), f"policy_versions must be sorted, got {spans}"
        )
        require(
            spans[-1].version == self.server.policy_version,
            f"policy_versions must end with {self.server.policy_version}, got {spans}",
        )
        if self.can.logprobs:
            require(out.logprobs is not None, "logprobs must be there as capabilities say, got None")
            bad = [value for value in out.logprobs or () if not math.isfinite(value) or value > 1e-6]
            require(not bad, f"logprobs must be finite and at most 0, got {bad[:3]}")
        else:
            require(out.logprobs is None, f"logprobs must be absent as capabilities say, got {out.logprobs}")
        if self.can.logprobs:
            silent = await self.ask(self.prompt(5), max_tokens=2, logprobs=False)
            require(silent.logprobs is None, f"logprobs=False must give None, got {silent.logprobs}")

    async def limits(self) -> None:
        longest = self.server.max_model_len
        need(longest != UNKNOWN_MAX_MODEL_LEN, "max_model_len is unknown")
        await self.refused("a prompt over max_model_len", self.prompt(longest + 1), SamplingParams(max_tokens=8))
        need(self.subject.thorough or longest <= _SHORT, f"prompts of {longest} tokens are left to the full scope")
        for room, wanted in ((6, 6), (1, 1), (0, 0)):
            out = await self.ask(self.prompt(longest - room), max_tokens=8, temperature=0)
            got = (len(out.token_ids), out.stop_reason)
            require(
                got == (wanted, StopReason.LENGTH),
                f"a prompt with room for {room} must end (length) with {wanted} tokens, got {got}",
            )
        out = await self.ask(self.prompt(longest - 5), temperature=0)
        require(len(out.token_ids) == 5, f"max_tokens=None must take the room of 5, got {len(out.token_ids)}")

    async def bad_requests(self) -> None:
        params = SamplingParams(max_tokens=2)
        await self.refused("an empty prompt", [], params)
        await self.refused("an id beyond the vocabulary", [1, self.vocab_size], params)
        await self.refused("a negative id", [1, -1], params)
        await self.refused("an unknown sampling parameter", [1, 2], {"max_tokens": 2, "tempertaure": 1.0})
        await self.refused("a temperature below 0", [1, 2], {"temperature": -1.0})
        if not self.can.media:
            try:
                await self.server.generate([1, 2], params, self.new_id(), media=[object()])
            except EngineInputError:
                pass
            else:
                raise ConformanceError("media must be refused where capabilities do not claim it, got an answer")
        out = await self.ask([1, 2], max_tokens=2)
        require(bool(out.token_ids), "a good request after bad ones must be served, got nothing")

    async def greedy(self) -> None:
        prompt = self.prompt(9)
        first = await self.ask(prompt, max_tokens=12, temperature=0)
        self.same("the same greedy request", prompt, await self.ask(prompt, max_tokens=12, temperature=0), first)
        short = await self.ask(prompt, max_tokens=5, temperature=0)
        self.same("a greedy request cut short", prompt, short, cut(first, 5))

    async def stop_tokens(self) -> None:
        prompt = self.prompt(7)
        free = await self.ask(prompt, max_tokens=12, temperature=0)
        stop = free.token_ids[4]
        never = next(token for token in range(self.vocab_size) if token not in free.token_ids)
        for stops in ((stop,), (never, stop)):
            out = await self.ask(prompt, max_tokens=12, temperature=0, stop_token_ids=stops)
            place = free.token_ids.index(stop)
            if out.token_ids[: place + 1] == free.token_ids[: place + 1]:
                self.same(f"stop ids {stops}", prompt, out, cut(free, place + 1))
            self._stopped_rightly(out, stops)
        place = free.token_ids.index(stop)
        out = await self.ask(prompt, max_tokens=place + 1, temperature=0, stop_token_ids=(stop,))
        self._stopped_rightly(out, (stop,))

    def _stopped_rightly(self, out: TokenOutput, stops: tuple[int, ...]) -> None:
        early = [token for token in out.token_ids[:-1] if token in stops]
        require(not early, f"stop ids {stops} must end the output, got {out.token_ids}")
        last = out.token_ids[-1]
        wanted = (StopReason.STOP, last) if last in stops else (StopReason.LENGTH, None)
        got = (out.stop_reason, out.stop_token_id)
        require(got == wanted, f"an output that ends with {last} under stop ids {stops} must say {wanted}, got {got}")

    async def logprobs(self) -> None:
        need(self.can.logprobs, "the engine returns no logprobs")
        if self.forward is None:
            raise Skip("no forward to compare with")
        await self.true_logprobs(self.forward)

    async def true_logprobs(self, forward: Forward) -> None:
        variants: list[dict[str, Any]] = [
            {},
            {"temperature": 0.0},
            {"temperature": 0.5},
            {"temperature": 1.7},
            {"top_p": 0.7},
            {"top_k": 5},
            {"min_p": 0.1},
            {"repetition_penalty": 1.3},
            {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.02, "repetition_penalty": 0.8},
        ]
        prompts = [self.prompt(4 + 3 * index) for index in range(len(variants))]
        outputs = await asyncio.gather(
            *(self.ask(prompt, max_tokens=10, **params) for prompt, params in zip(prompts, variants, strict=True))
        )
        for prompt, params, out in zip(prompts, variants, outputs, strict=True):
            self.true_to(forward, f"logprobs with {params}", prompt, out, SamplingParams(**params))

    def true_to(self, forward: Forward, what: str, prompt: list[int], out: TokenOutput, params: SamplingParams) -> None:
        """Every logprob of an output must be what the reference says of a plain forward's logits."""
        ids = [*prompt, *out.token_ids]
        logits = forward(ids)
        require(out.logprobs is not None, f"{what} must be there as capabilities say, got None")
        for place, got in enumerate(out.logprobs or (), start=len(prompt)):
            low, high = logprob_bounds(
                np.asarray(logits[place - 1]), ids[place], params, ids[:place], slack=self.tolerance
            )
            require(
                low <= got <= high,
                f"{what} must be within {self.tolerance}, got {got:.6f} outside [{low:.6f}, {high:.6f}] for output token "
                f"{place - len(prompt)}",
            )

    async def only_choice(self) -> None:
        prompt = self.prompt(8)
        greedy = await self.ask(prompt, max_tokens=8, temperature=0)
        choices: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-30}]
        for params in choices:
            out = await self.ask(prompt, max_tokens=8, **params)
            self.same(f"sampling with {params}", prompt, out, greedy)
            bad = [value for value in out.logprobs or () if not math.isfinite(value) or value > 1e-6]
            require(not bad, f"logprobs with {params} must be finite and at most 0, got {bad[:3]}")
            if self.forward is not None and self.can.logprobs:
                self.true_to(
                    self.forward, f"logprobs of the only choice, {params},", prompt, out, SamplingParams(**params)
                )

    async def seeds(self) -> None:
        need(self.can.seeds, "the engine takes no seeds")
        prompts = [self.prompt(8) for _ in range(16)]
        alone = [await self.ask(prompt, max_tokens=6, seed=7) for prompt in prompts]
        others = [self.ask(self.prompt(3 + i), max_tokens=5 + i) for i in range(6)]
        crowd = await asyncio.gather(*(self.ask(prompt, max_tokens=6, seed=7) for prompt in prompts), *others)
        num_different = sum(one.token_ids != two.token_ids for one, two in zip(alone, crowd, strict=False))
        # Rounding of the logits moves the edge between two tokens past the drawn number, but not that often.
        allowed = min(len(prompts) // 2, int(6 * len(prompts) * self.tolerance))
        require(
            num_different <= allowed,
            f"the same seeds in company must give the same tokens, got others for {num_different} of {len(prompts)}",
        )
        seeded = [await self.ask(prompts[0], max_tokens=6, seed=seed) for seed in range(8, 12)]
        require(
            any(out.token_ids != alone[0].token_ids for out in seeded),
            "other seeds must give other tokens, got the same",
        )

    async def ordering(self) -> None:
        prompts = [self.prompt(2 + index) for index in range(12)]
        lengths = [14 - index for index in range(12)]  # who came first ends last
        alone = [
            await self.ask(prompt, max_tokens=length, temperature=0)
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        together = await asyncio.gather(
            *(
                self.ask(prompt, max_tokens=length, temperature=0)
                for prompt, length in zip(prompts, lengths, strict=True)
            )
        )
        for index, (prompt, got, wanted) in enumerate(zip(prompts, together, alone, strict=True)):
            self.same(f"request {index} of 12 that end in another order than they came", prompt, got, wanted)

    async def concurrency(self) -> None:
        count = self.subject.num_concurrent
        prompts = [self.prompt(3 + index % 17) for index in range(min(count, 32))]
        alone = [await self.ask(prompt, max_tokens=8, temperature=0) for prompt in prompts]
        outputs = await asyncio.gather(
            *(self.ask(prompts[index % len(prompts)], max_tokens=8, temperature=0) for index in range(count))
        )
        for index, out in enumerate(outputs):
            which = index % len(prompts)
            self.same(f"request {index} of {count} at once", prompts[which], out, alone[which])

    async def turns(self) -> None:
        name = self.new_id()
        # Long enough to fill a block, where an engine reuses whole blocks only; three turns must fit behind it.
        prompt = self.prompt(max(10, min(_LONG_TURN, self.server.max_model_len - 40)))
        for turn in range(3):
            out = await self.ask(prompt, name, max_tokens=6, temperature=0)
            cold = await self.ask(prompt, max_tokens=6, temperature=0)
            self.same(f"turn {turn + 1} of a conversation", prompt, out, cold)
            if self.can.prefix_reuse and turn:
                require(
                    bool(out.num_cached_tokens), f"turn {turn + 1} must reuse its prefix, got {out.num_cached_tokens}"
                )
            prompt = [*prompt, *out.token_ids, *self.prompt(4)]
        prompt[3] = (prompt[3] + 1) % self.vocab_size
        changed = await self.ask(prompt, name, max_tokens=6, temperature=0)
        self.same("a rewritten history", prompt, changed, await self.ask(prompt, max_tokens=6, temperature=0))
        await self.server.release(name)

    async def long_prompt(self) -> None:
        length = min(self.subject.long_prompt_tokens, self.server.max_model_len - 4)
        need(length > 0, "no long prompt asked for")
        prompt, params = self.prompt(length), SamplingParams(temperature=0, max_tokens=4)
        out, short = await asyncio.gather(
            self.ask(prompt, max_tokens=4, temperature=0), self.ask(self.prompt(5), max_tokens=4, temperature=0)
        )
        require(
            len(out.token_ids) == len(short.token_ids) == 4, "a long and a short prompt must both be served, got less"
        )
        if self.forward is not None and self.can.logprobs:
            self.true_to(self.forward, f"logprobs after {length} tokens", prompt, out, params)
