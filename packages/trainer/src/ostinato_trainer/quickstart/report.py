"""What the quickstart shows at its end: a line per step, the curve, the checkpoint, and what to do next.

What draws the curve comes with the extra quickstart; it is imported where it is used, and asked for before a run begins.
"""

import json
import os
import shlex
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ostinato_trainer.checkpoints.manager import CheckpointManager
from ostinato_trainer.errors import MissingExtraError

COLUMNS = {
    "reward": ("critic/score/mean", "{:.3f}"),
    "tool calls": ("tool_call_counts/mean", "{:.2f}"),
    "response tokens": ("response_length/mean", "{:.1f}"),
    "turns": ("num_turns/mean", "{:.2f}"),
    "grad norm": ("actor/grad_norm", "{:.2f}"),
    "seconds": ("timing_s/step", "{:.2f}"),
}
ACCURACY = "val-core/ostinato/quickstart/acc/mean@1"


def require_drawing() -> None:
    """Make sure that the curve can be drawn.

    Raises:
        MissingExtraError: The extra quickstart is not installed.
    """
    missing = [name for name in ("matplotlib", "plotille") if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"{' and '.join(missing)} must be installed to draw the curve; run: pip install 'ostinato-trainer[quickstart]'"
        )


def read_metrics(output: Path) -> list[dict]:
    """The records of `output/metrics.jsonl`, in order of steps."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def print_report(output: Path, console: Console) -> None:
    """Print the run's report and write `output/reward.png`."""
    records = read_metrics(output)
    steps = [record for record in records if "critic/score/mean" in record]
    if not steps:
        console.print("no training step was made; nothing to report")
        return
    console.print(step_table(steps))
    rewards = [record["critic/score/mean"] for record in steps]
    console.print(terminal_curve(rewards), highlight=False, markup=False)
    save_curve(rewards, output / "reward.png")
    first, last = fmean(rewards[:5]), fmean(rewards[-5:])
    console.print(
        f"\nMean reward of the first five steps [bold]{first:.2f}[/bold], of the last five [bold]{last:.2f}[/bold]."
    )
    console.print(
        "The model could nearly do the task after the warm start: what the curve shows is GRPO removing the faults that it was shown."
    )
    accuracies = [record[ACCURACY] for record in records if ACCURACY in record]
    if len(accuracies) > 1:
        console.print(
            f"On held-out problems, never trained on: {accuracies[0]:.0%} right before, [bold]{accuracies[-1]:.0%}[/bold] after."
        )
    with CheckpointManager(output) as checkpoints:
        checkpoint = checkpoints.latest()
    if checkpoint is not None:
        print_next_steps(output, checkpoint, console)


def print_next_steps(output: Path, checkpoint: Path, console: Console) -> None:
    """Where things are and what to try; every command runs as it is printed."""
    ostinato, folder = _command(), _shown(output)
    retrain = f"{ostinato} train {folder}/config.yaml trainer.default_local_dir={folder}"
    lines = (
        "",
        f"curve       {folder}/reward.png",
        f"metrics     {folder}/metrics.jsonl",
        f"checkpoint  {_shown(checkpoint)}",
        "",
        "Talk to it, for example: What is 3 plus 4? Then multiply by 2.",
        f"  {ostinato} chat {_shown(checkpoint)}",
        "Train once more from the warm start, with another learning rate:",
        f"  {retrain}-lr actor_rollout_ref.actor.optim.lr=1e-3",
        f"Or edit the reward, {folder}/reward.py, and see what is learned then:",
        f"  {retrain}-reward",
        "All keys with type, default and meaning:",
        f"  {ostinato} config",
        "Real questions instead of made ones: see `Your own run` in the README.",
    )
    for line in lines:
        console.print(escape(line), highlight=False, soft_wrap=True)


def _command() -> str:
    """How this program is called: by its name, or through uv, which tells the programs that it runs where it is."""
    return "uv run ostinato" if "UV" in os.environ else "ostinato"


def _shown(path: Path) -> str:
    """`path` from the working directory if it is below, quoted for a shell."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def step_table(steps: list[dict]) -> Table:
    """One line per training step."""
    table = Table(box=None, header_style="bold")
    table.add_column("step", justify="right")
    for title in COLUMNS:
        table.add_column(title, justify="right")
    for record in steps:
        cells = (pattern.format(record[key]) if key in record else "" for key, pattern in COLUMNS.values())
        table.add_row(str(record["step"]), *cells)
    return table


def terminal_curve(rewards: list[float]) -> str:
    """The reward over steps, drawn with characters."""
    import plotille

    figure = plotille.Figure()
    figure.width, figure.height, figure.with_colors = 56, 14, False
    figure.x_label, figure.y_label = "step", "reward"
    figure.set_x_limits(min_=1, max_=max(2, len(rewards)))
    figure.set_y_limits(min_=0, max_=1)
    figure.register_label_formatter(float, lambda val, chars, delta, left=False: f"{val:.2f}")
    figure.plot(list(range(1, len(rewards) + 1)), rewards)
    return figure.show()


def save_curve(rewards: list[float], path: Path) -> None:
    """The same curve as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(rewards) + 1), rewards, color="tab:blue")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.02), title="quickstart: GRPO with a calculator")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
