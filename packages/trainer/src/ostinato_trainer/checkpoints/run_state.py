"""`RunState`: what a checkpoint holds of a run beside its models, as plain data in `run_state.json`.

The step, where each part of the run stands, and where the random generators stand. Which parts there are, the run says; what is in a
part's state, only that part knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from ostinato_engines.device import random_state, restore_random_state
from ostinato_trainer.errors import CheckpointError

__all__ = ["RunState", "Stateful", "read_run_state"]

_FILE: Final = "run_state.json"


class Stateful(Protocol):
    """A part of a run that can be taken up again."""

    def state_dict(self) -> Mapping[str, Any]:
        """Where it stands; plain JSON data."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Go on from there."""
        ...


class RunState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A run between two steps."""

    step: int
    """Steps that are done."""
    parts: dict[str, dict[str, Any]]
    """By the part's name, what its `state_dict` gave."""
    loggers: dict[str, Any]
    """By which services' runs are gone on with."""
    random: dict[str, Any]
    """Of Python's, numpy's and torch's generators."""

    @classmethod
    def of(cls, step: int, parts: Mapping[str, Stateful], loggers: Mapping[str, Any]) -> RunState:
        """The state of now."""
        states = {name: dict(part.state_dict()) for name, part in parts.items()}
        return cls(step=step, parts=states, loggers=dict(loggers), random=random_state())

    def write(self, directory: Path) -> None:
        """Write it below a checkpoint.

        Raises:
            CheckpointError: A part's state is no plain data.
            OSError: The directory cannot be written.
        """
        try:
            raw = msgspec.json.encode(self)
        except TypeError as error:
            raise CheckpointError(f"state_dict() must give plain JSON data, got: {error}; convert it there") from error
        for name, state in self.parts.items():
            if not _comes_back(msgspec.to_builtins(state, builtin_types=(bytes,))):
                raise CheckpointError(
                    f"state_dict() of {name} must come back from JSON as it was, got bytes, a number that is not finite or a key that is "
                    "no text; convert it there"
                )
        (directory / _FILE).write_bytes(raw)

    def restore_parts(self, parts: Mapping[str, Stateful]) -> None:
        """Let every part go on from its state.

        Raises:
            CheckpointError: A part has no state here.
            TrainerError: A part refuses its state; it says why.
        """
        if missing := [name for name in parts if name not in self.parts]:
            raise CheckpointError(
                f"the checkpoint must hold the state of {', '.join(missing)}, got only {', '.join(self.parts) or 'none'}; "
                "go on with the configuration that it was written with, config.yaml beside that state"
            )
        for name, part in parts.items():
            part.load_state_dict(self.parts[name])

    def restore_random(self) -> None:
        """Put the random generators where they were; the last thing before the next step, since whatever is started may draw from them.

        Raises:
            EngineInputError: The state is none of generators.
        """
        restore_random_state(self.random)


def read_run_state(directory: Path) -> RunState:
    """The state in a checkpoint.

    Raises:
        CheckpointError: There is none, or it is of another version.
    """
    path = directory / _FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunState)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(
            f"{path} must be the state of a run, got: {error}; resume from another step, or with the version that wrote it"
        ) from error


def _comes_back(value: Any) -> bool:
    """Whether JSON gives a value back, with tuples as lists."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _comes_back(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_comes_back, value))
    return math.isfinite(value) if isinstance(value, float) else isinstance(value, str | int | None)
