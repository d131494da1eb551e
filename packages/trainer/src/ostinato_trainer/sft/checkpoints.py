"""How a fine-tuning is taken up where it stood.

Invariant: a run that goes on learns the conversations that it would have learned, in the same batches. Which those are follows from the
conversations, the seed and the number of steps; so a checkpoint holds no order, only what tells other conversations.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from ostinato_tokenization import ChatTokenizer
from ostinato_trainer.backends.base import TrainingBackend
from ostinato_trainer.checkpoints.manager import CheckpointManager
from ostinato_trainer.checkpoints.resume import ResumePoint, check_same_run
from ostinato_trainer.checkpoints.run_state import RunState
from ostinato_trainer.checkpoints.saving import POLICY_FOLDER, write_run
from ostinato_trainer.config.loading import to_yaml
from ostinato_trainer.config.sft import SftConfig
from ostinato_trainer.errors import CheckpointError
from ostinato_trainer.sft.steps import MaskedTokens

__all__ = ["LearnedConversations", "SftCheckpoints", "began_at", "check_unused"]

_PART: Final = "conversations"
_METRICS: Final = re.compile(r"metrics(\.\d+)?\.jsonl")


class _State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a `LearnedConversations`."""

    number: int
    digest: str
    """Hash of their ids and masks, in the order in which they were read."""
    batch_size: int
    seed: int
    began_at: float
    """When the run began, in seconds since 1970: templates may print the date."""


class LearnedConversations:
    """What a run learns: a part of its state."""

    def __init__(self, conversations: Sequence[MaskedTokens], *, batch_size: int, seed: int, began_at: float) -> None:
        self._state = _State(len(conversations), _digest(conversations), batch_size, seed, began_at)

    def state_dict(self) -> Mapping[str, Any]:
        """What tells them from others."""
        return msgspec.to_builtins(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that they are those of the state.

        Raises:
            CheckpointError: They are not; the message names the keys to change.
        """
        saved = _read(state)
        cure = "set it as it was, or choose another trainer.default_local_dir to begin anew"
        if saved.seed != self._state.seed:
            raise CheckpointError(
                f"trainer.seed must be that of the checkpoint, {saved.seed}, got {self._state.seed}; {cure}"
            )
        if saved.digest != self._state.digest:
            raise CheckpointError(
                f"the conversations must be the {saved.number} of the checkpoint, got {self._state.number}, not the same; set data and "
                "model.chat_template as they were, and trainer.total_training_steps where that leaves some unread (trainer.total_epochs "
                "reads all), or choose another trainer.default_local_dir to begin anew"
            )
        if saved.batch_size != self._state.batch_size:
            raise CheckpointError(
                f"data.train_batch_size must be that of the checkpoint, {saved.batch_size}, got {self._state.batch_size}; {cure}"
            )


class SftCheckpoints:
    """Saves and restores a fine-tuning."""

    def __init__(
        self,
        manager: CheckpointManager,
        config: SftConfig,
        backend: TrainingBackend,
        learned: LearnedConversations,
        *,
        template: str | None,
    ) -> None:
        """
        Args:
            manager: Of the run's folder.
            config: The whole tree; every checkpoint has a copy.
            backend: The model under training.
            learned: What it learns.
            template: The chat template, where it is not the model's own.
        """
        self._manager, self._backend, self._template = manager, backend, template
        self._parts, self._config = {_PART: learned}, config

    def save(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the checkpoint of a step; it is there whole or not at all.

        Raises:
            CheckpointError: It could not be written; earlier ones are unharmed.
        """
        state, config = RunState.of(step, self._parts, {}), to_yaml(self._config)

        def write(directory: Path) -> None:
            write_run(directory, state, self._backend, template=self._template, config=config)

        self._manager.save(step, write, metrics)

    def restore(self, point: ResumePoint, tokenizer: ChatTokenizer) -> None:
        """Bring the model to where it was.

        Raises:
            CheckpointError: The checkpoint is of another model, other conversations, or another kind of run; the message names what differs.
        """
        point.state.restore_parts(self._parts)
        check_same_run(point, self._config, tokenizer)
        self._backend.load(point.directory / POLICY_FOLDER)
        point.state.restore_random()


def began_at(point: ResumePoint) -> float:
    """When the run of a checkpoint began, in seconds since 1970.

    Raises:
        CheckpointError: It is no checkpoint of a fine-tuning.
    """
    state = point.state.parts.get(_PART)
    if state is None:
        raise CheckpointError(
            f"trainer.default_local_dir must be a folder of `ostinato sft`, got {point.directory} of another kind of run; choose another"
        )
    return _read(state).began_at


def check_unused(manager: CheckpointManager) -> None:
    """Refuse a folder that holds something that no run has left for another to go on with.

    Raises:
        CheckpointError: Naming the folder and what is in it.
    """
    root = manager.root
    if manager.steps() or not root.is_dir():
        return
    found = sorted(path.name for path in root.iterdir() if not _METRICS.fullmatch(path.name))
    if found:
        raise CheckpointError(
            f"trainer.default_local_dir must be a new or empty folder, or that of a run with checkpoints, got {root} with {found[0]}; "
            "choose another --output or remove it"
        )


def _read(state: Mapping[str, Any]) -> _State:
    try:
        return msgspec.convert(state, type=_State)
    except msgspec.ValidationError as error:
        raise CheckpointError(
            f"the checkpoint must hold the state of its conversations, got: {error}; resume from another step"
        ) from error


def _digest(conversations: Sequence[MaskedTokens]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for each in conversations:
        digest.update(len(each.token_ids).to_bytes(8, "little"))
        digest.update(array("q", each.token_ids))
        digest.update(bytes(each.mask))
    return digest.hexdigest()
