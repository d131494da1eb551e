"""Asks math-verify whether two answers are the same mathematics. Run in a process of its own (`math_scorer`), never in ours.

math-verify stops itself by signals, which only a main thread can have, and takes its own failures for "not the same". Here its clocks
are off, as the process is killed from outside, and running out of memory is an error rather than a verdict.
"""

from __future__ import annotations

import logging

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its clocks are off

_HOW = (LatexExtractionConfig(), ExprExtractionConfig())


def equivalent(answer: str, truth: str) -> bool:
    """Whether `answer` is mathematically `truth`; it is not where one of them is no mathematics.

    Raises:
        MemoryError: the comparison needs more than there is.
    """
    try:
        return bool(verify(_parsed(truth), _parsed(answer), timeout_seconds=0, raise_on_error=True))
    except MemoryError:
        raise
    except Exception:  # of sympy's many kinds: the answer is nothing that can be compared with the truth
        return False


def _parsed(answer: str) -> list:
    try:
        return parse(f"${answer}$", _HOW, parsing_timeout=0, raise_on_error=True)
    except MemoryError:
        raise
    except Exception:  # of the parser's many kinds: this is no mathematics
        return []
