"""The embedded engine against `model.generate`, and what a later turn costs.

    uv run python -m benchmarks.engines [--new-tokens N] [--repeats N]

Both sides run the same random Qwen3-shaped model on the same prompts, one after the other, repeatedly; figures are
medians. `transformers_ratio_N` is our tokens per second over those of `generate` on an equal batch of N prompts of
equal length, greedy; that the tokens are the same is checked. `later_turn_prefill_ratio` is the time of a second turn
(a long history that is cached, and some new tokens) over that of a fresh prompt of just those new tokens.
"""

import argparse
import asyncio
import json
import statistics
import time

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from ostinato_engines import SamplingParams
from ostinato_engines.device import pick_device, synchronize
from ostinato_engines.transformers_server import TransformersServer

PROMPT_TOKENS = 96
HISTORY_TOKENS = 512
TURN_TOKENS = 128


def build_model() -> Qwen3ForCausalLM:
    """The width of SmolLM2-135M, the smallest model that people train, with six of its thirty layers and 8192 ids."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=576,
        num_hidden_layers=6,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        intermediate_size=1536,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.05,
    )
    return Qwen3ForCausalLM(config).eval()


async def ours(server: TransformersServer, prompts: torch.Tensor, new_tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds and output ids of one batch."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens)
    names = [f"bench-{index}" for index in range(len(prompts))]
    started = time.perf_counter()
    outputs = await asyncio.gather(
        *(server.generate(ids, params, name) for ids, name in zip(prompts.tolist(), names, strict=True))
    )
    seconds = time.perf_counter() - started
    for name in names:
        await server.release(name)
    return seconds, [output.token_ids for output in outputs]


def theirs(model: Qwen3ForCausalLM, prompts: torch.Tensor, new_tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds and output ids of `model.generate` on the same batch."""
    on_device = prompts.to(model.device)
    synchronize(model.device)
    started = time.perf_counter()
    with torch.inference_mode():
        whole = model.generate(
            on_device,
            attention_mask=torch.ones_like(on_device),
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
        )
    ids = whole[:, prompts.shape[1] :].tolist()
    return time.perf_counter() - started, ids


async def throughput_ratio(
    server: TransformersServer, model: Qwen3ForCausalLM, batch: int, new_tokens: int, repeats: int
) -> float:
    """Our throughput over theirs; raises if the greedy tokens differ."""
    prompts = torch.randint(0, 8192, (batch, PROMPT_TOKENS), generator=torch.Generator().manual_seed(batch))
    our_times, their_times = [], []
    for repeat in range(repeats + 1):
        our_seconds, our_ids = await ours(server, prompts, new_tokens)
        their_seconds, their_ids = theirs(model, prompts, new_tokens)
        if our_ids != their_ids:
            raise SystemExit(f"greedy tokens must equal those of generate, got others at batch {batch}")
        if repeat:
            our_times.append(our_seconds)
            their_times.append(their_seconds)
    print(
        f"{batch:3d} requests: {batch * new_tokens / statistics.median(our_times):8.0f} tokens/s, "
        f"generate {batch * new_tokens / statistics.median(their_times):8.0f}"
    )
    return statistics.median(their_times) / statistics.median(our_times)


async def later_turn_ratio(server: TransformersServer, repeats: int) -> float:
    """Seconds of a later turn's prefill over those of its new tokens alone."""
    params = SamplingParams(temperature=0, max_tokens=1)
    generator = torch.Generator().manual_seed(0)
    later, alone = [], []
    for repeat in range(4 * repeats + 1):
        history, new = (
            torch.randint(0, 8192, (size,), generator=generator).tolist() for size in (HISTORY_TOKENS, TURN_TOKENS)
        )
        first = await server.generate(history, params, "turns")
        turn = [*history, *first.token_ids, *new[1:]]
        started = time.perf_counter()
        await server.generate(turn, params, "turns")
        middle = time.perf_counter()
        await server.generate(new, params, "alone")
        ended = time.perf_counter()
        for name in ("turns", "alone"):
            await server.release(name)
        if repeat:
            later.append(middle - started)
            alone.append(ended - middle)
    print(
        f"later turn {1e3 * statistics.median(later):.2f} ms, its new tokens alone {1e3 * statistics.median(alone):.2f} ms"
    )
    return statistics.median(later) / statistics.median(alone)


async def run(new_tokens: int, repeats: int) -> dict[str, float]:
    """All figures."""
    device = pick_device("auto")
    model = build_model().to(device)
    figures: dict[str, float] = {}
    async with TransformersServer(build_model(), device=device) as server:
        for batch in (1, 8, 32):
            figures[f"transformers_ratio_{batch}"] = round(
                await throughput_ratio(server, model, batch, new_tokens, repeats), 3
            )
        figures["later_turn_prefill_ratio"] = round(await later_turn_ratio(server, repeats), 3)
    return figures


def main() -> None:
    """Prints one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    print(json.dumps(asyncio.run(run(arguments.new_tokens, arguments.repeats))))


if __name__ == "__main__":
    main()
