"""SGLangServer on this machine: does it keep the contract, how fast is it, what do updates cost and what does sleep free.

    python -m benchmarks.sglang_server [--parts conformance,speed,update,sleep,record] [--shape small|smollm2-135m|qwen3-1.7b | --model FOLDER]
        [--python PATH] [--python-path FOLDER] [--dtype NAME] [--eager] [--requests N] [--new-tokens N] [--repeats N] [--tolerance X]
        [--share-device] [--engine-args JSON] [--record-to FILE]

Needs torch, transformers and ostinato-engines here, and SGLang under --python (and --python-path). The model is random with the given shape, unless
a checkpoint is named. One server does all parts in their order. `speed` sends all requests at once, with and without the sampled token's logprob;
medians of the repeats count after one that warms up. `update` gives seconds of a whole weight update and its ratio to copying the same bytes once.
`sleep` gives the device memory that each level frees. `record` keeps the server's answers for the tests. Each part prints a line of JSON.
"""

import argparse
import asyncio
import copy
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.vllm_server import PROMPT_TOKENS, SHAPES, forward_of, load, new_model, weights_of
from ostinato_engines import SamplingParams
from ostinato_engines import device as devices
from ostinato_engines.sglang_engine.http import LocalClient
from ostinato_engines.sglang_server import SGLangServer
from ostinato_engines.testing import WeightUpdate, check_server
from ostinato_engines.testing.sglang_stub.recording import Exchange, Recorder
from ostinato_engines.testing.sglang_stub.tokenizer import save_tokenizer

MAX_MODEL_LEN = 10_240
PARTS = ("speed", "update", "sleep", "conformance", "record")


async def conformance(server: SGLangServer, options: argparse.Namespace, model: Any, folder: str) -> dict[str, Any]:
    """The suite in its full scope, weight updates and sleep included, but for the shutdown."""
    version = server.policy_version + 1
    other = new_model(options.shape, options.dtype, 1)
    on_device = copy.deepcopy(other).to(devices.pick_device()) if options.share_device else other
    manifest, named = weights_of(on_device, version)
    update = WeightUpdate(manifest, lambda: iter(named), forward_of(other))
    report = await check_server(
        server,
        vocab_size=model.config.vocab_size,
        forward=forward_of(model),
        weight_update=update,
        scope="full",
        logprob_tolerance=options.tolerance,
        deadline_s=120.0,
        end_with_shutdown="record" not in options.parts,
    )
    return {
        "passed": sum(not result.skipped for result in report.results),
        "skipped": {result.name: result.skipped for result in report.results if result.skipped},
    }


async def speed(server: SGLangServer, options: argparse.Namespace, model: Any, folder: str) -> dict[str, Any]:
    """Tokens per second of equal requests, in interleaved runs."""
    generator = torch.Generator().manual_seed(0)
    shape = (options.requests, PROMPT_TOKENS)
    prompts = torch.randint(0, model.config.vocab_size, shape, generator=generator).tolist()
    ways: dict[str, dict[str, Any]] = {
        "tok_s_without_logprobs": {"logprobs": False},
        "sglang_tok_s": {},
        "tok_s_top_p": {"top_p": 0.95},
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(options.repeats + 1):
        for name, way in ways.items():
            await server.reset_prefix_cache()
            params = SamplingParams(max_tokens=options.new_tokens, **way)
            start = time.perf_counter()
            outs = await asyncio.gather(
                *(server.generate(prompt, params, f"r{index}") for index, prompt in enumerate(prompts))
            )
            took = time.perf_counter() - start
            assert all(len(out.token_ids) == options.new_tokens for out in outs)
            if round_number:  # the first warms up
                seconds[name].append(took)
    num_tokens = options.requests * options.new_tokens
    return {
        **{name: round(num_tokens / statistics.median(values), 1) for name, values in seconds.items()},
        "spread": {
            name: [round(num_tokens / max(values)), round(num_tokens / min(values))] for name, values in seconds.items()
        },
    }


async def update(server: SGLangServer, options: argparse.Namespace, model: Any, folder: str) -> dict[str, Any]:
    """Whole updates, against copying the same bytes once."""
    result: dict[str, Any] = {"bytes": sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())}
    places = [] if options.share_device else [devices.HOST]
    places += [place for place in (devices.pick_device(),) if place != devices.HOST]
    for place in places:
        source = model.to(place)
        seconds, copies = [], []
        for _ in range(options.repeats + 1):
            manifest, named = weights_of(source, server.policy_version + 1)
            start = time.perf_counter()
            for _, tensor in named:
                tensor.to(devices.HOST, copy=True)
            middle = time.perf_counter()
            await server.update_weights(manifest, named)
            copies.append(middle - start)
            seconds.append(time.perf_counter() - middle)
        out = await server.generate([1, 2, 3], {"max_tokens": 2, "temperature": 0}, "after")
        assert out.policy_versions[-1].version == server.policy_version
        took, copied = statistics.median(seconds[1:]), statistics.median(copies[1:])
        result |= {f"update_s_{place}": round(took, 3), f"copy_s_{place}": round(copied, 3)}
    model.to(devices.HOST)
    return result


async def sleep(server: SGLangServer, options: argparse.Namespace, model: Any, folder: str) -> dict[str, Any]:
    """Bytes of the device that each level frees, seconds that it takes, and that the same is sampled afterwards."""
    freed: dict[str, Any] = {}
    greedy = SamplingParams(max_tokens=8, temperature=0)
    before = await server.generate([1, 2, 3], greedy, "before")
    for level in server.capabilities().sleep_levels:
        awake = free_bytes()
        start = time.perf_counter()
        await server.sleep(level)
        middle = time.perf_counter()
        asleep = free_bytes()
        resumed = time.perf_counter()
        await server.wake_up()
        end = time.perf_counter()
        if level == 2:
            source = model.to(devices.pick_device()) if options.share_device else model
            manifest, named = weights_of(source, server.policy_version + 1)
            await server.update_weights(manifest, named)
            model.to(devices.HOST)
        after = await server.generate([1, 2, 3], greedy, f"after-{level}")
        freed |= {
            f"freed_bytes_{level}": asleep - awake,
            f"sleep_s_{level}": round(middle - start, 3),
            f"wake_s_{level}": round(end - resumed, 3),
            f"same_{level}": after.token_ids == before.token_ids,
        }
    return freed


def free_bytes() -> int:
    """Of the device; 0 where there is none."""
    return torch.accelerator.get_memory_info()[0] if torch.accelerator.is_available() else 0


async def record(server: SGLangServer, options: argparse.Namespace, model: Any, folder: str) -> dict[str, Any]:
    """The server's answers to the stub's round of calls, kept in a file."""
    engine = server._engine
    assert engine is not None
    client = engine.running.client
    stranger = LocalClient(client._port, "of somebody else")
    lines: list[bytes] = []

    def keep(exchange: Exchange) -> None:
        lines.append(msgspec.json.encode(exchange) + b"\n")
        Path(options.record_to).write_bytes(b"".join(lines))

    await Recorder(client, stranger, Path(folder), can_sleep=engine.running.can_sleep, keep=keep).record()
    return {"exchanges": len(lines)}


async def run(options: argparse.Namespace, folder: str) -> int:
    """All parts, with one server; how many failed."""
    if options.model is None:
        new_model(options.shape, options.dtype, 0).save_pretrained(folder)
        if "record" in options.parts:
            save_tokenizer(Path(folder), SHAPES[options.shape]["vocab_size"])
    model = load(options.model or folder, options.dtype)
    server = SGLangServer(
        options.model or folder,
        python=options.python,
        dtype=options.dtype,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max(64, options.requests),
        enforce_eager=options.eager,
        engine_args=json.loads(options.engine_args),
        environment={} if options.python_path is None else {"PYTHONPATH": options.python_path},
        launcher=options.launcher.split(),
        share_device=options.share_device,
    )
    start = time.perf_counter()
    await server.start()
    tell(
        {"part": "start", "seconds": round(time.perf_counter() - start, 1), "versions": (await server.health()).detail}
    )
    parts = {"conformance": conformance, "speed": speed, "update": update, "sleep": sleep, "record": record}
    num_failed = 0
    try:
        for name in options.parts:
            start = time.perf_counter()
            try:
                result = await parts[name](server, options, model, options.model or folder)
            except Exception as error:  # the other parts are still of interest
                result = {"failure": f"{type(error).__name__}: {error}"}
                num_failed += 1
            tell({"part": name, "took_s": round(time.perf_counter() - start, 1), **result})
    finally:
        if server._engine is not None and options.log_to:
            Path(options.log_to).write_text(server._engine.process.log_tail())
        await server.shutdown()
    return num_failed


def tell(result: dict[str, Any]) -> None:
    print(json.dumps(result), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", type=lambda text: text.split(","), default=["speed"], help=", ".join(PARTS))
    parser.add_argument("--shape", choices=tuple(SHAPES), default="small")
    parser.add_argument("--model", help="a checkpoint instead of a random model")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has SGLang")
    parser.add_argument("--python-path", help="where its packages are, if they are not in its environment")
    parser.add_argument("--launcher", default="", help="a command instead of python -m sglang.launch_server")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--share-device", action="store_true", help="updates go from device to device")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="0.1 or so below float32")
    parser.add_argument("--engine-args", default="{}", help="JSON, more of SGLang's arguments")
    parser.add_argument("--record-to", default="sglang_replies.jsonl")
    parser.add_argument("--log-to", help="a file for the end of SGLang's log")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        num_failed = asyncio.run(run(options, str(Path(scratch) / "model")))
    sys.exit(num_failed > 0)


if __name__ == "__main__":
    main()
