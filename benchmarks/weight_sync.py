"""From the trainer's ranks to the engine: seconds until new weights serve, against copying the same bytes once.

    python -m benchmarks.weight_sync [--engine vllm|transformers] [--shape NAME] [--device NAME] [--dtype NAME] [--repeats N] [--ways NAMES] ...

A random Qwen3 (`1.7b`: 1.72 B parameters, 3.44 GB in bfloat16) is trained by one FSDP2 rank, a process of its own with float32 weights, and
served by an engine, as a run with `actor.strategy=fsdp2` builds both. A sync is what the loop does after a step: the manifest, the gathered
stream, the pool's update. How it travels is chosen as in a run, and reported (`memory`).

- `seconds`: the median of `--repeats` syncs after two, from asking for the manifest until the new weights serve; `spread`: least and most;
- `bytes`, `gb_per_s`: what the engine gets;
- `copy_seconds`: the bound, `copy_` of every tensor of the model once on the trainer's device, median; `seconds_over_bound`: the difference;
- `equal`: after the syncs every parameter of the engine has the trainer's bits (SHA-256); `equal_after_step`: again after an optimizer step and
  a sync, where `changed_by_step` parameters changed; `differed_before`: so many of the engine's were others before the first sync. vLLM on the
  CPU packs its weights, so that only some can be compared;
- `log_prob_diff_mean`, `log_prob_diff_max`: of sampled tokens, engine against trainer, after the last sync; `agrees`: the mean is at most
  `log_prob_bound`;
- `peak_extra_bytes`: by how much the device's free memory fell below that before the first sync, during the first two (all processes, the
  driver's part for new ones too); `held_after_bytes`: how much of it stayed; `peak_extra_share`: over `bytes`;
- `sleep`: the same sync to an engine that slept at level 2 and woke for it, where the engine sleeps;
- `ways`: seconds and GB/s of other ways at the same size: `controller` (along no route: ranks hand the tensors to this process), `local` (weights
  of this process, on the device, in the trainer's float32), `lora` (the same with adapters on queries and values: after the first sync
  `sent_tensors` of all; `agrees` as above, after a step), `host` (in memory of the host), `disk` (written to a file and read from it),
  `in_process` (an engine of ours in this process).

With `--separate` the engine has a device of its own, the second one, and the rank the first; with `--executor ray` rank and engine are actors. Of
the other ways those that need the engine in this process, or on the trainer's device, are left out then.

What fails says why in its place (`error`) and takes nothing else along. On a machine without an accelerator: --engine transformers.
"""

import argparse
import asyncio
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.shapes import QWEN3_0_6B, QWEN3_1_7B, sizes
from benchmarks.weight_digests import digests_of

SHAPES = {"tiny": sizes(512, 64, 2, 4, 2, 32, 96), "0.6b": QWEN3_0_6B, "1.7b": QWEN3_1_7B}
VISIBLE = "CUDA_VISIBLE_DEVICES"
ROOT = Path(__file__).resolve().parents[1]
BEGAN = time.perf_counter()
WAYS = ("controller", "local", "lora", "host", "disk", "in_process")
WARM_UPS = 2
LOG_PROB_BOUNDS = {"float32": 0.005, "bfloat16": 0.05}
"""Of the mean: what rounding explains."""
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 16, 24


def make_checkpoint(folder: Path, shape: str, dtype: str, device: str) -> None:
    """A random model; in a process of its own, so that the one that starts an engine has done no work on a device."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(SHAPES[shape])
    config = Qwen3Config(**sizes, max_position_embeddings=4096, tie_word_embeddings=True, initializer_range=0.02)
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def config_of(options: argparse.Namespace, model: Path, output: Path) -> Any:
    """The tree of a run with these parts."""
    from ostinato_trainer.config.loading import load_config

    engine = [f"actor_rollout_ref.rollout.name={options.engine}"]
    if options.executor == "ray":
        name = "TellingVLLM" if options.engine == "vllm" else "TellingTransformers"
        engine += [
            "trainer.executor=ray",
            "actor_rollout_ref.rollout.agent.num_workers=1",
            "actor_rollout_ref.rollout.agent.custom_async_server.path=benchmarks.telling_engines",
            f"actor_rollout_ref.rollout.agent.custom_async_server.name={name}",
            *(["actor_rollout_ref.rollout.nnodes=1"] if options.separate else []),
        ]
    if options.engine == "vllm":
        engine += [
            f"actor_rollout_ref.rollout.gpu_memory_utilization={options.gpu_memory_utilization}",
            "actor_rollout_ref.rollout.enforce_eager=true",
            # It begins with weights that are not the trainer's.
            "actor_rollout_ref.rollout.engine_kwargs.vllm={load_format: dummy}",
        ]
    return load_config(
        [],
        [
            f"actor_rollout_ref.model.path={model}",
            "actor_rollout_ref.actor.strategy=fsdp2",
            f"actor_rollout_ref.actor.dtype={options.dtype}",
            "actor_rollout_ref.actor.optim.lr=1e-4",
            "actor_rollout_ref.actor.use_kl_loss=false",
            "actor_rollout_ref.rollout.max_num_seqs=64",
            "data.max_prompt_length=256",
            "data.max_response_length=256",
            f"trainer.device={options.device}",
            "trainer.n_gpus_per_node=1",
            f"trainer.default_local_dir={output}",
            *engine,
        ],
    )


class Chosen(logging.Handler):
    """Remembers what is logged about the way that weights take."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "eights" in text and "through" in text:
            self.said.append(text)


@dataclass
class FreeMemory:
    """The device's free memory while something runs; nothing is known on the host."""

    device: str
    start: int | None = None
    least: int | None = None

    def now(self) -> int | None:
        from ostinato_engines import device as devices

        found = devices.device_memory(self.device)
        return None if found is None else found.free

    @contextmanager
    def watched(self) -> Any:
        """Looks about every millisecond, which slows what runs: nothing is timed meanwhile."""
        done = threading.Event()

        def look() -> None:
            while not done.is_set():
                free = self.now()
                if free is None:
                    return
                self.least = free if self.least is None else min(self.least, free)
                done.wait(0.001)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


@dataclass
class Bench:
    """The parts of the run, and what was found."""

    options: argparse.Namespace
    config: Any
    pool: Any
    backend: Any
    scratch: Path
    found: dict[str, Any] = field(default_factory=dict)
    version: int = 0
    other_engine: Any = None
    adapted: Any = None

    async def sync(self, source: Any = None) -> float:
        """What the loop does after a step, from this backend or the run's; seconds."""
        from ostinato_engines import device as devices

        self.version += 1
        devices.synchronize(self.options.device)
        started = time.perf_counter()
        manifest, stream = (source or self.backend).weights(version=self.version)
        pause = self.config.actor_rollout_ref.rollout.pool.sync_pause
        await self.pool.update_weights(manifest, stream, pause=pause, replayable=True)
        seconds = time.perf_counter() - started
        served = self.pool.servers[0].policy_version
        if served != self.version:
            raise RuntimeError(f"the engine must serve version {self.version}, got {served}")
        return seconds

    async def measure(self) -> None:
        """The run's own way: seconds, bytes, memory, bits, log-probabilities."""
        found, options = self.found, self.options
        manifest, _ = self.backend.weights(version=0)
        found["bytes"] = num_bytes = sum(num_bytes_of(spec) for spec in manifest.tensors)
        found["tensors"] = len(manifest.tensors)
        found["copy_seconds"] = copy_seconds(manifest, options.device)
        before = await self.engine_digests()
        memory = FreeMemory(options.device)
        memory.start = memory.now()
        chosen = Chosen()
        for name in ("ostinato_engines", "ostinato_rollout.routed_update"):
            logging.getLogger(name).setLevel(logging.INFO)
            logging.getLogger(name).addHandler(chosen)
        with memory.watched():
            cold = [await self.sync() for _ in range(WARM_UPS)]
        found["first_seconds"] = round(cold[0], 4)
        found["memory"] = chosen.said[-1] if chosen.said else "within the process"
        if memory.start is not None and memory.least is not None:
            found["peak_extra_bytes"] = memory.start - memory.least
            found["peak_extra_share"] = round((memory.start - memory.least) / num_bytes, 3)
            found["held_after_bytes"] = memory.start - (memory.now() or 0)
        seconds = [await self.sync() for _ in range(options.repeats)]
        median = statistics.median(seconds)
        found |= {
            "seconds": round(median, 4),
            "spread": [round(min(seconds), 4), round(max(seconds), 4)],
            "gb_per_s": round(num_bytes / median / 1e9, 2),
            "seconds_over_bound": round(median - found["copy_seconds"], 4),
            "times_bound": round(median / found["copy_seconds"], 1),
        }
        tell("syncs", found)
        await self.compare_bits(before)
        await self.compare_log_probs()

    async def compare_bits(self, before: dict[str, str]) -> None:
        """Bits of both sides, before and after an optimizer step."""
        found = self.found
        old, engine = await self.both_digests()
        found |= {"parameters": len(old), "equal": old == engine}
        found["differed_before"] = sum(before.get(name) != digest for name, digest in old.items())
        tell("bits", {name: found[name] for name in ("equal", "differed_before")})
        await asyncio.to_thread(self.train_once)
        await self.sync()
        new, engine = await self.both_digests()
        found |= {"equal_after_step": new == engine, "changed_by_step": sum(old[name] != new[name] for name in new)}
        if not (found["equal"] and found["equal_after_step"]):
            found["unequal"] = [name for name in {**new, **engine} if new.get(name) != engine.get(name)][:5]
        tell("bits", {name: found[name] for name in ("equal_after_step", "changed_by_step")})

    async def both_digests(self) -> tuple[dict[str, str], dict[str, str]]:
        """Of the trainer's weights, put together as the engine keeps them, and of the engine's."""
        fused = self.options.engine == "vllm"
        _, stream = self.backend.weights(version=self.version)
        trainer = asyncio.to_thread(digests_of, stream(), fused=fused)
        return await asyncio.gather(trainer, self.engine_digests())

    async def engine_digests(self) -> dict[str, str]:
        """Of the engine's parameters, by its names."""
        server = self.pool.servers[0]
        if self.options.executor == "ray":
            return dict(await server.chat_completion({}))
        if self.options.engine == "vllm":
            (digests,) = await server._engine.llm.collective_rpc("ostinato_weight_digests")
            return dict(digests)
        return digests_of(server._engine.writer.parameters.items(), fused=False)

    def train_once(self, backend: Any = None) -> None:
        """One step on random tokens, large enough to be seen in bfloat16."""
        from ostinato_trainer.algorithms.aggregation import with_loss_weights
        from ostinato_trainer.algorithms.policy_losses import PolicyLossOptions, policy_loss_fn
        from ostinato_trainer.batch import Batch

        rows = random_prompts(self.options.shape, 2 * PROMPT_TOKENS, seed=3)
        batch = Batch.from_segments([segment_of(row[:1], row[1:], None, place) for place, row in enumerate(rows)])
        signs = 1.0 - 2.0 * (batch.token_sequence % 2).double()
        batch = with_loss_weights(batch.with_columns(advantages=signs * batch.loss_mask), "token-mean")
        backend = backend or self.backend
        backend.forward_backward([batch], policy_loss_fn(PolicyLossOptions(), "vanilla"))
        stats = backend.optimizer_step()
        if stats.skipped:
            raise RuntimeError(f"the step must change the weights, got skipped: {stats.reason}")

    async def compare_log_probs(self) -> None:
        """Of the engine and the run's ranks."""
        self.found |= await self.log_prob_gap(self.backend)
        tell("log-probs", {name: value for name, value in self.found.items() if "log_prob" in name})

    async def log_prob_gap(self, backend: Any) -> dict[str, Any]:
        """The engine's log-probabilities of what it samples, against a trainer's of the same tokens."""
        from ostinato_engines import SamplingParams
        from ostinato_trainer.batch import Batch
        from ostinato_trainer.metrics.log_prob_gap import log_prob_gap

        server, prompts = self.pool.servers[0], random_prompts(self.options.shape, PROMPT_TOKENS, seed=1)
        outputs = await asyncio.gather(
            *(
                server.generate(prompt, SamplingParams(max_tokens=NEW_TOKENS, seed=place), f"prompt-{place}")
                for place, prompt in enumerate(prompts)
            )
        )
        batch = Batch.from_segments(
            [
                segment_of(prompt, output.token_ids, output.logprobs, place)
                for place, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
            ]
        )
        ours = await asyncio.to_thread(backend.log_probs, batch, temperature=1.0)
        gap = log_prob_gap(batch.rollout_log_probs, ours, batch.loss_mask)
        mean, bound = gap["training/rollout_log_probs_diff_mean"], LOG_PROB_BOUNDS[self.options.dtype]
        return {
            "log_prob_diff_mean": round(mean, 6),
            "log_prob_diff_max": round(gap["training/rollout_log_probs_diff_max"], 6),
            "log_prob_bound": bound,
            "agrees": mean <= bound,
        }

    async def sleep(self) -> dict[str, Any]:
        """An engine that gave its weights back takes them before it serves."""
        if 2 not in self.pool.servers[0].capabilities().sleep_levels:
            return {"skipped": "this engine does not sleep"}
        times = {
            "sleep_s": await timed(self.pool.sleep(2)),
            "sync_s": await self.sync(),
            "wake_s": await timed(self.pool.wake_up()),
        }
        await self.compare_log_probs()
        return {name: round(value, 4) for name, value in times.items()} | {"agrees": self.found["agrees"]}

    async def way(self, name: str) -> dict[str, Any]:
        """Another way at the same size."""
        takes = await asyncio.to_thread(getattr(self, f"prepare_{name}"))
        try:
            seconds = [await takes() for _ in range(1 + self.options.way_repeats)][1:]
            if self.adapted is not None:
                return await self.of_adapters(self.adapted, statistics.median(seconds))
        finally:
            self.adapted = None
            if self.other_engine is not None:
                await self.other_engine.shutdown()
                self.other_engine = None
        median = statistics.median(seconds)
        return {"seconds": round(median, 4), "gb_per_s": round(self.found["bytes"] / median / 1e9, 2)}

    async def of_adapters(self, backend: Any, seconds: float) -> dict[str, Any]:
        """What a sync of adapted layers sent, and whether the engine has the policy after a step of them."""
        part = backend.weights(version=0)[0].partial()
        await asyncio.to_thread(self.train_once, backend)
        await self.sync(backend)
        sent = {"sent_tensors": len(part.tensors), "sent_bytes": sum(num_bytes_of(spec) for spec in part.tensors)}
        return {"seconds": round(seconds, 4), **sent, **await self.log_prob_gap(backend)}

    def local_backend(self, **changes: Any) -> Any:
        import msgspec

        from ostinato_trainer.assembly import backend_options
        from ostinato_trainer.backends.local import LocalBackend

        return LocalBackend.from_pretrained(
            str(self.config.actor_rollout_ref.model.path),
            msgspec.structs.replace(backend_options(self.config, total_steps=1), **changes),
        )

    def prepare_controller(self) -> Callable[[], Awaitable[float]]:
        source = ThroughThisProcess(self.backend)
        return lambda: self.sync(source)

    def prepare_local(self) -> Callable[[], Awaitable[float]]:
        backend = self.local_backend()
        return lambda: self.sync(backend)

    def prepare_lora(self) -> Callable[[], Awaitable[float]]:
        from ostinato_trainer.backends.lora import LoraOptions

        lora = LoraOptions(rank=16, alpha=32.0, target_modules=["q_proj", "v_proj"])
        self.adapted = backend = self.local_backend(lora=lora)
        return lambda: self.sync(backend)

    def prepare_host(self) -> Callable[[], Awaitable[float]]:
        source = HostWeights(self.backend)
        return lambda: self.sync(source)

    def prepare_disk(self) -> Callable[[], Awaitable[float]]:
        source, file = HostWeights(self.backend), self.scratch / "weights.safetensors"
        return lambda: self.sync(StoredSource(source, file))

    def prepare_in_process(self) -> Callable[[], Awaitable[float]]:
        from ostinato_engines.transformers_server import TransformersServer

        backend, config = self.local_backend(), self.config
        self.other_engine = server = TransformersServer(
            str(config.actor_rollout_ref.model.path),
            device=self.options.device,
            dtype=self.options.dtype,
            cast_weights=True,
            max_model_len=512,
        )
        versions = iter(range(1, 100))

        async def takes() -> float:
            from ostinato_engines import device as devices

            await server.start()
            devices.synchronize(self.options.device)
            started = time.perf_counter()
            manifest, stream = backend.weights(version=next(versions))
            await server.update_weights(manifest, stream())
            devices.synchronize(self.options.device)
            return time.perf_counter() - started

        return takes


class ThroughThisProcess:
    """The weights of ranks as one who knows no routes sees them."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def weights(self, *, version: int) -> tuple[Any, Callable[[], Iterable[Any]]]:
        manifest, source = self._backend.weights(version=version)
        return manifest, lambda: source()


class HostWeights:
    """The trainer's weights as they would come from a rank without a device: in the host's memory."""

    def __init__(self, backend: Any) -> None:
        self._manifest, stream = backend.weights(version=0)
        self.tensors = [(name, tensor.to("cpu", copy=True)) for name, tensor in stream()]

    def weights(self, *, version: int) -> tuple[Any, Callable[[], Iterable[Any]]]:
        import msgspec

        return msgspec.structs.replace(self._manifest, version=version), lambda: iter(self.tensors)


class StoredSource:
    """Weights that are written to a file, and read from it."""

    def __init__(self, source: HostWeights, file: Path) -> None:
        self._source, self._file = source, file

    def weights(self, *, version: int) -> tuple[Any, Callable[[], Iterable[Any]]]:
        from ostinato_engines.weight_transfer import StoredWeights, write_weights

        manifest, stream = self._source.weights(version=version)
        write_weights(self._file, manifest, stream())

        def read() -> Iterable[Any]:
            with StoredWeights(self._file) as stored:
                yield from stored

        return manifest, read


def num_bytes_of(spec: Any) -> int:
    from ostinato_engines.weight_transfer.layout import num_bytes_of

    return num_bytes_of(spec)


def copy_seconds(manifest: Any, device: str) -> float:
    """The bound: every tensor copied once, on the device."""
    import torch

    from ostinato_engines import device as devices

    pairs = []
    for spec in manifest.tensors:
        source = torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
        pairs.append((torch.empty_like(source), source))
    seconds = []
    for _ in range(7):
        devices.synchronize(device)
        started = time.perf_counter()
        for to, source in pairs:
            to.copy_(source)
        devices.synchronize(device)
        seconds.append(time.perf_counter() - started)
    pairs.clear()
    devices.empty_cache(device)
    return round(statistics.median(seconds[2:]), 6)


def random_prompts(shape: str, length: int, seed: int) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, SHAPES[shape]["vocab_size"], (NUM_PROMPTS, length), generator=generator).tolist()


def segment_of(prompt: list[int], response: list[int], logprobs: list[float] | None, place: int) -> Any:
    from ostinato_trainer.segments import Segment

    return Segment(prompt, response, [1] * len(response), logprobs, "g", f"t{place}", float(place % 2))


async def timed(work: Awaitable[Any]) -> float:
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


def tell(part: str, values: dict[str, Any]) -> None:
    """What is known so far, and when: a run that is cut keeps it."""
    print(json.dumps({"part": part, "at_s": round(time.perf_counter() - BEGAN, 1), **values}), flush=True)


@contextmanager
def visible(devices: str | None) -> Any:
    """Processes that are started within the block see these devices alone; None changes nothing."""
    if devices is None:
        yield
        return
    before = os.environ[VISIBLE]
    os.environ[VISIBLE] = devices
    try:
        yield
    finally:
        os.environ[VISIBLE] = before


async def run(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """All figures."""
    from ostinato_trainer.placement.executor import cluster_of, places_of

    config = config_of(options, scratch / "model", scratch / "run")
    with cluster_of(config):
        async with places_of(config) as places:
            return await run_placed(options, config, places, scratch)


async def run_placed(options: argparse.Namespace, config: Any, places: Any, scratch: Path) -> dict[str, Any]:
    """The engine starts first, in a process that has not touched a device."""
    from ostinato_trainer.rollout_engine import build_pool

    started = time.perf_counter()
    apart = options.separate and options.executor == "local" and options.device != "cpu"
    of_rank = None
    if apart:  # for good: what a process has seen of devices once is what it sees
        of_rank, os.environ[VISIBLE] = os.environ.get(VISIBLE, "0,1").split(",")[:2]
    pool = build_pool(config, places)
    await pool.start()
    found: dict[str, Any] = {
        "engine": pool.servers[0].capabilities().engine,
        "engine_start_s": round(time.perf_counter() - started, 1),
    }
    tell("engine", found)
    try:
        from ostinato_trainer.assembly import backend_options
        from ostinato_trainer.backends.choice import build_backend

        started = time.perf_counter()
        with visible(of_rank):
            backend = await asyncio.to_thread(build_backend, config, backend_options(config, total_steps=10), places)
        found["ranks_start_s"] = round(time.perf_counter() - started, 1)
        bench = Bench(options, config, pool, backend, scratch, found)
        try:
            for name, part in {"measure": bench.measure, "sleep": bench.sleep}.items():
                await noted(name, part, found)
            ways: dict[str, Any] = found.setdefault("ways", {})
            for name in options.ways:
                await noted(name, lambda name=name: bench.way(name), ways)
                tell(name, ways[name])
        finally:
            await asyncio.to_thread(backend.close)
    finally:
        await pool.shutdown()
    return found


async def noted(name: str, part: Callable[[], Awaitable[Any]], found: dict[str, Any]) -> None:
    """Notes what a part gives, or why it failed: the others are still of interest."""
    try:
        result = await part()
    except Exception as error:
        logging.getLogger(__name__).exception("%s failed", name)
        result = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
    if result is not None:
        found[name] = result


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="transformers")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=tuple(LOG_PROB_BOUNDS), default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--way-repeats", type=int, default=2)
    parser.add_argument("--ways", help="names with commas between them; empty for none; by default all that can be")
    parser.add_argument("--separate", action="store_true", help="the engine has a device of its own")
    parser.add_argument("--executor", choices=("local", "ray"), default="local", help="where rank and engine are")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.3, help="vllm's part of the device")
    parser.add_argument("--directory", help="where the model and files go; by default a temporary folder")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    left_out = {"local", "lora", "in_process"} if options.separate or options.executor == "ray" else set()
    wanted = ",".join(name for name in WAYS if name not in left_out) if options.ways is None else options.ways
    options.ways = [name for name in wanted.split(",") if name]
    if unknown := set(options.ways) - set(WAYS):
        parser.error(f"--ways must be among {', '.join(WAYS)}, got {', '.join(sorted(unknown))}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Prints one JSON line last."""
    options = parsed(arguments)
    if options.make is not None:
        make_checkpoint(options.make, options.shape, options.dtype, options.device)
        return 0
    logging.basicConfig(level=logging.WARNING)
    started = time.perf_counter()
    if options.directory is not None:
        Path(options.directory).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="weight-sync-") as folder:
        scratch = Path(folder)
        settings = ["--shape", options.shape, "--dtype", options.dtype, "--device", options.device]
        command = [sys.executable, "-m", "benchmarks.weight_sync", "--make", str(scratch / "model"), *settings]
        subprocess.run(command, check=True, cwd=ROOT)
        found = asyncio.run(run(options, scratch))
    good = ("equal", "equal_after_step", "agrees")
    settings = {
        name: getattr(options, name) for name in ("shape", "device", "dtype", "repeats", "executor", "separate")
    }
    print(json.dumps({**settings, **found, "took_s": round(time.perf_counter() - started, 1)}), flush=True)
    if failed := [name for name in good if not found.get(name)]:
        print(f"must hold and does not: {', '.join(failed)}", file=sys.stderr)
    return int("measure" in found or bool(failed))


if __name__ == "__main__":
    sys.exit(main())
