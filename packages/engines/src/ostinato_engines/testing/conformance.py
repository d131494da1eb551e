"""A suite that every engine must pass, ours and third parties'.

It knows the contract only: what `capabilities()` does not claim is skipped and said to be, everything else must hold.
Every wait has a deadline, so that a server that loses a request fails a check instead of hanging.
"""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ostinato_engines.errors import (
    ConformanceError,
    EngineClosedError,
    EngineError,
    EngineInputError,
    EngineNotReadyError,
    ManifestError,
)
from ostinato_engines.server import UNKNOWN_MAX_MODEL_LEN, AsyncServerBase
from ostinato_engines.testing.reference import reference_logprobs
from ostinato_engines.types import (
    PauseMode,
    SamplingParams,
    StopReason,
    TokenOutput,
    WeightManifest,
    as_token_output,
)

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


class CheckResult(msgspec.Struct, frozen=True):
    """One check: failed where `failure` is set, skipped where `skipped` is."""

    name: str
    failure: str = ""
    skipped: str = ""


class ConformanceReport(msgspec.Struct, frozen=True):
    """All checks in order."""

    results: tuple[CheckResult, ...]

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """The checks that failed."""
        return tuple(result for result in self.results if result.failure)

    def raise_for_failures(self) -> None:
        """Raises `ConformanceError` with a line per failed check."""
        if self.failures:
            lines = "\n".join(f"  {result.name}: {result.failure}" for result in self.failures)
            raise ConformanceError(f"server must keep the contract, got {len(self.failures)} failed check(s):\n{lines}")


async def check_server(
    server: AsyncServerBase,
    *,
    vocab_size: int,
    forward: Forward | None = None,
    weight_update: WeightUpdate | None = None,
    num_concurrent: int = 64,
    long_prompt_tokens: int = 0,
    logprob_tolerance: float = 1e-4,
    deadline_s: float = 60.0,
    end_with_shutdown: bool = True,
) -> ConformanceReport:
    """Runs the suite against a started server that is otherwise unused.

    Args:
        server: With room for at least 64 tokens.
        vocab_size: Ids below are valid, this one and above are not.
        forward: A plain forward of the server's weights: turns on the check that logprobs are true.
        weight_update: Turns on the checks of weight updates; the server keeps the new weights.
        num_concurrent: Requests at once in the concurrency check.
        long_prompt_tokens: Length of one long prompt; 0 leaves that check out.
        logprob_tolerance: Absolute, per token.
        deadline_s: Per check.
        end_with_shutdown: Ends with the check that shutdown with requests in flight fails them.

    Raises:
        ConformanceError: With a line per failed check.
    """
    suite = _Suite(server, vocab_size, forward, weight_update, num_concurrent, long_prompt_tokens, logprob_tolerance)
    results = [await _outcome(name, check, deadline_s) for name, check in suite.checks(end_with_shutdown)]
    report = ConformanceReport(tuple(results))
    report.raise_for_failures()
    return report


class _Skip(Exception):
    pass


async def _outcome(name: str, check: Callable[[], Awaitable[None]], deadline_s: float) -> CheckResult:
    try:
        async with asyncio.timeout(deadline_s):
            await check()
    except _Skip as skip:
        return CheckResult(name, skipped=str(skip))
    except TimeoutError:
        return CheckResult(name, failure=f"did not end within {deadline_s} s")
    except ConformanceError as error:
        return CheckResult(name, failure=str(error))
    # The server is a stranger: whatever it raises is a finding about it, not about the suite.
    except Exception as error:
        return CheckResult(name, failure=f"raised {type(error).__name__}: {error}")
    return CheckResult(name)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConformanceError(message)


def _need(condition: bool, reason: str) -> None:
    if not condition:
        raise _Skip(reason)


class _Suite:
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

    def checks(self, end_with_shutdown: bool) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
        names = [
            "shape",
            "limits",
            "bad_requests",
            "greedy",
            "stop_tokens",
            "logprobs",
            "seeds",
            "concurrency",
            "turns",
            "long_prompt",
            "cancellation",
            "abort",
            "pause",
            "weights",
            "broken_weights",
            "no_leaks",
        ]
        return [(name, getattr(self, name)) for name in names + (["shutdown"] if end_with_shutdown else [])]

    # Asking

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
        _require(got.token_ids == wanted.token_ids, f"{what} must give {wanted.token_ids}, got {got.token_ids}")

    async def until_running(self, request_id: str) -> None:
        """Gives a request the chance to sample something."""
        for _ in range(1000):
            await asyncio.sleep(0)
            if (await self.server.health()).num_running:
                break
        for _ in range(20):
            await asyncio.sleep(0)

    # Checks

    async def shape(self) -> None:
        out = await self.ask(self.prompt(5), max_tokens=6)
        _require(1 <= len(out.token_ids) <= 6, f"max_tokens=6 must give 1 to 6 tokens, got {len(out.token_ids)}")
        _require(
            all(0 <= t < self.vocab_size for t in out.token_ids),
            f"tokens must be in the vocabulary, got {out.token_ids}",
        )
        spans = out.policy_versions
        _require(bool(spans) and spans[0].start == 0, f"policy_versions must start at 0, got {spans}")
        _require(
            list(spans) == sorted(spans, key=lambda span: span.start), f"policy_versions must be sorted, got {spans}"
        )
        _require(
            spans[-1].version == self.server.policy_version,
            f"policy_versions must end with {self.server.policy_version}, got {spans}",
        )
        if self.can.logprobs:
            _require(out.logprobs is not None, "logprobs must be there as capabilities say, got None")
            bad = [value for value in out.logprobs or () if not math.isfinite(value) or value > 1e-6]
            _require(not bad, f"logprobs must be finite and at most 0, got {bad[:3]}")
            silent = await self.ask(self.prompt(5), max_tokens=2, logprobs=False)
            _require(silent.logprobs is None, f"logprobs=False must give None, got {silent.logprobs}")

    async def limits(self) -> None:
        longest = self.server.max_model_len
        _need(longest != UNKNOWN_MAX_MODEL_LEN, "max_model_len is unknown")
        for room, wanted in ((6, 6), (1, 1), (0, 0)):
            out = await self.ask(self.prompt(longest - room), max_tokens=8, temperature=0)
            got = (len(out.token_ids), out.stop_reason)
            _require(
                got == (wanted, StopReason.LENGTH),
                f"a prompt with room for {room} must end (length) with {wanted} tokens, got {got}",
            )
        await self.refused("a prompt over max_model_len", self.prompt(longest + 1), SamplingParams(max_tokens=8))
        out = await self.ask(self.prompt(longest - 5), temperature=0)
        _require(len(out.token_ids) == 5, f"max_tokens=None must take the room of 5, got {len(out.token_ids)}")

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
        _require(bool(out.token_ids), "a good request after bad ones must be served, got nothing")

    async def greedy(self) -> None:
        prompt = self.prompt(9)
        first = await self.ask(prompt, max_tokens=12, temperature=0)
        self.same("the same greedy request", await self.ask(prompt, max_tokens=12, temperature=0), first)
        self.same("a greedy request cut short", await self.ask(prompt, max_tokens=5, temperature=0), _cut(first, 5))

    async def stop_tokens(self) -> None:
        prompt = self.prompt(7)
        free = await self.ask(prompt, max_tokens=12, temperature=0)
        stop = free.token_ids[4]
        place = free.token_ids.index(stop)
        for stops in ((stop,), (self.vocab_size - 1 if stop != self.vocab_size - 1 else 0, stop)):
            place = min(free.token_ids.index(t) for t in stops if t in free.token_ids)
            out = await self.ask(prompt, max_tokens=12, temperature=0, stop_token_ids=stops)
            self.same(f"stop ids {stops}", out, _cut(free, place + 1))
            got = (out.stop_reason, out.stop_token_id)
            _require(
                got == (StopReason.STOP, free.token_ids[place]),
                f"a sampled stop id must be reported as (stop, {free.token_ids[place]}), got {got}",
            )
        out = await self.ask(prompt, max_tokens=place + 1, temperature=0, stop_token_ids=(stop,))
        _require(out.stop_reason is StopReason.STOP, f"a stop id as the last token is a stop, got {out.stop_reason}")

    async def logprobs(self) -> None:
        _need(self.can.logprobs, "the engine returns no logprobs")
        if self.forward is None:
            raise _Skip("no forward to compare with")
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
            _require(
                worst <= self.tolerance, f"logprobs with {params} must be within {self.tolerance}, got {worst:.3g} off"
            )

    async def seeds(self) -> None:
        _need(self.can.seeds, "the engine takes no seeds")
        prompt = self.prompt(8)
        alone = await self.ask(prompt, max_tokens=12, seed=7)
        others = [self.ask(self.prompt(3 + i), max_tokens=5 + i) for i in range(6)]
        crowd = await asyncio.gather(self.ask(prompt, max_tokens=12, seed=7), *others)
        self.same("the same seed in company", crowd[0], alone)
        seeded = [await self.ask(prompt, max_tokens=12, seed=seed) for seed in range(8, 12)]
        _require(
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
                _require(
                    bool(out.num_cached_tokens), f"turn {turn + 1} must reuse its prefix, got {out.num_cached_tokens}"
                )
            prompt = [*prompt, *out.token_ids, *self.prompt(4)]
        prompt[3] = (prompt[3] + 1) % self.vocab_size
        changed = await self.ask(prompt, name, max_tokens=6, temperature=0)
        self.same("a rewritten history", changed, await self.ask(prompt, max_tokens=6, temperature=0))
        await self.server.release(name)

    async def long_prompt(self) -> None:
        _need(self.long_prompt_tokens > 0, "no long prompt asked for")
        prompt = self.prompt(self.long_prompt_tokens)
        out, short = await asyncio.gather(
            self.ask(prompt, max_tokens=4, temperature=0), self.ask(self.prompt(5), max_tokens=4, temperature=0)
        )
        _require(
            len(out.token_ids) == len(short.token_ids) == 4, "a long and a short prompt must both be served, got less"
        )
        if self.forward is not None:
            logits = self.forward([*prompt, *out.token_ids])
            wanted = reference_logprobs(logits, prompt, out.token_ids, SamplingParams(temperature=0))
            worst = max(abs(got - want) for got, want in zip(out.logprobs or (), wanted, strict=True))
            _require(
                worst <= self.tolerance,
                f"logprobs after a long prompt must be within {self.tolerance}, got {worst:.3g} off",
            )

    async def cancellation(self) -> None:
        prompt = self.prompt(6)
        wanted = await self.ask(prompt, max_tokens=8, temperature=0)
        name = self.new_id()
        doomed = self.start(self.prompt(6), name, max_tokens=40)
        other = self.start(prompt, self.new_id(), max_tokens=8, temperature=0)
        await self.until_running(name)
        doomed.cancel()
        await asyncio.wait([doomed])
        self.same("a request beside a cancelled one", await other, wanted)
        again = await self.ask(prompt, name, max_tokens=8, temperature=0)
        self.same("the id of a cancelled request, used again,", again, wanted)
        await self.server.release(name)
        await self.nothing_in_flight()

    async def abort(self) -> None:
        _need(self.can.abort, "the engine cannot abort")
        prompt = self.prompt(6)
        wanted = await self.ask(prompt, max_tokens=50, temperature=0)
        name = self.new_id()
        task = self.start(prompt, name, max_tokens=50, temperature=0)
        await self.until_running(name)
        count = await self.server.abort([name])
        out = await task
        if count:
            _require(out.stop_reason is StopReason.ABORTED, f"an aborted request must say so, got {out.stop_reason}")
        self.same("an aborted request's tokens so far", out, _cut(wanted, len(out.token_ids)))
        _require(await self.server.abort([name, "no-such-request"]) == 0, "aborting what is not in flight must count 0")
        rest = await self.ask([*prompt, *out.token_ids], max_tokens=50 - len(out.token_ids), temperature=0)
        whole = _cut(wanted, 50).token_ids[len(out.token_ids) :]
        _require(rest.token_ids == whole, f"an aborted request, resumed, must give {whole}, got {rest.token_ids}")
        await self.nothing_in_flight()

    async def pause(self) -> None:
        _need(bool(self.can.pause_modes), "the engine cannot pause")
        prompt = self.prompt(6)
        wanted = await self.ask(prompt, max_tokens=30, temperature=0)
        for mode in self.can.pause_modes:
            task = self.start(prompt, self.new_id(), max_tokens=30, temperature=0)
            await self.until_running("")
            await self.server.pause(mode)
            parked = self.start(prompt, self.new_id(), max_tokens=30, temperature=0)
            for _ in range(50):
                await asyncio.sleep(0)
            _require(not parked.done(), f"a request under pause({mode}) must wait for resume, got an answer")
            if mode is not PauseMode.KEEP:
                out = await task
                cut = len(out.token_ids) if out.stop_reason is StopReason.ABORTED else 30
                self.same(f"a request in flight at pause({mode})", out, _cut(wanted, cut))
            await self.server.resume()
            self.same(f"a request after pause({mode}) and resume", await parked, wanted)
            if mode is PauseMode.KEEP:
                self.same("a request kept over a pause", await task, wanted)

    async def weights(self) -> None:
        update = self._update()
        name = self.new_id()
        prompt = self.prompt(12)
        before = await self.ask(prompt, name, max_tokens=12, temperature=0)
        for what, manifest in _wrong_manifests(update.manifest):
            taken: list[str] = []
            try:
                await self.server.update_weights(manifest, _noting(update.make_weights(), taken))
            except ManifestError:
                pass
            else:
                raise ConformanceError(f"a manifest with {what} must raise ManifestError, got accepted")
            _require(not taken, f"a manifest with {what} must be refused before the first tensor, got {taken[:1]} read")
            self.same(
                f"the old policy after a manifest with {what}",
                await self.ask(prompt, max_tokens=12, temperature=0),
                before,
            )
        await self.server.update_weights(update.manifest, update.make_weights())
        _require(
            self.server.policy_version == update.manifest.version,
            f"policy_version must be {update.manifest.version} after the update, got {self.server.policy_version}",
        )
        after = await self.ask(prompt, name, max_tokens=12, temperature=0)
        _require(
            not after.num_cached_tokens, f"nothing cached may survive an update, got {after.num_cached_tokens} tokens"
        )
        _require(after.token_ids != before.token_ids, "new weights must change the output, got the old one")
        versions = [span.version for span in after.policy_versions]
        _require(versions == [update.manifest.version], f"the span must be of the new version, got {versions}")
        if update.forward is not None and self.can.logprobs:
            self.forward = update.forward
            await self.true_logprobs(update.forward)
        await self.server.release(name)

    async def broken_weights(self) -> None:
        update = self._update()
        newer = WeightManifest(update.manifest.version + 1, update.manifest.tensors)
        prompt = self.prompt(12)
        before = await self.ask(prompt, max_tokens=12, temperature=0)
        for what, make in (("an error", _breaking_off), ("too few tensors", _ending_early)):
            try:
                await self.server.update_weights(newer, make(update.make_weights()))
            except EngineError:
                pass
            else:
                raise ConformanceError(f"a stream with {what} must raise, got accepted")
            _require(
                not (await self.server.health()).ready,
                f"after a stream with {what} health must not be ready, got ready",
            )
            await self.refused(
                f"a request after a stream with {what}", prompt, SamplingParams(max_tokens=2), EngineNotReadyError
            )
        await self.server.update_weights(newer, update.make_weights())
        self.same("a complete update after broken ones", await self.ask(prompt, max_tokens=12, temperature=0), before)

    def _update(self) -> WeightUpdate:
        _need(self.can.weight_update, "the engine cannot update its weights")
        if self.weight_update is None:
            raise _Skip("no new weights to try")
        return self.weight_update

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

    async def no_leaks(self) -> None:
        await self.nothing_in_flight()

    async def shutdown(self) -> None:
        tasks = [self.start(self.prompt(5), self.new_id(), max_tokens=50) for _ in range(4)]
        await self.until_running("")
        await self.server.shutdown()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            _require(
                isinstance(outcome, TokenOutput | EngineClosedError),
                f"a request in flight at shutdown must raise EngineClosedError, got {outcome!r}",
            )
        await self.refused("a request after shutdown", [1, 2], SamplingParams(max_tokens=2), EngineClosedError)
        await self.server.shutdown()


def _cut(output: TokenOutput, length: int) -> TokenOutput:
    return TokenOutput(output.token_ids[:length], None, StopReason.LENGTH)


def _wrong_manifests(manifest: WeightManifest) -> list[tuple[str, WeightManifest]]:
    first, *rest = manifest.tensors
    other_dtype = "int8" if first.dtype != "int8" else "float32"
    changed = {
        "a tensor missing": rest,
        "an unknown tensor": [*manifest.tensors, msgspec.structs.replace(first, name=f"{first.name}.unknown")],
        "a tensor twice": [first, *manifest.tensors],
        "a wrong shape": [msgspec.structs.replace(first, shape=(*first.shape, 1)), *rest],
        "a wrong dtype": [msgspec.structs.replace(first, dtype=other_dtype), *rest],
    }
    return [(what, WeightManifest(manifest.version, tuple(tensors))) for what, tensors in changed.items()]


def _noting(weights: "Iterable[tuple[str, Tensor]]", taken: list[str]) -> "Iterable[tuple[str, Tensor]]":
    for name, tensor in weights:
        taken.append(name)
        yield name, tensor


def _breaking_off(weights: "Iterable[tuple[str, Tensor]]") -> "Iterable[tuple[str, Tensor]]":
    for index, pair in enumerate(weights):
        if index == 1:
            raise OSError("the sender went away")
        yield pair


def _ending_early(weights: "Iterable[tuple[str, Tensor]]") -> "Iterable[tuple[str, Tensor]]":
    *most, _last = list(weights)
    yield from most
