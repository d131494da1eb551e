"""The embedded engine against `model.generate`, what a later turn costs, and the engines that live in other environments.

    uv run python -m benchmarks.engines [--shape small|qwen3-0.6b] [--dtype NAME] [--device NAME] [--new-tokens N] [--repeats N]
        [--server-shape small|smollm2-135m|qwen3-1.7b] [--server-requests N] [--server-new-tokens N]

Both sides run the same random Qwen3-shaped model on the same prompts, one after the other, repeatedly; each figure is the
best of the repeats, since other processes only ever add time. `transformers_ratio_N` is our tokens per second over those
of `generate` on an equal batch of N prompts of equal length, greedy. That the tokens are the same is checked; below
float32 they may part where two logits are as close as rounding. `later_turn_prefill_ratio` is the time of a second turn (a
long history that is cached, and some new tokens) over that of a fresh prompt of just those new tokens.

`vllm_tok_s`, `vllm_logprob_cost`, `vllm_vs_offline` and `sglang_tok_s` are those of `benchmarks.vllm_server` and
`benchmarks.sglang_server`, run where the engines are: in this environment, or under the interpreters that OSTINATO_VLLM_PYTHON
and OSTINATO_SGLANG_PYTHON name. They are null where an engine is not there or does not run, and the reason is printed.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.shapes import QWEN3_0_6B, SMOLLM2_135M
from ostinato_engines import SamplingParams
from ostinato_engines.device import HOST, pick_device, synchronize
from ostinato_engines.transformers_server import TransformersServer

PROMPT_TOKENS = 96
HISTORY_TOKENS = 512
TURN_TOKENS = 128
BATCHES = (1, 8, 32)
SERVER_LIMIT_S = 900
TIE = 0.25
"""Logits of a bfloat16 model closer than this may change places with the batch."""

SHAPES = {
    # The width of SmolLM2-135M, the smallest model that people train, with six of its thirty layers and 8192 ids.
    "small": {**SMOLLM2_135M, "vocab_size": 8192, "num_hidden_layers": 6},
    "qwen3-0.6b": QWEN3_0_6B,
}


def build_model(shape: str = "small", dtype: str = "float32", device: str = "cpu") -> Qwen3ForCausalLM:
    """A random model; the same shape gives the same weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **SHAPES[shape], max_position_embeddings=16384, tie_word_embeddings=True, initializer_range=0.05
    )
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    return model.to(getattr(torch, dtype)).eval()


def random_prompts(vocab_size: int, lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


async def ours(
    server: TransformersServer, prompts: list[list[int]], new_tokens: list[int]
) -> tuple[float, list[list[int]]]:
    """Seconds and output ids of requests that come at once."""
    names = [f"bench-{index}" for index in range(len(prompts))]
    started = time.perf_counter()
    outputs = await asyncio.gather(
        *(
            server.generate(ids, SamplingParams(temperature=0, max_tokens=count), name)
            for ids, count, name in zip(prompts, new_tokens, names, strict=True)
        )
    )
    seconds = time.perf_counter() - started
    for name in names:
        await server.release(name)
    return seconds, [output.token_ids for output in outputs]


def theirs(model: Any, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds and output ids of `model.generate` on one batch of equally long prompts."""
    started = time.perf_counter()
    on_device = torch.tensor(prompts, device=model.device)
    with torch.inference_mode():
        whole = model.generate(
            on_device,
            attention_mask=torch.ones_like(on_device),
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
        )
    ids = whole[:, len(prompts[0]) :].tolist()
    return time.perf_counter() - started, ids


def check_same(model: Qwen3ForCausalLM, prompts: list[list[int]], got: list[list[int]], wanted: list[list[int]]) -> int:
    """Exits unless the greedy outputs are the same up to ties of rounding; returns how many part at such a tie."""
    num_ties = 0
    for prompt, one, other in zip(prompts, got, wanted, strict=True):
        place = next((i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), None)
        if place is None:
            continue
        num_ties += 1
        with torch.inference_mode():
            ids = torch.tensor([[*prompt, *one[:place]]], device=model.device)
            logits = model(input_ids=ids, use_cache=False).logits[0, -1].float()
        gap = float((logits[one[place]] - logits[other[place]]).abs())
        if gap > (1e-3 if model.dtype == torch.float32 else TIE):
            raise SystemExit(f"greedy tokens must be the same, got others at output token {place}, {gap:.3g} apart")
    return num_ties


async def throughput_ratio(
    server: TransformersServer, model: Qwen3ForCausalLM, batch: int, new_tokens: int, repeats: int
) -> float:
    """Our throughput over theirs; exits if the greedy tokens differ."""
    prompts = random_prompts(model.config.vocab_size, [PROMPT_TOKENS] * batch, seed=batch)
    our_times, their_times, num_ties = [], [], 0
    for repeat in range(repeats + 1):
        our_seconds, our_ids = await ours(server, prompts, [new_tokens] * batch)
        their_seconds, their_ids = theirs(model, prompts, new_tokens)
        if repeat:
            our_times.append(our_seconds)
            their_times.append(their_seconds)
        else:
            num_ties = check_same(model, prompts, our_ids, their_ids)
    print(
        f"{batch:3d} requests: {batch * new_tokens / min(our_times):8.0f} tokens/s, "
        f"generate {batch * new_tokens / min(their_times):8.0f}, {num_ties} outputs part at a tie",
        flush=True,
    )
    return min(their_times) / min(our_times)


async def later_turn_ratio(server: TransformersServer, vocab_size: int, repeats: int) -> float:
    """Seconds of a later turn's prefill over those of its new tokens alone."""
    params = SamplingParams(temperature=0, max_tokens=1)
    later, alone = [], []
    for repeat in range(4 * repeats + 1):
        history, new = random_prompts(vocab_size, [HISTORY_TOKENS, TURN_TOKENS], seed=repeat)
        first = await server.generate(history, params, "turns")
        turn = [*history, *first.token_ids, *new[1:]]
        started = time.perf_counter()
        output = await server.generate(turn, params, "turns")
        middle = time.perf_counter()
        await server.generate(new, params, "alone")
        ended = time.perf_counter()
        assert output.num_cached_tokens == HISTORY_TOKENS
        for name in ("turns", "alone"):
            await server.release(name)
        if repeat:
            later.append(middle - started)
            alone.append(ended - middle)
    print(f"later turn {1e3 * min(later):.2f} ms, its new tokens alone {1e3 * min(alone):.2f} ms")
    return min(later) / min(alone)


def measured_elsewhere(arguments: argparse.Namespace) -> dict[str, float | None]:
    """The figures of vLLM and SGLang, None where they cannot be had."""
    sizes = (
        *("--shape", arguments.server_shape, "--dtype", arguments.dtype),
        *("--requests", str(arguments.server_requests), "--new-tokens", str(arguments.server_new_tokens)),
        *(("--eager",) if pick_device(arguments.device) == HOST else ()),
    )
    vllm = sglang = None
    if (python := interpreter_with("vllm")) is not None:
        # Two engines share the device.
        parts = ("--parts", "speed", "--offline", "--engine-args", json.dumps({"gpu_memory_utilization": 0.4}))
        vllm = last_record([python, "-m", "benchmarks.vllm_server", *parts, *sizes], "tok_s_logprobs")
    if (python := interpreter_with("sglang")) is not None:
        parts = ("--parts", "speed", "--python", python)
        sglang = last_record([sys.executable, "-m", "benchmarks.sglang_server", *parts, *sizes], "sglang_tok_s")
    return {
        "vllm_tok_s": None if vllm is None else vllm["tok_s_logprobs"],
        "vllm_logprob_cost": None if vllm is None else vllm["vllm_logprob_cost"],
        "vllm_vs_offline": None if vllm is None else vllm["vllm_vs_offline"],
        "sglang_tok_s": None if sglang is None else sglang["sglang_tok_s"],
    }


def interpreter_with(engine: str) -> str | None:
    """The interpreter whose environment has an engine: the one that is named for it, or this one."""
    variable = f"OSTINATO_{engine.upper()}_PYTHON"
    if named := os.environ.get(variable):
        return named
    if importlib.util.find_spec(engine) is not None:
        return sys.executable
    print(f"{engine} is not measured: it is not installed here, and {variable} names no interpreter", flush=True)
    return None


def last_record(command: Sequence[str], key: str) -> dict[str, float] | None:
    """The last of the JSON lines with this key that a command prints; None, and why, where there is none."""
    others = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in others}
    started = time.perf_counter()
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=SERVER_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"{command[2]} is not measured: {error}", flush=True)
        return None
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{") and key in line]
    if not records:
        reason = (done.stderr.strip() or done.stdout.strip() or "no output")[-2000:]
        print(f"{command[2]} is not measured: it ended with status {done.returncode}:\n{reason}", flush=True)
        return None
    print(f"{command[2]}: {json.dumps(records[-1])} ({time.perf_counter() - started:.0f} s)", flush=True)
    return records[-1]


async def run(arguments: argparse.Namespace) -> dict[str, float]:
    """All figures."""
    device, shape, dtype, repeats = pick_device(arguments.device), arguments.shape, arguments.dtype, arguments.repeats
    model = build_model(shape, dtype, device)
    figures: dict[str, float] = {}
    async with TransformersServer(build_model(shape, dtype, device), device=device, dtype=dtype) as server:
        for batch in arguments.batches:
            ratio = await throughput_ratio(server, model, batch, arguments.new_tokens, repeats)
            figures[f"transformers_ratio_{batch}"] = round(ratio, 3)
        figures["later_turn_prefill_ratio"] = round(await later_turn_ratio(server, model.config.vocab_size, repeats), 3)
        synchronize(device)
    return figures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this benchmark and its sibling have in common."""
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES, help="numbers of requests at once")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)


def main() -> None:
    """Prints one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--server-shape", default="small", help="of the models that vLLM and SGLang serve")
    parser.add_argument("--server-requests", type=int, default=64)
    parser.add_argument("--server-new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    elsewhere = measured_elsewhere(arguments)  # before this process takes memory of the device
    print(json.dumps({**asyncio.run(run(arguments)), **elsewhere}))


if __name__ == "__main__":
    main()
