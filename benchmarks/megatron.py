"""Training with Megatron-core on GPUs, beside one device: `PYTHONPATH=.:packages/trainer/src:... python -m benchmarks.megatron`.

Needs megatron-core (extra `megatron`) and what the trainer brings; the packages need no installation. Models have random weights at real shapes,
or are those of `--model FOLDER`. For each of the `shapes`, and within it for each dtype:

- `logits`: of one rank and packed sequences, beside `transformers` and one sequence at a time: root mean square of the
  difference over that of the logits. In float32 at most 1e-5. In 16 bits what counts is the distance to the float32 logits: at most 1.25
  times that of `transformers` in 16 bits. `turned` is the same with one projection's rows in reverse, which must be far off.
- `curve`: five GRPO updates on a recorded batch in ranks of their own, as a run has them, beside `strategy=local`: the
  largest difference of losses, entropies, divergences and gradient norms, over the largest value of each: at most 1e-3 and 0.05, or three times
  what padding instead of packing makes of it on one device (`noise`). `control` is what a learning rate of half as much again makes of it, which
  must be beyond that twice.
- `checkpoint`: a step after saving equals the step after loading; whether streamed and exported weights are equal bit for bit; seconds.
- `update`, with bfloat16: tokens per second of an update, peak memory, seconds in which the weights come to the host; beside `strategy=local`.

`--ranks N --tensor T --pipeline P` spreads curves, checkpoint and update over N devices. The last line is JSON; the status is 1 where a bound does
not hold, and `failures` says which.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]  documented as public

from benchmarks.updates import CURVE_BOUND, SHAPES, Failures, Parts, check, make_batch, make_model, train
from ostinato_engines.device import HOST, is_available
from ostinato_trainer.backends.causal_lm import load_causal_lm
from ostinato_trainer.backends.megatron.options import MegatronOptions, MegatronRankFactory
from ostinato_trainer.backends.megatron.shape import MegatronLayout
from ostinato_trainer.backends.ranks.group import RankGroup
from ostinato_trainer.backends.ranks.processes import RankProcesses, RankProcessOptions
from ostinato_trainer.batch import Batch

LOGITS_BOUND = {"float32": 1e-5, "bfloat16": 1.25}


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

    def start(self, folder: Path, options: dict[str, Any]) -> RankGroup:
        """Ranks in processes of their own."""
        processes = RankProcessOptions(
            num_ranks=self.num_ranks, device=self.device, collective_timeout_s=120.0, call_timeout_s=180.0
        )
        return RankGroup(RankProcesses(processes), self.factory(folder, MegatronOptions(**options, layout=self.layout)))


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


def measure(name: str, arguments: argparse.Namespace, ranks: Ranks, failures: Failures) -> dict[str, Any]:
    """Figures of one shape."""
    noted: Failures = []
    parts = Parts(name, ranks.device, noted)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.model or Path(temporary) / "model"
        if arguments.model is None:
            make_model(SHAPES[name], folder, ranks.device)
        vocab_size = int(json.loads((folder / "config.json").read_text())["vocab_size"])
        parts.add("logits", lambda: compare_logits(folder, vocab_size, ranks.device, noted))
        micro_batch = make_batch(vocab_size, [arguments.length] * arguments.sequences)
        for dtype in arguments.dtype:
            settings: dict[str, Any] = {
                "micro_batch": micro_batch if dtype == "bfloat16" else None,
                "rounds": arguments.rounds,
                "failures": noted,
            }
            given = folder, vocab_size, dtype, ranks.device, partial(ranks.start, folder)
            parts.add(dtype, partial(train, *given, **settings))
    failures += [f"{name}: {what}" for what in noted]
    return parts.figures


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
    sys.exit(main())
