"""The format of Gemma 4: bare keys, text between its own quotes, calls that break."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_tools import ParsedTurn
from ostinato_tools.parsers import get_parser
from ostinato_tools.parsers.base import assemble

PARSER = get_parser("gemma4")
QUOTE = '<|"|>'


def written(value: Any) -> str:
    """A value as the format writes it."""
    if isinstance(value, str):
        return QUOTE + value + QUOTE
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return str(value)


def call(name: str, arguments: dict) -> str:
    return f"<|tool_call>call:{name}{written(arguments)}<tool_call|>"


def outcomes(turn: ParsedTurn) -> list[tuple[str, dict | None]]:
    return [(item.name, item.arguments) for item in turn.tool_calls]


TAGS = ["<|tool_call>", "<tool_call|>", "<|channel>thought", "<channel|>", "<turn|>", "<|tool_response>"]
TEXTS = (
    st.lists(
        st.sampled_from(
            [*TAGS, "call:f{", '"', "\\", "{", "}", "[", "]", ":", ",", "\n", "None", "<", "|>", "\0", "é", "😀"]
        )
        | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
        max_size=6,
    )
    .map("".join)
    .filter(lambda text: QUOTE not in text)
)
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
)
BAD_IN_KEYS = '{}[],:"<\\'
KEYS = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters=BAD_IN_KEYS), min_size=1, max_size=8)
KEYS |= st.sampled_from(["None", "true", "a b", "5", "it's", "-1"])
VALUES = st.recursive(
    SCALARS | TEXTS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=8
)
NAMES = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="{<"), min_size=1, max_size=10)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(KEYS, VALUES, max_size=4)), min_size=1, max_size=3)


@settings(max_examples=120, deadline=None)
@given(calls=CALLS)
def test_rendered_calls_come_back(calls: list[tuple[str, dict]]) -> None:
    """Any calls that the format can express come back with the same types, tags in their texts and all."""
    text = "<|channel>thought\nwhy\n<channel|>" + "".join(call(name, arguments) for name, arguments in calls)
    turn = PARSER.parse(text + "<|tool_response>", id_prefix="t_")
    assert outcomes(turn) == calls
    assert json.dumps([item.arguments for item in turn.tool_calls]) == json.dumps([arguments for _, arguments in calls])
    assert [item.raw_arguments for item in turn.tool_calls] == [written(arguments) for _, arguments in calls]
    assert [item.id for item in turn.tool_calls] == [f"t_{index}" for index in range(len(calls))]
    assert (turn.content, turn.reasoning, turn.errors) == ("", "why", ())


@pytest.mark.parametrize(
    ("raw", "arguments"),
    [
        ("{}", {}),
        ("{ a : 1 , b : [ ] }", {"a": 1, "b": []}),
        ('{a:"in JSON \\" }",b:["x:y"]}', {"a": 'in JSON " }', "b": ["x:y"]}),
        (f"{{{QUOTE}a:b{QUOTE}:1}}", {"a:b": 1}),
        ("{a:None,b:null,None:[None,None]}", {"a": None, "b": None, "None": [None, None]}),
        ("{a b:{c:1e-05}}", {"a b": {"c": 1e-05}}),
        (f"{{a:{QUOTE}None, x:1{QUOTE}}}", {"a": "None, x:1"}),
    ],
)
def test_values(raw: str, arguments: dict) -> None:
    """Blanks between values, JSON strings, quoted keys and Python's None are read."""
    assert outcomes(PARSER.parse(f"<|tool_call>call:f{raw}<tool_call|>")) == [("f", arguments)]


@pytest.mark.parametrize(
    "bad",
    [
        "call:bad{a:foo}",
        "call:bad{a:'x'}",
        "call:bad{a=1}",
        "call:bad{a:1",
        "call:bad{a:1}}",
        "call:bad{a:nan}",
        "call:bad{a:os.system(1)}",
        f"call:bad{{a:{QUOTE}x}}",
        f"call:bad{{a:{QUOTE}x{QUOTE}{QUOTE}y{QUOTE}}}",
        "call:bad{a:\0}",
        "call:bad[1]",
        'call:bad{"a',
        "call:{a:1}",
        "bad{a:1}",
        "",
    ],
)
def test_a_bad_call_leaves_its_siblings(bad: str) -> None:
    """A malformed call has an error and no arguments; its siblings are what they were."""
    good = call("f", {"t": "x"})
    turn = PARSER.parse(f"{good}<|tool_call>{bad}<tool_call|>{good}Done.<turn|>\n")
    assert [item.error is None for item in turn.tool_calls] == [True, False, True]
    assert outcomes(turn)[::2] == [("f", {"t": "x"})] * 2
    assert turn.tool_calls[1].arguments is None
    assert turn.tool_calls[1].name in ("bad", "")
    assert (turn.content, turn.errors) == ("Done.", ())


def test_texts_that_are_not_closed_stay_in_their_calls() -> None:
    """Two calls with a quote too few are two malformed calls, although their quotes together are even."""
    turn = PARSER.parse(
        f"<|tool_call>call:a{{x:{QUOTE}1}}<tool_call|><|tool_call>call:b{{y:{QUOTE}1}}<tool_call|>{call('c', {'z': 1})}"
    )
    assert outcomes(turn) == [("a", None), ("b", None), ("c", {"z": 1})]
    turn = PARSER.parse(f"<|tool_call>call:a{{x:{QUOTE}<tool_call|> is text{QUOTE},y:bad}}<tool_call|>Done.")
    assert (outcomes(turn), turn.content) == ([("a", None)], "Done.")


def test_an_unclosed_call_is_an_error_and_is_not_run() -> None:
    """A call cut off anywhere is no call but an error; those before and behind it are calls."""
    good, whole = call("good", {}), call("cut", {"t": "x", "n": [1]})
    for end in range(len("<|tool_call>"), len(whole)):
        turn = PARSER.parse(good + whole[:end])
        assert outcomes(turn) == [("good", {})]
        assert "never closed" in turn.errors[0]
    turn = PARSER.parse("<|tool_call>call:cut{a:1" + good)
    assert outcomes(turn) == [("good", {})]
    assert "never closed" in turn.errors[0]


def test_reasoning() -> None:
    """Drafts in the thought channel are not calls; a thought that is never closed is an error."""
    draft, real = call("draft", {"t": "x"}), call("real", {})
    for text, options in (
        (f"<|channel>thought\nmaybe {draft}\n<channel|>", {}),
        (f"maybe {draft}\n<channel|>", {"in_reasoning": True}),
        (f"maybe {draft}\n<channel|>", {}),
    ):
        turn = PARSER.parse(f"{text}Answer.{real}", **options)
        assert (outcomes(turn), turn.reasoning) == ([("real", {})], f"maybe {draft}")
        assert (turn.content, turn.errors) == ("Answer.", ())
    assert PARSER.parse("<|channel>thought\n<channel|>Hi.").content == "Hi."
    turn = PARSER.parse(f"<|channel>thought\nhm {draft}")
    assert turn.tool_calls == ()
    assert "never closed" in turn.errors[0]


PIECES = [
    *TAGS,
    QUOTE,
    "call:f{",
    "a:",
    "1",
    "}",
    ",",
    "[",
    "]",
    '"',
    "\\",
    "x",
    " ",
    "\n",
    "<",
    "None",
    call("f", {"t": "x"}),
]


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_a_stream_is_the_whole_text(data: st.DataObject) -> None:
    """However a text of the format's pieces is cut, deltas and finished turn are those of the whole text; none raises."""
    chunks = data.draw(st.lists(st.lists(st.sampled_from(PIECES), max_size=4).map("".join), max_size=10))
    if data.draw(st.booleans()):
        chunks = list("".join(chunks))
    options = {"in_reasoning": data.draw(st.booleans()), "late_reasoning": data.draw(st.booleans())}
    whole = PARSER.parse("".join(chunks), **options)
    for item in whole.tool_calls:
        assert (item.error is None) == (item.arguments is not None)
    stream = PARSER.stream(**options)
    deltas = [delta for chunk in chunks for delta in stream.feed(chunk)]
    assert stream.finish() == whole
    assert assemble([*deltas, *stream.drain()]) == whole


HOSTILE = ["<|tool_call>", QUOTE, '"\\', "None ", "a ", "{a:", "<|tool_call>call:f{a:" + QUOTE]


@pytest.mark.parametrize(
    "piece", [*HOSTILE, f"<|tool_call>call:f{{a:{QUOTE}<tool_call|>", f"{QUOTE},{QUOTE}<|tool_call>"]
)
def test_hostile_texts_are_read_once(piece: str) -> None:
    """Calls that break over and over are read in one pass: rereading would take minutes."""
    for before, behind in (
        ("", ""),
        ("<|tool_call>call:f{a:", "}<tool_call|>"),
        (f"<|tool_call>call:f{{a:{QUOTE}", ""),
    ):
        turn = PARSER.parse(before + piece * (200_000 // len(piece)) + behind)
        assert turn.errors or turn.tool_calls or turn.content
