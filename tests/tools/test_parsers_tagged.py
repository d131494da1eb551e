"""The formats whose arguments are text between tags: qwen3_coder, glm, minimax, seed_oss."""

import json
import re
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_tools import ParsedTurn
from ostinato_tools.parsers import get_parser
from ostinato_tools.parsers.base import assemble


class Tags(NamedTuple):
    """How a format writes a turn."""

    begin: str
    call: tuple[str, str]
    parameter: tuple[str, str, str]
    call_end: str
    end: str
    think: tuple[str, str] = ("<think>", "</think>")
    is_python: bool = False

    def call_of(self, name: str, values: dict[str, str]) -> str:
        opening, keyed, closing = self.parameter
        parameters = "".join(f"{opening}{key}{keyed}{text}{closing}\n" for key, text in values.items())
        return f"{self.call[0]}{name}{self.call[1]}\n{parameters}{self.call_end}"

    def section(self, *calls: str) -> str:
        """Calls as a turn has them; a format writes one or several in a section."""
        if self.begin.startswith("<minimax"):
            return "\n".join((self.begin, *calls, self.end))
        return "\n".join(f"{self.begin}{call}{self.end}" for call in calls)

    @property
    def ambiguous(self) -> re.Pattern[str]:
        """What no value may hold: its closing tag, followed by what follows a value."""
        after = "|".join(
            re.escape(tag.strip()) for tag in (self.parameter[0], self.call_end or self.end) if tag.strip()
        )
        return re.compile(rf"{re.escape(self.parameter[2].strip())}\s*({after})")


FORMATS = {
    "qwen3_coder": Tags(
        "<tool_call>\n",
        ("<function=", ">"),
        ("<parameter=", ">\n", "\n</parameter>"),
        "</function>\n",
        "</tool_call>",
        is_python=True,
    ),
    "glm": Tags("<tool_call>", ("", ""), ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"), "", "</tool_call>"),
    "minimax": Tags(
        "<minimax:tool_call>",
        ('<invoke name="', '">'),
        ('<parameter name="', '">', "</parameter>"),
        "</invoke>",
        "</minimax:tool_call>",
    ),
    "seed_oss": Tags(
        "<seed:tool_call>\n",
        ("<function=", ">"),
        ("<parameter=", ">", "</parameter>"),
        "</function>\n",
        "</seed:tool_call>",
        ("<seed:think>", "</seed:think>"),
        is_python=True,
    ),
}
ALL = pytest.mark.parametrize("name", sorted(FORMATS))
SCHEMAS = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}


def text_of(value: Any, tags: Tags) -> str:
    """A value as templates write it."""
    if isinstance(value, str):
        return value
    is_plain = not isinstance(value, dict | list)
    return str(value) if tags.is_python and is_plain else json.dumps(value, ensure_ascii=False)


def tools_for(calls: list[tuple[str, dict[str, Any]]]) -> list[dict]:
    """A tool for each call, with the types of its values."""
    return [tool(name, {key: {"type": SCHEMAS.get(type(value), "object")} for key, value in arguments.items()})
            for name, arguments in calls]  # fmt: skip


def tool(name: str, properties: dict) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def good(tags: Tags, name: str = "good") -> str:
    return tags.section(tags.call_of(name, {"x": "1"}))


def outcomes(turn: ParsedTurn) -> list[tuple[str, dict | None]]:
    return [(call.name, call.arguments) for call in turn.tool_calls]


FRAGMENTS = ["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "<arg_key>"]
FRAGMENTS += ["</arg_key>", "<arg_value>", "</arg_value>", "<minimax:tool_call>", "</minimax:tool_call>", "</invoke>"]
FRAGMENTS += [
    '<invoke name="f">',
    '<parameter name="a">',
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<think>",
    "</think>",
]
FRAGMENTS += ["\n", " ", '"', "'", "\\", "<", ">", "&lt;", "f", "a", "1", "é", "😀"]
TEXTS = st.lists(
    st.sampled_from(FRAGMENTS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=4), max_size=6
).map("".join)
INTEGERS = st.integers(-(2**63), 2**64 - 1)
SCALARS = st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False, allow_infinity=False)
NESTED = st.recursive(
    SCALARS | TEXTS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6
)
VALUES = SCALARS | TEXTS | st.lists(NESTED, max_size=3) | st.dictionaries(TEXTS, NESTED, max_size=3)
KEYS = st.from_regex(r"[\w.\- ]{0,10}\w", fullmatch=True).filter(str.isprintable)
NAMES = st.from_regex(r"\w([\w.\-/ ]{0,10}\w)?", fullmatch=True).filter(str.isprintable)
CALLS = st.lists(
    st.tuples(NAMES, st.dictionaries(KEYS, VALUES, max_size=4)), min_size=1, max_size=3, unique_by=lambda c: c[0]
)


@ALL
@settings(max_examples=80, deadline=None)
@given(calls=CALLS)
def test_rendered_calls_come_back(name: str, calls: list[tuple[str, dict]]) -> None:
    """Calls come back with the same values and types, tags in values and all; only where a value holds what follows a value,
    or begins a call, may they not, and then that is an error."""
    tags = FORMATS[name]
    written = [{key: text_of(value, tags) for key, value in arguments.items()} for _, arguments in calls]
    text = tags.section(
        *(tags.call_of(tool_name, values) for (tool_name, _), values in zip(calls, written, strict=True))
    )
    turn = get_parser(name).parse(f"{tags.think[0]}why{tags.think[1]}\nProse.\n{text}", tools_for(calls))
    values = [value for given in written for value in given.values()]
    if any(tags.ambiguous.search(value) for value in values):
        return
    if any(tags.begin.strip() in value for value in values) and outcomes(turn) != calls:
        assert turn.errors or any(call.error for call in turn.tool_calls)
        return
    assert outcomes(turn) == calls
    assert json.dumps([call.arguments for call in turn.tool_calls]) == json.dumps([arguments for _, arguments in calls])
    assert len({call.id for call in turn.tool_calls}) == len(calls)
    assert all(call.raw_arguments in text for call in turn.tool_calls)
    assert (turn.content, turn.reasoning, turn.errors) == ("Prose.", "why", ())


@ALL
def test_values_are_kept_as_they_are(name: str) -> None:
    """Of a value nothing is stripped or unescaped but the newlines that belong to the tags."""
    tags = FORMATS[name]
    for value in [
        "    if x:\n        y\n",
        "&lt;b&gt; &amp;",
        "trailing ",
        "",
        " ",
        "\n",
        "\n\n\n",
        "\t\\u00e9\\n",
        "5",
        "null",
    ]:
        turn = get_parser(name).parse(
            tags.section(tags.call_of("f", {"code": value})), tools_for([("f", {"code": ""})])
        )
        assert outcomes(turn) == [("f", {"code": value})]


@ALL
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": ["boolean", "null"]}, "false", False),
        ({"type": ["boolean", "null"]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
        ({"oneOf": [{"type": "integer"}, {"type": "object"}]}, '{"city": "Paris"}', {"city": "Paris"}),
        ({"$ref": "#/$defs/place"}, '{"city": "Paris"}', {"city": "Paris"}),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, "5", "5"),
        ({"type": "integer"}, '"5"', '"5"'),
        ({"type": "integer"}, "five", "five"),
        ({}, "5", "5"),
    ],
)
def test_types_come_from_the_schema(name: str, schema: dict, text: str, value: object) -> None:
    """A value is what the schema says that its text is; a text that is none of that stays text."""
    tags = FORMATS[name]
    described = tool("f", {"x": schema})
    described["function"]["parameters"]["$defs"] = {"place": {"type": "object"}}
    call = tags.call_of("f", {"x": text})
    assert outcomes(get_parser(name).parse(tags.section(call), [described])) == [("f", {"x": value})]
    assert outcomes(get_parser(name).parse(tags.section(call))) == [("f", {"x": text})]


def test_seed_oss_writes_python_literals() -> None:
    """What Seed-OSS writes as Python does is read, never evaluated; what is more than a literal stays text."""
    tags, described = FORMATS["seed_oss"], [tool("f", {"x": {"type": ["object", "null"]}, "y": {"type": "array"}})]
    for text, value in [("{'a': [True, None, 'it\\'s']}", {"a": [True, None, "it's"]}), ("None", None)]:
        assert outcomes(get_parser("seed_oss").parse(tags.section(tags.call_of("f", {"x": text})), described)) == [
            ("f", {"x": value})
        ]
    code = "[__import__('os').system('true')]"
    assert outcomes(get_parser("seed_oss").parse(tags.section(tags.call_of("f", {"y": code})), described)) == [
        ("f", {"y": code})
    ]


@ALL
def test_examples_in_values_are_text(name: str) -> None:
    """A whole call, or a tag alone, in a value belongs to the value and is not run."""
    tags = FORMATS[name]
    for value in [f"write {good(tags)} here", tags.end, tags.begin, f"{tags.parameter[2].strip()} and", *tags.think]:
        text = tags.section(tags.call_of("write", {"text": value})) + "\n" + good(tags)
        turn = get_parser(name).parse(text)
        assert outcomes(turn) == [("write", {"text": value}), ("good", {"x": "1"})]
        assert (turn.content, turn.reasoning, turn.errors) == ("", None, ())


def broken_calls(tags: Tags) -> list[str]:
    """Calls with their closing tag that are wrong inside."""
    whole = tags.section(tags.call_of("bad", {"x": "1"}))
    parameter = f"{tags.parameter[0]}x{tags.parameter[1]}1{tags.parameter[2]}"
    return [
        whole.replace(tags.parameter[2], "\n", 1),
        whole.replace(parameter, f"junk {parameter}"),
        whole.replace(parameter, f"{parameter}{parameter}"),
        whole.replace(f"{tags.call[0]}bad{tags.call[1]}", f"{tags.call[0]}{tags.call[1]}"),
        f"{tags.begin}{tags.end}",
    ]


@ALL
@pytest.mark.parametrize("index", range(5))
def test_a_bad_call_leaves_its_siblings(name: str, index: int) -> None:
    """A malformed call is a call with an error, and those before and behind it are what they were."""
    tags = FORMATS[name]
    text = f"{good(tags, 'first')}\n{broken_calls(tags)[index]}\n{good(tags, 'last')}"
    turn = get_parser(name).parse(text)
    first, bad, last = turn.tool_calls
    assert outcomes(turn)[0] == ("first", {"x": "1"})
    assert outcomes(turn)[2] == ("last", {"x": "1"})
    assert bad.arguments is None
    assert bad.error
    assert index == 3 or index == 4 or bad.name == "bad"
    assert (first.error, last.error, turn.content) == (None, None, "")
    assert [call.id for call in turn.tool_calls] == ["call_0", "call_1", "call_2"]


@ALL
def test_a_value_does_not_swallow_the_next_one(name: str) -> None:
    """A value that lacks its closing tag is an error if a parameter of the tool is lost in it; else the tag is text."""
    tags, parser = FORMATS[name], get_parser(name)
    whole = tags.section(tags.call_of("f", {"x": "1", "y": "2"}))
    broken = whole.replace(tags.parameter[2], "", 1)
    (call,) = parser.parse(broken, [tool("f", {"x": {}, "y": {}})]).tool_calls
    assert (call.arguments, "must end before y begins" in str(call.error)) == (None, True)
    (call,) = parser.parse(broken, [tool("f", {"x": {}})]).tool_calls
    assert call.arguments == {"x": f"1\n{tags.parameter[0]}y{tags.parameter[1]}2"}


@ALL
def test_an_unclosed_call_is_an_error_and_is_not_run(name: str) -> None:
    """A call cut off anywhere is no call but an error; the calls before and behind it are."""
    tags = FORMATS[name]
    whole = tags.section(tags.call_of("cut", {"x": "1", "y": "2"}))
    for end in range(len(tags.begin), len(whole)):
        for behind in ("", "\n" + good(tags, "last")):
            turn = get_parser(name).parse(f"{good(tags, 'first')}\n{whole[:end]}{behind}")
            ran = [call.name for call in turn.tool_calls if call.error is None]
            assert ran == (["first", "last"] if behind else ["first"]), whole[:end]
            assert turn.errors or any(call.error for call in turn.tool_calls)


@ALL
def test_what_a_whole_value_holds_is_text_even_if_the_call_is_cut(name: str) -> None:
    """An example call, or an end, in a value that was closed is text, although the call breaks off in a later value."""
    tags = FORMATS[name]
    for value in (f"see {good(tags)}.", f"see {tags.end}."):
        whole = tags.section(tags.call_of("cut", {"x": value, "y": "2"}))
        turn = get_parser(name).parse(whole[: whole.rindex("2")])
        assert (turn.tool_calls, turn.content) == ((), "")
        assert "never closed" in turn.errors[0]


@ALL
def test_reasoning(name: str) -> None:
    """Drafts in reasoning are not calls, whoever opened it; reasoning that is never closed is an error and no call."""
    tags, parser = FORMATS[name], get_parser(name)
    opening, closing = tags.think
    draft, real = good(tags, "draft"), good(tags)
    turn = parser.parse(f"{opening}maybe {draft}{closing}\nAnswer.\n{real}")
    assert (outcomes(turn), turn.reasoning, turn.content) == ([("good", {"x": "1"})], f"maybe {draft}", "Answer.")
    for thought in (f"maybe {draft}", f"the {tags.begin} tag", draft[:-3], draft[: len(draft) // 2]):
        for options in ({"in_reasoning": True}, {}):
            turn = parser.parse(f"{thought}{closing}\n\nAnswer.\n{real}", **options)
            assert outcomes(turn) == [("good", {"x": "1"})]
            assert (turn.reasoning, turn.content, turn.errors) == (thought, "Answer.", ())
    turn = parser.parse(f"{opening}hm {draft}")
    assert turn.tool_calls == ()
    assert "never closed" in turn.errors[0]


@ALL
def test_content_and_end_tokens(name: str) -> None:
    """Prose before, between and behind calls is content; end tokens are no part of it; stray closing tags are errors."""
    tags, parser = FORMATS[name], get_parser(name)
    for token in parser.end_tokens:
        turn = parser.parse(f"One.\n\n{good(tags)}\nTwo.\n{good(tags)}\nThree.{token}\n")
        assert (turn.content, len(turn.tool_calls), turn.errors) == ("One.\nTwo.\nThree.", 2, ())
    assert "closes nothing" in parser.parse(f"a {tags.end} b").errors[0]
    assert parser.parse(" plain\n").content == " plain\n"


def test_minimax_calls_share_a_section() -> None:
    """A broken call in a section leaves the others in it; text between calls breaks none."""
    tags = FORMATS["minimax"]
    a, b = tags.call_of("a", {"x": "1"}), tags.call_of("b", {"x": "2"})
    turn = get_parser("minimax").parse(f'{tags.begin}{a}<invoke name="bad">junk</invoke>{b}{tags.end}')
    assert outcomes(turn) == [("a", {"x": "1"}), ("bad", None), ("b", {"x": "2"})]


def test_minimax_m1_writes_json() -> None:
    """M1's rows of JSON are calls; a closing tag in a string is text; a bad row leaves the others; unclosed is an error."""
    parser = get_parser("minimax")
    rows = ['{"name": "a", "arguments": {"t": "</tool_calls>", "i": 5}}', '{"name": "b", "arguments": {}}']
    turn = parser.parse("Prose.\n<tool_calls>\n" + "\n".join(rows) + "\n</tool_calls><end_of_sentence>\n")
    assert (outcomes(turn), turn.content) == ([("a", {"t": "</tool_calls>", "i": 5}), ("b", {})], "Prose.")
    for bad in ('{"name": "bad", "arguments": {"t": "x}', '{"name": "bad", "arguments": [1]}', "junk", "{\n1\n"):
        turn = parser.parse(f"<tool_calls>\n{bad}\n{rows[1]}\n</tool_calls>")
        assert outcomes(turn)[1:] == [("b", {})]
        assert turn.tool_calls[0].error
    unclosed = '<tool_calls>\n{"name": "bad", "arguments": {"t": "x}\n</tool_calls>'
    turn = parser.parse(f"{unclosed}One.{unclosed}Two.")
    assert (outcomes(turn), turn.content) == ([("bad", None)] * 2, "One.\nTwo.")
    turn = parser.parse(f"<tool_calls>\n{rows[1]}\n")
    assert turn.tool_calls == ()
    assert "never closed" in turn.errors[0]
    assert "must hold a call" in parser.parse("<tool_calls></tool_calls>").errors[0]


@ALL
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_stream_is_the_whole_text(name: str, data: st.DataObject) -> None:
    """However a text of the format's pieces is cut, deltas and finished turn are those of the whole text; none raises."""
    tags = FORMATS[name]
    pieces = [tags.begin.strip(), tags.call[0] + "f", tags.call[1], *tags.parameter[:2], tags.parameter[2].strip()]
    pieces += [tags.call_end.strip(), tags.end, *tags.think, good(tags), "k", "1", " ", "\n", "<", ">"]
    if name == "minimax":
        pieces += ["<tool_calls>", "</tool_calls>", '{"name": "f", "arguments": {}}', '"', "{"]
    chunks = data.draw(st.lists(st.lists(st.sampled_from(pieces), max_size=4).map("".join), max_size=10))
    if data.draw(st.booleans()):
        chunks = list("".join(chunks))
    options = {"in_reasoning": data.draw(st.booleans()), "late_reasoning": data.draw(st.booleans())}
    whole = get_parser(name).parse("".join(chunks), **options)
    for call in whole.tool_calls:
        assert (call.error is None) == (call.arguments is not None)
    stream = get_parser(name).stream(**options)
    deltas = [delta for chunk in chunks for delta in stream.feed(chunk)]
    assert stream.finish() == whole
    assert assemble([*deltas, *stream.drain()]) == whole


@ALL
def test_hostile_texts_are_read_once(name: str) -> None:
    """Openers that nest deep, and values that end nowhere, are read in one pass: rereading would take minutes."""
    tags, parser = FORMATS[name], get_parser(name)
    opened = f"{tags.begin}{tags.call[0]}f{tags.call[1]}{tags.parameter[0]}k{tags.parameter[1]}"
    for piece in (opened, opened + tags.end, tags.begin, tags.parameter[2] + " ", opened + good(tags), tags.think[0]):
        number = 200_000 // len(piece)
        for text in (piece * number, opened + piece * number):
            turn = parser.parse(text)
            assert turn.errors or turn.tool_calls or turn.content


@ALL
def test_calls_in_values_are_not_copied(name: str) -> None:
    """Whole calls that stand deep in one another's values are one call; copying each of them would take minutes."""
    tags, depth = FORMATS[name], 40_000
    opening = tags.begin + tags.call[0] + "f" + tags.call[1] + tags.parameter[0] + "a" + tags.parameter[1]
    closing = tags.parameter[2] + tags.call_end + tags.end
    (call,) = get_parser(name).parse(opening * depth + "x" + closing * depth).tool_calls
    assert call.arguments == {"a": (opening * (depth - 1) + "x" + closing * (depth - 1))}


@ALL
def test_a_parameter_that_is_there_twice_is_named(name: str) -> None:
    """Of thousands of parameters the one that is repeated is named in the error."""
    tags = FORMATS[name]
    opening, keyed, closing = tags.parameter
    keys = [*(f"k{index}" for index in range(5000)), "k77"]
    parameters = "".join(f"{opening}{key}{keyed}1{closing}\n" for key in keys)
    (call,) = (
        get_parser(name).parse(tags.section(f"{tags.call[0]}f{tags.call[1]}\n{parameters}{tags.call_end}")).tool_calls
    )
    assert call.error is not None
    assert "got k77 more often" in call.error
