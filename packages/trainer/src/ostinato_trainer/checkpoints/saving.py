"""`RunCheckpoints`: what a checkpoint of a run holds, and how it is written beside the run; `restore_run`: how a run is taken up again.

Invariant: a checkpoint is of one moment between two steps, whatever the run does while it is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol

from ostinato_trainer.backends.base import TrainingBackend
from ostinato_trainer.chat_template import chat_template_text, write_chat_template
from ostinato_trainer.checkpoints.manager import CheckpointManager
from ostinato_trainer.checkpoints.resume import CONFIG_FILE, MODEL_FOLDER, ResumePoint
from ostinato_trainer.checkpoints.run_state import RunState, Stateful
from ostinato_trainer.checkpoints.thread import CheckpointThread
from ostinato_trainer.config import Config
from ostinato_trainer.config.loading import to_yaml
from ostinato_trainer.errors import CheckpointError
from ostinato_trainer.loggers.group import Loggers
from ostinato_trainer.loop.parts import Critic

__all__ = ["POLICY_FOLDER", "RunCheckpoints", "restore_run", "write_run"]

logger = logging.getLogger(__name__)

POLICY_FOLDER: Final = "actor"
"""Of a checkpoint: weights, moments and counters of the model under training."""
_CRITIC: Final = "critic"
_GRACE_S: Final = 10.0
"""How long an interrupted run waits for the checkpoint that is being written."""
_GRACE_AFTER_ERROR_S: Final = 300.0
"""The same for one that failed, since the error should be told soon."""


class _Saves(Protocol):
    def save(self, directory: Path) -> None: ...


class RunCheckpoints:
    """Saves a run. As a context it sees to it that at the run's end the last checkpoint is complete, or gone.

    Args:
        manager: Of the run's folder.
        config: The whole tree; every checkpoint has a copy.
        backend: The policy. With a method `snapshot`, which gives a copy that has `save` and `save_hf`, it is saved while training goes on.
        loggers: Whose runs a resumed run goes on with.
        critic: Likewise with `snapshot`.
        parts: Everything else that has a state, by name.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        config: Config,
        backend: TrainingBackend,
        loggers: Loggers,
        *,
        critic: Critic | None = None,
        parts: Mapping[str, Stateful],
    ) -> None:
        self._manager, self._config = manager, config
        self._backend, self._critic, self._loggers, self._parts = backend, critic, loggers, parts
        self._thread = CheckpointThread()
        self._has_warned_of_best = False

    async def save(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the state of now, to be written by a thread once the checkpoint before is complete.

        Args:
            step: Steps that are done.
            metrics: Of this step.

        Raises:
            CheckpointError: A checkpoint, this one or the one before, could not be written.
        """
        self._look_for_best(step, metrics)
        await self._thread.finish()
        state = RunState.of(step, self._parts, self._loggers.state_dict())
        policy, critic = await asyncio.to_thread(lambda: (_frozen(self._backend), _frozen(self._critic)))
        write = self._writer(state, policy, critic)
        await self._thread.start(f"checkpoint of step {step}", partial(self._manager.save, step, write, metrics))
        is_copy = policy is not self._backend and (critic is None or critic is not self._critic)
        if not (self._config.trainer.async_save and is_copy):
            await self._thread.finish()

    def check(self) -> None:
        """Raise what the last checkpoint has failed with, if it has; never waits.

        Raises:
            CheckpointError: It could not be written.
        """
        self._thread.check()

    async def finish(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            CheckpointError: It could not be written.
        """
        await self._thread.finish()

    async def __aenter__(self) -> RunCheckpoints:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        """Wait for the checkpoint that is being written; an interrupted run does so for a moment only."""
        is_interrupted = kind is not None and not issubclass(kind, Exception)
        try:
            await self._settle(_GRACE_S if is_interrupted else None if kind is None else _GRACE_AFTER_ERROR_S)
        except CheckpointError as failure:
            if kind is None:
                raise
            logger.warning("The run ended while a checkpoint was written, which is not there: %s", failure)
        finally:
            if self._thread.is_busy:
                self._manager.abandon()

    async def _settle(self, deadline_s: float | None) -> None:
        try:
            await self._thread.finish(deadline_s)
        except (asyncio.CancelledError, KeyboardInterrupt):
            with contextlib.suppress(CheckpointError):  # the interrupt says what is to be said
                await self._thread.finish(_GRACE_S)
            raise

    def _look_for_best(self, step: int, metrics: Mapping[str, float]) -> None:
        wanted = self._config.trainer.best_metric
        if wanted is None or self._has_warned_of_best or math.isfinite(metrics.get(wanted, math.nan)):
            return
        self._has_warned_of_best = True
        known = [name for name in metrics if name.startswith("val-core/")] or list(metrics)[:10]
        logger.warning(
            "The checkpoint of step %d cannot be the best, for the step has no finite metric %s (trainer.best_metric), got %s; it has %s. "
            "What validation measures is there in steps that trainer.test_freq divides",
            step,
            wanted,
            metrics.get(wanted, "none of that name"),
            ", ".join(known) or "none",
        )

    def _writer(self, state: RunState, policy: Any, critic: _Saves | None) -> Callable[[Path], None]:
        template, config = chat_template_text(self._config.actor_rollout_ref.model), to_yaml(self._config)

        def write(directory: Path) -> None:
            write_run(directory, state, policy, template=template, config=config)
            if critic is not None:
                critic.save(directory / _CRITIC)

        return write


def write_run(directory: Path, state: RunState, policy: Any, *, template: str | None, config: str) -> None:
    """Write what every checkpoint of a run holds.

    Args:
        directory: Of the checkpoint.
        state: Of this moment.
        policy: A model under training, or a copy, with `save` and `save_hf`.
        template: The chat template that it was trained with, where that is not its own.
        config: The whole tree as YAML.

    Raises:
        CheckpointError: A part's state is no plain data.
        OSError, SafetensorError: The directory cannot be written.
    """
    policy.save_hf(directory / MODEL_FOLDER)
    if template is not None:
        write_chat_template(directory / MODEL_FOLDER, template)
    policy.save(directory / POLICY_FOLDER)
    state.write(directory)
    (directory / CONFIG_FILE).write_text(config, encoding="utf-8")


def restore_run(
    point: ResumePoint, config: Config, backend: TrainingBackend, critic: Critic | None, parts: Mapping[str, Stateful]
) -> None:
    """Bring models and parts to where they were; the random generators come last, see `RunState.restore_random`.

    Raises:
        CheckpointError: The checkpoint is of another run; the message names what differs.
        TrainerError: A part refuses its state; it says why.
    """
    if critic is not None and not (point.directory / _CRITIC).is_dir():
        raise CheckpointError(
            f"{point.directory} must hold a critic for algorithm.adv_estimator={config.algorithm.adv_estimator}, got none; "
            "write the estimator of that run, or choose another trainer.default_local_dir to begin anew"
        )
    point.state.restore_parts(parts)
    backend.load(point.directory / POLICY_FOLDER)
    if critic is not None:
        critic.load(point.directory / _CRITIC)


def _frozen(part: Any) -> Any:
    """A copy of a model's state that the next step leaves as it is; the model itself where it makes none."""
    snapshot = getattr(part, "snapshot", None)
    return part if snapshot is None else snapshot()
