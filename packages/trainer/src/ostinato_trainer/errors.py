"""The trainer's errors: one tree, rooted in `TrainerError`.

Every leaf is also the standard-library error that a caller would expect, carries nothing but its message, and survives
pickling. Messages say `<name> must <constraint>, got <value>; <cure>`.
"""

from __future__ import annotations


class TrainerError(Exception):
    """Root of every error that this package raises on purpose."""


class ConfigError(TrainerError, ValueError):
    """The configuration cannot be read, holds an unknown or conflicting key, or asks for what cannot run."""


class DatasetError(TrainerError, ValueError):
    """A data file or one of its rows is not what the trainer needs; the message names file, row and field."""


class RewardError(TrainerError, RuntimeError):
    """A reward function is missing, raised, timed out or returned something that is no finite number."""


class CheckpointError(TrainerError, OSError):
    """A checkpoint could not be written, found or read."""


class BackendError(TrainerError, RuntimeError):
    """The training backend could not load a model or take a step."""


class OutOfMemoryError(BackendError, MemoryError):
    """Memory of a device or the host ran out, or cannot suffice; the message says what held it and which keys to change."""


class BatchError(TrainerError, ValueError):
    """The columns of a batch disagree, or an algorithm was given a batch that it cannot work on."""


class AlgorithmError(TrainerError, LookupError):
    """An advantage estimator, loss or aggregation of that name does not exist or needs a part that is absent."""


class LoggerError(TrainerError, RuntimeError):
    """A metrics logger could not be made, for example because its extra is not installed."""


class MissingExtraError(TrainerError, ImportError):
    """What was asked for needs an extra of this package that is not installed; the message says how to install it."""


class TrainingInterrupted(TrainerError, RuntimeError):
    """Training stopped before its last step for a reason that the message states."""


class PolicyMismatchError(TrainerError, RuntimeError):
    """Engine and trainer do not compute the same policy; the message has both numbers and the likely cause."""


class CallbackError(TrainerError, RuntimeError):
    """A callback raised; the message names it and what it raised."""


class StalledError(TrainerError, TimeoutError):
    """Nothing happened in a run for as long as `trainer.watchdog.fail_after_s` allows; the message says what it waited for."""
