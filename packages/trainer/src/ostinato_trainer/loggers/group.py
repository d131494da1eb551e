"""Where metrics go: the console and `metrics.jsonl` at once, TensorBoard, MLflow, wandb and Trackio by threads of their own.

Metrics are for people: a logger that fails is reported once and dropped, and the run goes on. Knows no metric by name.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console

from ostinato_trainer.config import Config
from ostinato_trainer.errors import LoggerError
from ostinato_trainer.loggers.base import MetricsLogger, RunEnd
from ostinato_trainer.loggers.thread import LoggerThread

__all__ = ["METRICS_FILE", "VALIDATION_FILE", "ConsoleLogger", "JsonlLogger", "Loggers", "MetricsLogger"]

logger = logging.getLogger(__name__)

METRICS_FILE: Final = "metrics.jsonl"
VALIDATION_FILE: Final = "val_only.jsonl"
"""Of runs with `trainer.val_only`, a line each: what training has measured stays as it is, each step once."""
_CONSOLE_METRICS: Final = (
    ("critic/score/mean", "score"),
    ("response_length/mean", "length"),
    ("num_turns/mean", "turns"),
    ("actor/pg_loss", "loss"),
    ("actor/grad_norm", "grad"),
    ("timing_s/step", "s"),
)

_IN_THREADS: Final = {
    "tensorboard": ("ostinato_trainer.loggers.tensorboard_logger", "TensorboardLogger", False),
    "mlflow": ("ostinato_trainer.loggers.mlflow_logger", "MlflowLogger", True),
    "wandb": ("ostinato_trainer.loggers.wandb_logger", "WandbLogger", True),
    "trackio": ("ostinato_trainer.loggers.trackio_logger", "TrackioLogger", True),
}
"""Module, class, and whether it goes on with a run by its id; else by the steps that are done."""


class ConsoleLogger:
    """A short line a step: score, lengths, loss, seconds, and whatever validation says."""

    name = "console"

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()

    def describe(self, facts: Mapping[str, str]) -> None:
        """Print a line for each fact."""
        for name, fact in facts.items():
            self._print(f"{name}  {fact}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line; without any of the usual metrics, the first few that there are."""
        shown = [(label, metrics[key]) for key, label in _CONSOLE_METRICS if key in metrics]
        shown += [(key, value) for key, value in metrics.items() if key.startswith("val-core/")]
        if not shown:
            shown = list(metrics.items())[: len(_CONSOLE_METRICS)]
        text = "  ".join(f"{label} {value:.4g}" for label, value in shown)
        self._print(f"step {step}  {text}")

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print prompt, answer and score of each sample."""
        for row in rows:
            for name in ("input", "output", "score", "failure"):
                if name in row:
                    self._print(f"[step {step}] {name}: {row[name]}")

    def close(self, end: RunEnd = RunEnd.FINISHED) -> None:
        """Nothing is pending."""

    def _print(self, text: str) -> None:
        """Print as it is, with escapes for what the terminal's encoding does not have."""
        encoding = self._console.encoding
        shown = text.encode(encoding, "backslashreplace").decode(encoding)
        self._console.print(shown, markup=False, highlight=False, soft_wrap=True)


class JsonlLogger:
    """`metrics.jsonl`: one JSON object a step, written out at once; NaN and infinities become null.

    The first object of a run also has what describes the run.

    Args:
        path: the file; its folder is made. A file of an earlier run is kept under another name, `metrics.1.jsonl`.
        resume: go on with the file that is there.

    Raises:
        OSError: the file cannot be written.
    """

    name = "jsonl"

    def __init__(self, path: str | Path, *, resume: bool = False) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not resume and self.path.exists() and self.path.stat().st_size:
            os.replace(self.path, _free_name(self.path))
        self._file = self.path.open("ab", buffering=0)
        self._facts: dict[str, str] = {}

    def describe(self, facts: Mapping[str, str]) -> None:
        """Keep the facts for the next line."""
        self._facts.update(facts)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the line of a step."""
        line = {"step": step, **self._facts, **{key: _json_number(value) for key, value in metrics.items()}}
        text = msgspec.json.encode(line) + b"\n"
        size = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(text) != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except BaseException:
            self._file.truncate(size)  # a file of whole lines, whatever ended this one
            raise
        self._facts = {}

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Not here: `trainer.validation_data_dir` has them all."""

    def close(self, end: RunEnd = RunEnd.FINISHED) -> None:
        """Close the file."""
        self._file.close()


class Loggers:
    """Several loggers as one; each that fails is reported and dropped.

    Args:
        loggers: the loggers, in the order in which they are to write.
    """

    name = "loggers"

    def __init__(self, loggers: Sequence[MetricsLogger]) -> None:
        self._loggers = list(loggers)

    @classmethod
    def from_config(
        cls,
        config: Config,
        *,
        console: Console | None = None,
        steps_done: int | None = None,
        state: Mapping[str, str] | None = None,
    ) -> Loggers:
        """The loggers that `trainer.logger` names.

        Args:
            config: the whole configuration; most loggers record it.
            console: where the console logger prints.
            steps_done: of a run that is taken up again: its files that are there are gone on with after this step. None: a new run.
            state: what `state_dict` gave, to go on with the same runs.

        Raises:
            LoggerError: a logger cannot be made, before any training is lost to it; those made before are closed.
        """
        made = cls([])
        try:
            for name in config.trainer.logger:
                made._loggers.append(_open(name, config, console, steps_done, (state or {}).get(name)))
        except BaseException:
            made.close(RunEnd.FAILED)
            raise
        return made

    def state_dict(self) -> dict[str, str]:
        """By logger, the id of its run, for those that have one."""
        ids = {each.name: getattr(each, "run_id", None) for each in self._loggers}
        return {name: run_id for name, run_id in ids.items() if run_id is not None}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the loggers that still work."""
        return tuple(each.name for each in self._loggers)

    def describe(self, facts: Mapping[str, str]) -> None:
        """Tell every logger what the run is made with."""
        logger.info("this run: %s", "; ".join(f"{name} {fact}" for name, fact in facts.items()))
        self._tell("before the first step", lambda each: each.describe(facts))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Give the metrics of a step to every logger that still works."""
        self._tell(f"at step {step}", lambda each: each.log(step, metrics))

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Give samples of a validation to every logger that still works."""
        self._tell(f"at step {step}", lambda each: each.log_generations(step, rows))

    def _tell(self, when: str, tell: Callable[[MetricsLogger], None]) -> None:
        for each in tuple(self._loggers):
            try:
                tell(each)
            except (Exception, SystemExit):  # rich, for one, ends the process where nobody reads its output any more
                logger.exception("the logger %s failed %s and gets no further metrics", each.name, when)
                self._loggers.remove(each)
                with contextlib.suppress(Exception):  # said already
                    each.close(RunEnd.FAILED)

    def close(self, end: RunEnd = RunEnd.FINISHED) -> None:
        """Close every logger that still works, and tell it how the run has ended."""
        for each in self._loggers:
            try:
                each.close(end)
            except Exception:
                logger.exception("the logger %s failed while closing", each.name)


def _open(
    name: str, config: Config, console: Console | None, steps_done: int | None, run_id: str | None
) -> MetricsLogger:
    if name == "console":
        return ConsoleLogger(console)
    if name == "jsonl":
        only_validates = config.trainer.val_only
        path = Path(config.trainer.local_dir) / (VALIDATION_FILE if only_validates else METRICS_FILE)
        try:
            return JsonlLogger(path, resume=steps_done is not None or only_validates)
        except OSError as error:
            raise LoggerError(
                f"{path} must be a file that can be written: {error.strerror or error}; "
                "set trainer.default_local_dir to another folder"
            ) from error
    if name not in _IN_THREADS:
        known = ", ".join(("console", "jsonl", *_IN_THREADS))
        raise LoggerError(f"trainer.logger must name loggers of {known}, got {name!r}; write one of these")
    module_name, class_name, has_run_id = _IN_THREADS[name]
    try:
        made: Callable[..., MetricsLogger] = getattr(import_module(module_name), class_name)
    except ImportError as error:
        raise LoggerError(
            f"the logger {name} must have the extra {name} ({error}); run: pip install 'ostinato-trainer[{name}]', "
            f"or leave {name} out of trainer.logger"
        ) from None
    steps_done = None if config.trainer.val_only else steps_done  # does no step again
    goes_on: dict[str, Any] = {"steps_done": steps_done} | ({"run_id": run_id} if has_run_id else {})
    return LoggerThread(name, partial(made, config, **goes_on))


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_suffix(f".{number}{path.suffix}")).exists():
        number += 1
    return candidate


def _json_number(value: Any) -> Any:
    if isinstance(value, bool | int | str) or value is None:
        return value
    number = float(value)
    return number if math.isfinite(number) else None
