"""Whether the recipes learn, and whether what must not learn does not: `just learn`.

    python -m benchmarks.learning [--seeds N] [--jobs N] [--only NAME ...] [--write FILE]

Every seed has a home of its own: the quickstart's files and its warm start, made once. From there each recipe of `recipes/quickstart` is
trained as `ostinato train HOME/config.yaml recipes/quickstart/NAME.yaml` does it; `sft_grpo` begins without the warm start, with
`ostinato sft recipes/sft/quickstart.yaml`. The gain is the mean reward of the last five steps less
that of the first five. The controls train as GRPO does, but for one thing that takes the meaning out of it:

- `learning_rate_0`: the optimizer steps with a rate of 0.
- `shuffled_rewards`: the rewards of a step are dealt out to its trajectories at random.
- `inverted_masks`: what tools said is trained on, and what the policy sampled is not.

A recipe has learned if its gain is at least 0.1 with every seed; a control has if the mean of its gains is. The status says
whether all is as it should be; `--write` writes the table as Markdown.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean

REPO = Path(__file__).resolve().parent.parent
SFT_GRPO = "sft_grpo"
RECIPES = (*sorted(path.stem for path in (REPO / "recipes/quickstart").glob("*.yaml")), SFT_GRPO)
CONTROLS = ("learning_rate_0", "shuffled_rewards", "inverted_masks")
LEARNED = 0.1
NUM_ENDS = 5
HEADING = """# What learns, and what does not

The recipes of `recipes/quickstart` on the quickstart's task, each from the warm start of three seeds, and controls that must not learn; on the CPU.
`just learn` writes this page anew; `benchmarks/learning.py` says what the runs are. Rewards of the recipe `dapo` include its overlong shaping.
"""


def make_home(folder: str, seed: int) -> str:
    """The quickstart's files and warm start; returns the folder."""
    from rich.console import Console

    from ostinato_engines.device import host_threads
    from ostinato_trainer.quickstart.run import WARM_START, make_files, make_warm_start

    home = Path(folder)
    home.mkdir(parents=True)
    with host_threads(1):
        make_files(home, seed=seed)
        make_warm_start(home, seed=seed, settings=WARM_START, console=Console(quiet=True))
    return folder


def train(home: str, name: str, output: str) -> list[float]:
    """Train a recipe or a control; returns the mean reward of each step."""
    from ostinato_engines.device import host_threads
    from ostinato_trainer.assembly import run_training
    from ostinato_trainer.config.loading import load_config

    overrides = [f"trainer.default_local_dir={output}", "trainer.logger=[jsonl]", "trainer.save_freq=0"]
    files = [Path(home) / "config.yaml"]
    if name in CONTROLS:
        SPOIL[name](overrides)
    elif name == SFT_GRPO:
        files.append(REPO / "recipes/quickstart/grpo.yaml")
        overrides.append(f"actor_rollout_ref.model.path={fine_tuned(home, f'{output}-sft')}")
    else:
        files.append(REPO / "recipes/quickstart" / f"{name}.yaml")
    with host_threads(1):
        run_training(load_config(files, overrides))
    lines = map(json.loads, (Path(output) / "metrics.jsonl").read_text().splitlines())
    return [line["critic/score/mean"] for line in lines if "critic/score/mean" in line]


def fine_tuned(home: str, output: str) -> str:
    """The model of a home, without its warm start, after `ostinato sft` by the recipe; returns the model's folder."""
    from rich.console import Console

    from ostinato_engines.device import host_threads
    from ostinato_trainer.config.loading import load_tree
    from ostinato_trainer.config.sft import SftConfig
    from ostinato_trainer.sft.run import run_sft

    overrides = [
        f"model.path={home}/model",
        f"data.train_files={home}/dialogues.jsonl",
        f"trainer.default_local_dir={output}",
    ]
    config, _ = load_tree(SftConfig, [REPO / "recipes/sft/quickstart.yaml"], overrides)
    with host_threads(1):
        run_sft(config, console=Console(quiet=True))
    return output


def no_learning_rate(overrides: list[str]) -> None:
    """The optimizer changes nothing."""
    overrides.append("actor_rollout_ref.actor.optim.lr=0")


def shuffle_rewards(_: list[str]) -> None:
    """In this process, the rewards of a batch are dealt out at random before advantages are made of them."""
    import dataclasses

    import torch

    from ostinato_trainer.loop import ppo_trainer

    generator = torch.Generator().manual_seed(0)
    prepare = ppo_trainer.prepare_batch

    def prepare_shuffled(batch, *rest):
        order = torch.randperm(batch.num_trajectories, generator=generator)
        prepared, metrics = prepare(dataclasses.replace(batch, rewards=batch.rewards[order]), *rest)
        return dataclasses.replace(prepared, rewards=batch.rewards), metrics

    ppo_trainer.prepare_batch = prepare_shuffled


def invert_masks(_: list[str]) -> None:
    """In this process, batches train on what was not sampled of a response."""
    import dataclasses

    from ostinato_trainer.loop import experience

    segments_of = experience.segments_of

    def inverted(trajectories):
        return [
            dataclasses.replace(
                segment, response_mask=[1 - bit for bit in segment.response_mask], response_logprobs=None
            )
            for segment in segments_of(trajectories)
        ]

    experience.segments_of = inverted


SPOIL: dict[str, Callable[[list[str]], None]] = {
    "learning_rate_0": no_learning_rate,
    "shuffled_rewards": shuffle_rewards,
    "inverted_masks": invert_masks,
}


def gain(rewards: Sequence[float]) -> float:
    """The mean of the last five less that of the first five."""
    return fmean(rewards[-NUM_ENDS:]) - fmean(rewards[:NUM_ENDS])


def table(curves: dict[str, list[list[float]]]) -> str:
    """Markdown: a line for each run's name, a column for each seed."""
    seeds = range(max(len(of_name) for of_name in curves.values()))
    lines = [
        f"| run | first {NUM_ENDS} steps | last {NUM_ENDS} steps | {' | '.join(f'gain, seed {seed}' for seed in seeds)} | mean gain |",
        "| --- | --- | --- | " + "--- | " * len(seeds) + "--- |",
    ]
    for name, of_name in curves.items():
        first, last = (fmean(fmean(part) for part in parts) for parts in _ends(of_name))
        gains = [gain(rewards) for rewards in of_name]
        label = f"control: {name.replace('_', ' ')}" if name in CONTROLS else f"`{name}`"
        cells = " | ".join(f"{value:+.3f}" for value in gains)
        lines.append(f"| {label} | {first:.3f} | {last:.3f} | {cells} | {fmean(gains):+.3f} |")
    return "\n".join(lines) + "\n"


def _ends(curves: Sequence[Sequence[float]]) -> tuple[list[Sequence[float]], list[Sequence[float]]]:
    return [rewards[:NUM_ENDS] for rewards in curves], [rewards[-NUM_ENDS:] for rewards in curves]


def main() -> int:
    """Make the homes, train everything, say what learned."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, each in one thread")
    parser.add_argument("--only", nargs="+", choices=[*RECIPES, *CONTROLS], default=[*RECIPES, *CONTROLS])
    parser.add_argument("--write", type=Path, help="a Markdown file for the table")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    # One process for each run: controls change what they train with.
    with (
        tempfile.TemporaryDirectory(prefix="ostinato-learning-") as scratch,
        ProcessPoolExecutor(arguments.jobs, mp_context=context, max_tasks_per_child=1) as pool,
    ):
        seeds = range(arguments.seeds)
        homes = [pool.submit(make_home, f"{scratch}/home-{seed}", seed) for seed in seeds]
        folders = [home.result() for home in homes]
        runs = {
            name: [pool.submit(train, folders[seed], name, f"{scratch}/{name}-{seed}") for seed in seeds]
            for name in arguments.only
        }
        curves: dict[str, list[list[float]]] = {}
        for name, of_name in runs.items():
            curves[name] = [run.result() for run in of_name]
            print(f"{name}: {', '.join(f'{gain(rewards):+.3f}' for rewards in curves[name])}", flush=True)
    text = table(curves)
    print(f"\n{text}")
    if arguments.write is not None:
        arguments.write.write_text(f"{HEADING}\n{text}")
    gains = {name: [round(gain(rewards), 4) for rewards in of_name] for name, of_name in curves.items()}
    failed = [name for name in gains if name not in CONTROLS and min(gains[name]) < LEARNED]
    learned = [name for name in gains if name in CONTROLS and fmean(gains[name]) >= LEARNED]
    print(json.dumps({"gains": gains, "recipes_that_failed": failed, "controls_that_learned": learned}))
    return 1 if failed or learned else 0


if __name__ == "__main__":
    sys.exit(main())
