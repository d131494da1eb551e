"""What the steps of a fine-tuning are called and where they are shown: `metrics.jsonl`, and lines where no bar can move."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from ostinato_trainer.checkpoints.resume import ResumePoint
from ostinato_trainer.config.sft import SftTrainerConfig
from ostinato_trainer.loggers.group import METRICS_FILE, JsonlLogger
from ostinato_trainer.sft.steps import SftStep

__all__ = ["StepReports", "step_metrics", "step_note"]


class StepReports:
    """Where the steps go.

    Args:
        trainer: Says where they are wanted.
        folder: Of the run.
        console: Gets a line at every validation and at every tenth of the steps, unless it is a terminal.
        point: The checkpoint that the run goes on from, if it does.

    Raises:
        OSError: `metrics.jsonl` cannot be written.
    """

    def __init__(self, trainer: SftTrainerConfig, folder: Path, console: Console, point: ResumePoint | None) -> None:
        self._console = console if "console" in trainer.logger and not console.is_terminal else None
        self._log = JsonlLogger(folder / METRICS_FILE, resume=point is not None) if "jsonl" in trainer.logger else None
        if self._log is not None and point is not None:
            self._log.describe({"resumed_from": str(point.directory)})

    def show(self, step: SftStep, metrics: Mapping[str, float], *, num_steps: int) -> None:
        """Show one of `num_steps` steps."""
        if self._log is not None:
            self._log.log(step.step, metrics)
        is_tenth = step.step * 10 // num_steps > (step.step - 1) * 10 // num_steps
        if self._console is not None and (step.val_loss is not None or is_tenth):
            self._console.print(f"step {step.step} of {num_steps}  {step_note(step)}", highlight=False)

    def close(self) -> None:
        """Close the file."""
        if self._log is not None:
            self._log.close()


def step_metrics(step: SftStep, *, epoch: float, seconds: float) -> dict[str, float]:
    """The metrics of a step by name.

    Args:
        step: What it did.
        epoch: Passes over the conversations when it was done.
        seconds: That it took.
    """
    measured = {} if step.val_loss is None else {"val/loss": step.val_loss}
    if step.step == 0:
        return measured
    return {
        "train/loss": step.loss,
        "train/grad_norm": step.grad_norm,
        "train/lr": step.lr,
        "train/num_tokens": float(step.num_tokens),
        "train/num_skipped_steps": float(step.skipped),
        "train/epoch": epoch,
        "timing_s/step": seconds,
        **measured,
    }


def step_note(step: SftStep) -> str:
    """A step's losses for people."""
    losses = [] if step.step == 0 else [f"loss {step.loss:.3f}"]
    return "  ".join(losses + ([] if step.val_loss is None else [f"val loss {step.val_loss:.3f}"]))
