"""What the GSM8K benchmark says about two models' answers."""

import math

import pytest
from benchmarks.gsm8k import compared


def test_answers_to_one_question_are_compared_with_each_other():
    """The difference is that of pairs, with an interval of its own, and what a model has no answer to is left out of both."""
    before = {"a": 0.0, "b": 0.0, "c": 1.0, "d": 1.0, "e": 1.0, "f": None}
    after = {"f": 1.0, "e": None, "d": 1.0, "c": 0.0, "b": 1.0, "a": 1.0}
    found = compared(before, after)
    assert (found["sft_accuracy"], found["grpo_accuracy"], found["difference"]) == (0.5, 0.75, 0.25)
    assert (found["num_questions"], found["left_out"], found["better"], found["worse"]) == (4, 2, 2, 1)
    margin = 1.96 * math.sqrt(((1 - 0.25) ** 2 * 2 + (-1 - 0.25) ** 2 + 0.25**2) / 3 / 4)
    assert found["interval"] == pytest.approx([0.25 - margin, 0.25 + margin])


def test_other_questions_are_refused():
    """Answers to different questions, or to none, are no comparison."""
    with pytest.raises(SystemExit, match="same questions, got 1 and 2"):
        compared({"a": 1.0}, {"a": 1.0, "b": 1.0})
    with pytest.raises(SystemExit, match="at least two questions"):
        compared({"a": 1.0, "b": None}, {"a": 1.0, "b": 1.0})
