"""The embedded engine on a device of its own: the same suite, and memory that can be measured."""

import asyncio
import gc

import numpy as np
import pytest

from ostinato_engines import SamplingParams, WeightManifest
from ostinato_engines.device import HOST, empty_cache, memory_allocated, pick_device
from ostinato_engines.testing import CHECKS, WeightUpdate, check_server, reference_distribution

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ostinato_engines.sampling import SamplingRows, sample, stream_keys  # noqa: E402
from ostinato_engines.transformers_server import TransformersServer  # noqa: E402
from ostinato_engines.vllm_engine.race import race  # noqa: E402

DEVICE = pick_device("auto")

pytestmark = pytest.mark.skipif(DEVICE == HOST, reason="this machine has no accelerator")


class Rows:
    """Logits that stay on the device until a row is asked for."""

    def __init__(self, logits):
        self.logits = logits

    def __getitem__(self, place):
        """float64 [vocab]."""
        return self.logits[place].double().cpu().numpy()


def forward_on_device(model):
    """A plain forward of a model that nobody changes."""

    def forward(ids):
        with torch.no_grad():
            return Rows(model(input_ids=torch.tensor([list(ids)], device=DEVICE), use_cache=False).logits[0])

    return forward


@pytest.fixture
def make_large():
    """A function that builds random models of the shape of Qwen3-0.6B in bfloat16."""

    def make(seed):
        torch.manual_seed(seed)
        config = transformers.Qwen3Config(
            vocab_size=151_936,
            hidden_size=1024,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size=3072,
            max_position_embeddings=10_100,
            tie_word_embeddings=True,
            initializer_range=0.05,
        )
        with torch.device(DEVICE):
            return transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).eval()

    return make


async def checked(server, model, other, **settings):
    """Runs the full suite; nothing may be skipped."""
    tensors = dict(other.named_parameters())
    update = WeightUpdate(
        WeightManifest.from_tensors(3, tensors.items()), lambda: iter(tensors.items()), forward_on_device(other)
    )
    await server.start()
    report = await check_server(
        server, forward=forward_on_device(model), weight_update=update, scope="full", deadline_s=200, **settings
    )
    assert {result.name for result in report.results if not result.skipped} == set(CHECKS)


@pytest.mark.parametrize("inline", [False, True])
async def test_the_suite_in_float32(make_model, vocab_size, inline):
    """On the device a tiny float32 model passes the full suite at the tolerance of float32."""
    model, plain, other = (make_model(seed=seed, max_len=10_100).to(DEVICE) for seed in (0, 0, 1))
    server = TransformersServer(model, max_num_seqs=32, full_determinism=inline)
    await checked(server, plain, other, vocab_size=vocab_size)


async def test_the_suite_in_bfloat16(make_large):
    """On the device a bfloat16 model of a real shape passes the full suite at the tolerance of bfloat16."""
    model, plain, other = (make_large(seed) for seed in (0, 0, 1))
    server = TransformersServer(model, dtype="bfloat16", max_num_seqs=32)
    await checked(server, plain, other, vocab_size=151_936, logprob_tolerance=0.35)
    empty_cache(DEVICE)


async def test_sleep_gives_memory_back(make_large):
    """Level 1 gives back the cache, level 2 the weights as well, as the device counts memory; waking takes it again."""
    gc.collect()  # what earlier tests left would otherwise be given back in the middle of this one
    before = memory_allocated(DEVICE)
    model, tensors = make_large(0), [(n, p.detach().cpu()) for n, p in make_large(0).named_parameters()]
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    async with TransformersServer(model, dtype="bfloat16") as server:
        wanted = await server.generate(list(range(2000)), {"temperature": 0, "max_tokens": 8}, "a")
        cache = server._engine.runner.cache.num_bytes
        assert memory_allocated(DEVICE) - before >= weights + cache
        await server.sleep(1)
        assert weights <= memory_allocated(DEVICE) - before < weights + cache // 10
        await server.wake_up()
        await server.generate(list(range(2000)), {"temperature": 0, "max_tokens": 8}, "a")
        await server.sleep(2)
        left = memory_allocated(DEVICE) - before
        print(f"weights {weights / 2**20:.0f} MiB, cache {cache / 2**20:.0f} MiB, asleep {left / 2**20:.1f} MiB")
        assert left < weights // 10
        await server.wake_up()
        await server.update_weights(WeightManifest.from_tensors(1, tensors), tensors)
        again = await server.generate(list(range(2000)), {"temperature": 0, "max_tokens": 8}, "a")
        assert again.token_ids == wanted.token_ids


async def test_full_determinism_is_bitwise(make_large):
    """With full determinism two runs of the same program agree in every token and every bit of every logprob."""

    async def program():
        async with TransformersServer(make_large(0), dtype="bfloat16", full_determinism=True, seed=11) as server:
            outs = await asyncio.gather(
                *(server.generate([index + 1, 5, 9], {"max_tokens": 3 + index}, str(index)) for index in range(9))
            )
            return [(out.token_ids, out.logprobs) for out in outs]

    assert await program() == await program()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.3, top_p=0.9),
        SamplingParams(temperature=1.5, top_k=40, min_p=0.02),
        SamplingParams(top_k=1),
    ],
)
def test_logprobs_are_those_of_a_float64_reference(params):
    """On the device sampled tokens of a large vocabulary have the logprobs of a float64 reference on the same logits."""
    logits = torch.randn(16, 50_000, generator=torch.Generator().manual_seed(0)) * 4
    count = len(logits)
    rows = SamplingRows(
        temperature=np.full(count, params.temperature, np.float32),
        keys=stream_keys(np.arange(count, dtype=np.uint64)),
        filtered=np.full(count, params.top_k > 0 or params.top_p < 1 or params.min_p > 0),
        top_k=np.full(count, max(params.top_k, 0)),
        top_p=np.full(count, params.top_p),
        min_p=np.full(count, params.min_p),
    )
    tokens, logprobs = sample(logits.to(DEVICE), rows)
    for row in range(count):
        wanted = reference_distribution(logits[row].numpy(), params)[tokens[row].item()]
        assert logprobs[row].item() == pytest.approx(wanted, abs=2e-5)


def test_the_kernel_draws_what_the_host_draws():
    """On the device the kernel that draws for vLLM draws the tokens that the same seeds and places give on the host."""
    pytest.importorskip("triton")
    logits = torch.randn(300, 50_003, generator=torch.Generator().manual_seed(0)) * 4
    logits[:, 100:200] = -torch.inf
    keys = torch.from_numpy(stream_keys(np.arange(300, dtype=np.uint64) + 2**62).view(np.int64))
    for start in (0, 10_000):
        positions = torch.arange(start, start + 300, dtype=torch.int32)
        drawn = race(logits.to(DEVICE), keys.to(DEVICE), positions.to(DEVICE))
        assert torch.equal(drawn.cpu(), race(logits, keys, positions))
