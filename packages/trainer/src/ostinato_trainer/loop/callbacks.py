"""What a run can be watched through: `TrainerCallback`, and `Callbacks`, which tells them.

A callback is part of the run: one that raises ends it with an error that names it, since what it was for (an upload, a stop, a check)
did not happen. Loggers are none of this; they never end a run.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from ostinato_agent_loop import Trajectory
from ostinato_trainer.custom_code import load_object
from ostinato_trainer.errors import CallbackError, ConfigError

__all__ = ["Callbacks", "StepFunction", "TrainerCallback", "load_callbacks"]

logger = logging.getLogger(__name__)


class TrainerCallback(Protocol):
    """Derive from it, or write a class of your own, and define what you want to be told; every method may be absent.

    All are plain functions, called on the event loop between two phases of a step: sampling ahead stands still until they return.
    """

    def on_train_begin(self, step: int, total_steps: int) -> None:
        """Before the first step; `step` were done before, if the run is taken up again."""

    def on_step_begin(self, step: int) -> None:
        """Before a step samples."""

    def on_sample_end(self, step: int, trajectories: Sequence[Trajectory], validate: bool) -> None:
        """After the trajectories of a step, or with `validate` those of a validation, were sampled and scored; failed ones are among them."""

    def on_validate_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """After a validation; step 0 is the one before training."""

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """After a step was trained, its weights sent and its metrics known; step 0 brings those of the validation before training."""

    def on_train_end(self, step: int, error: BaseException | None) -> None:
        """Once, however the run ends; `error` is what ended it before its last step."""


EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))


class StepFunction:
    """A callback that hands each step's metrics to a function."""

    def __init__(self, function: Callable[[int, Mapping[str, float]], None]) -> None:
        self._function = function

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `TrainerCallback`."""
        self._function(step, metrics)


class Callbacks:
    """Tells all callbacks, in order.

    Args:
        callbacks: Who is told.
        phase: Makes the context in which one is told something, by what that is.
    """

    def __init__(
        self, callbacks: Iterable[object], phase: Callable[[str], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self._callbacks, self._phase = tuple(callbacks), phase

    def tell(self, event: str, *arguments: Any) -> None:
        """Call the method `event` of all who have it.

        Raises:
            CallbackError: One of them raised.
        """
        for callback in self._callbacks:
            method = getattr(callback, event, None)
            if method is None:
                continue
            name = f"{type(callback).__name__}.{event}"
            try:
                with self._phase(f"callback {name}"):
                    method(*arguments)
            except Exception as error:
                raise CallbackError(
                    f"callback {name} has ended the run with {type(error).__name__}: {error}; where it was not to, mend it, or leave it out of"
                    " trainer.callbacks"
                ) from error

    def tell_of_the_end(self, step: int, error: BaseException | None) -> None:
        """`on_train_end` for each of them; where something else has ended the run, that is what is raised."""
        for callback in self._callbacks:
            try:
                Callbacks([callback], self._phase).tell("on_train_end", step, error)
            except CallbackError:
                if error is None:
                    raise
                logger.exception("a callback failed while the run ended with an error of its own")


def load_callbacks(names: Sequence[str]) -> list[object]:
    """Make the callbacks that `trainer.callbacks` names.

    Raises:
        ConfigError: A class cannot be imported or made, or has no method that it could be told through.
    """
    return [_made(name, f"trainer.callbacks[{place}]") for place, name in enumerate(names)]


def _made(name: str, key: str) -> object:
    path, _, attribute = name.rpartition(":")
    if not path or not attribute:
        raise ConfigError(f"{key} must be module:Class or file.py:Class, got {name!r}; write it so")
    kind = load_object(path, attribute, key=key, error=ConfigError)
    methods = [getattr(kind, event) for event in EVENTS if hasattr(kind, event)]
    if not isinstance(kind, type) or not methods:
        raise ConfigError(
            f"{key} must be a class with one of {', '.join(EVENTS)}, got {name}; define what it is to be told"
        )
    if any(inspect.iscoroutinefunction(method) for method in methods):
        raise ConfigError(f"{key} must have plain functions, got coroutines in {name}; define them without async")
    try:
        return kind()
    except Exception as error:
        raise ConfigError(
            f"{key} must be made without arguments, got {type(error).__name__}: {error} from {name}; give its arguments defaults"
        ) from error
