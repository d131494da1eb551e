"""The calculator: Python's arithmetic within limits, and never Python."""

import ast
import asyncio
import inspect
import math
from pathlib import Path

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
        ("-1e100", "-1e+100"),
        ("9" * 100, "9" * 100),
        ("(0-1)**(10**99)", "1"),
        ("0.5**9999", "0"),
        ("2**-9**9", "0"),
        ("1e-999", "0"),
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
        "9" * 1001,
        "9**9**9**9",
        "(-9)**9**9",
        "1/1e-320",
        "1e-300**-5",
        "(1e99)**(1e99)",
        "(1/3)**-(10**99)",
        "1e1e1",
        "1_000",
        "0x10",
        "1j",
        "nan",
        "inf",
        "\x00",
        "\ud800",
        "().__class__",
        "1 .real",
        "lambda: 1",
        "[1][0]",
        "'a'*9",
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


HOSTILE = st.lists(
    st.sampled_from(
        ["0", "1", "9", "99", "0.5", "1e99", "1e-320", "9" * 90, "+", "-", "*", "**", "/", "%", "(", ")", " "]
    ),
    max_size=60,
).map("".join)


@given(HOSTILE | st.text(max_size=MAX_LENGTH + 10))
def test_any_text_has_a_short_value_or_is_refused(expression: str) -> None:
    """Whatever the text, there is a number that is short to write, or the one error that is meant for the model."""
    try:
        value = evaluate(expression)
    except ToolArgumentError:
        return
    assert -1e100 <= value <= 1e100
    assert len(format_number(value)) <= 102


def test_nothing_evaluates_python() -> None:
    """The module calls none of the functions by which text becomes code, and imports nothing that does."""
    tree = ast.parse(Path(inspect.getsourcefile(evaluate) or "").read_text(encoding="utf-8"))
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not called & {"eval", "exec", "compile", "__import__", "getattr", "globals"}
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert imported <= {"math", "re"}
