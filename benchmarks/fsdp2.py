"""Sharded training on several GPUs, beside one device: `PYTHONPATH=.:packages/trainer/src:... python -m benchmarks.fsdp2 [--ranks N]`.

The packages need no installation, only what the trainer brings. Models have random weights at real shapes. For each shape:

- `float32`, `bfloat16`: five GRPO updates on a recorded batch in `--ranks` ranks with uneven shares, as a run has them, beside `strategy=local`:
  the largest difference of losses, entropies, divergences and gradient norms, over the largest value of each (`apart`): at most 1e-3 and 0.05, or
  three times what padding instead of packing makes of it on one device (`noise`). `control` is what a learning rate of half as much again makes
  of it, which must be beyond that twice. `checkpoint`: a step after saving equals the step after loading; whether streamed and exported weights
  are equal bit for bit; seconds. `update`, with bfloat16: tokens per second of all ranks and peak memory of one, beside `strategy=local`, which
  has one device and as many tokens (`update_of_local`); `speedup` is the ratio.

The last line is JSON; the status is 1 where a bound does not hold, and `failures` says which.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.updates import CURVE_BOUND, SHAPES, Failures, Parts, make_batch, make_model, train
from ostinato_engines.device import CUDA, HOST, device_count
from ostinato_trainer.backends.fsdp2 import Fsdp2Factory, Fsdp2Options
from ostinato_trainer.backends.ranks.group import RankGroup
from ostinato_trainer.backends.ranks.processes import RankProcesses, RankProcessOptions


def measure(name: str, arguments: argparse.Namespace, failures: Failures) -> dict[str, Any]:
    """Figures of one shape."""
    noted: Failures = []
    device = HOST if arguments.cpu else CUDA
    parts = Parts(name, device, noted)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        make_model(SHAPES[name], folder, device)
        vocab_size = SHAPES[name]["vocab_size"]
        micro_batch = make_batch(vocab_size, [arguments.length] * arguments.sequences)

        def start(options: dict[str, Any]) -> RankGroup:
            processes = RankProcessOptions(
                num_ranks=arguments.ranks, device=device, collective_timeout_s=120.0, call_timeout_s=180.0
            )
            sharded = Fsdp2Options(
                **options,
                max_tokens_per_forward=10**6,
                use_torch_compile=arguments.compile,
                gradient_checkpointing=arguments.gradient_checkpointing,
                reshard_after_forward=not arguments.no_reshard,
                ulysses_sequence_parallel_size=arguments.ulysses,
                param_offload=arguments.offload,
                optimizer_offload=arguments.offload,
            )
            return RankGroup(RankProcesses(processes), Fsdp2Factory(str(folder), sharded))

        for dtype in arguments.dtype:
            with_speed = micro_batch if dtype == "bfloat16" else None
            given = folder, vocab_size, dtype, device, start
            settings: dict[str, Any] = {"micro_batch": with_speed, "rounds": arguments.rounds, "failures": noted}
            parts.add(dtype, lambda given=given, settings=settings: train(*given, **settings))
            if "update_of_local" in (found := parts.figures[dtype]):
                ranks, one = found["update"]["tokens_per_s"], found["update_of_local"]["tokens_per_s"]
                found["speedup"] = round(ranks / one, 3)
    failures += [f"{name}: {what}" for what in noted]
    return parts.figures


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["0.6B"])
    parser.add_argument("--dtype", nargs="+", choices=CURVE_BOUND, default=list(CURVE_BOUND))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ulysses", type=int, default=1, help="ranks that share the tokens of a sequence")
    parser.add_argument("--compile", action="store_true", help="let torch.compile fuse the layers of the ranks")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="of the ranks")
    parser.add_argument(
        "--offload", action="store_true", help="keep the ranks' parameters and moments in the host's memory"
    )
    parser.add_argument("--no-reshard", action="store_true", help="keep gathered layers between forward and backward")
    parser.add_argument("--sequences", type=int, default=8, help="of the update that is timed")
    parser.add_argument("--length", type=int, default=4096, help="tokens in each of them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="with gloo, to see that the program runs")
    arguments = parser.parse_args(argv)
    if not arguments.cpu and (found := device_count(CUDA)) < arguments.ranks:
        print(f"this benchmark needs {arguments.ranks} GPUs, and there are {found}", file=sys.stderr)
        return 1
    failures: Failures = []
    shapes = {name: measure(name, arguments, failures) for name in arguments.shape}
    settings = {
        "ranks": arguments.ranks,
        "compiled": arguments.compile,
        "ulysses": arguments.ulysses,
        "offload": arguments.offload,
    }
    print(
        json.dumps({"ok": not failures, "failures": failures, "shapes": shapes, "torch": torch.__version__, **settings})
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
