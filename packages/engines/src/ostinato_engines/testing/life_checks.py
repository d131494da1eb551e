"""Conformance checks of a server's life: cancellation, abort, pause, weight updates, leaks, shutdown."""

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from ostinato_engines.errors import (
    ConformanceError,
    EngineClosedError,
    EngineError,
    EngineNotReadyError,
    ManifestError,
)
from ostinato_engines.testing.asking import Skip, WeightUpdate, cut, need, require
from ostinato_engines.testing.request_checks import RequestChecks
from ostinato_engines.types import PauseMode, SamplingParams, StopReason, TokenOutput, WeightManifest

if TYPE_CHECKING:
    from torch import Tensor


class LifeChecks(RequestChecks):
    """One method per check; each raises `ConformanceError` or `Skip`."""

    async def cancellation(self) -> None:
        prompt = self.prompt(6)
        wanted = await self.ask(prompt, max_tokens=8, temperature=0)
        name = self.new_id()
        doomed = self.start(self.prompt(6), name, max_tokens=40)
        other = self.start(prompt, self.new_id(), max_tokens=8, temperature=0)
        await self.until_running(name)
        doomed.cancel()
        await asyncio.wait([doomed])
        self.same("a request beside a cancelled one", prompt, await other, wanted)
        again = await self.ask(prompt, name, max_tokens=8, temperature=0)
        self.same("the id of a cancelled request, used again,", prompt, again, wanted)
        await self.server.release(name)
        await self.nothing_in_flight()

    async def abort(self) -> None:
        need(self.can.abort, "the engine cannot abort")
        prompt = self.prompt(6)
        wanted = await self.ask(prompt, max_tokens=50, temperature=0)
        name = self.new_id()
        task = self.start(prompt, name, max_tokens=50, temperature=0)
        await self.until_running(name)
        count = await self.server.abort([name])
        out = await task
        if count:
            require(out.stop_reason is StopReason.ABORTED, f"an aborted request must say so, got {out.stop_reason}")
        self.same("an aborted request's tokens so far", prompt, out, cut(wanted, len(out.token_ids)))
        require(await self.server.abort([name, "no-such-request"]) == 0, "aborting what is not in flight must count 0")
        await self.resumed("an aborted request", prompt, out, wanted)
        await self.nothing_in_flight()

    async def resumed(self, what: str, prompt: list[int], head: TokenOutput, wanted: TokenOutput) -> TokenOutput:
        """Sends an aborted request again with its tokens; the whole must be what an undisturbed one gives."""
        missing = len(wanted.token_ids) - len(head.token_ids)
        rest = await self.ask([*prompt, *head.token_ids], max_tokens=missing, temperature=0)
        whole = TokenOutput([*head.token_ids, *rest.token_ids], None, StopReason.LENGTH)
        self.same(f"{what}, resumed,", prompt, whole, wanted)
        return rest

    async def pause(self) -> None:
        need(bool(self.can.pause_modes), "the engine cannot pause")
        prompt = self.prompt(6)
        wanted = await self.ask(prompt, max_tokens=30, temperature=0)
        for mode in self.can.pause_modes:
            task = self.start(prompt, self.new_id(), max_tokens=30, temperature=0)
            await self.until_running("")
            await self.server.pause(mode)
            parked = self.start(prompt, self.new_id(), max_tokens=30, temperature=0)
            for _ in range(50):
                await asyncio.sleep(0)
            require(not parked.done(), f"a request under pause({mode}) must wait for resume, got an answer")
            if mode is not PauseMode.KEEP:
                out = await task
                length = len(out.token_ids) if out.stop_reason is StopReason.ABORTED else 30
                self.same(f"a request in flight at pause({mode})", prompt, out, cut(wanted, length))
            await self.server.resume()
            self.same(f"a request after pause({mode}) and resume", prompt, await parked, wanted)
            if mode is PauseMode.KEEP:
                self.same("a request kept over a pause", prompt, await task, wanted)

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
            require(not taken, f"a manifest with {what} must be refused before the first tensor, got {taken[:1]} read")
            again = await self.ask(prompt, max_tokens=12, temperature=0)
            self.same(f"the old policy after a manifest with {what}", prompt, again, before)
        await self.server.update_weights(update.manifest, update.make_weights())
        require(
            self.server.policy_version == update.manifest.version,
            f"policy_version must be {update.manifest.version} after the update, got {self.server.policy_version}",
        )
        after = await self.ask(prompt, name, max_tokens=12, temperature=0)
        require(
            not after.num_cached_tokens, f"nothing cached may survive an update, got {after.num_cached_tokens} tokens"
        )
        require(after.token_ids != before.token_ids, "new weights must change the output, got the old one")
        versions = [span.version for span in after.policy_versions]
        require(versions == [update.manifest.version], f"the span must be of the new version, got {versions}")
        self.forward = update.forward
        if update.forward is not None and self.can.logprobs:
            await self.true_logprobs(update.forward)
        await self.server.release(name)

    async def versions(self) -> None:
        """The same weights under a new version, so that tokens tell nothing and only the spans do."""
        update = self._update()
        need(bool({PauseMode.ABORT, PauseMode.KEEP} & set(self.can.pause_modes)), "the engine cannot pause")
        await self.server.update_weights(update.manifest, update.make_weights())
        prompt = self.prompt(6)
        wanted = await self.ask(prompt, max_tokens=40, temperature=0)
        old = self.server.policy_version
        for mode in self.can.pause_modes:
            if mode is PauseMode.WAIT:
                continue
            task = self.start(prompt, self.new_id(), max_tokens=40, temperature=0)
            await self.until_running("")
            await self.server.pause(mode)
            new = old + 1
            await self.server.update_weights(WeightManifest(new, update.manifest.tensors), update.make_weights())
            await self.server.resume()
            out = await task
            if mode is PauseMode.ABORT:
                self._spans_say("a request aborted before an update", out, [old])
                if out.stop_reason is StopReason.ABORTED:
                    self._spans_say("its rest", await self.resumed("a request", prompt, out, wanted), [new])
            else:
                self.same("a request kept over an update with the same weights", prompt, out, wanted)
                self._spans_say("a request kept over an update", out, [old, new], [new], [old])
            old = new

    def _spans_say(self, what: str, out: TokenOutput, *wanted: list[int]) -> None:
        spans = out.policy_versions
        starts, versions = [span.start for span in spans], [span.version for span in spans]
        require(versions in wanted, f"{what} must come from versions {wanted}, got {versions}")
        fits = starts == sorted(set(starts)) and starts[0] == 0 and starts[-1] < max(1, len(out.token_ids))
        require(fits, f"spans of {what} must start at 0 and grow within {len(out.token_ids)} tokens, got {starts}")
        inexact = not all(span.exact for span in spans)
        require(not (inexact and self.can.exact_policy_spans), f"spans of {what} must be exact as claimed, got {spans}")

    async def sleep(self) -> None:
        need(bool(self.can.sleep_levels), "the engine cannot sleep")
        update = self.subject.weight_update
        prompt = self.prompt(12)
        before = await self.ask(prompt, max_tokens=12, temperature=0)
        for level in self.can.sleep_levels:
            if level > 1 and (update is None or not self.can.weight_update):
                continue  # nothing could bring the weights back
            await self.server.sleep(level)
            require(not (await self.server.health()).ready, f"health after sleep({level}) must not be ready, got ready")
            params = SamplingParams(max_tokens=2)
            await self.refused(f"a request after sleep({level})", prompt, params, EngineNotReadyError)
            await self.server.wake_up()
            if level > 1 and update is not None:
                newer = WeightManifest(self.server.policy_version + 1, update.manifest.tensors)
                await self.server.update_weights(newer, update.make_weights())
            require(
                (await self.server.health()).ready, f"health after sleep({level}) and waking must be ready, got not"
            )
            after = await self.ask(prompt, max_tokens=12, temperature=0)
            self.same(f"an output after sleep({level})", prompt, after, before)

    async def broken_weights(self) -> None:
        update = self._update()
        newer = WeightManifest(self.server.policy_version + 1, update.manifest.tensors)
        prompt = self.prompt(12)
        before = await self.ask(prompt, max_tokens=12, temperature=0)
        for what, make in (("an error", _breaking_off), ("too few tensors", _ending_early)):
            try:
                await self.server.update_weights(newer, make(update.make_weights()))
            except EngineError:
                pass
            else:
                raise ConformanceError(f"a stream with {what} must raise, got accepted")
            require(
                not (await self.server.health()).ready,
                f"after a stream with {what} health must not be ready, got ready",
            )
            await self.refused(
                f"a request after a stream with {what}", prompt, SamplingParams(max_tokens=2), EngineNotReadyError
            )
        await self.server.update_weights(newer, update.make_weights())
        after = await self.ask(prompt, max_tokens=12, temperature=0)
        self.same("a complete update after broken ones", prompt, after, before)

    def _update(self) -> WeightUpdate:
        need(self.can.weight_update, "the engine cannot update its weights")
        if self.subject.weight_update is None:
            raise Skip("no new weights to try")
        return self.subject.weight_update

    async def no_leaks(self) -> None:
        await self.nothing_in_flight()

    async def shutdown(self) -> None:
        tasks = [self.start(self.prompt(5), self.new_id(), max_tokens=50) for _ in range(4)]
        await self.until_running("")
        await self.server.shutdown()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            require(
                isinstance(outcome, TokenOutput | EngineClosedError),
                f"a request in flight at shutdown must raise EngineClosedError, got {outcome!r}",
            )
        await self.refused("a request after shutdown", [1, 2], SamplingParams(max_tokens=2), EngineClosedError)
        await self.server.shutdown()


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
