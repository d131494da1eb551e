"""Patterns in schemas that strangers wrote: checked as ever, and without an end to none of them."""

from __future__ import annotations

import asyncio
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato_tools import (
    OutcomeKind,
    ToolCall,
    ToolExecutor,
    ToolRegistry,
    ToolSchemaError,
    function_tool,
    schema_patterns,
)
from ostinato_tools.schema import compile_json_schema, compile_validator
from ostinato_tools.schema_patterns import is_found, may_be_slow

ENDLESS = "^(a+)+$"
"""Against many letters and one that does not fit, twice as long for every letter more."""
HOSTILE = "a" * 64 + "!"
SEMVER = r"^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(?:-((?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)(?:\.(?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*))*))?$"


def schema(pattern: str, **more: object) -> dict:
    parameters = {"type": "object", "properties": {"text": {"type": "string", "pattern": pattern}}, **more}
    return {"type": "function", "function": {"name": "f", "description": "d", "parameters": parameters}}


@pytest.mark.parametrize(
    ("pattern", "fits", "does_not"),
    [
        ("^[a-z]+$", "abc", "ABC"),
        ("^[a-z]+(-[a-z]+)*$", "a-slug-of-some-more-words-than-few", "a-slug-of-some-more-words--than-few"),
        (SEMVER, "1.22.333-alpha.1.beta", "1.22.333-alpha..1"),
        (r"(?i)^x(?=y)y\w{2,5}\Z", "XYzzz", "xyz"),
        (r"(\w)\1", "letter", "word"),
        ("^.*(x|y|z){3}.*$", "a" * 1500 + "xyz", "a" * 1500),
        ("^\N{SNOWMAN}+$", "\N{SNOWMAN}" * 70, "\N{SNOWMAN}" * 70 + "!"),
    ],
)
def test_usual_patterns_say_what_they_always_said(pattern: str, fits: str, does_not: str) -> None:
    """Whether in this process or in another one."""
    assert is_found(pattern, fits) is True
    assert is_found(pattern, does_not) is False
    check = compile_validator(schema(pattern), "here")
    assert check({"text": fits}) == []
    (problem,) = check({"text": does_not})
    assert "does not match" in problem


@given(
    st.text("ab", max_size=12),
    st.recursive(
        st.sampled_from(["a", "b", "[ab]", "."]),
        lambda inner: st.one_of(
            st.builds("({}){}".format, inner, st.sampled_from(["*", "+", "?", "{1,3}"])),
            st.builds("({}|{})".format, inner, inner),
            st.builds("{}{}".format, inner, inner),
        ),
        max_leaves=5,
    ),
)
def test_a_search_here_is_a_short_one(text: str, pattern: str) -> None:
    """What is estimated to be short is searched for in this process, and says what `re` says."""
    compiled = schema_patterns._compiled(pattern)
    assert compiled is not None
    if schema_patterns._is_quick(compiled[1], len(text)):
        assert is_found(pattern, text) is (re.search(pattern, text) is not None)


@pytest.mark.parametrize("pattern", [ENDLESS, "(a|a)*b", "(a|ab|aab)*c", "((a*)*)*b", "(x+x+)+y", "^(?:.*a){20}$"])
def test_searches_that_take_years_are_not_made_here(pattern: str) -> None:
    """Each kind of ambiguity is taken for slow."""
    compiled = schema_patterns._compiled(pattern)
    assert compiled is not None
    assert not schema_patterns._is_quick(compiled[1], len(HOSTILE))
    assert may_be_slow(pattern)


async def test_a_pattern_without_an_end_is_left_to_the_tool(caplog: pytest.LogCaptureFixture) -> None:
    """The event loop goes on while another process looks for it, that process ends, the call is made, and the log says it."""
    started = asyncio.Event()

    @function_tool(schema=schema(ENDLESS))
    async def f(text: str) -> str:
        return f"{len(text)} letters"

    async def beats() -> int:
        num_beats = 0
        while not started.is_set():
            num_beats += 1
            await asyncio.sleep(0.001)
        return num_beats

    beating = asyncio.create_task(beats())
    async with ToolExecutor(ToolRegistry([f]), timeout_s=60).open("t") as tools:
        call = ToolCall(name="f", arguments={"text": HOSTILE}, raw_arguments="", id="c")
        (outcome,) = await tools.run([call])
        started.set()
        (fitting,) = await tools.run([ToolCall(name="f", arguments={"text": "aaa"}, raw_arguments="", id="d")])
        (wrong,) = await tools.run([ToolCall(name="f", arguments={"text": "b"}, raw_arguments="", id="e")])
    assert (outcome.kind, outcome.message["content"]) == (OutcomeKind.OK, "65 letters")
    assert [fitting.kind, wrong.kind] == [OutcomeKind.OK, OutcomeKind.BAD_ARGUMENTS]
    assert await beating > 1
    assert "a search for it took too long" in caplog.text


def test_names_of_properties_are_searched_for_in_time() -> None:
    """Patterns for names, beside additionalProperties, mean what they say; the one keyword that searches by itself is refused beside a slow one."""
    written = {
        "type": "object",
        "properties": {"known": {}},
        "patternProperties": {"^x-": {"type": "integer"}, "^n+$": {"type": "string"}},
        "additionalProperties": False,
    }
    check = compile_json_schema(written, "parameters", "here")
    assert check({"known": 1, "x-a": 2, "nnn": "s"}) == []
    assert check({"x-a": "2"}) == ["x-a: '2' is not of type 'integer'"]
    assert "'other' was unexpected" in check({"other": 1, "x-a": 1})[0]
    slow = {"patternProperties": {ENDLESS: {"type": "integer"}}, "additionalProperties": False}
    assert compile_json_schema(slow, "parameters", "here")({HOSTILE: "text"}) == []
    with pytest.raises(ToolSchemaError, match="quick to search for beside unevaluatedProperties"):
        compile_json_schema({"patternProperties": {ENDLESS: {}}, "unevaluatedProperties": False}, "parameters", "here")
