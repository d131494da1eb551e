"""Streams of every format: however the text is cut, the deltas and the finished turn are those of the whole text."""


import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_tools.parsers import PARSERS, get_parser
from ostinato_tools.parsers.base import assemble

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "string"}}},
        },
    }
]
PIECES = [
    "<think>",
    "</think>",
    "f",
    "x",
    "y",
    "5",
    " ",
    "\n",
    '"',
    "'",
    "\\",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    "<",
    ">",
    "=",
    ",",
    ":",
]
PIECES += [
    '{"name": "f", "arguments": {"x": 1}}',
    '{"name": "f", "parameters": {}}',
    '{"x": "a"}',
    "[f(x=1)]",
    "é",
    "😀",
]


def fragments(name: str) -> list[str]:
    """Tags of a format, whole and cut, and what stands between them."""
    parser = PARSERS[name]()
    tags = [tag for kind in ("openers", "closers", "end_tokens", "example_pieces") for tag in getattr(parser, kind, ())]
    tags += [tag for pair in getattr(parser, "reasoning_tags", ()) for tag in pair]
    return PIECES + [part for tag in tags for part in (tag, tag, tag[: len(tag) // 2], tag[len(tag) // 2 :])]


@st.composite
def cut_texts(draw: st.DrawFn, name: str) -> list[str]:
    """A text of a format's fragments, cut anywhere."""
    text = "".join(draw(st.lists(st.sampled_from(fragments(name)), max_size=25)))
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=8)))
    if draw(st.booleans()):
        cuts = list(range(len(text)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("name", sorted(PARSERS))
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_stream_is_the_whole_text(name: str, data: st.DataObject) -> None:
    """For every text and every cut, the deltas together, and the finished turn, equal the turn of the whole text."""
    parser = get_parser(name)
    chunks = data.draw(cut_texts(name))
    options = {"in_reasoning": data.draw(st.booleans()), "late_reasoning": data.draw(st.booleans())}
    whole = parser.parse("".join(chunks), TOOLS, **options)
    stream = parser.stream(TOOLS, **options)
    deltas = [delta for chunk in chunks for delta in stream.feed(chunk)]
    finished = stream.finish()
    deltas += stream.drain()
    assert finished == whole
    assert assemble(deltas) == whole
    assert stream.drain() == []
