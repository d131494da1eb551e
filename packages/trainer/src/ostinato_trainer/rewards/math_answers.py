"""Answers of mathematical problems as text: where they stand in a response, and whether two of them are plainly the same.

Pure functions, linear in their input. `plainly_equal` never says yes to different answers; it may say no to equal ones that are
written differently, `(x+1)^2` and `x^2+2x+1`, for which a computer algebra system is asked (`math_scorer`).
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

__all__ = ["boxed_answer", "plain_form", "plainly_equal", "stated_answer"]

_BOXED: Final = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*(?:\{|([^\s{}$]))")
_STATED: Final = re.compile(r"(?i)\banswer(?:\s+is)?\**\s*:[ \t]*([^\n]*)")
_BRACES: Final = re.compile(r"\\[\\{}]|[{}]")

_THIN_SPACE_OF_A_LIST: Final = re.compile(r",\\,")
_DROPPED: Final = re.compile(r"\\(?:left|right|displaystyle|bigl|bigr|big|Big|limits)(?![a-zA-Z])|(?<!\\)\\[!,]|\$")
_SPACES: Final = re.compile(r"(?:(?<!\\)\\[;: ]|\\q?quad(?![a-zA-Z])|[~\s])+")
_SPACE_BESIDE_NO_DIGITS: Final = re.compile(r"(?<!\d) | (?!\d)")
_UNITS: Final = re.compile(
    r"(?<=[\d}])(?:\\[,;: ]|[~\s])*\\(?:text|mathrm|textrm|mbox)\{(?!\s*[ei]\s*\})[^{}\\]*\}(?:\^\{?\d\}?)?$"
)
"""Words after a number; `e` and `i` are numbers themselves."""
_WORDS: Final = re.compile(r"\\(?:text|mathrm|textrm|textbf|mathbf|mbox|textit|mathit|operatorname)\{([^{}]*)\}")
_DEGREES: Final = re.compile(r"\^\{?\\circ\}?|\\degree(?![a-zA-Z])|°")
_PERCENT: Final = re.compile(r"(?<=\d) ?\\?%$")
_SHORT_FRACTION: Final = re.compile(r"\\frac(?:(\d)(\d)|(\d)(\{[^{}]*\})|(\{[^{}]*\})(\d))")
_SHORT_ROOT: Final = re.compile(r"\\sqrt([0-9a-zA-Z])")
_SHORT_SCRIPT: Final = re.compile(r"([\^_])\{([0-9a-zA-Z])\}")
_THOUSANDS: Final = re.compile(r"\d{1,3}(?:(?:,|\{,\})\d{3})+(?:\.\d+)?")
_ASSIGNED: Final = re.compile(r"[a-zA-Z](?:_[0-9a-zA-Z])?(?:\([a-zA-Z]\))?=([^=]+)")
_CHOICE: Final = re.compile(r"\(([A-Z])\)")

_INTEGER: Final = r"\d{1,50}"
_DECIMAL: Final = re.compile(rf"([-+]?)(?:({_INTEGER})(?:\.(\d{{0,50}}))?|\.(\d{{1,50}}))")
_RATIO: Final = re.compile(rf"([-+]?)(?:({_INTEGER})/({_INTEGER})|\\frac\{{(-?{_INTEGER})\}}\{{({_INTEGER})\}})")
_MIXED: Final = re.compile(
    rf"([-+]?)({_INTEGER})(?: ({_INTEGER})/({_INTEGER})|\\frac\{{({_INTEGER})\}}\{{({_INTEGER})\}})"
)

MAX_ANSWER_CHARS: Final = 1000
"""A longer text is not taken for an answer that could be compared."""


def boxed_answer(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` or `\fbox{...}` that is closed, nested braces and all.

    `\boxed 7` is 7. None where there is no such mark.
    """
    closing = _closing_braces(text)
    found: str | None = None
    position = 0
    while (mark := _BOXED.search(text, position)) is not None:
        position = mark.end()
        if mark[1] is not None:
            found = mark[1]
        elif (end := closing.get(mark.end() - 1)) is not None:
            found, position = text[position:end].strip(), end + 1
    return found


def stated_answer(text: str) -> str | None:
    r"""What follows the last `Answer:` in its line, a `\boxed{...}`, dollar signs or `**` around it taken off."""
    found: str | None = None
    for match in _STATED.finditer(text):
        found = match[1]
    if found is None:
        return None
    boxed = boxed_answer(found)
    plain = (found if boxed is None else boxed).strip(" \t\r*").removesuffix(".")
    return plain.strip("$ ") or None


def plainly_equal(answer: str, truth: str) -> bool:
    """Whether two answers are the same number, or the same text but for spelling that means nothing.

    Units, degree and percent signs do not count, and neither does `x=` before an answer where the other has none.
    """
    if len(answer) > MAX_ANSWER_CHARS or len(truth) > MAX_ANSWER_CHARS:
        return answer.strip() == truth.strip()
    ours, theirs = plain_form(answer), plain_form(truth)
    if not ours or not theirs:
        return False
    if ours == theirs:
        return True
    mine, other = _ASSIGNED.fullmatch(ours), _ASSIGNED.fullmatch(theirs)
    if (mine is None) != (other is None):  # x=5 is 5, but not y=5
        ours, theirs = ours if mine is None else mine[1], theirs if other is None else other[1]
    number = _rational(ours)
    return ours == theirs or (number is not None and number == _rational(theirs))


def plain_form(answer: str) -> str:
    r"""One spelling of an answer in LaTeX: `\dfrac12\text{ cm}.` becomes `\frac{1}{2}`, and `1{,}000` becomes 1000."""
    text = answer.strip().removesuffix(".").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("−", "-")
    text = _DEGREES.sub("", text.replace("\\$", "").replace("\\cdot", "\\times"))
    text = text.strip().strip("$").strip()
    if (unit := _UNITS.search(text)) is not None and not _WORDS.search(text, 0, unit.start()):
        text = text[: unit.start()]
    text = _DROPPED.sub("", _THIN_SPACE_OF_A_LIST.sub(", ", _WORDS.sub(r"\1", text)))
    text = _PERCENT.sub("", _SPACES.sub(" ", text).strip())
    if _THOUSANDS.fullmatch(text.lstrip("-+ ")):  # with no space: `100, 200` are two
        text = text.replace("{,}", "").replace(",", "")
    text = _SPACE_BESIDE_NO_DIGITS.sub("", text)
    text = _SHORT_FRACTION.sub(_full_fraction, text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text)
    text = _SHORT_SCRIPT.sub(r"\1\2", text)
    return text if (choice := _CHOICE.fullmatch(text)) is None else choice[1]


def _full_fraction(match: re.Match[str]) -> str:
    above, below = [part.strip("{}") for part in match.groups() if part is not None]
    return f"\\frac{{{above}}}{{{below}}}"


def _rational(text: str) -> Fraction | None:
    if (found := _DECIMAL.fullmatch(text)) is not None:
        sign, whole, decimals, only = found.groups()
        digits = decimals or only or ""
        value = Fraction(int((whole or "") + digits or "0"), 10 ** len(digits))
    elif (found := _RATIO.fullmatch(text)) is not None:
        sign, above, below, above_tex, below_tex = found.groups()
        denominator = int(below or below_tex)
        if denominator == 0:
            return None
        value = Fraction(int(above or above_tex), denominator)
    elif (found := _MIXED.fullmatch(text)) is not None:
        sign, whole, above, below, above_tex, below_tex = found.groups()
        denominator = int(below or below_tex)
        if denominator == 0:
            return None
        value = int(whole) + Fraction(int(above or above_tex), denominator)
    else:
        return None
    return -value if sign == "-" else value


def _closing_braces(text: str) -> dict[int, int]:
    """Opening brace -> its closing one, for those that have one; braces after a backslash are letters."""
    closing: dict[int, int] = {}
    open_braces: list[int] = []
    for match in _BRACES.finditer(text):
        if match[0] == "{":
            open_braces.append(match.start())
        elif match[0] == "}" and open_braces:
            closing[open_braces.pop()] = match.start()
    return closing
