"""What a rank's process and its controller send each other. Errors arrive as what they were where they can travel."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ostinato_trainer.backends.memory import has_run_out
from ostinato_trainer.errors import BackendError, OutOfMemoryError


@dataclass(frozen=True)
class Answer:
    """What a call returned."""

    value: Any


@dataclass(frozen=True)
class Failure:
    """What a call raised."""

    error: Exception
    traceback: str


@dataclass(frozen=True)
class LogLine:
    """A message of a rank's logger."""

    logger: str
    level: int
    text: str


@dataclass(frozen=True)
class Progress:
    """A rank has computed something and goes on."""


def failure_of(error: Exception) -> Failure:
    """The error as it can travel: itself, or a `BackendError` with its text where it cannot be pickled and read again. Memory that ran out where
    nobody expected it is an `OutOfMemoryError` too."""
    lines = "".join(traceback.format_exception(error))
    if has_run_out(error):
        error = OutOfMemoryError(
            f"memory must suffice for what a rank is asked for, but it ran out: {error}; lower "
            "actor_rollout_ref.rollout.gpu_memory_utilization, or share the model out over more devices"
        )
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # errors of others may refuse in any way
        error = BackendError(f"{type(error).__name__}: {error}")
    else:
        error = error.with_traceback(None)
    return Failure(error, lines)


def replay(line: LogLine) -> None:
    """Shows a rank's message as one of this process."""
    logger = logging.getLogger(line.logger)
    if logger.isEnabledFor(line.level):
        logger.log(line.level, "%s", line.text)


def request_of(method: str, arguments: tuple[Any, ...]) -> bytes:
    """A call as bytes.

    Raises:
        BackendError: something in it cannot travel.
    """
    try:
        return pickle.dumps((method, arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise BackendError(
            f"arguments of {method} must be picklable to reach the ranks, got {error}; a loss or factory must be a function of a module or a "
            "dataclass with __call__"
        ) from error


def error_of(failures: dict[int, Failure], num_ranks: int) -> Exception:
    """The first rank's error, which says where it was raised and by `ranks_in_step` whether all ranks raised."""
    first = min(failures)
    error = failures[first].error
    error.ranks_in_step = len(failures) == num_ranks  # pyright: ignore[reportAttributeAccessIssue]  read by `call`
    error.add_note(f"raised on {named_ranks(list(failures))} of {num_ranks}")
    error.add_note(f"on rank {first}:\n{failures[first].traceback}")
    return error


def named_ranks(ranks: Sequence[int]) -> str:
    """For people."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
