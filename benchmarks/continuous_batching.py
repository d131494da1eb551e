"""The embedded engine's loop against the continuous batching of transformers itself, on the same work.

    uv run python -m benchmarks.continuous_batching [--shape small|qwen3-0.6b] [--dtype NAME] [--device NAME]

The same random model on both sides, greedy, logprobs of the sampled tokens on both. `cb_ratio_N` is our tokens per second
over theirs for N requests of equal length that come at once, `cb_ratio_mixed` for 64 requests of many lengths. The
manager is made and warmed up before the clock runs. `cb_later_turn_ratio` is their later turn over ours: a history that
both have computed before, and some new tokens.
"""

import argparse
import asyncio
import json
import time

from transformers import ContinuousBatchingConfig, GenerationConfig, Qwen3ForCausalLM
from transformers.generation.continuous_batching import ContinuousBatchingManager

from benchmarks.engines import (
    HISTORY_TOKENS,
    PROMPT_TOKENS,
    TURN_TOKENS,
    add_arguments,
    build_model,
    check_same,
    ours,
    random_prompts,
)
from ostinato_engines import SamplingParams
from ostinato_engines.device import HOST, pick_device
from ostinato_engines.transformers_server import TransformersServer

MIXED_PROMPTS = [8 + 37 * index % 249 for index in range(64)]
MIXED_OUTPUTS = [4 + 53 * index % 93 for index in range(64)]


def theirs(
    manager: ContinuousBatchingManager, prompts: list[list[int]], new_tokens: list[int]
) -> tuple[float, list[list[int]]]:
    """Seconds and output ids of requests that come at once."""
    started = time.perf_counter()
    names = [
        manager.add_request(prompt, max_new_tokens=count) for prompt, count in zip(prompts, new_tokens, strict=True)
    ]
    found: dict[str, list[int]] = {}
    while len(found) < len(names):
        result = manager.get_result(timeout=60)
        if result is None or result.error is not None:
            raise SystemExit(f"their manager must answer, got {result and result.error}")
        if result.is_finished():
            found[result.request_id] = result.generated_tokens
            assert len(result.logprobs) == len(result.generated_tokens)
    return time.perf_counter() - started, [found[name] for name in names]


async def compare(
    server: TransformersServer,
    manager: ContinuousBatchingManager,
    model: Qwen3ForCausalLM,
    prompts: list[list[int]],
    new_tokens: list[int],
    repeats: int,
) -> float:
    """Our throughput over theirs, best of the repeats each."""
    our_times, their_times, num_ties = [], [], 0
    for repeat in range(repeats + 1):
        our_seconds, our_ids = await ours(server, prompts, new_tokens)
        their_seconds, their_ids = theirs(manager, prompts, new_tokens)
        if repeat:
            our_times.append(our_seconds)
            their_times.append(their_seconds)
        else:
            num_ties = check_same(model, prompts, our_ids, their_ids)
    count = sum(new_tokens)
    print(
        f"{len(prompts):3d} requests: {count / min(our_times):8.0f} tokens/s, theirs {count / min(their_times):8.0f}, "
        f"{num_ties} outputs part at a tie",
        flush=True,
    )
    return min(their_times) / min(our_times)


async def later_turns(
    server: TransformersServer, manager: ContinuousBatchingManager, vocab_size: int, repeats: int
) -> float:
    """Their seconds of a later turn over ours."""
    our_times, their_times = [], []
    for repeat in range(4 * repeats + 1):
        history, new = random_prompts(vocab_size, [HISTORY_TOKENS, TURN_TOKENS], seed=repeat)
        params = SamplingParams(temperature=0, max_tokens=1)
        first = await server.generate(history, params, "turns")
        theirs(manager, [history], [1])
        turn = [*history, *first.token_ids, *new[1:]]
        started = time.perf_counter()
        await server.generate(turn, params, "turns")
        if repeat:
            our_times.append(time.perf_counter() - started)
            their_times.append(theirs(manager, [turn], [1])[0])
        await server.release("turns")
    print(f"later turn {1e3 * min(our_times):.2f} ms, theirs {1e3 * min(their_times):.2f} ms")
    return min(their_times) / min(our_times)


async def run(arguments: argparse.Namespace) -> dict[str, float]:
    """All figures."""
    device = pick_device(arguments.device)
    shape, dtype = arguments.shape, arguments.dtype
    model, plain = (build_model(shape, dtype, device) for _ in range(2))
    vocab_size = plain.config.vocab_size
    manager = model.init_continuous_batching(
        GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=128),
        ContinuousBatchingConfig(
            return_logprobs=True,
            max_requests_per_batch=64,
            num_blocks=128 if device == HOST else None,  # of 256 tokens; left alone they take nine tenths of the memory
            max_batch_tokens=2048 if device == HOST else None,
        ),
    )
    manager.warmup()
    manager.start()
    figures: dict[str, float] = {}
    try:
        async with TransformersServer(build_model(shape, dtype, device), device=device, dtype=dtype) as server:
            for batch in arguments.batches:
                prompts = random_prompts(vocab_size, [PROMPT_TOKENS] * batch, seed=batch)
                new_tokens = [arguments.new_tokens] * batch
                ratio = await compare(server, manager, plain, prompts, new_tokens, arguments.repeats)
                figures[f"cb_ratio_{batch}"] = round(ratio, 3)
            prompts = random_prompts(vocab_size, MIXED_PROMPTS)
            ratio = await compare(server, manager, plain, prompts, MIXED_OUTPUTS, arguments.repeats)
            figures["cb_ratio_mixed"] = round(ratio, 3)
            ratio = await later_turns(server, manager, vocab_size, arguments.repeats)
            figures["cb_later_turn_ratio"] = round(ratio, 3)
    finally:
        manager.stop(block=True)
        manager.destroy()
    return figures


def main() -> None:
    """Prints one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
