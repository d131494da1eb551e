"""Does reinforcement learning help on GSM8K: a warm start and what GRPO makes of it, on the same test questions.

    python -m benchmarks.gsm8k --model FOLDER --gsm8k FOLDER --output FOLDER [--sft KEY=VALUE ...] [--grpo KEY=VALUE ...] [--both KEY=VALUE ...]

Runs the commands of `recipes/gsm8k_calculator.yaml`, each in a process of its own: rows without a tool that knows the answer, `ostinato sft`,
`ostinato train`, and a validation of both models, greedy, on every test question. `--both` holds for training and validation. What is finished
already in the output folder is not done again, and what was stopped goes on.

Accuracies are shares of right answers. The interval is that of the mean difference between two answers to one question, 95 %, by the normal
approximation: mean +- 1.96 s / sqrt(n). A question that either model could not answer for a fault of the system, not its own, is left out of both
and counted in `left_out`.

- `sft_accuracy`, `grpo_accuracy`, `difference`, `interval`: the comparison;
- `num_questions`, `left_out`; `better` and `worse`: questions right after GRPO only, and before it only;
- `sha256`: of the weights that were compared.
"""

import argparse
import hashlib
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

REPO = Path(__file__).resolve().parent.parent
RECIPE = REPO / "recipes/gsm8k_calculator.yaml"
SFT_RECIPE = REPO / "recipes/sft/gsm8k_calculator.yaml"
COMMAND = (sys.executable, "-c", "from ostinato_trainer.cli import main; main()")
LATEST = "latest_checkpointed_iteration.txt"


def main() -> None:
    """Train, validate, compare, and print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name in ("model", "gsm8k", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("sft", "grpo", "both"):
        parser.add_argument(f"--{name}", nargs="*", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    output: Path = options.output.resolve()
    data, warm, run = output / "data", output / "warm", output / "grpo"

    if not (data / "sft.jsonl").exists():
        ostinato("prepare", "gsm8k", "--input", options.gsm8k.resolve(), "--output", data, "--no-check")
    if not (warm / "config.json").exists():
        source = [f"model.path={options.model.resolve()}", f"data.train_files={data / 'sft.jsonl'}"]
        ostinato("sft", SFT_RECIPE, *source, f"trainer.default_local_dir={warm}", *options.sft)
    rows = [f"data.train_files={data / 'train.parquet'}", f"data.val_files={data / 'test.parquet'}"]
    where = [f"actor_rollout_ref.model.path={warm}", f"trainer.default_local_dir={run}"]
    ostinato("train", RECIPE, *rows, *options.both, *where, *options.grpo)

    last = run / (run / LATEST).read_text().strip()
    trained = (last if last.is_dir() else run / f"global_step_{last.name}") / "huggingface"
    before, after = (
        validated(model, output / name, rows, options.both)
        for name, model in (("val_sft", warm), ("val_grpo", trained))
    )
    hashes = {name: weights_hash(model) for name, model in (("sft", warm), ("grpo", trained))}
    print(json.dumps({**compared(before, after), "sha256": hashes}))


def ostinato(*arguments: object) -> None:
    """Run a command of ours; its failure ends this program."""
    words = [str(argument) for argument in arguments]
    print("$ ostinato", *words, flush=True)
    subprocess.run([*COMMAND, *words], check=True)


def validated(model: Path, folder: Path, rows: Sequence[str], overrides: Sequence[str]) -> dict[str, float | None]:
    """Question -> 1.0 for a right answer, 0.0 for a wrong one, None where there is none; greedy."""
    if not (folder / "answers").is_dir():
        keys = [f"actor_rollout_ref.model.path={model}", f"trainer.default_local_dir={folder}", "trainer.val_only=true"]
        files = [f"trainer.validation_data_dir={folder / 'answers'}", "trainer.resume_mode=disable"]
        ostinato("train", RECIPE, *rows, *overrides, *keys, *files)
    [answers] = (folder / "answers").glob("*.jsonl")
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    return {answer["group_id"]: answer.get("acc") for answer in found}


def compared(before: Mapping[str, float | None], after: Mapping[str, float | None]) -> dict[str, object]:
    """Accuracies over the questions that both answered, and their paired difference with its interval."""
    if before.keys() != after.keys():
        raise SystemExit(
            f"both must be asked the same questions, got {len(before)} and {len(after)}; empty the output folder"
        )
    pairs = [
        (first, second)
        for name in before
        if (first := before[name]) is not None and (second := after[name]) is not None
    ]
    if len(pairs) < 2:
        raise SystemExit(
            f"at least two questions must be answered by both, got {len(pairs)}; see the failures in the answers"
        )
    differences = [second - first for first, second in pairs]
    mean, margin = fmean(differences), 1.96 * stdev(differences) / math.sqrt(len(pairs))
    return {
        "sft_accuracy": fmean(first for first, _ in pairs),
        "grpo_accuracy": fmean(second for _, second in pairs),
        "difference": mean,
        "interval": [mean - margin, mean + margin],
        "num_questions": len(pairs),
        "left_out": len(before) - len(pairs),
        "better": sum(difference > 0 for difference in differences),
        "worse": sum(difference < 0 for difference in differences),
    }


def weights_hash(model: Path) -> str:
    """SHA-256 over the model's safetensors files in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(model.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
