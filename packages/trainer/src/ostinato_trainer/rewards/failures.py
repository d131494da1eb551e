"""Whatever goes wrong with a score, said in the same words wherever it was computed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from ostinato_trainer.errors import RewardError

__all__ = ["failing_as", "late_text", "raised_text"]


@contextmanager
def failing_as(name: str) -> Iterator[None]:
    """Turn what foreign code raises, also what is no Exception, into a `RewardError`; cancellations and Ctrl-C go through."""
    try:
        yield
    except (RewardError, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise RewardError(raised_text(name, error)) from error


def raised_text(name: str, error: BaseException) -> str:
    """What is said of a function that raised."""
    try:
        shown = f"{type(error).__name__}: {error}"
    except Exception:  # an error that cannot even be shown
        shown = type(error).__name__
    return f"{name} must return a score, got {shown}; mend the function or the row"


def late_text(name: str, timeout_s: float, got: str = "no answer") -> str:
    """What is said of a score that took longer than it may."""
    return (
        f"{name} must answer within reward.timeout_s={timeout_s:g} s, got {got}; raise it, or find what takes so long"
    )
