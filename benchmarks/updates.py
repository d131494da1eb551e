"""Updates of one backend beside those of another, for the benchmarks of ranks: a model, a recorded batch, curves, a checkpoint, speed.

Not a benchmark: `benchmarks.megatron` and `benchmarks.fsdp2` are made of it.
"""

import gc
import json
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.shapes import QWEN3_0_6B, QWEN3_1_7B, SMOLLM2_135M
from ostinato_engines.device import HOST, empty_cache, max_memory_allocated, synchronize
from ostinato_trainer.algorithms.advantages import with_advantages
from ostinato_trainer.algorithms.aggregation import with_loss_weights
from ostinato_trainer.algorithms.policy_losses import PolicyLossOptions, policy_loss_fn
from ostinato_trainer.backends.base import EntropyMode, LossFn, LossOutput, MicroBatch, MicroBatchOutput
from ostinato_trainer.backends.local import LocalBackend, LocalBackendOptions
from ostinato_trainer.backends.ranks.group import RankGroup
from ostinato_trainer.batch import Batch
from ostinato_trainer.segments import Segment

SHAPES: dict[str, dict[str, Any]] = {
    "135M": {"model_type": "llama", **SMOLLM2_135M},
    "0.6B": {"model_type": "qwen3", **QWEN3_0_6B},
    "1.7B": {"model_type": "qwen3", **QWEN3_1_7B},
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
CURVE_BOUND = {"float32": 1e-3, "bfloat16": 0.05}
LOSS = policy_loss_fn(PolicyLossOptions(kl_loss_coef=0.01, entropy_coeff=0.001))
NAMES = ("actor/pg_loss", "actor/ppo_kl", "actor/kl_loss", "actor/entropy", "grad_norm")
"""What is compared of a step; clipped tokens are counted one by one and jump."""
GIB = 2**30

Failures = list[str]


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
    device: str,
    start: Callable[[dict[str, Any]], RankGroup],
    *,
    micro_batch: Batch | None,
    rounds: int,
    failures: Failures,
) -> dict[str, Any]:
    """Curve and checkpoint, and with a micro-batch speed; beside one device.

    Args:
        folder: Of the model.
        vocab_size: Its.
        dtype: In which matrices are multiplied.
        device: Its kind.
        start: Starts ranks with these options, whichever backend's.
        micro_batch: Of the update that is timed.
        rounds: So many of these.
        failures: What does not hold is noted there.
    """
    batch = make_batch(vocab_size, [64 + 29 * place for place in range(16)])
    options: dict[str, Any] = {"lr": LR, "dtype": dtype}

    def local(**others: Any) -> LocalBackend:
        return LocalBackend.from_pretrained(folder, LocalBackendOptions(device=device, **{**options, **others}))

    expected = curve(local(), batch)
    noise = distance(curve(local(use_remove_padding=False), batch), expected)
    control = distance(curve(local(lr=1.5 * LR), batch), expected)
    bound = max(CURVE_BOUND[dtype], 3 * max(noise.values()))
    free(device)  # the ranks need it
    started = time.perf_counter()
    group = start(options)
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
            figures["update"] = speed(group, micro_batch, device, rounds)
    finally:
        group.close()
    if micro_batch is not None:
        free(device)
        if device != HOST:
            torch.cuda.reset_peak_memory_stats()
        figures["update_of_local"] = speed(local(max_tokens_per_forward=10**6), micro_batch, device, rounds)
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
        equal = all(
            torch.equal(tensor.to(HOST), exported.pop(name).to(tensor.dtype)) for name, tensor in group.weights()[1]()
        )
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


class Parts:
    """Figures of one shape, part by part: one that fails says why in its place and does not take the others along."""

    def __init__(self, name: str, device: str, failures: Failures) -> None:
        self.figures: dict[str, Any] = {}
        self._name, self._device, self._failures = name, device, failures

    def add(self, key: str, action: Callable[[], dict[str, Any]]) -> None:
        """Prints it at once, so that it is not lost with what comes after."""
        started = time.perf_counter()
        try:
            found = action()
        except Exception as error:  # whatever goes wrong is that part's figure
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
            self._failures.append(f"{key}: {type(error).__name__}")
        self.figures[key] = {**found, "seconds": round(time.perf_counter() - started, 1)}
        free(self._device)
        print(f"  {self._name} {key}: {json.dumps(self.figures[key])}", flush=True)
