"""Conformance checks of single requests: limits, stop ids, determinism, true logprobs, turns."""

import asyncio
import math
from typing import Any

from ostinato_engines.errors import ConformanceError, EngineInputError
from ostinato_engines.server import UNKNOWN_MAX_MODEL_LEN
from ostinato_engines.testing.asking import Asker, Forward, Skip, cut, need, require
from ostinato_engines.testing.reference import reference_logprobs
from ostinato_engines.types import SamplingParams, StopReason


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
            silent = await self.ask(self.prompt(5), max_tokens=2, logprobs=False)
            require(silent.logprobs is None, f"logprobs=False must give None, got {silent.logprobs}")

    async def limits(self) -> None:
        longest = self.server.max_model_len
        need(longest != UNKNOWN_MAX_MODEL_LEN, "max_model_len is unknown")
        for room, wanted in ((6, 6), (1, 1), (0, 0)):
            out = await self.ask(self.prompt(longest - room), max_tokens=8, temperature=0)
            got = (len(out.token_ids), out.stop_reason)
            require(
                got == (wanted, StopReason.LENGTH),
                f"a prompt with room for {room} must end (length) with {wanted} tokens, got {got}",
            )
        await self.refused("a prompt over max_model_len", self.prompt(longest + 1), SamplingParams(max_tokens=8))
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
        self.same("the same greedy request", await self.ask(prompt, max_tokens=12, temperature=0), first)
        self.same("a greedy request cut short", await self.ask(prompt, max_tokens=5, temperature=0), cut(first, 5))

    async def stop_tokens(self) -> None:
        prompt = self.prompt(7)
        free = await self.ask(prompt, max_tokens=12, temperature=0)
        stop = free.token_ids[4]
        place = free.token_ids.index(stop)
        for stops in ((stop,), (self.vocab_size - 1 if stop != self.vocab_size - 1 else 0, stop)):
            place = min(free.token_ids.index(t) for t in stops if t in free.token_ids)
            out = await self.ask(prompt, max_tokens=12, temperature=0, stop_token_ids=stops)
            self.same(f"stop ids {stops}", out, cut(free, place + 1))
            got = (out.stop_reason, out.stop_token_id)
            require(
                got == (StopReason.STOP, free.token_ids[place]),
                f"a sampled stop id must be reported as (stop, {free.token_ids[place]}), got {got}",
            )
        out = await self.ask(prompt, max_tokens=place + 1, temperature=0, stop_token_ids=(stop,))
        require(out.stop_reason is StopReason.STOP, f"a stop id as the last token is a stop, got {out.stop_reason}")

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
            wanted = reference_logprobs(
                forward([*prompt, *out.token_ids]), prompt, out.token_ids, SamplingParams(**params)
            )
            worst = max(abs(got - want) for got, want in zip(out.logprobs or (), wanted, strict=True))
            require(
                worst <= self.tolerance, f"logprobs with {params} must be within {self.tolerance}, got {worst:.3g} off"
            )

    async def seeds(self) -> None:
        need(self.can.seeds, "the engine takes no seeds")
        prompt = self.prompt(8)
        alone = await self.ask(prompt, max_tokens=12, seed=7)
        others = [self.ask(self.prompt(3 + i), max_tokens=5 + i) for i in range(6)]
        crowd = await asyncio.gather(self.ask(prompt, max_tokens=12, seed=7), *others)
        self.same("the same seed in company", crowd[0], alone)
        seeded = [await self.ask(prompt, max_tokens=12, seed=seed) for seed in range(8, 12)]
        require(
            any(out.token_ids != alone.token_ids for out in seeded), "other seeds must give other tokens, got the same"
        )

    async def concurrency(self) -> None:
        prompts = [self.prompt(3 + index % 17) for index in range(min(self.num_concurrent, 8))]
        alone = [await self.ask(prompt, max_tokens=8, temperature=0) for prompt in prompts]
        many = [prompts[index % len(prompts)] for index in range(self.num_concurrent)]
        outputs = await asyncio.gather(*(self.ask(prompt, max_tokens=8, temperature=0) for prompt in many))
        for index, out in enumerate(outputs):
            self.same(f"request {index} of {len(many)} at once", out, alone[index % len(prompts)])

    async def turns(self) -> None:
        name = self.new_id()
        prompt = self.prompt(10)
        for turn in range(3):
            out = await self.ask(prompt, name, max_tokens=6, temperature=0)
            cold = await self.ask(prompt, max_tokens=6, temperature=0)
            self.same(f"turn {turn + 1} of a conversation", out, cold)
            if self.can.prefix_reuse and turn:
                require(
                    bool(out.num_cached_tokens), f"turn {turn + 1} must reuse its prefix, got {out.num_cached_tokens}"
                )
            prompt = [*prompt, *out.token_ids, *self.prompt(4)]
        prompt[3] = (prompt[3] + 1) % self.vocab_size
        changed = await self.ask(prompt, name, max_tokens=6, temperature=0)
        self.same("a rewritten history", changed, await self.ask(prompt, max_tokens=6, temperature=0))
        await self.server.release(name)

    async def long_prompt(self) -> None:
        need(self.long_prompt_tokens > 0, "no long prompt asked for")
        prompt = self.prompt(self.long_prompt_tokens)
        out, short = await asyncio.gather(
            self.ask(prompt, max_tokens=4, temperature=0), self.ask(self.prompt(5), max_tokens=4, temperature=0)
        )
        require(
            len(out.token_ids) == len(short.token_ids) == 4, "a long and a short prompt must both be served, got less"
        )
        if self.forward is not None:
            logits = self.forward([*prompt, *out.token_ids])
            wanted = reference_logprobs(logits, prompt, out.token_ids, SamplingParams(temperature=0))
            worst = max(abs(got - want) for got, want in zip(out.logprobs or (), wanted, strict=True))
            require(
                worst <= self.tolerance,
                f"logprobs after a long prompt must be within {self.tolerance}, got {worst:.3g} off",
            )
