"""Finding answers in responses, and comparing them plainly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato_trainer.rewards.math_answers import boxed_answer, plain_form, plainly_equal, stated_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{1}, no: \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed 7", "7"),
        (r"$\fbox{ 3 }$", "3"),
        (r"{ \boxed{7}", "7"),
        (r"\boxed{ \boxed{7}", "7"),
        (r"\boxed{7} and \boxed{8", "7"),
        (r"\boxed{a\\}", r"a\\"),
        (r"\boxed{}", ""),
        (r"\boxed{x", None),
        (r"\boxedanswer{7}", None),
        ("7", None),
        ("", None),
    ],
)
def test_the_last_closed_box_is_the_answer(text: str, answer: str | None) -> None:
    r"""The answer is what stands in the last `\boxed{...}` whose brace is closed, nested braces and all."""
    assert boxed_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: 42", "42"),
        ("Answer: 1\nAnswer: 2", "2"),
        ("**Answer:** $42$.", "42"),
        ("**Answer**: 42", "42"),
        (r"the answer is: \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("Answer: 4\nwell", "4"),
        ("Answer:", None),
        ("answers: 4", None),
        ("", None),
    ],
)
def test_the_last_stated_answer_is_its_line(text: str, answer: str | None) -> None:
    """The answer is what follows the last `Answer:` in its line, without what only sets it off."""
    assert stated_answer(text) == answer


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (r"\dfrac12", "0.5"),
        (r"\frac{3}{6}", "1/2"),
        ("-.5", r"-\frac{1}{2}"),
        (r"2\frac12", "5/2"),
        ("1 1/2", r"\frac{3}{2}"),
        (r"10\,000", "10{,}000"),
        ("no solution", r"\text{no}~\text{solution}"),
        ("1{,}000", "1000"),
        ("$1,000.00$", "1000"),
        (r"5\text{ cm}", "5"),
        (r"5\,\text{cm}^2", "5"),
        (r"2\mathrm{i}", "2i"),
        ("- 1,000", "-1000"),
        (r"50 \%", "50"),
        ("100, 200", r"100,\,200"),
        (r"\text{even}", "even"),
        ("(A)", r"\text{A}"),
        ("x = 5", "5"),
        (r"90^\circ", "90"),
        (r"50\%", "50"),
        ("1,2", "1, 2"),
        (r"\sqrt3", r"\sqrt{3}"),
        ("x^{2}", "x^2"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"),
    ],
)
def test_spelling_makes_no_difference(answer: str, truth: str) -> None:
    """Equal answers that are spelled otherwise are equal, whichever of them is the truth."""
    assert plainly_equal(answer, truth)
    assert plainly_equal(truth, answer)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("x=5", "y=5"),
        ("12", "1,2"),
        ("100, 200", "100200"),
        (r"100,\,200", "100200"),
        (r"1,\ 234", "1234"),
        (r"3\mathrm{i}", "3"),
        (r"2\text{e}", "2"),
        (r"\text{no}\text{ solution}", r"\text{no}\text{ limit}"),
        (r"2\mathrm{\pi}", "2"),
        ("1 2", "12"),
        (r"1\ 2", "12"),
        ("1 1/2", "11/2"),
        ("1,000", "1,0"),
        ("0.333333", "1/3"),
        ("3.14", r"\pi"),
        ("(1,2]", "[1,2)"),
        ("12_{16}", "12"),
        (r"\text{even}", r"\text{odd}"),
        ("1", "-1"),
        ("1/0", "2/0"),
        ("6,7", "6"),
        ("", ""),
        ("", "0"),
    ],
)
def test_different_answers_stay_different(answer: str, truth: str) -> None:
    """No two different answers are taken for one, and no answer is none."""
    assert not plainly_equal(answer, truth)
    assert not plainly_equal(truth, answer)


@given(st.integers(-(10**15), 10**15), st.integers(-(10**15), 10**15))
def test_numbers_are_equal_exactly_if_they_are(one: int, other: int) -> None:
    """Two integers, written with or without separators, are equal exactly if they are the same."""
    assert plainly_equal(f"{one:,}", str(one))
    assert plainly_equal(f"{one:,}", str(other)) == (one == other)


@given(st.integers(-999, 999), st.integers(1, 999), st.integers(1, 50))
def test_fractions_are_compared_by_value(above: int, below: int, factor: int) -> None:
    """A fraction is equal to itself expanded, and to no fraction of another value."""
    assert plainly_equal(f"\\frac{{{above}}}{{{below}}}", f"{above * factor}/{below * factor}")
    assert not plainly_equal(f"\\frac{{{above}}}{{{below}}}", f"{above + 1}/{below}")


_TEX = st.text(alphabet="\\{}$%, .=-^_()0123456789abdefrtox", max_size=60)


@given(_TEX, _TEX)
def test_comparison_is_symmetric_and_spelling_is_settled_once(one: str, other: str) -> None:
    """The comparison never raises and does not care which answer is the truth; what has been spelled plainly is equal to itself."""
    assert plainly_equal(one, other) == plainly_equal(other, one)
    assert plainly_equal(one, one) == bool(plain_form(one))


@given(_TEX, st.text(alphabet="ab{}\\ ", max_size=20))
def test_a_box_written_last_is_read(before: str, answer: str) -> None:
    """Whatever stands before it, an answer with balanced braces in a box at the end is read as it was written."""
    depth, balanced = 0, "\\" not in answer
    for letter in answer:
        depth += (letter == "{") - (letter == "}")
        balanced &= depth >= 0
    if balanced and depth == 0 and not before.endswith("\\"):
        assert boxed_answer(f"{before} \\boxed{{{answer}}}") == answer.strip()


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" * 50_000,
        "{" * 200_000,
        r"\boxed{" * 20_000 + "}" * 20_000,
        "answer:" * 50_000,
        "Answer" + " " * 200_000,
        "Answer: " + "*" * 200_000,
    ],
)
def test_hostile_responses_are_read_in_linear_time(text: str) -> None:
    """Text made to trouble the search is read like any other (a hang would end at the test's deadline)."""
    boxed_answer(text)
    stated_answer(text)


@pytest.mark.parametrize(
    "text",
    [
        "{" * 1000,
        "2" + " " * 999,
        "1 " * 500,
        "1" + "~" * 900 + r"\text{i}",
        r"\frac" * 200,
        "1," * 500,
        r"\text{" * 160,
        "-" * 1000,
        "x=" * 500,
        " " * 1000,
    ],
)
def test_hostile_answers_are_compared_in_time(text: str) -> None:
    """Answers made to trouble the comparison are compared like any other."""
    assert not plainly_equal(text, "1")


def test_long_answers_are_compared_as_they_are() -> None:
    """Beyond a thousand letters an answer must be the truth to the letter."""
    assert plainly_equal("1" * 2000, "1" * 2000)
    assert not plainly_equal("1" * 2000, "1" * 2000 + ".0")
