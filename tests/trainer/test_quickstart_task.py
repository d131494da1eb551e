"""The quickstart's problems, demonstrations and reward."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato_tools import ToolExecutor, load_tools
from ostinato_trainer.quickstart import files
from ostinato_trainer.quickstart.dialogues import DialogueMaker
from ostinato_trainer.quickstart.files.reward import compute_score
from ostinato_trainer.quickstart.task import Problem, Step, distinct_problems, first_steps

TOOLS = Path(files.__file__).with_name("tools.py")


def transcript(problem: Problem, *, answer: int | None = None, expressions: list[str] | None = None) -> str:
    """What a perfect agent's response decodes to, or one with other expressions or another answer."""
    text = ""
    for expression in expressions if expressions is not None else [step.expression for step in problem.steps]:
        text += f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": {json.dumps(expression)}}}}}\n</tool_call>'
        text += "\n"
    return text + f"The answer is {problem.answer if answer is None else answer}."


def score(problem: Problem, text: str) -> float:
    """The reward of a transcript."""
    extra = problem.row(0, "train")["extra_info"]
    extra["sampled_text"] = text
    return asyncio.run(compute_score("ostinato/quickstart", text, str(problem.answer), extra))["score"]


@pytest.mark.parametrize("seed", range(5))
def test_evaluated_calculations_are_never_trained_on(seed: int) -> None:
    """No first calculation of a held-out problem occurs in a training problem, in any wording; every operator is evaluated."""
    train = distinct_problems(500, held_out=False, seed=seed)
    held_out = distinct_problems(64, held_out=True, seed=seed)
    assert not {problem.steps[0] for problem in train} & {problem.steps[0] for problem in held_out}
    assert not {problem.question for problem in train} & {problem.question for problem in held_out}
    assert {problem.steps[0].operator for problem in held_out} == {"+", "-", "*"}
    assert len(first_steps(held_out=True, seed=seed)) + len(first_steps(held_out=False, seed=seed)) == 243


@given(st.integers(0, 10_000))
def test_the_right_way_scores_one(seed: int) -> None:
    """Whoever makes the expected calls and gives the answer gets the whole reward; a wrong answer costs half of it."""
    [problem] = distinct_problems(1, held_out=False, seed=seed)
    assert score(problem, transcript(problem)) == pytest.approx(1.0)
    assert score(problem, transcript(problem, answer=problem.answer + 1)) == pytest.approx(0.5)


def test_the_parts_of_the_reward() -> None:
    """A valid call, right expressions and the answer that follows from them count separately; luck does not count."""
    problem = Problem("What is 3 minus 4? Then add 5.", (Step(3, "-", 4), Step(-1, "+", 5)))
    assert score(problem, "The answer is 4.") == 0.0
    assert score(problem, transcript(problem, expressions=["4-3", "-1+5"])) == pytest.approx(0.2)
    assert score(problem, transcript(problem, expressions=["3-4"])) == pytest.approx(0.2 + 0.15)
    assert score(problem, transcript(problem, expressions=["3-4", "5+-1"])) == pytest.approx(1.0)
    assert (
        score(
            problem, '<tool_call>\n{"name": "calculator", "arguments": {"expr": "3-4"}}\n</tool_call>The answer is 4.'
        )
        == 0.0
    )
    assert score(problem, transcript(problem) + " So it is.") == pytest.approx(0.5)


def test_demonstrations_hold_real_tool_replies_and_all_faults() -> None:
    """Tool messages in the dialogues are what the executor answers; some dialogues are without fault."""
    maker = DialogueMaker(ToolExecutor(load_tools(None, str(TOOLS))), seed=0)
    dialogues = asyncio.run(maker.make(400))
    kinds: Counter[str] = Counter()
    for dialogue in dialogues:
        assert dialogue[0]["role"] == "user"
        assert dialogue[-1]["role"] == "assistant"
        for call, reply in zip(dialogue[1::2], dialogue[2::2], strict=False):
            [function] = [made["function"] for made in call["tool_calls"]]
            arguments = function["arguments"]
            if "expression" in arguments:
                assert int(reply["content"]) == eval(arguments["expression"])
                kinds["valid"] += 1
            else:
                assert "expression" in reply["content"]
                kinds["wrong_key"] += 1
        kinds["no_tool"] += len(dialogue) == 2
        kinds["stops_early"] += dialogue[-1]["content"] == ""
    assert min(kinds.values()) > 20, kinds


def test_demonstrations_repeat_with_their_seed() -> None:
    """The same seed makes the same dialogues, another seed others."""
    executor = ToolExecutor(load_tools(None, str(TOOLS)))
    first, again, other = (asyncio.run(DialogueMaker(executor, seed=seed).make(50)) for seed in (3, 3, 4))
    assert first == again
    assert first != other
