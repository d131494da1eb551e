"""Which checkpoint a run goes on from, and whether it is one of this run.

Invariant: a run never begins anew in silence where an earlier one has left checkpoints, and never goes on from one that is damaged or
foreign. What follows a checkpoint is undone before the run goes on, so that the metrics show each step once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from ostinato_tokenization import ChatTokenizer
from ostinato_trainer.algorithms.advantages import needs_critic
from ostinato_trainer.checkpoints.inventory import Inventory, check_complete
from ostinato_trainer.checkpoints.kept_keys import CONFIG_FILE, MODEL_FOLDER, check_kept, keys_of, saved_keys
from ostinato_trainer.checkpoints.manager import CheckpointManager, steps_below
from ostinato_trainer.checkpoints.run_state import RunState, read_run_state
from ostinato_trainer.config import Config, OptimConfig
from ostinato_trainer.config.resuming import ResumeConfig
from ostinato_trainer.config.sft import SftConfig
from ostinato_trainer.errors import CheckpointError
from ostinato_trainer.home_paths import home_path
from ostinato_trainer.loggers.group import METRICS_FILE

__all__ = [
    "CONFIG_FILE",
    "MODEL_FOLDER",
    "ResumePoint",
    "changed_keys",
    "check_same_run",
    "resume_point",
    "take_up",
]

logger = logging.getLogger(__name__)

_VOLATILE_OF_MODELS: Final = frozenset(
    ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
)
"""What saving a model changes in its config.json."""

_HARMLESS: Final = (
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.nccl_timeout",
    "model.path",
    "actor_rollout_ref.rollout.trace",
    "data.train_files",
    "data.val_",
    "data.filter_overlong_prompts_workers",
    "ray_kwargs",
    "trainer.async_save",
    "trainer.best_metric",
    "trainer.default_local_dir",
    "trainer.experiment_name",
    "trainer.log",
    "trainer.max_ckpt_to_keep",
    "trainer.max_restarts",
    "trainer.project_name",
    "trainer.resume",
    "trainer.rollout_data_dir",
    "trainer.save_freq",
    "trainer.test_freq",
    "trainer.total_",
    "trainer.val",
    "trainer.watchdog",
)
"""Beginnings of keys that may differ: they do not shape the curve, or are checked by what they name."""
_LENGTH_OF_RUN: Final = "trainer.total_"
"""Shapes the curve after all where the learning rate follows the length of the run."""


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint that was found whole."""

    directory: Path
    inventory: Inventory
    state: RunState

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self.state.step


def resume_point(trainer: ResumeConfig, manager: CheckpointManager) -> ResumePoint | None:
    """The checkpoint to go on from, by `trainer.resume_mode`; None for a run from the beginning.

    Args:
        trainer: Says where to look.
        manager: Of `trainer.default_local_dir`.

    Raises:
        CheckpointError: The one that was asked for is damaged, foreign or absent; none of several is whole; or a run is to begin anew
            where there are checkpoints.
    """
    steps = manager.steps()
    if trainer.resume_mode == "resume_path":
        return _asked_for(
            home_path(str(trainer.resume_from_path), "trainer.resume_from_path", CheckpointError), manager
        )
    if not steps:
        return None
    if trainer.resume_mode == "disable":
        raise CheckpointError(
            f"trainer.default_local_dir must hold no checkpoints for a run that begins anew, got {manager.root} with step {steps[-1]}; "
            "choose another folder, remove them, or write trainer.resume_mode=auto to go on from there"
        )
    return _newest_whole(manager)


def check_same_run(point: ResumePoint, config: Config | SftConfig, tokenizer: ChatTokenizer) -> None:
    """Refuse a checkpoint of another model or tokenizer, and warn of settings that make another curve.

    Raises:
        CheckpointError: Naming what differs, and the key to change.
    """
    saved = point.directory / MODEL_FOLDER
    model, key = (
        (config.model, "model")
        if isinstance(config, SftConfig)
        else (config.actor_rollout_ref.model, "actor_rollout_ref.model")
    )
    given = home_path(str(model.path), f"{key}.path")
    check_kept(point.directory, config)
    if (saved / "config.json").is_file() and (given / "config.json").is_file():
        _check_same_model(saved, given, key)
    _check_same_tokenizer(saved, given, tokenizer, key)
    if changed := changed_keys(point, config):
        logger.warning(
            "The run goes on from %s with other settings than it was begun with, so the curve is not that of a run that was never "
            "stopped: %s",
            point.directory,
            "; ".join(changed),
        )


def changed_keys(point: ResumePoint, config: Config | SftConfig) -> list[str]:
    """Sentences about keys whose values are not those that the checkpoint was written with, if they matter to the curve."""
    saved = saved_keys(point.directory)
    current, default = keys_of(config), keys_of(type(config)())
    saved = {
        key: value for key, value in default.items() if value != {}
    } | saved  # keys that were not yet known have their default
    schedule_needs_length = any(each.lr_scheduler_type != "constant" for each in _optimizers(config))
    return [
        f"{key} is {current.get(key, 'absent')} instead of {saved.get(key, 'absent')}"
        for key in dict.fromkeys((*saved, *current))
        if saved.get(key) != current.get(key)
        and (not key.startswith(_HARMLESS) or (schedule_needs_length and key.startswith(_LENGTH_OF_RUN)))
    ]


def _optimizers(config: Config | SftConfig) -> list[OptimConfig]:
    if isinstance(config, SftConfig):
        return [config.optim]
    has_critic = needs_critic(config.algorithm.adv_estimator)
    return [config.actor_rollout_ref.actor.optim, *([config.critic.optim] if has_critic else [])]


def take_up(manager: CheckpointManager, point: ResumePoint) -> None:
    """Undo what follows a checkpoint: it becomes the newest, and `metrics.jsonl` loses the lines of later steps.

    A line of the checkpoint's own step that a kill has kept from being written is added from the checkpoint. To be called when nothing is
    left that could refuse the checkpoint.

    Raises:
        CheckpointError: A file cannot be read or written.
    """
    path = manager.root / METRICS_FILE
    try:
        if point.directory.resolve().parent == manager.root.resolve():
            later = [step for step in manager.steps() if step > point.step]
            if later:
                logger.warning(
                    "The run goes back to step %d; checkpoints of later steps (%s) stay until it reaches them or trainer.max_ckpt_to_keep "
                    "removes them",
                    point.step,
                    ", ".join(map(str, later)),
                )
            manager.point_latest(point.step)
        if path.exists():
            manager.write_file(METRICS_FILE, _metrics_until(point, path.read_bytes()))
    except OSError as error:
        raise CheckpointError(
            f"{manager.root} must be a folder that can be written, got {error}; fix that, or choose another trainer.default_local_dir"
        ) from error


def _metrics_until(point: ResumePoint, content: bytes) -> bytes:
    lines: dict[int, bytes] = {}
    for line in content.splitlines():
        step = _step_of(line)
        if step is not None and step <= point.step:
            lines[step] = line
    if point.step not in lines and point.inventory.metrics:
        lines[point.step] = msgspec.json.encode({"step": point.step, **point.inventory.metrics})
    return b"".join(line + b"\n" for _, line in sorted(lines.items()))


def _asked_for(directory: Path, manager: CheckpointManager) -> ResumePoint:
    key = f"trainer.resume_from_path must name a checkpoint, got {directory}"
    if not directory.is_dir():
        raise CheckpointError(f"{key}, which is no folder; give a directory global_step_N that a run wrote")
    if not (directory / "checkpoint.json").is_file():
        below = steps_below(directory)
        cure = (
            f"write {directory / f'global_step_{below[-1]}'}, or one beside it"
            if below
            else "give a directory global_step_N that a run wrote"
        )
        raise CheckpointError(f"{key}, which is none; {cure}")
    point = _read(directory)
    is_own = directory.resolve().parent == manager.root.resolve()
    steps = manager.steps()
    if steps and not is_own:
        raise CheckpointError(
            f"trainer.default_local_dir must hold no checkpoints for a run that goes on from {directory}, got {manager.root} with step "
            f"{steps[-1]}; choose another folder, or write trainer.resume_mode=auto to go on from there"
        )
    return point


def _newest_whole(manager: CheckpointManager) -> ResumePoint:
    """The latest checkpoint, or the newest before it that is whole; those that are not are named."""
    latest = manager.latest()
    assert latest is not None
    last = int(latest.name.rpartition("_")[2])
    problems = []
    for step in sorted((step for step in manager.steps() if step <= last), reverse=True):
        try:
            point = _read(manager.path_of(step))
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if problems:
            logger.warning("The run goes on from step %d, for: %s", step, "; ".join(problems))
        return point
    raise CheckpointError(
        f"{manager.root} must hold a whole checkpoint to go on from, got none: {'; '.join(problems)}; "
        "choose another trainer.default_local_dir to begin anew"
    )


def _read(directory: Path) -> ResumePoint:
    inventory, state = check_complete(directory), read_run_state(directory)
    if inventory.step != state.step:
        raise CheckpointError(
            f"{directory} must be of one step, got {inventory.step} in checkpoint.json and {state.step} in its state; "
            "resume from another step"
        )
    return ResumePoint(directory, inventory, state)


def _check_same_model(saved: Path, given: Path, key: str) -> None:
    """Compares what transformers makes of the two config.json, since saving rewrites one."""
    from transformers import AutoConfig

    try:
        saved_config, given_config = (AutoConfig.from_pretrained(str(path)).to_dict() for path in (saved, given))
    except (OSError, ValueError, KeyError) as error:
        logger.info("config.json is left to the backend, for transformers does not read it: %s", error)
        return
    for name in sorted({*saved_config, *given_config} - _VOLATILE_OF_MODELS):
        if saved_config.get(name) != given_config.get(name):
            raise CheckpointError(
                f"{key}.path must name the model of {saved.parent}, but its {name} is {given_config.get(name)} "
                f"instead of {saved_config.get(name)} in {given}; write the path of that model, or choose another "
                "trainer.default_local_dir to begin anew"
            )


def _check_same_tokenizer(saved: Path, given: Path, tokenizer: ChatTokenizer, key: str) -> None:
    name = "tokenizer.json"
    if not all((path / name).is_file() for path in (saved, given)):
        return
    if (saved / name).read_bytes() != (given / name).read_bytes():
        raise CheckpointError(
            f"{key}.path must have the tokenizer of {saved.parent}, but {given / name} is another; "
            "write the path of the model with that tokenizer, or choose another trainer.default_local_dir to begin anew"
        )
    if ChatTokenizer.from_pretrained(saved).template_hash != tokenizer.template_hash:
        logger.warning(
            "The chat template is not that of %s, so prompts are others than before; see %s.chat_template",
            saved.parent,
            key,
        )


def _step_of(line: bytes) -> int | None:
    """The step of a line of metrics; None for one that a kill has cut off."""
    try:
        step = msgspec.json.decode(line, type=dict).get("step")
    except msgspec.DecodeError:
        return None
    return step if isinstance(step, int) else None
