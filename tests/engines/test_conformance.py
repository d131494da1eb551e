"""The embedded engine passes the public suite, and broken servers do not."""

import asyncio

import msgspec
import pytest

from ostinato_engines import (
    AsyncServerBase,
    ConformanceError,
    EngineClosedError,
    EngineInputError,
    PolicySpan,
    SamplingParams,
    StopReason,
    TokenOutput,
    UnsupportedError,
    WeightManifest,
)
from ostinato_engines.testing import CHECKS, WeightUpdate, check_server, reference_logprobs

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ostinato_engines.transformers_server import TransformersServer  # noqa: E402


@pytest.fixture
def update_for(make_model, forward_of):
    """New weights for a kind of tiny model."""

    def make(kind="qwen3", dtype=None, **overrides):
        other = make_model(kind, seed=1, **overrides).to(dtype or torch.float32)
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
    report = await check_server(server, vocab_size=vocab_size, forward=forward, weight_update=update_for(kind))
    assert [result.name for result in report.results if result.skipped] == []


@pytest.mark.parametrize(
    "checks",
    [("concurrency", "long_prompt"), pytest.param(CHECKS, marks=pytest.mark.slow)],
    ids=["large", "all"],
)
async def test_the_embedded_engine_passes_the_full_suite(make_model, forward_of, update_for, vocab_size, checks):
    """A thousand requests at once and a prompt of ten thousand tokens are served, and their logprobs are true."""
    model = make_model(max_len=10_100)
    server = TransformersServer(model, device="cpu", max_num_seqs=32)
    forward = forward_of(model)
    await server.start()
    report = await check_server(
        server,
        vocab_size=vocab_size,
        forward=forward,
        weight_update=update_for(max_len=10_100),
        scope="full",
        checks=checks,
    )
    assert {result.name for result in report.results if not result.skipped} == set(checks)
    await server.shutdown()


async def test_the_embedded_engine_passes_the_suite_in_bfloat16(make_model, forward_of, update_for, vocab_size):
    """In bfloat16, whose rounding depends on the batch, the contract holds within the tolerance of its logits."""
    model = make_model().to(torch.bfloat16)
    server = TransformersServer(model, device="cpu", dtype="bfloat16", max_num_seqs=16, cast_weights=True)
    forward = forward_of(model)
    await server.start()
    report = await check_server(
        server,
        vocab_size=vocab_size,
        forward=forward,
        weight_update=update_for(dtype=torch.bfloat16),
        logprob_tolerance=0.1,
    )
    assert [result.name for result in report.results if result.skipped] == []


async def test_an_engine_that_claims_little_is_asked_little(vocab_size):
    """Checks of what capabilities do not claim are skipped, each with its reason, and so are those left out."""
    report = await check_server(Minimal(), vocab_size=vocab_size, checks=[name for name in CHECKS if name != "turns"])
    skipped = {result.name: result.skipped for result in report.results if result.skipped}
    assert {"abort", "limits", "logprobs", "pause", "seeds", "sleep", "turns", "versions", "weights"} <= set(skipped)
    assert skipped["abort"] == "the engine cannot abort"
    with pytest.raises(EngineInputError, match="checks must name checks, got 'turn'"):
        await check_server(Minimal(), vocab_size=vocab_size, checks=["turn"])


class Minimal(AsyncServerBase):
    """The two methods that the contract requires, and no more: the next token is the last one plus one."""

    closed = False

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        self.refuse_media(media)
        if self.closed:
            raise EngineClosedError("closed")
        params = SamplingParams.from_mapping(sampling_params)
        if not prompt_ids or not all(0 <= token < 96 for token in prompt_ids):
            raise EngineInputError("prompt_ids must be ids")
        await asyncio.sleep(0)
        ids = [(prompt_ids[-1] + 1 + index) % 96 for index in range(params.max_tokens)]
        place = next((index for index, token in enumerate(ids) if token in params.stop_token_ids), None)
        if place is None:
            return TokenOutput(ids, None, StopReason.LENGTH)
        return TokenOutput(ids[: place + 1], None, StopReason.STOP, ids[place])

    async def chat_completion(self, raw_request):
        raise UnsupportedError("no chat")

    async def shutdown(self):
        self.closed = True


class StaleWeights(TransformersServer):
    """Says that it took new weights."""

    async def update_weights(self, manifest, weights):
        self._engine.writer.check(manifest)
        for _ in weights:
            pass
        self.policy_version = self._engine.batcher.policy_version = manifest.version


class ShiftedLogprobs(TransformersServer):
    """Reports the logprob of the token after."""

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        out = await super().generate(prompt_ids, sampling_params, request_id, media)
        shifted = out.logprobs and [*out.logprobs[1:], out.logprobs[0]]
        return msgspec.structs.replace(out, logprobs=shifted)


class LostRequest(TransformersServer):
    """Never answers its eighth request."""

    count = 0

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        self.count += 1
        if self.count == 8:
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


class RawLogprobs(TransformersServer):
    """Reports logprobs at temperature 1 whatever was asked for."""

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        out = await super().generate(prompt_ids, sampling_params, request_id, media)
        with torch.no_grad():
            logits = self._source(input_ids=torch.tensor([[*prompt_ids, *out.token_ids]]), use_cache=False).logits[0]
        wanted = reference_logprobs(logits.double().numpy(), prompt_ids, out.token_ids, SamplingParams())
        return msgspec.structs.replace(out, logprobs=out.logprobs and wanted)


class SwappedAnswers(TransformersServer):
    """Hands the answers of requests under way together to each other's callers."""

    last = None

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        mine = asyncio.ensure_future(super().generate(prompt_ids, sampling_params, request_id, media))
        other, self.last = self.last, mine
        if other is None or other.done():
            return await mine
        return (await asyncio.gather(mine, other))[1]


class OldVersion(TransformersServer):
    """Reports the version that served first for everything after."""

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        out = await super().generate(prompt_ids, sampling_params, request_id, media)
        return msgspec.structs.replace(out, policy_versions=(*out.policy_versions[:-1], PolicySpan(0, 3)))


@pytest.mark.parametrize(
    ("broken", "caught_by"),
    [
        (StaleWeights, "weights"),
        (ShiftedLogprobs, "logprobs"),
        (LostRequest, "concurrency"),
        (IgnoredStop, "stop_tokens"),
        (LeakedRequest, "cancellation"),
        (RawLogprobs, "logprobs"),
        (SwappedAnswers, "ordering"),
        (OldVersion, "versions"),
    ],
)
async def test_a_broken_server_fails_the_suite(make_model, forward_of, update_for, vocab_size, broken, caught_by):
    """Each classic fault is found by the check that is about it."""
    model = make_model()
    server = broken(model, device="cpu")
    forward = forward_of(model)
    await server.start()
    with pytest.raises(ConformanceError) as caught:
        await check_server(
            server,
            vocab_size=vocab_size,
            forward=forward,
            weight_update=update_for(),
            num_concurrent=8,
            deadline_s=10,
            checks=("shape", "weights", caught_by),
        )
    assert f"  {caught_by}: " in str(caught.value)
    assert "AttributeError" not in str(caught.value), "the fault itself must be found"
    await server.shutdown()
