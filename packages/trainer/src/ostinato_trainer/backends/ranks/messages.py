"""What a rank's process and its controller send each other. Errors arrive as what they were where they can travel."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist

from ostinato_trainer.backends.memory import has_run_out
from ostinato_trainer.backends.ranks.workers import RankExchangeError
from ostinato_trainer.errors import BackendError, OutOfMemoryError

_OTHERS_ARE_GONE: Final = (
    *("timed out", "timeout", "connection closed", "connection reset", "connection refused", "broken pipe"),
    *("remote process", "remoteerror", "aborted", "unreachable"),
)
"""Words by which gloo and NCCL, which have no errors of their own for it, say that another rank does not take part."""


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
    nobody expected it is an `OutOfMemoryError` too, and an exchange that others did not take part in a `RankExchangeError`."""
    lines = "".join(traceback.format_exception(error))
    if has_run_out(error):
        error = OutOfMemoryError(
            f"memory must suffice for what a rank is asked for, but it ran out: {error}; lower "
            "actor_rollout_ref.rollout.gpu_memory_utilization, or share the model out over more devices"
        )
    elif _waited_in_vain(error):
        error = RankExchangeError(f"an exchange between ranks must end, got: {str(error).strip():.500}")
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


def error_of(failures: dict[int, Failure], num_ranks: int, hosts: Sequence[str] = ()) -> Exception:
    """The error of the first rank that raised by itself, not because others were missing; it says where it was raised and by `ranks_in_step`
    whether all ranks raised so. Where all that raised had waited for others, a `RankExchangeError` that names these, with the hosts of ranks."""
    own = [rank for rank, failure in failures.items() if not isinstance(failure.error, RankExchangeError)]
    first = min(own or failures)
    error = failures[first].error if own else _missing(failures, first, num_ranks, hosts)
    error.ranks_in_step = len(own) == num_ranks  # pyright: ignore[reportAttributeAccessIssue]  read by `call`
    error.add_note(f"raised on {named_ranks(own or list(failures))} of {num_ranks}")
    error.add_note(f"on rank {first}:\n{failures[first].traceback}")
    return error


def _missing(failures: dict[int, Failure], first: int, num_ranks: int, hosts: Sequence[str]) -> RankExchangeError:
    silent = [rank for rank in range(num_ranks) if rank not in failures]
    who = (
        f"{named_ranks(silent, hosts)} did not take part and gave no answer"
        if silent
        else "all ranks waited for each other"
    )
    return RankExchangeError(
        f"ranks must take part in an exchange within actor_rollout_ref.nccl_timeout, but {who}; see whether a process was stopped or a host is out "
        f"of reach, or raise actor_rollout_ref.nccl_timeout. Rank {first} says: {failures[first].error}"
    )


def _waited_in_vain(error: Exception) -> bool:
    """Whether an error of torch's exchanges tells that another rank is not there."""
    text = str(error).lower()
    of_exchange = isinstance(error, dist.DistError) or (type(error) is RuntimeError and "/gloo/" in text)
    return of_exchange and any(words in text for words in _OTHERS_ARE_GONE)


def named_ranks(ranks: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """For people; with the host of each, where they are on several."""
    named = [f"{rank} (on {hosts[rank]})" if hosts else str(rank) for rank in ranks]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(named)
