"""Scorers of mathematical answers: read the answer, compare it plainly, and ask math-verify about what is left.

A plain comparison settles most answers in microseconds, where it is called. The others go to math-verify in processes of their own, since
it is not made for threads, and sympy can compute for hours, or fill the memory, on a line that a policy may write (docs/decisions/0025).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ostinato_trainer.errors import MissingExtraError, RewardError
from ostinato_trainer.rewards.math_answers import MAX_ANSWER_CHARS, boxed_answer, plainly_equal, stated_answer
from ostinato_trainer.rewards.scoring_processes import ScoringProcesses

__all__ = ["Equivalent", "MathEquivalence", "check_math_verify", "score_math", "score_math_dapo"]

Equivalent = Callable[[str, str], Awaitable[bool]]
"""Whether an answer is mathematically the truth."""

_PROGRAM: Final = Path(__file__).with_name("math_equivalence.py")
_MAX_MEMORY_BYTES: Final = 2 * 2**30


async def score_math(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    *,
    equivalent: Equivalent,
    math_verify: bool = True,
    score: float = 1.0,
    wrong_score: float = 0.0,
) -> dict[str, Any]:
    r"""Compare what stands in the last `\boxed{...}` with the ground truth.

    Args:
        data_source: for messages.
        solution_str: the response; used where `extra_info` has no `sampled_text`.
        ground_truth: the right answer in LaTeX, in a `\boxed{...}` or not.
        extra_info: the row's, with `sampled_text`.
        equivalent: is asked where a plain comparison says no.
        math_verify: whether to ask it.
        score: for the right answer.
        wrong_score: for a wrong one, or none.

    Returns:
        score, acc (1.0 or 0.0) and pred (the answer found, or an empty text).

    Raises:
        RewardError: the ground truth is empty, or `equivalent` has no verdict.
    """
    answer = boxed_answer(_sampled(solution_str, extra_info))
    right = await _is_right(answer, ground_truth, data_source, equivalent if math_verify else None)
    return _scored(answer, right, score, wrong_score)


async def score_math_dapo(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    *,
    equivalent: Equivalent,
    math_verify: bool = True,
    score: float = 1.0,
    wrong_score: float = -1.0,
) -> dict[str, Any]:
    r"""Compare the last line `Answer: ...`, or where there is none the last `\boxed{...}`, with the ground truth.

    Arguments, answer and errors are those of `score_math`; a wrong answer costs 1, as in DAPO (arXiv:2503.14476, equation 7).
    """
    text = _sampled(solution_str, extra_info)
    answer = stated_answer(text) or boxed_answer(text)
    right = await _is_right(answer, ground_truth, data_source, equivalent if math_verify else None)
    return _scored(answer, right, score, wrong_score)


def check_math_verify() -> None:
    """Find out whether math-verify is there, without importing it.

    Raises:
        MissingExtraError: it is not.
    """
    if find_spec("math_verify") is None:
        raise MissingExtraError(
            "answers of mathematical problems need math-verify, which is not installed; pip install 'ostinato-trainer[math]', or "
            "compare plainly: reward.custom_reward_function.reward_kwargs.math_verify=false"
        )


class MathEquivalence:
    """math-verify in processes of its own; a question that is cancelled, or late, kills the process that thinks about it.

    Args:
        num_processes: most of them; there are no more than processors.
        timeout_s: seconds for one question, from when a process has it.
    """

    def __init__(self, num_processes: int, timeout_s: float) -> None:
        self._processes = ScoringProcesses(
            "math-verify",
            module="ostinato_math_equivalence",
            file=str(_PROGRAM),
            function="equivalent",
            num_processes=min(num_processes, os.cpu_count() or 1),
            timeout_s=timeout_s,
            max_memory_bytes=_MAX_MEMORY_BYTES if sys.platform == "linux" else None,  # others do not keep it
        )

    async def __call__(self, answer: str, truth: str) -> bool:
        """Whether `answer` is mathematically `truth`.

        Raises:
            RewardError: the comparison needs more time or memory than it may have.
        """
        return await self._processes.call({"answer": answer, "truth": truth}) is True

    async def aclose(self) -> None:
        """Kill the processes."""
        await self._processes.aclose()


def _sampled(solution_str: str, extra_info: Mapping[str, Any]) -> str:
    return extra_info.get("sampled_text", solution_str)


async def _is_right(answer: str | None, ground_truth: Any, data_source: str, equivalent: Equivalent | None) -> bool:
    text = "" if ground_truth is None else str(ground_truth).strip()
    truth = text if (boxed := boxed_answer(text)) is None else boxed
    if not truth:
        raise RewardError(f"ground_truth must be an answer for {data_source}, got {ground_truth!r}; mend the row")
    if answer is None:
        return False
    if plainly_equal(answer, truth):
        return True
    if equivalent is None or not 0 < len(answer) <= MAX_ANSWER_CHARS:
        return False
    return await equivalent(answer, truth)


def _scored(answer: str | None, right: bool, score: float, wrong_score: float) -> dict[str, Any]:
    return {"score": score if right else wrong_score, "acc": float(right), "pred": answer or ""}
