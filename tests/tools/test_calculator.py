"""The calculator: Python's arithmetic within limits, and never Python."""

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato_tools import ToolArgumentError
from ostinato_tools.calculator import MAX_DEPTH, MAX_LENGTH, calculator, evaluate, format_number

LEAVES = st.integers(0, 99).map(str) | st.floats(0, 99).map(lambda value: format(value, ".3f"))
EXPRESSIONS = st.recursive(
    LEAVES,
    lambda inner: (
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "%", " + ", "*-"]), inner).map("".join)
        | inner.map("({})".format)
        | inner.map("-{}".format)
        | st.tuples(inner.map("({})".format), st.sampled_from(["**2", "**-1", "**0.5"])).map("".join)
    ),
    max_leaves=8,
)


@given(EXPRESSIONS)
def test_it_agrees_with_python(expression: str) -> None:
    """Where Python gives a real number within the limits, the calculator gives that number."""
    try:
        expected = eval(expression)
    except (ZeroDivisionError, OverflowError):
        expected = None
    if expected is None or isinstance(expected, complex):
        with pytest.raises(ToolArgumentError):
            evaluate(expression)
        return
    try:
        value = evaluate(expression)
    except ToolArgumentError:
        # an intermediate value had no real value, or left the limits, and came back
        assert "**" in expression or "/" in expression
        return
    assert math.isclose(value, expected, rel_tol=1e-12, abs_tol=1e-12)


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("1+2*3", "7"),
        ("-2**2", "-4"),
        ("2**-1", "0.5"),
        ("2**3**2", "512"),
        ("7%3", "1"),
        ("6/3", "2"),
        ("0.1+0.2", "0.3"),
        ("1/3", "0.333333333333333"),
        (" ( 1 + 2 )\n* 3 ", "9"),
        ("10**99*10", "1" + "0" * 100),
        ("1e3", "1000"),
        (".5+5.", "5.5"),
        ("--1", "1"),
        ("1**" + "9" * 90, "1"),
    ],
)
async def test_values(expression: str, text: str) -> None:
    """Known expressions have known texts."""
    assert await calculator(expression) == text


@pytest.mark.parametrize(
    "expression",
    [
        "",
        " ",
        "1+",
        "*1",
        "1 2",
        "(1",
        "1)",
        "()",
        "1//2",
        "1,000",
        "x",
        "__import__('os')",
        "1 if 1 else 2",
        "١",
        "1/0",
        "1%0",
        "0**-1",
        "(0-8)**0.5",
        "9**9**9",
        "10**101",
        "-10**101",
        "1e999",
        "9" * 200,
        "1e200*1e200",
        "(0.5)**-9999",
        "(" * 500 + ")" * 400,
        "-" * 500 + "1",
        "2**" * 200 + "1",
        "1+" * MAX_LENGTH + "1",
    ],
)
def test_what_is_refused(expression: str) -> None:
    """Everything else is refused at once with a sentence that the model can act on."""
    with pytest.raises(ToolArgumentError, match=r"^expression must"):
        evaluate(expression)


def test_depth_is_allowed_to_the_limit() -> None:
    """The limit itself is still allowed."""
    assert evaluate("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH) == 1
    with pytest.raises(ToolArgumentError, match="nested"):
        evaluate("(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1))


def test_numbers_are_written_as_people_do() -> None:
    """Whole floats lose their point, long ones their noise."""
    assert [format_number(value) for value in (3.0, -0.0, 2.5, 1e20, 10**30)] == [
        "3",
        "0",
        "2.5",
        "1e+20",
        "1" + "0" * 30,
    ]


def test_it_runs_on_the_loop() -> None:
    """The tool is a coroutine function with its own schema."""
    assert asyncio.iscoroutinefunction(calculator.function)
    assert calculator.get_openai_tool_schema()["function"]["parameters"]["required"] == ["expression"]
