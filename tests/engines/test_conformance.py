"""The embedded engine passes the public suite, and five broken servers do not."""

import asyncio

import pytest

from ostinato_engines import ConformanceError, WeightManifest
from ostinato_engines.testing import WeightUpdate, check_server

pytest.importorskip("torch")
pytest.importorskip("transformers")

import msgspec

from ostinato_engines.transformers_server import TransformersServer


@pytest.fixture
def update_for(make_model, forward_of):
    """New weights for a kind of tiny model."""

    def make(kind="qwen3", **overrides):
        other = make_model(kind, seed=1, **overrides)
        tensors = dict(other.named_parameters())
        return WeightUpdate(
            WeightManifest.from_tensors(3, tensors.items()), lambda: iter(tensors.items()), forward_of(other)
        )

    return make


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
@pytest.mark.parametrize("inline", [False, True])
async def test_the_embedded_engine_passes_the_suite(make_model, forward_of, update_for, vocab_size, kind, inline):
    """TransformersServer keeps the whole contract, in a worker thread and on the event loop, for several models."""
    model = make_model(kind)
    server = TransformersServer(model, device="cpu", full_determinism=inline, max_num_seqs=16, prefill_chunk_tokens=64)
    forward = forward_of(model)
    await server.start()
    report = await check_server(
        server,
        vocab_size=vocab_size,
        forward=forward,
        weight_update=update_for(kind),
        num_concurrent=40,
        long_prompt_tokens=100,
    )
    assert [result.name for result in report.results if result.skipped] == []


class StaleWeights(TransformersServer):
    """Says that it took new weights."""

    async def update_weights(self, manifest, weights):
        self._writer.check(manifest)
        for _ in weights:
            pass
        self.policy_version = self._batcher.policy_version = manifest.version


class ShiftedLogprobs(TransformersServer):
    """Reports the logprob of the token after."""

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        out = await super().generate(prompt_ids, sampling_params, request_id, media)
        shifted = out.logprobs and [*out.logprobs[1:], out.logprobs[0]]
        return msgspec.structs.replace(out, logprobs=shifted)


class LostRequest(TransformersServer):
    """Never answers its twentieth request."""

    count = 0

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        self.count += 1
        if self.count == 20:
            await asyncio.Event().wait()
        return await super().generate(prompt_ids, sampling_params, request_id, media)


class IgnoredStop(TransformersServer):
    """Samples past stop ids."""

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        if not isinstance(sampling_params, dict):
            sampling_params = msgspec.structs.replace(sampling_params, stop_token_ids=())
        return await super().generate(prompt_ids, sampling_params, request_id, media)


class LeakedRequest(TransformersServer):
    """Goes on computing for callers that went away."""

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        return await asyncio.shield(
            asyncio.ensure_future(super().generate(prompt_ids, sampling_params, request_id, media))
        )


@pytest.mark.parametrize(
    ("broken", "caught_by"),
    [
        (StaleWeights, "weights"),
        (ShiftedLogprobs, "logprobs"),
        (LostRequest, None),
        (IgnoredStop, "stop_tokens"),
        (LeakedRequest, "cancellation"),
    ],
)
async def test_a_broken_server_fails_the_suite(make_model, forward_of, update_for, vocab_size, broken, caught_by):
    """Each of five classic faults is found by the check that is about it."""
    model = make_model()
    server = broken(model, device="cpu")
    forward = forward_of(model)
    await server.start()
    with pytest.raises(ConformanceError) as caught:
        await check_server(
            server, vocab_size=vocab_size, forward=forward, weight_update=update_for(), num_concurrent=8, deadline_s=3
        )
    assert f"  {caught_by}: " in str(caught.value) or (caught_by is None and "did not end within" in str(caught.value))
    await server.shutdown()
