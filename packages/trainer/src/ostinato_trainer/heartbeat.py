"""A count of what has been computed in this process, so that whoever watches a run can tell long work from a standstill.

A backend beats after each pass through a model; what processes of its own compute is told to this one, which beats for them. Knows neither
backends nor who counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

__all__ = ["beat", "num_beats", "tell"]

_beats = itertools.count(1)
_last = 0
_listener: Callable[[], None] | None = None


def beat() -> None:
    """Say that a part of the work is done; from any thread."""
    global _last
    _last = next(_beats)
    if _listener is not None:
        _listener()


def num_beats() -> int:
    """How often that was said; it only grows while something is computed."""
    return _last


def tell(listener: Callable[[], None] | None) -> None:
    """Call a function with every further beat, in the thread that beats; None calls nobody any more."""
    global _listener
    _listener = listener
