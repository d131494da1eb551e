"""The pythonic format: lists of calls in Python's spelling, read without evaluating anything."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_tools import ParsedTurn
from ostinato_tools.parsers import get_parser

PARSER = get_parser("pythonic")


def good(turn: ParsedTurn) -> list[tuple[str, dict | None]]:
    """Return the calls of a turn that have no error."""
    return [(call.name, call.arguments) for call in turn.tool_calls if call.error is None]


TEXTS = st.lists(
    st.sampled_from(["<|tool_call_end|>", "<|tool_call_start|>", "<think>", ")]", "\\", '"', "'", "\n", "é😀"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    max_size=5,
).map("".join)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=8
)
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,10}(\.[a-z]{1,5})?", fullmatch=True)
CALLS = st.lists(
    st.tuples(NAMES, st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True), VALUES, max_size=4)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=150, deadline=None)
@given(CALLS, st.sampled_from(["", "<|tool_call_start|>", "<|python_start|>", "Prose. <|tool_call_start|>"]))
def test_written_calls_come_back(calls: list[tuple[str, dict]], opening: str) -> None:
    """Calls written as Python writes them come back the same, in tags and without, types included."""
    written = ", ".join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in made.items())})" for name, made in calls
    )
    closing = "<|python_end|>" if "python" in opening else "<|tool_call_end|>" if opening else ""
    turn = PARSER.parse(f"{opening}[{written}]{closing}<|eot_id|>")
    assert good(turn) == calls
    assert repr([made for _, made in good(turn)]) == repr([made for _, made in calls])
    assert [call.raw_arguments for call in turn.tool_calls] == [
        f"({', '.join(f'{key}={value!r}' for key, value in made.items())})" for _, made in calls
    ]
    assert (turn.content, turn.errors) == ("Prose." if "Prose" in opening else "", ())


@pytest.mark.parametrize(
    "text",
    ["[1] says so", "[link](http://a)", "[]", "[", "[f]", "Use [f(x=1)] now", "f(x=1)", "[f (x=1)]", "[1, f(x=1)]"],
)
def test_other_brackets_are_content(text: str) -> None:
    """Without tags, only a list that begins with a call where content begins is a list of calls."""
    turn = PARSER.parse(text)
    assert (turn.content, turn.tool_calls, turn.errors) == (text, (), ())


@pytest.mark.parametrize(
    "arguments",
    ["1", "x=y", "x=1+1", "x=open('a')", "**{}", "x=1, x=2", "x={1}", "x=f'{y}'", "x=[i for i in y]", "x=a$b"],
)
def test_what_is_no_literal_is_an_error(arguments: str) -> None:
    """A call whose arguments are no literals by name is a call with an error, and its siblings run."""
    turn = PARSER.parse(f"[a(), f({arguments}), b(y=')')]")
    assert [call.name for call in turn.tool_calls] == ["a", "f", "b"]
    assert good(turn) == [("a", {}), ("b", {"y": ")"})]
    assert turn.errors == ()


def test_lists_that_break() -> None:
    """A list that is never closed keeps its whole calls and is an error, as is a list of something else."""
    for text, runs in (
        ("[f(x=1), g(", [("f", {"x": 1})]),
        ("[f(x=1)", [("f", {"x": 1})]),
        ("[f(x=1) and", [("f", {"x": 1})]),
        ("[f(x='a", []),
        ("<|tool_call_start|>f(x=1)<|tool_call_end|>", []),
        ("<|tool_call_start|>[1]<|tool_call_end|>", []),
        ("<|tool_call_start|>[]<|tool_call_end|>", []),
        ("<|tool_call_start|>", []),
    ):
        turn = PARSER.parse(text)
        assert good(turn) == runs
        assert turn.errors
    turn = PARSER.parse("<|tool_call_start|>[f(x='a)]<|tool_call_end|><|tool_call_start|>[g(y=1,),]<|tool_call_end|>")
    assert [call.name for call in turn.tool_calls] == ["f", "g"]
    assert good(turn) == [("g", {"y": 1})]
