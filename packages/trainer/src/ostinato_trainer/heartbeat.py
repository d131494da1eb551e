"""A count of what has been computed in this process, so that whoever watches a run can tell long work from a standstill.

A backend beats after each pass through a model. Knows neither backends nor who counts.
"""

from __future__ import annotations

import itertools

__all__ = ["beat", "num_beats"]

_beats = itertools.count(1)
_last = 0


def beat() -> None:
    """Say that a part of the work is done; from any thread."""
    global _last
    _last = next(_beats)


def num_beats() -> int:
    """How often that was said; it only grows while something is computed."""
    return _last
