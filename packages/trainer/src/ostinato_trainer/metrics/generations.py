"""What the policy wrote, for people to read: one JSON line a trajectory, and a few samples of a validation for loggers that can show texts.

Invariant: reading along costs the run nothing but the time to write; a folder that cannot be written is said once, and the run goes on.
Values that JSON does not know are written as `ostinato_rollout.tracing.values` defines it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ostinato_agent_loop import Trajectory
from ostinato_rollout.tracing.values import storable
from ostinato_trainer.config import TrainerConfig
from ostinato_trainer.home_paths import home_path

if TYPE_CHECKING:
    from ostinato_trainer.loggers.group import Loggers

__all__ = ["GENERATION_COLUMNS", "GenerationFiles", "GenerationWatch", "generation_row", "generation_rows"]

logger = logging.getLogger(__name__)

GENERATION_COLUMNS: Final = ("input", "output", "gts", "score", "failure")
"""What a table of samples shows."""

_OWN_NAMES: Final = {"step", *GENERATION_COLUMNS}
"""What the reward function says under these names is left out."""

Decode = Callable[[Sequence[int]], str]
"""From token ids to text, control tokens included."""


def generation_row(trajectory: Trajectory, decode: Decode) -> dict[str, Any]:
    """A trajectory in plain values: `input`, `output`, `score`, `gts` and what the reward function said beside the score.

    The text is that of the last segment. A failed trajectory has `failure` in place of a score.

    Args:
        trajectory: Of a rollout.
        decode: The tokenizer's.
    """
    row = trajectory.row
    reward_model = row.get("reward_model")
    record: dict[str, Any] = {
        "group_id": trajectory.group_id,
        "trajectory_id": trajectory.trajectory_id,
        "data_source": row.get("data_source"),
        "gts": reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None,
    }
    if trajectory.segments:
        last = trajectory.segments[-1]
        record |= {
            "input": decode(last.prompt_ids),
            "output": decode(last.response_ids),
            "num_turns": last.num_turns,
            "num_segments": len(trajectory.segments),
            "stop_reason": str(last.stop_reason.value),
        }
    if trajectory.failure is not None:
        failure = trajectory.failure
        return record | {"failure": f"{failure.kind.value} in {failure.where}: {failure.message}"}
    if trajectory.reward is not None:
        extra = {key: value for key, value in trajectory.reward.extra.items() if key not in record.keys() | _OWN_NAMES}
        record |= {"score": trajectory.reward.score, **extra}
    return record


def generation_rows(trajectories: Sequence[Trajectory], decode: Decode, count: int) -> list[dict[str, Any]]:
    """Rows of the first trajectory of each of the first `count` groups: the same prompts in every validation."""
    first: dict[str, Trajectory] = {}
    for trajectory in trajectories:
        first.setdefault(trajectory.group_id, trajectory)
    return [storable(generation_row(trajectory, decode)) for trajectory in list(first.values())[:count]]


def _json(row: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(row)
    except (TypeError, ValueError, OverflowError, RecursionError):  # what JSON does not know, lone surrogates among it
        return msgspec.json.encode(storable(row))


class GenerationFiles:
    """A folder of files `STEP.jsonl`, each there whole or not at all.

    Args:
        folder: Is made with the first file.
        decode: The tokenizer's.
    """

    def __init__(self, folder: str | Path, decode: Decode) -> None:
        self.folder = home_path(folder, "the folder of generations")
        self._decode = decode
        self._is_told = False

    def write(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Write the file of a step, in place of one that is there."""
        target = self.folder / f"{step}.jsonl"
        hidden = target.with_name(f".{target.name}.{os.getpid()}.writing")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with hidden.open("wb") as file:
                for trajectory in trajectories:
                    row = {"step": step, **generation_row(trajectory, self._decode)}
                    file.write(_json(row) + b"\n")
            hidden.replace(target)
        except OSError as error:
            with contextlib.suppress(OSError):
                hidden.unlink(missing_ok=True)
            if not self._is_told:
                self._is_told = True
                logger.warning("what was sampled at step %d cannot be written below %s: %s", step, self.folder, error)


class GenerationWatch:
    """A callback that keeps what is sampled, as `trainer.rollout_data_dir`, `validation_data_dir` and `log_val_generations` say.

    Args:
        config: The node `trainer`.
        loggers: Get the samples of a validation.
        decode: The tokenizer's.
    """

    def __init__(self, config: TrainerConfig, loggers: Loggers, decode: Decode) -> None:
        def files(folder: str | None) -> GenerationFiles | None:
            return None if folder is None else GenerationFiles(folder, decode)

        self._of_training, self._of_validation = files(config.rollout_data_dir), files(config.validation_data_dir)
        self._num_logged = config.log_val_generations
        self._loggers, self._decode = loggers, decode

    def on_sample_end(self, step: int, trajectories: Sequence[Trajectory], validate: bool) -> None:
        """See `TrainerCallback`."""
        files = self._of_validation if validate else self._of_training
        if files is not None:
            files.write(step, trajectories)
        if validate and self._num_logged:
            self._loggers.log_generations(step, generation_rows(trajectories, self._decode, self._num_logged))
