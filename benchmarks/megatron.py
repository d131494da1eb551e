"""Training with Megatron-core on GPUs, beside one device: `PYTHONPATH=.:packages/trainer/src:... python -m benchmarks.megatron`.

Needs megatron-core (extra `megatron`) and what the trainer brings; the packages need no installation. Models have random weights at real shapes,
or are those of `--model FOLDER`. For each shape:

- `logits_float32`, `logits_bfloat16`: of one rank and packed sequences, beside `transformers` and one sequence at a time: root mean square of the
  difference over that of the logits. In float32 at most 1e-5. In 16 bits what counts is the distance to the float32 logits: at most 1.25
  times that of `transformers` in 16 bits. `turned` is the same with one projection's rows in reverse, which must be far off.
- `curve_float32`, `curve_bfloat16`: five GRPO updates on a recorded batch in ranks of their own, as a run has them, beside `strategy=local`: the
  largest difference of losses, entropies, divergences and gradient norms, over the largest value of each: at most 1e-3 and 0.05, or three times
  what padding instead of packing makes of it on one device (`noise`). `control` is what a learning rate of half as much again makes of it, which
  must be beyond that twice.
- `checkpoint`: a step after saving equals the step after loading; whether streamed and exported weights are equal bit for bit; seconds.
- `update`, with bfloat16: tokens per second of an update, peak memory, seconds in which the weights come to the host; beside `strategy=local`.

`--ranks N --tensor T --pipeline P` spreads curves, checkpoint and update over N devices. The last line is JSON; the status is 1 where a bound does
not hold, and `failures` says which.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]  documented as public

from benchmarks.shapes import QWEN3_0_6B, SMOLLM2_135M
from ostinato_engines.device import HOST, empty_cache, is_available, max_memory_allocated, synchronize
from ostinato_trainer.algorithms.advantages import with_advantages
from ostinato_trainer.algorithms.aggregation import with_loss_weights
from ostinato_trainer.algorithms.policy_losses import PolicyLossOptions, policy_loss_fn
from ostinato_trainer.backends.base import EntropyMode, LossFn, LossOutput, MicroBatch, MicroBatchOutput
from ostinato_trainer.backends.causal_lm import load_causal_lm
from ostinato_trainer.backends.local import LocalBackend, LocalBackendOptions
from ostinato_trainer.backends.megatron.options import MegatronOptions, MegatronRankFactory
from ostinato_trainer.backends.megatron.shape import MegatronLayout
from ostinato_trainer.backends.ranks.group import RankGroup
from ostinato_trainer.backends.ranks.processes import RankProcesses, RankProcessOptions
from ostinato_trainer.batch import Batch
from ostinato_trainer.segments import Segment

SHAPES: dict[str, dict[str, Any]] = {
    "135M": {"model_type": "llama", **SMOLLM2_135M},
    "0.6B": {"model_type": "qwen3", **QWEN3_0_6B},
    "tiny": {
        "model_type": "qwen3",
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
}
NUM_UPDATES = 5
TEMPERATURE = 0.8
LR = 1e-4
LOGITS_BOUND = {"float32": 1e-5, "bfloat16": 1.25}
CURVE_BOUND = {"float32": 1e-3, "bfloat16": 0.05}
LOSS = policy_loss_fn(PolicyLossOptions(kl_loss_coef=0.01, entropy_coeff=0.001))
NAMES = ("actor/pg_loss", "actor/ppo_kl", "actor/kl_loss", "actor/entropy", "grad_norm")
"""What is compared of a step; clipped tokens are counted one by one and jump."""
GIB = 2**30

Failures = list[str]


@dataclass(frozen=True)
class Ranks:
    """How many there are and how they share a model."""

    num_ranks: int
    layout: MegatronLayout
    device: str

    def factory(self, folder: Path, options: MegatronOptions) -> Any:
        """Of the ranks; on the CPU with the shim of the tests."""
        factory = MegatronRankFactory(path=str(folder), options=options)
        if self.device != HOST:
            return factory
        import megatron_on_cpu  # pyright: ignore[reportMissingImports]

        return megatron_on_cpu.OnCPU(factory)

    def start(self, folder: Path, options: MegatronOptions) -> RankGroup:
        """Ranks in processes of their own."""
        options = msgspec.structs.replace(options, layout=self.layout)
        processes = RankProcessOptions(
            num_ranks=self.num_ranks, device=self.device, collective_timeout_s=120.0, call_timeout_s=180.0
        )
        return RankGroup(RankProcesses(processes), self.factory(folder, options))


@dataclass(frozen=True)
class Metered:
    """A loss whose metrics say how much memory its process has held at most; it travels to the ranks."""

    loss: LossFn
    device: str

    def __call__(self, output: MicroBatchOutput, batch: MicroBatch) -> LossOutput:
        loss, metrics = self.loss(output, batch)
        return loss, {**metrics, "peak_gib_max": max_memory_allocated(self.device) / GIB}


def make_model(shape: dict[str, Any], folder: Path, device: str) -> None:
    """A folder with random weights; norms are random, too, so that one in the wrong place shows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {name: value for name, value in shape.items() if name != "model_type"}
    config = AutoConfig.for_model(
        shape["model_type"], **sizes, tie_word_embeddings=True, max_position_embeddings=8192, initializer_range=0.04
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def make_batch(vocab_size: int, lengths: Sequence[int], *, prompt: int = 8, group_size: int = 4) -> Batch:
    """Trajectories in groups, with rewards, advantages and weights as a GRPO step makes them."""
    generator = torch.Generator().manual_seed(1)
    segments = []
    for place, length in enumerate(lengths):
        ids = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
        mask = [1] * (length - prompt)
        reward = float(place * 7 % 5 % 2)
        group = f"g{place // group_size}"
        segments.append(Segment(ids[:prompt], ids[prompt:], mask, None, group, f"t{place}", reward))
    return with_loss_weights(with_advantages(Batch.from_segments(segments), "grpo"), "token-mean")


def logits_of_transformers(folder: Path, batch: Batch, dtype: torch.dtype, device: str) -> Tensor:
    """float32 [T, vocabulary], one sequence at a time."""
    model = load_causal_lm(folder, dtype=dtype, device=torch.device(device))
    parts = batch.token_ids.to(device).split(batch.sequence_lengths.tolist())
    with torch.no_grad():
        return torch.cat([model(input_ids=ids.unsqueeze(0)).logits[0].float() for ids in parts])


def logits_of_megatron(folder: Path, batch: Batch, dtype: str, device: str) -> tuple[Tensor, Tensor]:
    """float32 [T, vocabulary], and the same with the rows of a projection in reverse; of one rank, in this process."""
    from megatron.core import parallel_state  # pyright: ignore[reportMissingImports]

    from ostinato_trainer.backends.megatron import core
    from ostinato_trainer.backends.megatron.rank import MegatronRank

    parallel_state.destroy_model_parallel()
    rank = MegatronRank(folder, MegatronOptions(dtype=dtype), device=torch.device(device))
    on_device = batch.to(torch.device(device))

    def logits() -> Tensor:
        states = core.states_of(rank.training.optimizer.model, on_device).squeeze(1)
        return (states @ core.output_weight(rank.training.optimizer.model.module).T).float()

    with torch.no_grad():
        straight = logits()
        weight = rank.training.optimizer.parameters["decoder.layers.0.self_attention.linear_qkv.weight"]
        weight.copy_(weight.flip(0))
        return straight, logits()


def compare_logits(folder: Path, vocab_size: int, device: str, failures: Failures) -> dict[str, Any]:
    """Both types' figures; see the module's docstring."""
    batch = make_batch(vocab_size, (37, 96, 200, 512))
    exact = logits_of_transformers(folder, batch, torch.float32, device)

    def apart(logits: Tensor) -> float:
        return float((logits - exact).square().mean().sqrt() / exact.square().mean().sqrt())

    figures: dict[str, Any] = {}
    straight, turned = logits_of_megatron(folder, batch, "float32", device)
    figures["logits_float32"] = {
        "apart": apart(straight),
        "largest": float((straight - exact).abs().max()),
        "turned": apart(turned),
    }
    check(apart(straight) <= LOGITS_BOUND["float32"], f"float32 logits are {apart(straight):.2g} apart", failures)
    check(apart(turned) > 1e-2, "float32 logits do not tell a turned projection", failures)
    del straight, turned
    half, turned = logits_of_megatron(folder, batch, "bfloat16", device)
    theirs = apart(logits_of_transformers(folder, batch, torch.bfloat16, device))
    figures["logits_bfloat16"] = {"apart": apart(half), "of_transformers": theirs, "turned": apart(turned)}
    bound = LOGITS_BOUND["bfloat16"] * theirs
    check(apart(half) <= bound, f"bfloat16 logits are {apart(half):.2g} apart, beyond {bound:.2g}", failures)
    check(apart(turned) > 2 * bound, "bfloat16 logits do not tell a turned projection", failures)
    return figures


def check(holds: bool, otherwise: str, failures: Failures) -> None:
    """Notes what does not hold."""
    if not holds:
        failures.append(otherwise)


def update(backend: Any, micro_batches: Sequence[Batch], loss: LossFn = LOSS) -> dict[str, float]:
    """One optimizer step and what it says of itself."""
    metrics = backend.forward_backward(micro_batches, loss, temperature=TEMPERATURE, entropy=EntropyMode.GRADIENT)
    return {**metrics, "grad_norm": backend.optimizer_step().grad_norm}


def recorded(backend: Any, batch: Batch) -> list[Batch]:
    """Two micro-batches of a batch, with a backend's log-probabilities as those of the sampler and of the reference."""
    log_probs = backend.log_probs(batch, temperature=TEMPERATURE)
    batch = batch.with_columns(old_log_probs=log_probs, ref_log_probs=log_probs)
    cut = batch.num_sequences // 2
    return [batch.select(range(cut)), batch.select(range(cut, batch.num_sequences))]


def curve(backend: Any, batch: Batch) -> list[dict[str, float]]:
    """What the updates on a batch say of themselves."""
    micro_batches = recorded(backend, batch)
    return [update(backend, micro_batches) for _ in range(NUM_UPDATES)]


def distance(ours: Sequence[dict[str, float]], theirs: Sequence[dict[str, float]]) -> dict[str, float]:
    """The largest difference of two curves, over the largest value, for each of their names."""
    found = {}
    for name in NAMES:
        scale = max(abs(step[name]) for step in theirs)
        apart = max(abs(one[name] - other[name]) for one, other in zip(ours, theirs, strict=True))
        found[name.removeprefix("actor/")] = apart / scale if scale else apart
    return found


def train(
    folder: Path,
    vocab_size: int,
    dtype: str,
    ranks: Ranks,
    *,
    micro_batch: Batch | None,
    rounds: int,
    failures: Failures,
) -> dict[str, Any]:
    """Curve and checkpoint, and with a micro-batch speed; beside one device."""
    batch = make_batch(vocab_size, [64 + 29 * place for place in range(16)])
    options: dict[str, Any] = {"lr": LR, "dtype": dtype}

    def local(**others: Any) -> LocalBackend:
        return LocalBackend.from_pretrained(folder, LocalBackendOptions(device=ranks.device, **{**options, **others}))

    expected = curve(local(), batch)
    noise = distance(curve(local(use_remove_padding=False), batch), expected)
    control = distance(curve(local(lr=1.5 * LR), batch), expected)
    bound = max(CURVE_BOUND[dtype], 3 * max(noise.values()))
    free(ranks.device)  # the ranks need it
    started = time.perf_counter()
    group = ranks.start(folder, MegatronOptions(**options))
    try:
        figures: dict[str, Any] = {"start_s": round(time.perf_counter() - started, 1)}
        ours = curve(group, batch)
        apart = distance(ours, expected)
        figures["curve"] = {"apart": apart, "noise": noise, "control": control, "bound": bound}
        worst, name = max((value, name) for name, value in apart.items())
        check(worst <= bound, f"{dtype} curves of {name} are {worst:.2g} apart, beyond {bound:.2g}", failures)
        check(max(control.values()) > 2 * bound, f"{dtype} curves do not tell another rate", failures)
        figures["checkpoint"] = checkpoint(group, recorded(group, batch), dtype, failures)
        if micro_batch is not None:
            figures["update"] = speed(group, micro_batch, ranks.device, rounds)
    finally:
        group.close()
    if micro_batch is not None:
        free(ranks.device)
        if ranks.device != HOST:
            torch.cuda.reset_peak_memory_stats()
        figures["update_of_local"] = speed(local(max_tokens_per_forward=10**6), micro_batch, ranks.device, rounds)
    return figures


def checkpoint(group: RankGroup, micro_batches: Sequence[Batch], dtype: str, failures: Failures) -> dict[str, Any]:
    """Save, step, load, step again; and the weights by stream and by folder."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        save_s = seconds(lambda: group.save(place / "state"))
        first = update(group, micro_batches)
        load_s = seconds(lambda: group.load(place / "state"))
        again = update(group, micro_batches)
        group.save_hf(place / "model")
        exported: dict[str, Tensor] = {}
        for file in sorted((place / "model").glob("*.safetensors")):
            exported |= load_file(file)
        equal = all(torch.equal(tensor.to(HOST), exported.pop(name)) for name, tensor in group.weights()[1]())
    apart = distance([again], [first])
    apart = max(apart[name] for name in ("pg_loss", "entropy", "grad_norm"))  # of one step divergences are rounding
    check(apart <= CURVE_BOUND[dtype] / 10, f"a step after loading is {apart:.2g} from the one before", failures)
    check(equal and not exported, "streamed and exported weights differ", failures)
    return {"step_apart": apart, "equal": equal and not exported, "save_s": save_s, "load_s": load_s}


def free(device: str) -> None:
    """Gives memory of this process that nobody holds any more back to the device."""
    gc.collect()
    if device != HOST:
        empty_cache(device)


def seconds(action: Callable[[], Any]) -> float:
    """How long it takes."""
    started = time.perf_counter()
    action()
    return round(time.perf_counter() - started, 3)


def speed(backend: Any, micro_batch: Batch, device: str, rounds: int) -> dict[str, Any]:
    """Tokens per second, peak memory, and the seconds in which the weights come to the host."""
    loss, found, peak = Metered(LOSS, device), [], 0.0
    log_probs = backend.log_probs(micro_batch, temperature=TEMPERATURE)
    micro_batch = micro_batch.with_columns(old_log_probs=log_probs, ref_log_probs=log_probs)
    for _ in range(rounds + 2):  # two that warm up
        started = time.perf_counter()
        peak = update(backend, [micro_batch], loss)["peak_gib_max"]  # of the updates before
        if device != HOST:
            synchronize(device)
        found.append(time.perf_counter() - started)
    num_bytes, started = 0, time.perf_counter()
    for _, tensor in backend.weights()[1]():
        num_bytes += tensor.to(HOST).nbytes
    weights_s = time.perf_counter() - started
    return {
        "tokens_per_s": round(micro_batch.num_tokens / statistics.median(found[2:])),
        "tokens": micro_batch.num_tokens,
        "peak_gib": round(peak, 2),
        "weights_s": round(weights_s, 3),
        "weights_gib": round(num_bytes / GIB, 3),
    }


def measure(name: str, arguments: argparse.Namespace, ranks: Ranks, failures: Failures) -> dict[str, Any]:
    """Figures of one shape; a part that fails says why and does not take the others along."""
    figures: dict[str, Any] = {}

    def part(key: str, action: Callable[[], dict[str, Any]]) -> None:
        started = time.perf_counter()
        try:
            figures[key] = action()
        except Exception as error:  # whatever goes wrong is that part's figure
            traceback.print_exc()
            figures[key] = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
            failures.append(f"{name}: {key}: {type(error).__name__}")
        figures[key]["seconds"] = round(time.perf_counter() - started, 1)
        free(ranks.device)
        print(f"  {name} {key}: {json.dumps(figures[key])}", flush=True)

    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.model or Path(temporary) / "model"
        if arguments.model is None:
            make_model(SHAPES[name], folder, ranks.device)
        vocab_size = int(json.loads((folder / "config.json").read_text())["vocab_size"])
        noted: Failures = []
        part("logits", lambda: compare_logits(folder, vocab_size, ranks.device, noted))
        micro_batch = make_batch(vocab_size, [arguments.length] * arguments.sequences)
        for dtype in arguments.dtype:
            with_speed = micro_batch if dtype == "bfloat16" else None
            settings = {"micro_batch": with_speed, "rounds": arguments.rounds, "failures": noted}
            part(dtype, lambda dtype=dtype, settings=settings: train(folder, vocab_size, dtype, ranks, **settings))
        failures += [f"{name}: {what}" for what in noted]
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["135M"])
    parser.add_argument("--model", type=Path, help="a folder in the Hugging Face format, in place of random weights")
    parser.add_argument("--dtype", nargs="+", choices=CURVE_BOUND, default=list(CURVE_BOUND))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--sequences", type=int, default=4, help="of the update that is timed")
    parser.add_argument("--length", type=int, default=4096, help="tokens in each of them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="by the shim of the tests, to see that the program runs")
    arguments = parser.parse_args(argv)
    if arguments.cpu:
        shim = str(Path(__file__).parent.parent / "tests/trainer")
        sys.path.insert(0, shim)
        os.environ["PYTHONPATH"] = os.pathsep.join((shim, os.environ.get("PYTHONPATH", "")))
        import megatron_on_cpu  # pyright: ignore[reportMissingImports]

        megatron_on_cpu.install()
    elif not is_available("cuda"):
        print("this benchmark needs a GPU", file=sys.stderr)
        return 1
    layout = MegatronLayout(
        tensor_model_parallel_size=arguments.tensor, pipeline_model_parallel_size=arguments.pipeline
    )
    ranks = Ranks(arguments.ranks, layout, HOST if arguments.cpu else "cuda")
    dist.init_process_group(
        "gloo" if arguments.cpu else "nccl",
        store=HashStore(),
        rank=0,
        world_size=1,  # of the logits alone
    )
    failures: Failures = []
    try:
        shapes = {name: measure(name, arguments, ranks, failures) for name in arguments.shape}
    finally:
        dist.destroy_process_group()
    versions = {"torch": torch.__version__, "layout": msgspec.to_builtins(layout), "ranks": arguments.ranks}
    print(json.dumps({"ok": not failures, "failures": failures, "shapes": shapes, **versions}))
    return 1 if failures else 0


if __name__ == "__main__":
    from benchmarks import megatron  # by this name the ranks find the loss

    sys.exit(megatron.main())
