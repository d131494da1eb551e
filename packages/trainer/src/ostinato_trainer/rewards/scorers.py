"""Scorers that come with the project, by the row's `data_source`.

Functions of text, linear in its length. They read what the policy wrote (`extra_info["sampled_text"]`, where the
reward manager puts it) and not what tools answered, so that a number in a tool's answer earns nothing.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, Final, Literal

from ostinato_trainer.errors import RewardError
from ostinato_trainer.rewards.functions import keywords_of
from ostinato_trainer.rewards.math_scorer import MathEquivalence, check_math_verify, score_math, score_math_dapo

__all__ = ["SCORERS", "BuiltInScorers", "ground_truth_of", "normalized_number", "score_gsm8k", "scorer_for"]

_NUMBER: Final = r"(?:(?<![\d).])[-+])?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_MARKED: Final = re.compile(r"####[ \t]*(" + _NUMBER + r")")
_ANY_NUMBER: Final = re.compile(_NUMBER)
_MAX_CHARS: Final = 4096
"""Only the end of an answer is searched for its last number; the mark `####` is searched everywhere."""


def score_gsm8k(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    *,
    method: Literal["strict", "flexible"] = "strict",
    score: float = 1.0,
    format_score: float = 0.0,
) -> dict[str, Any]:
    """Compare the final number with the ground truth.

    Strict takes the last `#### NUMBER`; flexible takes, where there is none, the last number at all. Commas, a dollar
    sign and trailing zeros do not matter: `#### 1,000.0` is 1000.

    Args:
        data_source: not read.
        solution_str: the response; used where `extra_info` has no `sampled_text`.
        ground_truth: the right number as text.
        extra_info: the row's, with `sampled_text`.
        method: strict or flexible.
        score: for the right number.
        format_score: for a wrong number in the right form.

    Returns:
        score, acc (1.0 for the right number, else 0.0) and pred (the number found, or an empty text).

    Raises:
        RewardError: the ground truth is no number, or method is another word.
    """
    if method not in ("strict", "flexible"):
        raise RewardError(f"method must be strict or flexible, got {method!r}; set it in reward_kwargs")
    truth = normalized_number(str(ground_truth))
    if truth is None:
        raise RewardError(f"ground_truth must be a number for {data_source}, got {ground_truth!r}; mend the row")
    text = extra_info.get("sampled_text", solution_str)
    found = _last(_MARKED.finditer(text), 1)
    if found is None and method == "flexible":
        found = _last(_ANY_NUMBER.finditer(text[-_MAX_CHARS:]), 0)
    number = None if found is None else normalized_number(found)
    if number is None:
        return {"score": 0.0, "acc": 0.0, "pred": ""}
    right = number == truth
    return {"score": score if right else format_score, "acc": float(right), "pred": number}


def ground_truth_of(answer: str) -> str | None:
    """What follows the last `####` in a GSM8K answer, commas removed; None where there is no number."""
    found = _last(_MARKED.finditer(answer), 1)
    return None if found is None else found.replace(",", "").replace("$", "")


def normalized_number(text: str) -> str | None:
    """One spelling for equal numbers: `$1,000.50` becomes `1000.5`; None where the text is no number."""
    plain = text.strip().replace(",", "").replace("$", "").rstrip(".")
    try:
        value = Decimal(plain)
    except InvalidOperation:
        return None
    if not value.is_finite() or len(plain) > 100 or abs(value.adjusted()) > 100:
        return None
    if value == 0:
        return "0"
    digits = f"{value:f}"
    return (digits.rstrip("0").rstrip(".") if "." in digits else digits).lstrip("+")


def _last(matches: Any, group: int) -> str | None:
    found = None
    for match in matches:
        found = match
    return None if found is None else found.group(group)


SCORERS: Final[dict[str, Callable[..., Any]]] = {
    "openai/gsm8k": score_gsm8k,
    "gsm8k": score_gsm8k,
    "lighteval/MATH": score_math,
    "DigitalLearningGmbH/MATH-lighteval": score_math,
    "HuggingFaceH4/MATH-500": score_math,
    "math": score_math_dapo,
    "math_dapo": score_math_dapo,
    "math_dapo_reasoning": score_math_dapo,
    "aime": score_math_dapo,
}
"""data_source -> scorer. They run on the event loop: what takes longer than microseconds in them goes to other processes."""

_PREFIXES: Final[dict[str, Callable[..., Any]]] = {"aime": score_math_dapo}
"""Beginning of a data_source, such as `aime2024` or `aime_2025` -> scorer."""


def scorer_for(data_source: str | None) -> Callable[..., Any]:
    """The scorer of a data source.

    Raises:
        RewardError: there is none; the message lists those there are.
    """
    if isinstance(data_source, str):
        if data_source in SCORERS:
            return SCORERS[data_source]
        for prefix, scorer in _PREFIXES.items():
            if data_source.startswith(prefix):
                return scorer
    known = ", ".join([*sorted(SCORERS), *(f"{prefix}..." for prefix in _PREFIXES)])
    got = "no data_source" if data_source is None else repr(data_source)
    raise RewardError(
        f"data_source must have a scorer (there are {known}), got {got}; "
        "name your own function by reward.custom_reward_function.path, or mend the column data_source"
    )


class BuiltInScorers:
    """The scorer of each row by its `data_source`, with those of the user's keyword arguments that it takes.

    Args:
        kwargs: `reward_kwargs`.
        num_workers: scores at the same time, for those that run in processes.
        timeout_s: seconds for one of these.

    Raises:
        RewardError: no scorer takes one of `kwargs`.
    """

    name = "the built-in scorer"

    def __init__(self, kwargs: Mapping[str, Any], num_workers: int, timeout_s: float) -> None:
        self._kwargs = dict(kwargs)
        self._equivalence = MathEquivalence(num_workers, timeout_s)
        self._check_kwargs(SCORERS.values(), "any built-in scorer")

    def check(self, data_sources: Iterable[str | None]) -> None:
        """Find out before a run whether every kind of row can be scored.

        Raises:
            RewardError: a data source without a scorer, or a keyword argument that none of theirs takes.
            MissingExtraError: a scorer needs what is not installed.
        """
        scorers = list(dict.fromkeys(scorer_for(data_source) for data_source in data_sources))
        if scorers:
            self._check_kwargs(scorers, "the scorers of these rows")
        if self._kwargs.get("math_verify", True) and any(map(_asks_math_verify, scorers)):
            check_math_verify()

    async def __call__(self, arguments: Mapping[str, Any]) -> Any:
        """Score one row: at once, but for what has to ask math-verify.

        Raises:
            RewardError: its data source has no scorer, the row is not what its scorer reads, or there is no verdict.
        """
        scorer = scorer_for(arguments["data_source"])
        given = keywords_of(scorer, self._kwargs)
        if _asks_math_verify(scorer):
            given["equivalent"] = self._equivalence
        answer = scorer(**arguments, **given)
        return await answer if inspect.isawaitable(answer) else answer

    async def aclose(self) -> None:
        """Free what the scorers hold."""
        await self._equivalence.aclose()

    def _check_kwargs(self, scorers: Iterable[Callable[..., Any]], whose: str) -> None:
        taken = {name for scorer in scorers for name in keywords_of(scorer, self._kwargs)} - {"equivalent"}
        for name in self._kwargs:
            if name not in taken:
                raise RewardError(
                    f"reward.custom_reward_function.reward_kwargs must be arguments of {whose}, got {name}; remove it, or name "
                    "your own function by reward.custom_reward_function.path"
                )


def _asks_math_verify(scorer: Callable[..., Any]) -> bool:
    return scorer in (score_math, score_math_dapo)
