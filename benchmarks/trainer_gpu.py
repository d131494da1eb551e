"""Speed of our backend on one GPU: `PYTHONPATH=.:packages/trainer/src:... python -m benchmarks.trainer_gpu [--shape NAME ...]`.

Qwen3 shapes with random weights, bfloat16 on float32 weights, rows packed of sequences of 4,096 tokens; the packages need no installation,
only torch, transformers, msgspec and what those bring. A step is what a training step does with a micro-batch that fills it: forward and
backward with the clipped policy loss, clipping of the gradient, AdamW. A log-prob pass is the same forward without gradients.

FLOPs a token: `6 N + 6 x layers x width x length` for the update, with N all parameters, the output layer among them and a tied one counted
once, and causal attention; a third of it for the log-prob pass. Nothing that is computed twice counts twice. `mfu` is FLOPs per second
over `--peak` (989 TFLOP/s, the dense bfloat16 peak of an H100 or H200).

- `mfu_update`, `mfu_logprob`, `peak_gib`: those of the largest shape;
- `shapes`: the same and tokens per second for every shape.
"""

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.shapes import QWEN3_0_6B, QWEN3_1_7B, SMOLLM2_135M
from ostinato_trainer.algorithms.aggregation import with_loss_weights
from ostinato_trainer.algorithms.policy_losses import PolicyLossOptions, policy_loss_fn
from ostinato_trainer.backends import fused_attention, packed_attention
from ostinato_trainer.backends.local import LocalBackend, LocalBackendOptions
from ostinato_trainer.batch import Batch
from ostinato_trainer.segments import Segment

SHAPES = {"135M": SMOLLM2_135M, "0.6B": QWEN3_0_6B, "1.7B": QWEN3_1_7B}
LENGTH = 4096
SEQUENCES = {"135M": 16, "0.6B": 8, "1.7B": 4}
"""Sequences of one micro-batch."""


def make_batch(vocab_size: int, num_sequences: int) -> Batch:
    """Sequences of which all but the first token is trained on."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (num_sequences, LENGTH), generator=generator).tolist()
    segments = [
        Segment(row[:1], row[1:], [1] * (LENGTH - 1), None, "g", f"t{place}", float(place % 2))
        for place, row in enumerate(ids)
    ]
    batch = Batch.from_segments(segments)
    signs = 1.0 - 2.0 * (batch.token_sequence % 2).double()
    return with_loss_weights(batch.with_columns(advantages=signs * batch.loss_mask), "token-mean")


def flops_per_token(model: Any) -> float:
    """Of forward and backward; see the module's docstring."""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    config = model.config
    return 6.0 * num_parameters + 6.0 * config.num_hidden_layers * config.hidden_size * LENGTH


def attention() -> str:
    """What packed rows are attended with."""
    if fused_attention._kernels() is not None:
        return "flash-attn-4"
    return "sequence" if packed_attention._VARLEN is None else "torch"


def seconds_of(call: Any, rounds: int) -> float:
    """The median of `rounds` calls, after three that warm the device and the compiler."""
    for _ in range(3):
        call()
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def measure(name: str, *, compiled: bool, num_sequences: int, rounds: int, peak: float) -> dict[str, Any]:
    """Figures of one shape."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPES[name], tie_word_embeddings=True, max_position_embeddings=LENGTH))
    options = LocalBackendOptions(
        device="cuda",
        dtype="bfloat16",
        lr=1e-6,
        use_torch_compile=compiled,
        max_tokens_per_forward=num_sequences * LENGTH,
    )
    backend = LocalBackend(model, options)
    batch = make_batch(SHAPES[name]["vocab_size"], num_sequences)
    loss_fn = policy_loss_fn(PolicyLossOptions(), "vanilla")

    def update() -> None:
        backend.forward_backward([batch], loss_fn)
        backend.optimizer_step()

    torch.cuda.reset_peak_memory_stats()
    update_s = seconds_of(update, rounds)
    peak_gib = torch.cuda.max_memory_allocated() / 2**30
    logprob_s = seconds_of(lambda: backend.log_probs(batch, temperature=1.0), rounds)
    flops, num_tokens = flops_per_token(model), batch.num_tokens
    return {
        "layout": "padded" if backend.pads_sequences else "packed",
        "compiled": compiled,
        "attention": attention(),
        "tokens": num_tokens,
        "update_tokens_per_s": round(num_tokens / update_s),
        "logprob_tokens_per_s": round(num_tokens / logprob_s),
        "mfu_update": round(flops * num_tokens / update_s / peak, 4),
        "mfu_logprob": round(flops / 3 * num_tokens / logprob_s / peak, 4),
        "peak_gib": round(peak_gib, 1),
    }


def measure_all(
    names: tuple[str, ...] = tuple(SHAPES),
    *,
    compiled: bool = True,
    num_sequences: int | None = None,
    rounds: int = 5,
    peak: float = 989e12,
) -> dict[str, Any]:
    """Figures of all shapes; a shape that fails says why and does not take the others along."""
    shapes: dict[str, Any] = {}
    for name in names:
        try:
            shapes[name] = measure(
                name, compiled=compiled, num_sequences=num_sequences or SEQUENCES[name], rounds=rounds, peak=peak
            )
        except Exception as error:  # whatever goes wrong at one shape is that shape's figure
            shapes[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(f"  {name}: {json.dumps(shapes[name])}", flush=True)
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    largest = shapes[names[-1]]
    return {
        **{key: largest.get(key) for key in ("mfu_update", "mfu_logprob", "peak_gib")},
        "shapes": shapes,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
    }


def main() -> int:
    """Prints one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--sequences", type=int, help="of 4,096 tokens in a micro-batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", type=float, default=989e12, help="FLOP/s")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument(
        "--attention",
        choices=("best", "torch", "sequence"),
        default="best",
        help="what is there, torch's kernel for all sequences, or a call each",
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a GPU", file=sys.stderr)
        return 1
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if arguments.attention != "best":
        fused_attention._kernels = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    if arguments.attention == "sequence":
        packed_attention._VARLEN = None
    figures = measure_all(
        tuple(arguments.shape),
        compiled=not arguments.eager,
        num_sequences=arguments.sequences,
        rounds=arguments.rounds,
        peak=arguments.peak,
    )
    print(json.dumps(figures))
    return 0 if figures["mfu_update"] is not None else 1


if __name__ == "__main__":
    sys.exit(main())
