"""`calc_gsm8k_reward`: the tool with which a model checks in its answer to a GSM8K problem."""

import re
from decimal import Decimal
from typing import Any

from ostinato_tools.base import BaseTool
from ostinato_tools.errors import ToolConfigError
from ostinato_tools.responses import ToolResponse

_SCHEMA = {
    "type": "function",
    "function": {
        "name": "calc_gsm8k_reward",
        "description": "Checks in the final answer to a grade-school mathematics problem and tells its score.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "The final answer, a number"}},
            "required": ["answer"],
        },
    },
}
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(rf"(?:\$ ?)?([-+]?)(?:\$ ?)?({_DIGITS}) ?\$?", re.ASCII)
"""A number as people write it: with a currency sign on either side, and commas between groups of three digits only."""


def normalize_answer(answer: str) -> str:
    """Bring a number into one spelling: no `####`, currency sign, thousands separators, spaces or trailing zeros.

    Returns:
        The number as plain decimal digits, or the stripped text where it is no number.
    """
    text = answer.rpartition("####")[2].strip().rstrip(".,").replace("\N{MINUS SIGN}", "-").strip()
    match = _NUMBER.fullmatch(text) if len(text) <= 100 else None
    if match is None:
        return text
    number = Decimal(match[1] + match[2].replace(",", ""))
    digits = format(number, "f")
    if "." in digits:
        digits = digits.rstrip("0").rstrip(".")
    return "0" if number == 0 else digits.lstrip("+")


class CalcGsm8kReward(BaseTool):
    """Scores an answer against the row's ground truth: 1.0 where they are the same number, 0.0 otherwise."""

    def __init__(self, config: dict | None = None, tool_schema: dict | None = None) -> None:
        """Make the tool; its schema is its own unless one is given."""
        super().__init__({} if config is None else config, _SCHEMA if tool_schema is None else tool_schema)
        self._ground_truth = ""
        self._score = 0.0

    async def create(self, instance_id: str | None = None, *, ground_truth: Any = None, **create_kwargs: Any) -> None:
        """Take the row's ground truth.

        Raises:
            ToolConfigError: it is missing or empty.
        """
        truth = "" if ground_truth is None else normalize_answer(str(ground_truth))
        if not truth:
            raise ToolConfigError(
                f"ground_truth must be given, got {ground_truth!r}; "
                "put it in the row's tools_kwargs.calc_gsm8k_reward.create_kwargs"
            )
        if create_kwargs:
            raise ToolConfigError(
                f"create_kwargs must be ground_truth only, got also {sorted(create_kwargs)}; remove them"
            )
        self._ground_truth = truth

    async def execute(
        self, instance_id: str, parameters: dict, **execute_kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        """Score `parameters["answer"]`; the last answer is the one that counts in `calc_reward`."""
        answer = normalize_answer(str(parameters["answer"]))
        self._score = 1.0 if answer == self._ground_truth else 0.0
        shown = answer[:50].encode("utf-8", "backslashreplace").decode()  # JSON may hold half a surrogate pair
        return ToolResponse(text=f"Answer {shown} has score {self._score}."), self._score, {"score": self._score}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the score of the last answer; 0.0 before there is one."""
        return self._score
