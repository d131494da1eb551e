"""What every format keeps: calls come back, drafts and cut calls do not run, siblings are unharmed, streams are whole texts."""

import json
import re
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_tools import ParsedTurn, ToolParser
from ostinato_tools.errors import ParserInputError
from ostinato_tools.parsers import PARSERS, CallDelta, ContentDelta, Format, ReasoningDelta, TagFormat, get_parser
from ostinato_tools.parsers.base import assemble

Call = tuple[str, dict]


def in_tags(opening: str, closing: str, write: Callable[[int, str, dict], str], between: str = "") -> Callable:
    """Make a renderer of calls that stand in a section."""
    return lambda calls: opening + between.join(write(i, *call) for i, call in enumerate(calls)) + closing


def text_of(value: object) -> str:
    """Write a value as formats do whose arguments are text."""
    return value if isinstance(value, str) else json.dumps(value)


def gemma4_value(value: object) -> str:
    """Write a value as Gemma 4 does."""
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def parameters(arguments: dict, form: str, write: Callable[[object], str] = text_of) -> str:
    """Write arguments one after the other, by a form with {key} and {value}."""
    return "".join(form.format(key=key, value=write(value)) for key, value in arguments.items())


XML = "<function={name}>\n{parameters}</function>\n"
RENDERERS: dict[str, Callable[[Sequence[Call]], str]] = {
    "deepseek_v3": in_tags(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        lambda _, name, given: f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(given)}<｜tool▁call▁end｜>",
    ),
    "gemma4": in_tags(
        "",
        "",
        lambda _, name, given: (
            f"<|tool_call>call:{name}{{{parameters(given, '{key}:{value},', gemma4_value)[:-1]}}}<tool_call|>"
        ),
    ),
    "glm": in_tags(
        "",
        "",
        lambda _, name, given: (
            f"<tool_call>{name}\n"
            + parameters(given, "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n")
            + "</tool_call>"
        ),
        "\n",
    ),
    "gpt_oss": in_tags(
        "<|channel|>commentary",
        "<|call|>",
        lambda _, name, given: f" to=functions.{name} <|constrain|>json<|message|>{json.dumps(given)}",
        "<|call|><|start|>assistant<|channel|>commentary",
    ),
    "hermes": in_tags(
        "<tool_call>\n",
        "\n</tool_call>",
        lambda _, name, given: json.dumps({"name": name, "arguments": given}),
        "\n</tool_call>\n<tool_call>\n",
    ),
    "kimi_k2": in_tags(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        lambda index, name, given: (
            f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json.dumps(given)}<|tool_call_end|>"
        ),
    ),
    "llama3_json": in_tags("", "", lambda _, name, given: json.dumps({"name": name, "parameters": given}), "; "),
    "minimax": in_tags(
        "<minimax:tool_call>\n",
        "</minimax:tool_call>",
        lambda _, name, given: (
            f'<invoke name="{name}">\n'
            + parameters(given, '<parameter name="{key}">{value}</parameter>\n')
            + "</invoke>\n"
        ),
    ),
    "mistral": in_tags("", "", lambda _, name, given: f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}"),
    "pythonic": in_tags(
        "[", "]", lambda _, name, given: f"{name}({parameters(given, '{key}={value}, ', repr)[:-2]})", ", "
    ),
    "qwen3_coder": in_tags(
        "",
        "",
        lambda _, name, given: (
            "<tool_call>\n"
            + XML.format(name=name, parameters=parameters(given, "<parameter={key}>\n{value}\n</parameter>\n"))
            + "</tool_call>"
        ),
        "\n",
    ),
    "seed_oss": in_tags(
        "",
        "",
        lambda _, name, given: (
            "<seed:tool_call>\n"
            + XML.format(name=name, parameters=parameters(given, "<parameter={key}>{value}</parameter>\n"))
            + "</seed:tool_call>"
        ),
        "\n",
    ),
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "integer"}, "y": {"type": "string"}, "z": {"type": ["boolean", "null"]}},
            },
        },
    }
    for name in ("f", "g")
]
ONE: list[Call] = [("f", {"x": 5, "y": "5"})]
TWO: list[Call] = [("f", {"x": 1, "y": "a"}), ("f", {"x": 2})]
GPT_OSS_ANSWER = "<|start|>assistant<|channel|>final<|message|>"
every_format = pytest.mark.parametrize("name", sorted(PARSERS))
every_tag_format = pytest.mark.parametrize(
    "name", sorted(name for name in PARSERS if isinstance(get_parser(name), TagFormat))
)


def parse(name: str, text: str, **options: object) -> ParsedTurn:
    """Parse a text under the tools of these tests."""
    return get_parser(name).parse(text, TOOLS, **options)  # type: ignore[arg-type]


def calls_of(turn: ParsedTurn) -> list[Call]:
    """Return the good calls of a turn."""
    return [(call.name, call.arguments) for call in turn.tool_calls if call.arguments is not None]


def test_every_format_is_here() -> None:
    """These tests know how to write calls in every registered format."""
    assert sorted(RENDERERS) == sorted(PARSERS)


ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "x": st.integers(-(2**60), 2**60),
        "y": st.text(st.characters(categories=["L", "N"]), min_size=1) | st.sampled_from(["5", "null", "true", "[1]"]),
        "z": st.booleans() | st.none(),
    },
)


@every_format
@settings(max_examples=60, deadline=None)
@given(given_calls=st.lists(st.tuples(st.sampled_from("fg"), ARGUMENTS), min_size=1, max_size=4))
def test_calls_come_back(name: str, given_calls: list[Call]) -> None:
    """Calls are the same again, in order, each with its own arguments and types and an id of its own."""
    turn = parse(name, RENDERERS[name](given_calls), id_prefix="turn3_")
    assert calls_of(turn) == given_calls
    assert [type(value) for _, made in calls_of(turn) for value in made.values()] == [
        type(value) for _, made in given_calls for value in made.values()
    ]
    assert all(call.error is None for call in turn.tool_calls)
    assert len({call.id for call in turn.tool_calls}) == len(given_calls)
    assert (turn.content, turn.reasoning, turn.errors) == ("", None, ())


@every_format
def test_ids_belong_to_the_turn(name: str) -> None:
    """Another prefix gives other ids, unless the model itself wrote them."""
    text = RENDERERS[name](TWO)
    first, second = (parse(name, text, id_prefix=prefix).tool_calls for prefix in ("turn0_", "turn1_"))
    if name == "kimi_k2":
        assert [call.id for call in first] == ["functions.f:0", "functions.f:1"]
    else:
        assert not {call.id for call in first} & {call.id for call in second}


@every_format
def test_a_cut_call_is_never_another_call(name: str) -> None:
    """A call cut at any character runs as it was, or not at all; where anything of it was there, that is an error."""
    text = RENDERERS[name](ONE)
    for cut in range(len(text)):
        turn = parse(name, text[:cut], end_tokens=())
        assert calls_of(turn) in ([], ONE)
        if not calls_of(turn) and not turn.content:
            assert cut == 0 or turn.errors or any(call.error for call in turn.tool_calls)


@every_tag_format
@pytest.mark.parametrize("opened", ["model", "prompt", "prompt, not told"])
def test_drafts_in_reasoning_do_not_run(name: str, opened: str) -> None:
    """A call in reasoning is a draft, whoever opened the reasoning; the call behind it runs."""
    (opening, closing), *_ = get_parser(name).reasoning_tags  # type: ignore[attr-defined]
    draft, real = RENDERERS[name]([("f", {"x": 1})]), RENDERERS[name]([("g", {"x": 2})])
    for thought in (f"maybe\n{draft}", draft, draft[: len(draft) * 2 // 3], f"{draft}\nand {draft}"):
        text = f"{opening if opened == 'model' else ''}{thought}{closing}\n\n{real}"
        turn = parse(name, text, in_reasoning=opened == "prompt")
        assert calls_of(turn) == [("g", {"x": 2})]
        assert (turn.reasoning, turn.content, turn.errors) == (thought.strip("\n"), "", ())
        assert len(turn.tool_calls) == 1


@every_tag_format
@pytest.mark.parametrize("opened", ["model", "prompt"])
def test_unclosed_reasoning_runs_nothing(name: str, opened: str) -> None:
    """Reasoning that is never closed is an error, and no call in it runs."""
    opening = get_parser(name).reasoning_tags[0][0]  # type: ignore[attr-defined]
    text = "Let me see. " + RENDERERS[name](ONE)
    turn = parse(name, (opening if opened == "model" else "") + text, in_reasoning=opened == "prompt")
    assert turn.tool_calls == ()
    assert (turn.content, turn.reasoning) == ("", text)
    assert "never closed" in turn.errors[0]


@every_tag_format
@pytest.mark.parametrize("opened", ["model", "prompt", "prompt, not told"])
def test_calls_in_reasoning_count_if_asked(name: str, opened: str) -> None:
    """With `calls_in_reasoning` a call in tags counts wherever it stands; the reasoning around it stays reasoning."""
    (opening, closing), *_ = get_parser(name).reasoning_tags  # type: ignore[attr-defined]
    first, last = {"llama3_json": ("<|python_tag|>", ""), "pythonic": ("<|tool_call_start|>", "<|tool_call_end|>")}.get(
        name, ("", "")
    )
    inner, real = f"{first}{RENDERERS[name](ONE)}{last}", RENDERERS[name]([("g", {"x": 2})])
    text = f"{opening if opened == 'model' else ''}so be it {inner} and on{closing}{real}"
    turn = parse(name, text, in_reasoning=opened == "prompt", calls_in_reasoning=True)
    assert calls_of(turn) == [*ONE, ("g", {"x": 2})]
    assert len({call.id for call in turn.tool_calls}) == 2
    assert (turn.content, turn.errors) == ("", ())
    assert (turn.reasoning or "").startswith("so be it ")
    assert (turn.reasoning or "").endswith(" and on")
    assert calls_of(parse(name, text, in_reasoning=opened == "prompt")) == [("g", {"x": 2})]


@every_format
def test_a_format_names_what_opens_reasoning(name: str) -> None:
    """A prompt that ends with one of `reasoning_openers` has opened reasoning: what the turn begins with is reasoning."""
    parser = get_parser(name)
    assert isinstance(parser, Format)
    assert parser.reasoning_openers
    assert parse(name, "so be it", in_reasoning=True).reasoning == "so be it"
    for opener in parser.reasoning_openers:
        assert parse(name, opener + "so be it").reasoning == "so be it"


@every_tag_format
def test_a_late_end_of_reasoning_can_be_an_error(name: str) -> None:
    """Without `late_reasoning` a closing tag of reasoning that nothing opened is an error, and the calls before it run."""
    closing = get_parser(name).reasoning_tags[0][1]  # type: ignore[attr-defined]
    turn = parse(name, f"{RENDERERS[name](ONE)}{closing} bye", late_reasoning=False)
    assert calls_of(turn) == ONE
    assert "closes nothing" in turn.errors[0]
    assert turn.reasoning is None


BROKEN = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"x": }}\n</tool_call>',
    "mistral": '[TOOL_CALLS]f[ARGS]{"x": }',
    "deepseek_v3": '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1<｜tool▁call▁end｜>',
    "kimi_k2": '<|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>{"x": 1<|tool_call_end|>',
    "gpt_oss": '<|channel|>commentary to=functions.f<|message|>{"x": 1<|call|><|start|>assistant',
}


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_broken_call_leaves_its_sibling(name: str) -> None:
    """A malformed call is a call with an error and its name; the call behind it runs."""
    turn = parse(name, BROKEN[name] + RENDERERS[name](ONE))
    bad, good = turn.tool_calls
    assert (bad.name, bad.arguments, good.name, good.arguments) == ("f", None, *ONE[0])
    assert bad.error is not None
    assert "not valid JSON" in bad.error
    assert '"x"' in bad.raw_arguments
    assert turn.errors == ()


PIECES = [
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
    ";",
    "é",
    "😀",
]
PIECES += ['{"name": "f", "arguments": {"x": 1}}', '{"name": "f", "parameters": {}}', '{"x": "a"}', "[f(x=1)]", "[f("]
SPECIAL = {
    "deepseek_v3": ["<｜tool▁sep｜>", "function<｜tool▁sep｜>f\n```json\n", "\n```"],
    "gemma4": ["call:f{", '<|"|>'],
    "glm": ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "gpt_oss": [
        "<|start|>",
        "assistant",
        "<|channel|>",
        "analysis",
        "final",
        " to=functions.f",
        "<|message|>",
        "<|end|>",
    ],
    "kimi_k2": ["<|tool_call_argument_begin|>", "functions.f:0"],
    "minimax": [
        '<invoke name="f">',
        "</invoke>",
        '<parameter name="x">',
        "</parameter>",
        "<tool_calls>",
        "</tool_calls>",
    ],
    "mistral": ["[ARGS]", "[CALL_ID]", "abcdefghi"],
    "qwen3_coder": ["<function=f>", "</function>", "<parameter=x>", "</parameter>"],
    "seed_oss": ["<function=f>", "</function>", "<parameter=x>", "</parameter>"],
}


def tags_of(parser: ToolParser) -> list[str]:
    """Return the tags of a format."""
    tags = [tag for kind in ("openers", "closers", "end_tokens") for tag in getattr(parser, kind, ())]
    tags += [tag for pair in getattr(parser, "reasoning_tags", ()) for tag in pair]
    return tags + SPECIAL.get(parser.name, [])


def fragments(name: str) -> list[str]:
    """Tags of a format, whole and cut, calls, and what stands between them."""
    cut = [part for tag in tags_of(get_parser(name)) for part in (tag, tag, tag[: len(tag) // 2], tag[len(tag) // 2 :])]
    return PIECES + cut + [RENDERERS[name](ONE), RENDERERS[name](TWO)] * 4


@every_format
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_stream_is_the_whole_text(name: str, data: st.DataObject) -> None:
    """For every text and every cut, the deltas together, and the finished turn, are the turn of the whole text."""
    parser = get_parser(name)
    text = "".join(data.draw(st.lists(st.sampled_from(fragments(name)), max_size=20)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    if data.draw(st.booleans()):
        cuts = list(range(len(text)))
    options = {key: data.draw(st.booleans()) for key in ("in_reasoning", "late_reasoning", "calls_in_reasoning")}
    options = data.draw(st.sampled_from([{}, options]))
    whole = parser.parse(text, TOOLS, **options)
    stream = parser.stream(TOOLS, **options)
    deltas = [
        delta
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)
        for delta in stream.feed(text[start:end])
    ]
    finished = stream.finish()
    deltas += stream.drain()
    assert finished == whole
    assert assemble(deltas) == whole
    assert stream.drain() == []


@every_format
def test_no_text_is_refused(name: str) -> None:
    """Text that is half a character, or control characters, gives a turn like any other."""
    for text in ("\ud800", "\x00\x1f", "\ud800".join(tags_of(get_parser(name)))):
        assert isinstance(parse(name, text), ParsedTurn)


@every_format
def test_a_stream_tells_early(name: str) -> None:
    """Content is told as it comes, and a call when it has ended: nothing waits for the end of the text."""
    stream = get_parser(name).stream(TOOLS, in_reasoning=False)
    intro = "<|channel|>final<|message|>" if name == "gpt_oss" else ""
    assert stream.feed(intro + "Hello") == [ContentDelta("Hello")]
    assert stream.feed(" world ") == [ContentDelta(" world")]
    stream = get_parser(name).stream(TOOLS, in_reasoning=False)
    told = stream.feed(RENDERERS[name](ONE) + "<")
    assert [(delta.call.name, delta.call.arguments) for delta in told if isinstance(delta, CallDelta)] == ONE


@given(
    st.lists(st.sampled_from(["[e~[", "<end>", "[", "e", "~", "<", "end>", " ", "\n", "x"]), max_size=12),
    st.lists(st.integers(1, 5), min_size=40, max_size=40),
)
def test_a_stream_takes_off_the_same_end(pieces: list[str], lengths: list[int]) -> None:
    """Whatever end tokens, parts of them and white space stand in and at the end of a text, streams take off the same."""
    text, tokens = "".join(pieces), ("[e~[", "<end>")
    stream = get_parser("hermes").stream(end_tokens=tokens)
    deltas, position = [], 0
    for length in [*lengths, len(text)]:
        deltas += stream.feed(text[position : position + length])
        position += length
    assert stream.finish() == get_parser("hermes").parse(text, end_tokens=tokens)
    assert assemble([*deltas, *stream.drain()]) == stream.finish()


def test_a_stream_waits_while_reasoning_may_still_turn_up() -> None:
    """Not told whether the prompt opened reasoning, a stream tells nothing before that is decided."""
    stream = get_parser("hermes").stream()
    assert stream.feed("so be it") == []
    assert stream.feed("</think>") == [ReasoningDelta(""), ReasoningDelta("so be it")]
    assert stream.feed("yes") == [ContentDelta("yes")]
    stream = get_parser("hermes").stream()
    assert stream.feed("so be it") == []
    assert stream.feed("<think>") == [ContentDelta("so be it"), ReasoningDelta("")]
    stream = get_parser("hermes").stream(in_reasoning=True)
    assert stream.feed("so be it") == [ReasoningDelta(""), ReasoningDelta("so be it")]


def test_a_stream_holds_back_end_tokens() -> None:
    """An end token is never told as content, however it is cut, unless text follows that makes it content."""
    stream = get_parser("hermes").stream(in_reasoning=False)
    assert stream.feed("a<|im_") == [ContentDelta("a")]
    assert stream.feed("end|>\n<|im_end|>") == []
    assert stream.feed("b<|im_end|>\n") == [ContentDelta("<|im_end|>\n<|im_end|>b")]
    assert stream.finish().content == "a<|im_end|>\n<|im_end|>b"
    for tokens in (("<end>", "<end><end>"), ("ab", "ba"), ("aa",), ("\n<end>",)):
        with pytest.raises(ParserInputError, match="overlap"):
            get_parser("hermes").stream(end_tokens=tokens)
    with pytest.raises(ParserInputError, match="after finish"):
        stream.feed("c")


@every_format
@pytest.mark.timeout(120)
def test_hostile_text_ends(name: str) -> None:
    """Tens of kilobytes of any tag with what opens strings and brackets behind it are parsed, whole and as a stream;
    at quadratic cost this would take minutes (growth itself is measured by the benchmark)."""
    parser = get_parser(name)
    tags = tags_of(parser)
    for tag in tags:
        for behind in ("", '"', '{"', '{"name": "', "[f('"):
            unit = tag + behind
            parser.parse(tags[0] + unit * (60_000 // len(unit)), TOOLS)
    stream = parser.stream(TOOLS)
    for _ in range(50_000):
        stream.feed("{")
    stream.finish()
    stream = parser.stream(TOOLS)
    stream.feed(RENDERERS[name]([("f", {"y": "Q"})]).partition("Q")[0])
    for _ in range(50_000):
        stream.feed("ab")
    assert not any(isinstance(delta, CallDelta) for delta in stream.drain())
    stream.finish()


def test_formats_are_made_of_few_parts() -> None:
    """A format of one's own needs tags and how to read one call; the rest is shared."""

    class Shout(TagFormat):
        name = "shout"
        openers = ("CALL ",)

        def read_call(self, turn, opener):
            start = turn.position
            turn.position = yield from turn.word_end(re.compile("[a-z]{0,20}"), start)
            turn.add_call(turn.text[start : turn.position], {}, "")

    turn = Shout().parse("<think>CALL no</think>CALL home")
    assert calls_of(turn) == [("home", {})]
    assert isinstance(Shout(), Format)


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("text", [None, b"bytes", [1, 2, 3]])
def test_what_is_no_text_is_refused(name: str, text: object) -> None:
    """Bytes and token ids in place of text are an error of the caller's, which says what to pass."""
    with pytest.raises(ParserInputError, match=r"text must be a string, got .*; decode token ids"):
        get_parser(name).parse(text)  # type: ignore[arg-type]
    with pytest.raises(ParserInputError, match=r"text must be a string, got .*; decode token ids"):
        get_parser(name).stream().feed(text)  # type: ignore[arg-type]
