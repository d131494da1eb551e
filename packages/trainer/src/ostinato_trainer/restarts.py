"""A run whose processes were lost goes on by itself, a number of times.

Invariant: only the loss of a process begins a run again, never an error of the configuration, the data or the algorithm; and the run goes on
from its newest checkpoint as one that somebody starts again does.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from ostinato_rollout import NoReplicaError
from ostinato_rollout.errors import ActorLostError, ClusterError
from ostinato_trainer.backends.ranks.workers import RankDiedError, RankExchangeError, RankTimeoutError
from ostinato_trainer.config import Config
from ostinato_trainer.errors import ConfigError, TrainingInterrupted

__all__ = ["is_loss", "restart_metrics", "run_with_restarts"]

logger = logging.getLogger(__name__)

_LOSSES = (RankDiedError, RankTimeoutError, RankExchangeError, ActorLostError, NoReplicaError)


def run_with_restarts(config: Config, attempt: Callable[[Config, Sequence[str]], None]) -> None:
    """Call `attempt(config, causes)` until one comes to its end, `trainer.max_restarts` times after the first; `causes` are those of the
    restarts so far.

    Raises:
        TrainingInterrupted: Every attempt lost processes, or what is left of the cluster has no room; the message has all causes.
        Exception: What an attempt raised that is no loss, or the loss itself where no restart is allowed.
    """
    allowed, causes = config.trainer.max_restarts, []
    while True:
        try:
            return attempt(config, tuple(causes))
        except Exception as error:
            if not is_loss(error) and causes and isinstance(error, (ConfigError, ClusterError)):
                raise TrainingInterrupted(
                    f"the run must find places again after it has lost processes, got {type(error).__name__}: {error}. It had lost: "
                    f"{_listed(causes)}; bring back what is gone, and start the run again: it goes on from its newest checkpoint"
                ) from error
            if not is_loss(error) or not allowed:
                raise
            causes.append(f"{type(error).__name__}: {error}")
            if len(causes) > allowed:
                raise TrainingInterrupted(
                    f"the run must lose processes at most {allowed} times (trainer.max_restarts), got {len(causes)}: {_listed(causes)}; "
                    "see to what ends them, and start the run again: it goes on from its newest checkpoint"
                ) from error
            logger.warning(
                "The run has lost processes, and goes on from its newest checkpoint (%d of %d restarts): %s",
                len(causes),
                allowed,
                causes[-1],
            )
        gc.collect()  # what the attempt held, cycles included, before the next one loads as much
        config = _going_on(config)


def _listed(causes: Sequence[str]) -> str:
    return "; ".join(f"{number}. {cause}" for number, cause in enumerate(causes, 1))


def restart_metrics(causes: Sequence[str]) -> dict[str, float]:
    """What a step says of restarts."""
    return {"training/num_restarts": float(len(causes))} if causes else {}


def is_loss(error: BaseException) -> bool:
    """Whether an error tells of processes that are gone, and not of what the run was told to do."""
    return any(isinstance(each, _LOSSES) for each in _with_causes(error))


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def _going_on(config: Config) -> Config:
    """The configuration of a run that goes on: from its own newest checkpoint, once it has written one."""
    trainer = config.trainer
    has_own = any(Path(trainer.local_dir).glob("global_step_*"))
    if trainer.resume_mode == "auto" or not has_own:
        return config
    return msgspec.structs.replace(config, trainer=msgspec.structs.replace(trainer, resume_mode="auto"))
