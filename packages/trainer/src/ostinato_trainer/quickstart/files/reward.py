"""The reward of the quickstart: did the agent call the calculator rightly, and does its answer follow?

0.2 for a valid call, 0.3 x the share of the expected expressions that were computed, 0.5 for the right answer that follows
from the right expressions. Change it and train again; a reward that is quick is best an `async` function, for a plain one runs in a thread.
"""

import json
import re

CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
ANSWER = re.compile(r"The answer is (-?\d+)\.\s*$")


async def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> dict:
    """Score one trajectory.

    Args:
        data_source: Where the row comes from; this task has one source only.
        solution_str: Everything after the prompt, the tool's replies included; not read here.
        ground_truth: The answer, an integer as text.
        extra_info: Holds `sampled_text`, what the model itself wrote, and `expressions`, the calculations that lead to the
            answer, in order.

    Returns:
        `score` in 0..1, `acc` (1.0 if the answer is right) and `calls`, the number of valid calls.
    """
    text = extra_info["sampled_text"]
    made = [expression for call in CALL.findall(text) if (expression := called_expression(call)) is not None]
    expected = [ordered(expression) for expression in extra_info["expressions"]]
    num_right = 0
    for expression in map(ordered, made):
        if num_right < len(expected) and expression == expected[num_right]:
            num_right += 1
    all_right = num_right == len(expected) and len(made) == len(expected)
    answer = ANSWER.search(text)
    correct = all_right and answer is not None and answer.group(1) == ground_truth
    return {
        "score": 0.2 * bool(made) + 0.3 * num_right / len(expected) + 0.5 * correct,
        "acc": float(correct),
        "calls": len(made),
    }


def called_expression(call: str) -> str | None:
    """The expression of a calculator call as it stands between the tags; None if it is no valid call."""
    try:
        parsed = json.loads(call)
    except ValueError:
        return None
    if not isinstance(parsed, dict) or parsed.get("name") != "calculator":
        return None
    arguments = parsed.get("arguments")
    if not isinstance(arguments, dict) or set(arguments) != {"expression"}:
        return None
    return arguments["expression"] if isinstance(arguments["expression"], str) else None


def ordered(expression: str) -> tuple[str, ...]:
    """`a op b` without spaces, in one order where the order does not matter: 4+3 is 3+4."""
    match = re.fullmatch(r"(-?\d+)([-+*])(-?\d+)", expression.replace(" ", ""))
    if match is None:
        return (expression,)
    left, operator, right = match.groups()
    if operator in "+*":
        left, right = sorted((left, right))
    return left, operator, right
