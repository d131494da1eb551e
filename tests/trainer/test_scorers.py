"""The scorer of GSM8K answers."""

from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato_trainer.errors import RewardError
from ostinato_trainer.rewards.math_scorer import score_math, score_math_dapo
from ostinato_trainer.rewards.scorers import (
    SCORERS,
    BuiltInScorers,
    ground_truth_of,
    normalized_number,
    score_gsm8k,
    scorer_for,
)


def score(text: str, truth: str = "1000", **keys: object) -> float:
    return score_gsm8k("openai/gsm8k", text, truth, {}, **keys)["score"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["#### 1000", "so\n#### 1,000", "####$1,000.00", "#### 1000.", "#### 7\n#### 1000", "#### +1000"]
)
def test_equal_numbers_after_the_mark_score(text: str) -> None:
    """Commas, currency sign, trailing zeros and a full stop do not matter; the last mark counts."""
    assert score(text) == 1.0


@pytest.mark.parametrize("text", ["", "1000", "#### 999", "#### 1000\n#### 7", "#### -1000", "#### 10000", "### 1000"])
def test_other_answers_do_not_score(text: str) -> None:
    """A wrong number, and a right one without the mark, score nothing under the strict method."""
    assert score(text) == 0.0


@pytest.mark.parametrize(
    ("text", "right"),
    [("The answer is $1,000.", True), ("1000 or 7", False), ("500*2=1000", True), ("2000-1000", True), ("none", False)],
)
def test_the_flexible_method_falls_back_to_the_last_number(text: str, right: bool) -> None:
    """Without a mark the flexible method takes the last number; a minus after a number is an operator."""
    assert score(text, method="flexible") == float(right)
    assert score(f"#### 7 {text}", method="flexible") == 0.0


def test_only_what_the_policy_wrote_is_read() -> None:
    """A number in a tool's answer earns nothing: the sampled text counts, not the whole response."""
    answer = score_gsm8k("openai/gsm8k", "tool says #### 5", "5", {"sampled_text": "I do not know"})
    assert answer == {"score": 0.0, "acc": 0.0, "pred": ""}


def test_format_and_score_can_be_set() -> None:
    """reward_kwargs set what right and well-formed answers earn; acc stays a rate."""
    assert score_gsm8k("s", "#### 1", "2", {}, format_score=0.1) == {"score": 0.1, "acc": 0.0, "pred": "1"}
    assert score_gsm8k("s", "#### 2", "2", {}, score=5.0) == {"score": 5.0, "acc": 1.0, "pred": "2"}


def test_a_row_without_a_number_is_an_error() -> None:
    """A ground truth that is no number, and an unknown method, are errors and no zeros."""
    for truth in ("x", "", "None"):
        with pytest.raises(RewardError, match="ground_truth must be a number"):
            score("#### 1", truth)
    with pytest.raises(RewardError, match="method must be strict or flexible"):
        score("#### 1", method="lenient")


@pytest.mark.parametrize(
    ("text", "normal"),
    [("1,000.50", "1000.5"), ("-0", "0"), ("$3", "3"), ("+4.0", "4"), ("x", None), ("", None), ("1e999999999", None), ("nan", None)],
)  # fmt: skip
def test_one_spelling_for_equal_numbers(text: str, normal: str | None) -> None:
    """Numbers are compared in one spelling; what is none, or absurdly large, has no spelling."""
    assert normalized_number(text) == normal


@given(st.integers(-(10**20), 10**20))
def test_every_integer_scores_against_itself(number: int) -> None:
    """An integer written with thousands separators is the integer."""
    assert score(f"work\n#### {number:,}", str(number)) == 1.0
    assert ground_truth_of(f"#### {number:,}") == str(number)


@pytest.mark.parametrize(
    "text", ["#" * 200_000, "1," * 100_000, "#### " * 50_000, "-$" * 100_000, "####" + " " * 200_000]
)
def test_hostile_text_is_read_in_linear_time(text: str) -> None:
    """Text made to trouble a regular expression is scored like any other (a hang would end at the test's deadline)."""
    assert score(text, method="flexible") == 0.0


def test_an_unknown_data_source_lists_the_known() -> None:
    """A data source without a scorer is an error that lists those there are and names the key for one's own."""
    assert scorer_for("openai/gsm8k") is SCORERS["openai/gsm8k"]
    for unknown in ("x", None, 3, ["openai/gsm8k"]):
        with pytest.raises(RewardError, match=r"openai/gsm8k.*reward.custom_reward_function.path"):
            scorer_for(unknown)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data_source", "scorer"),
    [
        ("HuggingFaceH4/MATH-500", score_math),
        ("lighteval/MATH", score_math),
        ("DigitalLearningGmbH/MATH-lighteval", score_math),
        ("math_dapo", score_math_dapo),
        ("aime2024", score_math_dapo),
        ("aime_2025", score_math_dapo),
    ],
)
def test_the_field_s_data_sources_have_their_scorers(data_source: str, scorer: object) -> None:
    """The names that data sets of this field carry are known, AIME of any year among them."""
    assert scorer_for(data_source) is scorer


@pytest.mark.skipif(find_spec("math_verify") is None, reason="math-verify is not installed (extra math)")
async def test_each_scorer_gets_the_arguments_that_it_takes() -> None:
    """Arguments for one scorer do not trouble another of the same data; what none of the rows' scorers takes is refused."""
    scorers = BuiltInScorers({"method": "flexible", "wrong_score": -1.0}, 1, 60.0)
    scorers.check(["openai/gsm8k", "HuggingFaceH4/MATH-500"])
    row = {"solution_str": "it is 42", "ground_truth": "42", "extra_info": {}}
    assert (await scorers({**row, "data_source": "openai/gsm8k"}))["score"] == 1.0
    assert (await scorers({**row, "data_source": "HuggingFaceH4/MATH-500"}))["score"] == -1.0
    with pytest.raises(RewardError, match="arguments of the scorers of these rows, got method"):
        scorers.check(["HuggingFaceH4/MATH-500"])
    for unknown in ("speed", "equivalent", "ground_truth"):
        with pytest.raises(RewardError, match=f"arguments of any built-in scorer, got {unknown}"):
            BuiltInScorers({unknown: 1}, 1, 60.0)
    await scorers.aclose()
