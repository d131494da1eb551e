"""Literals in Python's spelling: read as Python reads them, without evaluating anything."""

import ast
import contextlib
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato_tools.parsers.literals import LiteralError, read_keywords, read_literal

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=12
)


@given(VALUES)
def test_what_python_writes_comes_back(value: object) -> None:
    """The `repr` of any JSON value is read as that value, types included."""
    got = read_literal(repr(value))
    assert repr(got) == repr(value)


@pytest.mark.parametrize(
    "text",
    [
        r"'a\n\t\\\'\"\x41\u00e9\U0001F600\101\0'",
        r"'\q \/ \d'",
        r"r'\d\n'",
        "'one' \"two\" 'three'",
        "'''a b'''",
        "'a\\\nb'",
        "[1, 2.5, .5, 5., 1e3, -3, +4, 0x1F, 0b101, 0o17, 1_000, 1_0.5]",
        "{'a': None, 'b': True, 'c': False,}",
        "(5)",
        "[]",
        "  [ 1 ,\n 2 ]  ",
    ],
)
def test_spellings_are_pythons(text: str) -> None:
    """Escapes, strings side by side, numbers and brackets mean what they mean in Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of backslashes that escape nothing
        expected = ast.literal_eval(text.strip())
    assert read_literal(text) == expected


def test_some_spellings_are_jsons() -> None:
    """JSON's words are read, tuples are lists, line breaks are text, and two halves of a character are one."""
    assert read_literal("[true, false, null]") == [True, False, None]
    assert read_literal("((1, 2), (3,), ())") == [[1, 2], [3], []]
    assert read_literal("'a\nb'") == "a\nb"
    assert read_literal('"""a\nb"""') == "a\nb"
    assert read_literal(r"'\ud83d\ude00'") == "😀"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "f(1)",
        "1 + 1",
        "--1",
        "1j",
        "5abc",
        "007",
        "1e999",
        "9" * 5000,
        "b'a'",
        "f'{x}'",
        "{1, 2}",
        "{1: 2}",
        "{**a}",
        "[*a]",
        "[x for x in y]",
        "[1",
        "[1 2]",
        "[,]",
        "'a",
        "'a' 1",
        r"'\ud800'",
        r"'\U99999999'",
        "__import__('os').system('true')",
        "[" * 100_000,
        "...",
        "lambda: 0",
        "1 if 1 else 2",
    ],
)
def test_everything_else_is_refused(text: str) -> None:
    """What is no literal, or no JSON value, is an error that says where; nothing is evaluated and nothing overflows."""
    with pytest.raises(LiteralError, match="at character"):
        read_literal(text)


def test_keywords_are_arguments_by_name() -> None:
    """The arguments of a call are literals by name; positions, doubles and stars are errors."""
    assert read_keywords("(a=1, b_c='x, y)', d={'e': [None]},)") == {"a": 1, "b_c": "x, y)", "d": {"e": [None]}}
    assert read_keywords("()") == {}
    for text in (
        "(1)",
        "(a=1, a=2)",
        "(*a)",
        "(**a)",
        "(a=1",
        "(a=1) b",
        "(a=b)",
        "a=1",
        "(a==1)",
        "(a=1 b=2)",
        "('a'=1)",
    ):
        with pytest.raises(LiteralError):
            read_keywords(text)


@given(st.text("'\"\\[](){}=,:ab1 \n.-", max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    """No text raises anything but a literal error."""
    for read in (read_literal, read_keywords):
        with contextlib.suppress(LiteralError):
            read(text)
