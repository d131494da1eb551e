"""Patterns of JSON schemas, which may be a stranger's: however they are written, a search has an end.

Python's `re` backtracks, holds the interpreter meanwhile and cannot be told to stop: `(a+)+$` takes years for forty letters. How many steps
a search can take at most is estimated from the pattern and the length of the text. Where that is too many, another process searches, which
has so many seconds; where those do not suffice, nothing is said of the text, and the tool is left to refuse it. Knows no schema.
"""

import json
import logging
import math
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

_logger = logging.getLogger(__name__)

MAX_STEPS = 2**20
"""Of a search in this process: about ten milliseconds."""
CPU_S = 1
"""Of a search in another one."""
_DEADLINE_S = 20.0
"""Of the same with its start, and with the wait for others to end, on a busy machine."""
_MAX_MEMORY_BYTES = 1 << 30
_NUM_AT_ONCE = 4
_MAX_PATTERN = 10_000
"""Characters."""
_LONG = 10**8
_FEW = 4.0
"""Base-2 logarithm."""
_SEQUENCE_OPS = frozenset({"SUBPATTERN", "ASSERT", "ASSERT_NOT", "ATOMIC_GROUP"})
_REPEAT_OPS = frozenset({"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"})
_STEP_OPS = frozenset({"LITERAL", "NOT_LITERAL", "ANY", "IN", "AT", "CATEGORY", "RANGE"})
_START = frozenset({"AT_BEGINNING", "AT_BEGINNING_STRING"})
_SEARCH = """
import json, re, resource, sys
cpu, memory = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
pattern, text = json.load(sys.stdin)
print(int(re.search(pattern, text) is not None))
"""

_places = threading.BoundedSemaphore(_NUM_AT_ONCE)


def is_found(pattern: str, text: str) -> bool | None:
    """Whether `pattern` occurs in `text`; None, said once, where Python cannot read the pattern or did not find out in time.

    May wait for another process; see `may_be_slow`.
    """
    compiled = _compiled(pattern)
    if compiled is None:
        return None
    if _is_quick(compiled[1], len(text)):
        return compiled[0].search(text) is not None
    found = _found_elsewhere(pattern, text)
    if found is None:
        _say_once(pattern, "a search for it took too long")
    return found


def may_be_slow(pattern: str) -> bool:
    """Whether a search takes long in some text."""
    compiled = _compiled(pattern)
    return compiled is not None and not _is_quick(compiled[1], _LONG)


def _is_quick(nodes: Sequence[Any], length: int) -> bool:
    """Whether a search in so many characters takes few steps at all, or few for each character."""
    return _log_steps(nodes, length) <= math.log2(MAX_STEPS) or _log_ways(nodes, length) <= _FEW


def _found_elsewhere(pattern: str, text: str) -> bool | None:
    """Searches in a process that ends by itself."""
    if not _places.acquire(timeout=_DEADLINE_S):
        return None
    try:
        ended = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _SEARCH, str(CPU_S), str(_MAX_MEMORY_BYTES)],
            input=json.dumps([pattern, text]).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_DEADLINE_S,
            check=False,
        )
    except (subprocess.TimeoutExpired, OSError):
        return None
    finally:
        _places.release()
    return {b"0": False, b"1": True}.get(ended.stdout.strip())


@lru_cache(maxsize=4096)
def _say_once(pattern: str, why: str) -> None:
    _logger.warning(
        "the pattern %.200r of a tool's schema is not checked: %s; the tool itself must refuse what does not fit",
        pattern,
        why,
    )


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> tuple[re.Pattern[str], Sequence[Any]] | None:
    """With its syntax tree; None, said once, of what cannot be searched for."""
    try:
        if len(pattern) > _MAX_PATTERN:
            raise ValueError(f"has {len(pattern)} characters")
        return re.compile(pattern), re._parser.parse(pattern)  # pyright: ignore[reportAttributeAccessIssue]
    except (re.error, ValueError, OverflowError, RecursionError) as error:  # of another dialect, for example
        _say_once(pattern, f"Python cannot read it ({error})")
        return None


def _log_steps(nodes: Sequence[Any], length: int) -> float:
    """The base-2 logarithm of the most steps that a search in so many characters can take."""
    first = nodes[0] if len(nodes) else None
    is_anchored = first is not None and str(first[0]) == "AT" and str(first[1]) in _START
    # Every way is walked from every place where it may begin.
    return _log_ways(nodes, length) + (0.0 if is_anchored else math.log2(length + 1))


def _log_ways(nodes: Sequence[Any], length: int) -> float:
    """Of the number of ways in which a sequence can fit a text."""
    return sum(_log_ways_of(str(op), argument, length) for op, argument in nodes)


def _log_ways_of(op: str, argument: Any, length: int) -> float:
    if op in _STEP_OPS:
        return 0.0
    if op in _SEQUENCE_OPS:
        return _log_ways(argument if op == "ATOMIC_GROUP" else argument[-1], length)
    if op == "GROUPREF":
        return math.log2(length + 1)
    if op == "BRANCH":
        options = [_log_ways(option, length) for option in argument[1]]
        return max(options) + math.log2(len(options))
    if op not in _REPEAT_OPS:
        return math.inf
    least, most, body = argument
    counts = math.log2(min(length, most - least) + 1)
    num_choices = _num_choices(body)
    if not num_choices:
        return counts
    # Either so often the ways of the body, or for every character the choice of where in the body it belongs.
    return min(counts + min(most, length) * _log_ways(body, length), length * math.log2(2 * num_choices))


def _num_choices(nodes: Sequence[Any]) -> int:
    """Places of a sequence at which there is something to choose."""
    found = 0
    for op, argument in nodes:
        if str(op) in _SEQUENCE_OPS:
            found += _num_choices(argument if str(op) == "ATOMIC_GROUP" else argument[-1])
        elif str(op) == "BRANCH":
            found += len(argument[1]) + sum(map(_num_choices, argument[1]))
        elif str(op) in _REPEAT_OPS:
            found += (argument[0] != argument[1]) + _num_choices(argument[2])
    return found
