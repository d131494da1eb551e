"""Asks math-verify whether two answers are the same mathematics. Run in a process of its own (`math_scorer`), never in ours.

math-verify stops itself by signals, which only a main thread can have, and takes its own failures for "not the same". Here its clocks
are off, as the process is killed from outside, and running out of memory is an error rather than a verdict.
"""

from __future__ import annotations

import logging
import re

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its clocks are off

_HOW = (LatexExtractionConfig(), ExprExtractionConfig())
_UPRIGHT_CONSTANT = re.compile(r"(?<![a-zA-Z])\\(?:mathrm|text|textrm|mbox)\{\s*([ei])\s*\}")


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
        # math-verify takes upright letters for units, and drops them: 3i would be 3.
        text = _UPRIGHT_CONSTANT.sub(r"\1", answer)
        return parse(f"${text}$", _HOW, parsing_timeout=0, raise_on_error=True)
    except MemoryError:
        raise
    except Exception:  # of the parser's many kinds: this is no mathematics
        return []


equivalent("(x+1)^2", "x^2+2x+1")  # loads what sympy loads late: part of a start, and of no question's time
