"""The hermes parser: strings are text, drafts are not calls, errors are values, time is linear."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_tools import HermesParser, ParsedTurn, UnknownParserError, get_parser

PARSER = get_parser("hermes")


def call(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def names(turn: ParsedTurn) -> list[str]:
    return [item.name for item in turn.tool_calls if item.error is None]


SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
)
HARD_TEXT = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "<think>", "</think>", '"', "\\", "{", "}", "<|im_end|>", "\n", "é", "😀"]
    )
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    max_size=6,
).map("".join)
VALUES = st.recursive(
    SCALARS | HARD_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(HARD_TEXT, inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(HARD_TEXT, VALUES, max_size=4)
NAMES = HARD_TEXT.filter(bool)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_rendered_calls_come_back(calls: list[tuple[str, dict]], ascii_only: bool, reasoned: bool) -> None:
    """Any calls, rendered and parsed, are the same calls in order with distinct ids and exact raw arguments."""
    bodies = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii_only) for name, arguments in calls]
    text = "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies) + "<|im_end|>"
    if reasoned:
        text = "<think>\nwhy not\n</think>\n\n" + text
    turn = PARSER.parse(text, id_prefix="turn0_")
    assert [(item.name, item.arguments) for item in turn.tool_calls] == calls
    assert [item.error for item in turn.tool_calls] == [None] * len(calls)
    assert [item.id for item in turn.tool_calls] == [f"turn0_{index}" for index in range(len(calls))]
    assert [json.loads(item.raw_arguments) for item in turn.tool_calls] == [arguments for _, arguments in calls]
    assert all(item.raw_arguments in body for item, body in zip(turn.tool_calls, bodies, strict=True))
    assert turn.content == ""
    assert turn.errors == ()
    assert turn.reasoning == ("why not" if reasoned else None)


SHARED = Path(os.environ.get("OSTINATO_SHARED") or Path(__file__).parents[3] / "shared")
TEMPLATES = ["qwen/chat_template_qwen2.5.jinja", "qwen/chat_template_qwen3.jinja", "qwen/chat_template_qwq.jinja"]


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=50, deadline=None)
@given(calls=st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3))
def test_calls_rendered_by_real_templates_come_back(template: str, calls: list[tuple[str, dict]]) -> None:
    """What a public template of this format writes for an assistant turn parses back to the same calls."""
    sandbox = pytest.importorskip("jinja2.sandbox", reason="jinja2 is not installed")
    path = SHARED / "tokenizers" / template
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    tool_calls = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    # These templates write the name between quotes as it is, so a name that JSON would escape is out of their reach.
    tool_calls = [item for item in tool_calls if json.dumps(item["function"]["name"])[1:-1] == item["function"]["name"]]
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Prose.", "tool_calls": tool_calls}]
    text = environment.from_string(path.read_text(encoding="utf-8")).render(messages=messages, tools=None)
    turn = PARSER.parse(text.rpartition("<|im_start|>assistant\n")[2])
    assert [{"name": item.name, "arguments": item.arguments} for item in turn.tool_calls] == [
        item["function"] for item in tool_calls
    ]
    assert (turn.content, turn.errors) == ("Prose.", ())


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "{",
        "}",
        "[",
        '"',
        "\\",
        '\\"',
        ":",
        ",",
        "<",
        "a",
        " ",
        "\n",
        '{"name": "f", "arguments": {}}',
        '"name"',
        "<|im_end|>",
        "\ud800",
        "9" * 30,
    ]
)


@settings(max_examples=500, deadline=None)
@given(st.lists(FRAGMENTS, max_size=40).map("".join), st.booleans())
def test_any_text_gives_a_turn(text: str, in_reasoning: bool) -> None:
    """No text raises; a call is either well-formed or carries an error; ids are distinct."""
    turn = PARSER.parse(text, in_reasoning=in_reasoning)
    for item in turn.tool_calls:
        assert (item.error is None) == (item.arguments is not None)
        assert item.error is not None or item.name
    assert len({item.id for item in turn.tool_calls}) == len(turn.tool_calls)


def test_tags_in_strings_are_text() -> None:
    """Closing and opening tags inside a JSON string belong to the string."""
    text = "a </tool_call> b <tool_call> c </think> d <think>"
    turn = PARSER.parse(call("write", {"text": text}))
    assert [item.arguments for item in turn.tool_calls] == [{"text": text}]
    assert turn.errors == ()
    assert turn.reasoning is None


def test_drafts_in_reasoning_are_not_run() -> None:
    """Calls inside reasoning, opened by the model or by the prompt, are not calls."""
    real, draft = call("b", {}), call("a", {})
    turn = PARSER.parse(f"<think>maybe {draft}</think>\n{real}")
    assert (names(turn), turn.reasoning, turn.errors) == (["b"], f"maybe {draft}", ())
    for thought in (
        f"maybe {draft}",
        "use the <tool_call> tag",
        'the "<tool_call>" tag',
        '<tool_call>{"name": </tool_call>',
    ):
        for in_reasoning in (False, True):
            turn = PARSER.parse(f"{thought}</think>\n\nAnswer\n{real}", in_reasoning=in_reasoning)
            assert (names(turn), turn.reasoning, turn.content, turn.errors) == (["b"], thought, "Answer", ())
            assert len(turn.tool_calls) == 1


def test_unclosed_reasoning_has_no_call() -> None:
    """Reasoning that is never closed is an error value and runs nothing."""
    turn = PARSER.parse("before<think>maybe " + call("a", {}))
    assert turn.tool_calls == ()
    assert turn.content == "before"
    assert "never closed" in turn.errors[0]
    turn = PARSER.parse(call("a", {}), in_reasoning=True)
    assert turn.tool_calls == ()
    assert "never closed" in turn.errors[0]


@pytest.mark.parametrize("cut", range(1, len(call("f", {"x": "abc"}))))
def test_a_cut_call_is_never_run(cut: int) -> None:
    """A call cut at any character is no call; once its opening tag is there, it is an error value."""
    text = call("f", {"x": "abc"})[:cut]
    turn = PARSER.parse(text, end_tokens=())
    assert turn.tool_calls == ()
    assert bool(turn.errors) == (cut >= len("<tool_call>"))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"name": "f", "arguments": {"x": 1}', "ends too early"),
        ('{"name": "f", "arguments": [1, 2]}', "got an array"),
        ('{"name": "f", "arguments": "text"}', "got a string"),
        ('{"name": "f", "arguments": null}', "got null"),
        ('{"name": "f", "arguments": 7}', "got a number"),
        ('{"name": "f", "arguments": {"x": 1}} trailing', "trailing characters at character"),
        ('{"name": "f", "arguments": {"x": NaN}}', "at character 34"),
        ('{"name": "f", "arguments": {"x": 1e999}}', "out of range"),
        ("{'name': 'f'}", "at character 2"),
        ('{"name": "f"}', "arguments"),
        ('{"arguments": {}}', "name"),
        ('{"name": "", "arguments": {}}', "must not be empty"),
        ('{"name": 3, "arguments": {}}', "name"),
        ('["f", {}]', "array"),
        ("", "empty"),
        ('{"name": "f", "arguments": {"x": "oops}}', "ends too early"),
        ('{"name": "f", "arguments": {"x": "a\nb"}}', "at character"),
        ('{"name": "f", "arguments": ' + "[" * 100_000, "too deeply"),
        ('{"name": <f>, "arguments": {}}', "at character 10"),
    ],
)
def test_a_malformed_call_leaves_its_siblings(body: str, said: str) -> None:
    """A malformed call is a call with an error that says where; the calls around it are unharmed."""
    turn = PARSER.parse(f"{call('a', {'k': 'v'})}\n<tool_call>\n{body}\n</tool_call>\n{call('b', {'k': 'v'})}")
    assert names(turn) == ["a", "b"]
    first, bad, last = turn.tool_calls
    assert (first.id, bad.id, last.id) == ("call_0", "call_1", "call_2")
    assert bad.arguments is None
    assert bad.error is not None
    assert said in bad.error
    assert turn.errors == ()


def test_a_malformed_call_keeps_its_name_and_text() -> None:
    """The name is read where it can be, and the raw text is what was sampled."""
    body = '{"name": "f", "arguments": {"x": 1}'
    (bad,) = PARSER.parse(f"<tool_call>{body}</tool_call>").tool_calls
    assert (bad.name, bad.raw_arguments) == ("f", body)


def test_an_unclosed_call_leaves_the_next_one() -> None:
    """A call that is still open where another begins is an error value; the other one is a call."""
    turn = PARSER.parse('<tool_call>\n{"name": "a", "arguments": {"x": 1}\n' + call("b", {}))
    assert names(turn) == ["b"]
    assert len(turn.errors) == 1


def test_a_quoted_closing_tag_in_a_malformed_call_is_still_inside() -> None:
    """A malformed call ends at its own closing tag, not at one that its strings quote."""
    turn = PARSER.parse('<tool_call>{"name": "f", "arguments": {"x": "raw\nline </tool_call> on"}}</tool_call> bye')
    assert [item.name for item in turn.tool_calls] == ["f"]
    assert turn.tool_calls[0].error is not None
    assert (turn.content, turn.errors) == ("bye", ())


def test_prose_is_kept() -> None:
    """Prose before, between and after calls is content; two calls of one tool keep their own arguments."""
    turn = PARSER.parse(f"One.\n{call('f', {'x': 1})}\nTwo.\n{call('f', {'x': 2})}\nThree.<|im_end|>\n")
    assert turn.content == "One.\nTwo.\nThree."
    assert [item.arguments for item in turn.tool_calls] == [{"x": 1}, {"x": 2}]


def test_plain_content_is_exact() -> None:
    """Without tags the content is the text to the character, end tokens and what follows them apart."""
    assert PARSER.parse("  indented \n").content == "  indented \n"
    assert PARSER.parse("  indented \n<|im_end|>\n").content == "  indented \n"
    assert PARSER.parse("a<|im_end|><|endoftext|>").content == "a"
    assert PARSER.parse("a<|im_end|>b").content == "a<|im_end|>b"
    assert PARSER.parse("a<end>", end_tokens=("<end>", "")).content == "a"
    assert PARSER.parse("").content == ""


def test_types_stay() -> None:
    """JSON types are kept: "5" is not 5, true is not "true", and no character is lost."""
    arguments = {"a": "5", "b": 5, "c": 5.0, "d": True, "e": None, "f": "    if x:\n        y\n", "g": "&lt; \\u00e9"}
    (item,) = PARSER.parse(call("f", arguments)).tool_calls
    assert item.arguments == arguments
    assert [type(value) for value in item.arguments.values()] == [type(value) for value in arguments.values()]


def test_a_missing_opening_tag_is_an_error() -> None:
    """A closing tag without an opening one is an error value, not a silent end."""
    turn = PARSER.parse('{"name": "f", "arguments": {}}\n</tool_call>')
    assert turn.tool_calls == ()
    assert "</tool_call>" in turn.errors[0]


@pytest.mark.parametrize(
    "unit",
    [
        "<tool_call>",
        '<tool_call>{"',
        '<tool_call>{"</tool_call>"',
        '<tool_call>"\\"</tool_call>',
        '<tool_call>"</tool_call>',
        '<tool_call>{"x</tool_call>',
        "<tool_call><",
        "<tool_call>[",
        "[",
        "</tool_call>",
        "<think>",
        "</think>",
        "<think></think>",
    ],
)
@pytest.mark.timeout(60)
def test_hostile_text_ends(unit: str) -> None:
    """A megabyte of tags, quotes or brackets is parsed; at quadratic cost this would take hours."""
    PARSER.parse(unit * (1_000_000 // len(unit)))
    PARSER.parse("<tool_call>" + unit * (1_000_000 // len(unit)) + "</tool_call>")


def test_lookup() -> None:
    """Parsers are found by name; an unknown name lists those known."""
    assert isinstance(get_parser("hermes"), HermesParser)
    assert PARSER.stop_tokens == ()
    with pytest.raises(UnknownParserError, match="hermes"):
        get_parser("nope")
