"""VLLMServer on this machine: does it keep the contract, how fast is it, and what do logprobs, seeds and updates cost.

    python -m benchmarks.vllm_server [--parts conformance,speed,draw,update,sleep] [--shape small|smollm2-135m|qwen3-1.7b | --model FOLDER]
        [--dtype NAME] [--eager] [--requests N] [--new-tokens N] [--pairs N] [--ways NAMES] [--tensor-parallel N] [--tolerance X] [--offline]
        [--engine-args JSON]

Runs in an environment that has vllm and ostinato-engines. The model is random with the given shape, unless a checkpoint is named. One server does
all parts in their order (conformance ends it); each prints a line of JSON, and `speed` one after every round, so that a run that is cut keeps what it
has read. `speed` interleaves the same requests in several ways: `none`, without logprobs; `logprobs`, with the sampled token's; `seeded`, the same
with a seed for each request; `plain`, through vLLM's own final-only way, with its default form of logprobs; with --offline also `offline`, through
`LLM.generate` of a second engine that shares the device. Medians count. `vllm_logprob_cost` and `vllm_seed_cost` are the shares of the tokens per
second that logprobs and seeds take; `vllm_vs_plain` and `vllm_vs_offline` compare. `spread` gives the least and the most tokens per second of each
way. `draw` gives the milliseconds that drawing one token for each of N seeded requests takes, by vLLM and by us. `update` gives seconds of a whole
weight update and its ratio to copying the same bytes once, for weights on the host, and on a device where there is one. `sleep` gives the device
memory that each level frees.
"""

import argparse
import asyncio
import importlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers

from benchmarks.shapes import QWEN3_1_7B, SMOLLM2_135M, sizes
from ostinato_engines import SamplingParams, WeightManifest
from ostinato_engines import device as devices
from ostinato_engines.testing import WeightUpdate, check_server
from ostinato_engines.vllm_server import VLLMServer

PROMPT_TOKENS = 64
MAX_POSITIONS = 16_384
LLAMAS = ("smollm2-135m",)
SHAPES = {"small": sizes(8192, 512, 4, 8, 2, 64, 1536), "smollm2-135m": SMOLLM2_135M, "qwen3-1.7b": QWEN3_1_7B}


def new_model(shape: str, dtype: str, seed: int) -> Any:
    """A random Qwen3, or Llama where that is the shape's; the same arguments give the same weights."""
    torch.manual_seed(seed)
    kind = transformers.LlamaConfig if shape in LLAMAS else transformers.Qwen3Config
    config = kind(
        **SHAPES[shape], max_position_embeddings=MAX_POSITIONS, tie_word_embeddings=True, initializer_range=0.05
    )
    with torch.device(devices.pick_device("auto")):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    return model.to(devices.HOST)


def load(folder: str, dtype: str) -> Any:
    """A checkpoint's model."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def forward_of(model: Any) -> Any:
    """Ids to float64 logits [n, vocab] of a plain forward."""

    def forward(ids: Any) -> Any:
        with torch.no_grad():
            return model(input_ids=torch.tensor([list(ids)])).logits[0].double().numpy()

    return forward


def weights_of(model: Any, version: int) -> tuple[WeightManifest, list[tuple[str, torch.Tensor]]]:
    """All parameters, and what they are."""
    named = [(name, tensor.detach()) for name, tensor in model.named_parameters()]
    return WeightManifest.from_tensors(version, named), named


async def conformance(server: VLLMServer, options: argparse.Namespace, model: Any) -> dict[str, Any]:
    """The suite in its full scope, weight updates included; it ends the server."""
    other = new_model(options.shape, options.dtype, 1) if options.model is None else None
    update = None
    if other is not None:
        manifest, named = weights_of(other, 1)
        update = WeightUpdate(manifest, lambda: iter(named), forward_of(other))
    report = await check_server(
        server,
        vocab_size=model.config.vocab_size,
        forward=forward_of(model),
        weight_update=update,
        scope="full",
        logprob_tolerance=options.tolerance,
        deadline_s=300.0,
    )
    return {
        "passed": sum(not result.skipped for result in report.results),
        "skipped": {result.name: result.skipped for result in report.results if result.skipped},
    }


async def speed(server: VLLMServer, options: argparse.Namespace, model: Any) -> dict[str, Any]:
    """Tokens per second of equal requests, in interleaved runs."""
    generator = torch.Generator().manual_seed(0)
    shape = (options.requests, PROMPT_TOKENS)
    prompts = torch.randint(0, model.config.vocab_size, shape, generator=generator).tolist()
    known: dict[str, Callable[[], Awaitable[None]]] = {
        "none": lambda: ours(server, prompts, options.new_tokens, logprobs=False),
        "logprobs": lambda: ours(server, prompts, options.new_tokens),
        "seeded": lambda: ours(server, prompts, options.new_tokens, seeds=True),
        "plain": lambda: plain(server, prompts, options.new_tokens),
    }
    ways = {name: known[name] for name in options.ways}
    if options.offline:
        llm = await asyncio.to_thread(offline_engine, options)
        ways["offline"] = lambda: asyncio.to_thread(offline, llm, prompts, options.new_tokens)
    num_tokens = options.requests * options.new_tokens
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(options.pairs + 1):
        for name, way in ways.items():
            await server.reset_prefix_cache()
            start = time.perf_counter()
            await way()
            rates[name].append(round(num_tokens / (time.perf_counter() - start), 1))
        tell({"round": round_number, **{name: values[-1] for name, values in rates.items()}})
    # The first warms up.
    return compared({name: values[1:] for name, values in rates.items()})


def compared(rates: dict[str, list[float]]) -> dict[str, Any]:
    """What the tokens per second of each way come to."""
    rate = {name: statistics.median(values) for name, values in rates.items()}
    result: dict[str, Any] = {f"tok_s_{name}": value for name, value in rate.items()}
    for name, base, other in (("vllm_logprob_cost", "logprobs", "none"), ("vllm_seed_cost", "seeded", "logprobs")):
        if base in rate and other in rate:
            result[name] = round(1 - rate[base] / rate[other], 3)
    for other in ("plain", "offline"):
        if "logprobs" in rate and other in rate:
            result[f"vllm_vs_{other}"] = round(rate["logprobs"] / rate[other], 3)
    return result | {"spread": {name: (min(values), max(values)) for name, values in rates.items()}}


def offline_engine(options: argparse.Namespace) -> Any:
    """vLLM's own engine for lists of prompts, with its defaults."""
    return importlib.import_module("vllm").LLM(
        options.checkpoint,
        dtype=options.dtype,
        max_model_len=PROMPT_TOKENS + options.new_tokens,
        max_num_seqs=max(64, options.requests),
        tensor_parallel_size=options.tensor_parallel,
        enforce_eager=options.eager,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        **json.loads(options.engine_args),
    )


def offline(llm: Any, prompts: list[list[int]], new_tokens: int) -> None:
    """All requests at once, with the sampled token's logprob."""
    params = importlib.import_module("vllm").SamplingParams(
        max_tokens=new_tokens, logprobs=0, ignore_eos=True, detokenize=False
    )
    outs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    assert all(len(out.outputs[0].logprobs) == new_tokens for out in outs)


async def ours(
    server: VLLMServer, prompts: list[list[int]], new_tokens: int, *, logprobs: bool = True, seeds: bool = False
) -> None:
    """All requests at once through the server."""
    asked = [
        SamplingParams(max_tokens=new_tokens, logprobs=logprobs, seed=index if seeds else None)
        for index in range(len(prompts))
    ]
    outs = await asyncio.gather(
        *(server.generate(prompt, asked[index], f"r{index}") for index, prompt in enumerate(prompts))
    )
    assert all(len(out.token_ids) == new_tokens for out in outs)
    assert all((out.logprobs is not None) == logprobs for out in outs)


async def plain(server: VLLMServer, prompts: list[list[int]], new_tokens: int) -> None:
    """The same of vLLM directly: final output only, logprobs in its default form."""
    engine = server._engine
    assert engine is not None
    params = engine.parts.sampling_params(
        max_tokens=new_tokens, logprobs=0, ignore_eos=True, detokenize=False, output_kind=engine.parts.final_only
    )

    async def one(index: int, prompt: list[int]) -> None:
        async for _ in engine.llm.generate(
            {"prompt_token_ids": prompt}, params, f"plain-{index}-{time.monotonic_ns()}"
        ):
            pass

    await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))


async def draw(server: VLLMServer, options: argparse.Namespace, model: Any) -> dict[str, Any]:
    """Milliseconds of one draw for all requests: vLLM's without and with seeds, and ours."""
    device = torch.device(devices.pick_device("auto"))
    rows, vocab_size = options.requests, model.config.vocab_size
    theirs = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler").TopKTopPSampler("processed_logprobs")
    parts = importlib.import_module("ostinato_engines.vllm_engine.seeded_draw")
    seeds = SimpleNamespace(keys=torch.arange(rows, device=device))
    lengths = SimpleNamespace(seq_lens=torch.full((rows,), PROMPT_TOKENS, dtype=torch.int32, device=device))
    generators = {row: torch.Generator(device).manual_seed(row) for row in range(rows)}
    ways = {
        "theirs": lambda logits: theirs.forward_native(logits, {}, None, None),
        "theirs_seeded": lambda logits: theirs.forward_native(logits, generators, None, None),
        "ours": lambda logits: parts.SeededDraw(theirs, seeds, lengths)(logits, generators, None, None),
    }
    logits = torch.randn(rows, vocab_size, device=device)
    milliseconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(2 + 4 * options.pairs):
        for name, way in ways.items():
            devices.synchronize(str(device))
            start = time.perf_counter()
            way(logits)
            devices.synchronize(str(device))
            milliseconds[name].append(1e3 * (time.perf_counter() - start))
    return {f"draw_ms_{name}": round(statistics.median(values[2:]), 3) for name, values in milliseconds.items()}


async def update(server: VLLMServer, options: argparse.Namespace, model: Any) -> dict[str, Any]:
    """Whole updates, against copying the same bytes once: of weights on the host, and on a device where there is one."""
    measured: dict[str, Any] = {}
    versions = itertools.count(1)
    for device in dict.fromkeys((devices.HOST, devices.pick_device("auto"))):
        model.to(device)
        seconds, copies = [], []
        for _ in range(options.pairs + 1):
            manifest, named = weights_of(model, next(versions))
            devices.synchronize(device)
            start = time.perf_counter()
            for _, tensor in named:
                torch.empty_like(tensor).copy_(tensor)
            devices.synchronize(device)
            middle = time.perf_counter()
            await server.update_weights(manifest, named)
            copies.append(middle - start)
            seconds.append(time.perf_counter() - middle)
        out = await server.generate([1, 2, 3], {"max_tokens": 2, "temperature": 0}, "after")
        assert out.policy_versions[-1].version == server.policy_version
        took, copied = statistics.median(seconds[1:]), statistics.median(copies[1:])
        measured |= {f"update_s_{device}": round(took, 4), f"copy_s_{device}": round(copied, 5)}
        measured |= {f"ratio_{device}": round(took / copied, 2)}
        measured |= {f"spread_s_{device}": [round(min(seconds[1:]), 4), round(max(seconds[1:]), 4)]}
    return measured | {"bytes": sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())}


async def sleep(server: VLLMServer, options: argparse.Namespace, model: Any) -> dict[str, Any]:
    """Bytes of the device that each level frees, as the device tells them."""
    freed = {}
    greedy = SamplingParams(max_tokens=8, temperature=0)
    before = await server.generate([1, 2, 3], greedy, "before")
    for level in server.capabilities().sleep_levels:
        awake = torch.accelerator.get_memory_info()[0]
        await server.sleep(level)
        freed[f"freed_bytes_{level}"] = torch.accelerator.get_memory_info()[0] - awake
        await server.wake_up()
        if level == 2:
            manifest, named = weights_of(model, server.policy_version + 1)
            await server.update_weights(manifest, named)
        after = await server.generate([1, 2, 3], greedy, f"after-{level}")
        assert after.token_ids == before.token_ids, (level, before.token_ids, after.token_ids)
    return freed


async def run(options: argparse.Namespace, folder: str) -> int:
    """All parts, with one engine; how many failed."""
    if options.model is None:
        new_model(options.shape, options.dtype, 0).save_pretrained(folder)
        devices.empty_cache(devices.pick_device("auto"))
    options.checkpoint = options.model or folder
    model = load(options.checkpoint, options.dtype)
    server = VLLMServer(
        options.checkpoint,
        dtype=options.dtype,
        max_model_len=10_240 if "conformance" in options.parts else PROMPT_TOKENS + options.new_tokens,
        max_num_seqs=max(64, options.requests),
        tensor_parallel_size=options.tensor_parallel,
        enforce_eager=options.eager,
        engine_args=json.loads(options.engine_args),
    )
    start = time.perf_counter()
    await server.start()
    tell({"part": "start", "took_s": round(time.perf_counter() - start, 1), "versions": (await server.health()).detail})
    num_failed = 0
    try:
        for name in options.parts:
            start = time.perf_counter()
            try:
                result = await PARTS[name](server, options, model)
            except Exception as error:  # the other parts are still of interest
                result = {"failure": f"{type(error).__name__}: {error}"}
                num_failed += 1
            tell({"part": name, "took_s": round(time.perf_counter() - start, 1), **result})
    finally:
        await server.shutdown()
    return num_failed


PARTS = {"conformance": conformance, "speed": speed, "draw": draw, "update": update, "sleep": sleep}
WAYS = ("none", "logprobs", "seeded", "plain")


def tell(result: dict[str, Any]) -> None:
    print(json.dumps(result), flush=True)


def names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Reads names with commas between them."""

    def read(text: str) -> list[str]:
        unknown = set(text.split(",")) - set(known)
        if unknown:
            raise argparse.ArgumentTypeError(f"{sorted(unknown)} must be of {', '.join(known)}")
        return text.split(",")

    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", type=names(PARTS), default=["speed"], help=", ".join(PARTS))
    parser.add_argument("--ways", type=names(WAYS), default=list(WAYS), help=f"speed: {', '.join(WAYS)}")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="small")
    parser.add_argument("--model", help="a checkpoint instead of a random model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="0.1 or so below float32")
    parser.add_argument(
        "--offline", action="store_true", help="speed: beside LLM.generate; lower gpu_memory_utilization"
    )
    parser.add_argument("--engine-args", default="{}", help="JSON, more of vLLM's engine arguments")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        num_failed = asyncio.run(run(options, str(Path(scratch) / "model")))
    sys.exit(num_failed > 0)


if __name__ == "__main__":
    main()
