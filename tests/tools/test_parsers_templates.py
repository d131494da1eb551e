"""Parsers and real chat templates: which format a template writes, and calls that come back from what it writes."""

import functools
import json
import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_tools import ParsedTurn, UnknownParserError
from ostinato_tools.errors import ParserInputError
from ostinato_tools.parsers import PARSERS, get_parser, parser_for

SHARED = Path(os.environ.get("OSTINATO_SHARED") or Path(__file__).parents[3] / "shared")

FORMATS = {
    "Bielik-11B-v3.0-Instruct": "hermes",
    "ByteDance-Seed-OSS": "seed_oss",
    "GLM-4.6": "glm",
    "Kimi-K2-Instruct": "kimi_k2",
    "Kimi-K2-Thinking": "kimi_k2",
    "LFM2-8B-A1B": "pythonic",
    "LFM2.5-Instruct": "pythonic",
    "MiMo-VL": "hermes",
    "MiniMax-M1": "minimax",
    "MiniMax-M2": "minimax",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3-Coder": "qwen3_coder",
    "Reka-Edge": "hermes",
    "Spark2.5": "glm",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "deepseek_v3",
    "deepseek-ai-DeepSeek-V3.1": "deepseek_v3",
    "ibm-granite-granite-4.0": "hermes",
    "inclusionai-ling-3.0-flash": "glm",
    "llama-cpp-deepseek-r1": "deepseek_v3",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3_json",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3_json",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3_json",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "moonshotai-Kimi-K2": "kimi_k2",
    "openai-gpt-oss-120b": "gpt_oss",
    "poolside-Laguna-S-2.1": "glm",
    "poolside-Laguna-XS-2.1": "glm",
    "unsloth-mistral-Devstral-Small-2507": "mistral",
}
OTHERS = [  # public templates that write calls in no format of ours, or none at all
    "Apertus-8B-Instruct",
    "Apriel-1.6-15b-Thinker-fixed",
    "Cohere2MoE",
    "GigaChat3-10B-A1.8B",
    "NVIDIA-Nemotron-Nano-v2",
    "deepseek-ai-DeepSeek-V4",
    "fireworks-ai-llama-3-firefunction-v2",
    "google-gemma-2-2b-it",
    "ibm-granite-granite-3.3-2B-Instruct",
    "meetkai-functionary-medium-v3.1",
    "meetkai-functionary-medium-v3.2",
    "unsloth-Apriel-1.5",
]


def template(name: str) -> str:
    """Return the text of a public template; the test is skipped without it."""
    path = SHARED / "templates" / f"{name}.jinja"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "expected"), FORMATS.items())
def test_a_template_tells_its_format(name: str, expected: str) -> None:
    """Every public template that writes a known format is known to write that one."""
    assert parser_for(template(name)).name == expected


@pytest.mark.parametrize("name", OTHERS)
def test_a_template_of_another_format_is_refused(name: str) -> None:
    """A template that writes no known format is refused, with the known ones and the cure."""
    with pytest.raises(UnknownParserError, match=r"hermes, kimi_k2, .* name="):
        parser_for(template(name))
    assert parser_for(template(name), name="hermes").name == "hermes"


def test_small_templates_tell_their_format() -> None:
    """The marks of a format suffice; two formats in one template, no mark, and no text are errors that say what to do."""
    hermes = '<tool_call>\n{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}\n</tool_call>'
    assert parser_for(hermes).name == "hermes"
    with pytest.raises(UnknownParserError, match=r"several \(hermes, mistral\)"):
        parser_for(hermes + "[TOOL_CALLS]")
    with pytest.raises(UnknownParserError, match="no mark of any; pass"):
        parser_for("{{ messages }}")
    with pytest.raises(UnknownParserError, match="correct the format"):
        parser_for(hermes, name="nope")
    with pytest.raises(ParserInputError, match="got dict"):
        parser_for({"default": hermes})  # type: ignore[arg-type]


def test_every_format_can_be_told() -> None:
    """Every registered format has a template or marks by which it is found, and is registered under its own name."""
    assert sorted({*FORMATS.values(), "gemma4"}) == sorted(PARSERS)
    assert all(get_parser(name).name == name for name in PARSERS)


NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.\-]{0,20}", fullmatch=True)
TAGS = [
    "</tool_call>",
    "<tool_call>",
    "<think>",
    "</think>",
    "<|tool_call_end|>",
    "<｜tool▁call▁end｜>",
    "<|python_tag|>",
]
MARKS = ["[TOOL_CALLS]", "[ARGS]", "<|eot_id|>", "</s>", "```", '"', "'", "\\", "{", "}", "[", "]", ";", "\n", " "]
TEXTS = st.lists(
    st.sampled_from([*TAGS, *MARKS]) | st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=6
).map("".join)
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    SCALARS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(TEXTS, VALUES, max_size=4)), min_size=1, max_size=3)


@functools.cache
def compiled(name: str) -> Any:
    """Return a template, compiled as chat templates are."""
    sandbox = pytest.importorskip("jinja2.sandbox", reason="jinja2 is not installed")
    ext = pytest.importorskip("jinja2.ext")

    class Generation(ext.Extension):
        """The block around what the assistant says, which marks and prints nothing."""

        tags: ClassVar = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = sandbox.SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = lambda value, ensure_ascii=False, **_: json.dumps(value, ensure_ascii=ensure_ascii)
    environment.globals["strftime_now"] = lambda _format: "2026-01-01"
    return environment.from_string(template(name))


def rendered_turn(source: Any, calls: list[tuple[str, dict]], content: str | None, **options: Any) -> str:
    """Return what a template writes for an assistant turn, its header included."""
    as_text = options.pop("as_text", False)
    options.setdefault("tools", None)
    tool_calls = [
        {
            "id": f"abcdefg{index:02}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments) if as_text else arguments},
        }
        for index, (name, arguments) in enumerate(calls)
    ]
    messages = [{"role": "user", "content": "q"}]
    before = source.render(messages=messages, **options)
    messages.append({"role": "assistant", "content": content, "tool_calls": tool_calls})
    after = source.render(messages=messages, **options)
    assert after.startswith(before)
    return after[len(before) :]


def check_round_trip(
    name: str, calls: list[tuple[str, dict]], *, content: str | None = "Prose.", header: str = "", **options: Any
) -> ParsedTurn:
    """Render calls with a template, parse what it wrote, and compare."""
    text = rendered_turn(compiled(name), calls, content, bos_token="", **options)
    assert text.startswith(header)
    turn = get_parser(FORMATS[name]).parse(text[len(header) :])
    assert [(call.name, call.arguments) for call in turn.tool_calls] == calls
    assert [call.error for call in turn.tool_calls] == [None] * len(calls)
    assert len({call.id for call in turn.tool_calls}) == len(calls)
    assert turn.errors == ()
    for call, (_, arguments) in zip(turn.tool_calls, calls, strict=True):
        assert json.dumps(call.arguments) == json.dumps(arguments)  # types too: 1 is not 1.0 and not True
    return turn


HERMES = sorted(name for name, known in FORMATS.items() if known == "hermes")
EXAMPLES = settings(max_examples=25, deadline=None)


@pytest.mark.parametrize("name", HERMES)
@EXAMPLES
@given(calls=CALLS)
def test_hermes_templates(name: str, calls: list[tuple[str, dict]]) -> None:
    """Calls that templates of the hermes format write come back the same."""
    check_round_trip(name, calls, eos_token="<end>", tools=[])


@pytest.mark.parametrize("name", ["Kimi-K2-Instruct", "Kimi-K2-Thinking", "moonshotai-Kimi-K2"])
@EXAMPLES
@given(calls=CALLS)
def test_kimi_templates(name: str, calls: list[tuple[str, dict]]) -> None:
    """Calls that Kimi's templates write come back the same, with the ids that the template gave them."""
    turn = check_round_trip(name, calls)
    ids = [f"functions.{name}:{index}" for index, (name, _) in enumerate(calls)]
    assert [call.id for call in turn.tool_calls] == ids


@EXAMPLES
@given(calls=CALLS, content=st.sampled_from([None, "Prose."]))
def test_deepseek_v3_1_template(calls: list[tuple[str, dict]], content: str | None) -> None:
    """Calls that DeepSeek V3.1's template writes come back the same, with the prose before them."""
    header = "<｜Assistant｜><think></think>"
    turn = check_round_trip("deepseek-ai-DeepSeek-V3.1", calls, content=content, header=header)
    assert turn.content == (content or "")


@EXAMPLES
@given(calls=CALLS)
def test_deepseek_r1_template(calls: list[tuple[str, dict]]) -> None:
    """Calls that templates of DeepSeek R1 write come back the same."""
    check_round_trip("llama-cpp-deepseek-r1", calls, content=None, header="<｜Assistant｜>")
    # This one ends the section, and the turn, behind every call but the first: a third would stand in another turn.
    name = "deepseek-ai-DeepSeek-R1-Distill-Llama-8B"
    check_round_trip(name, calls[:2], content=None, header="<｜Assistant｜>", as_text=True)


LLAMA_HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"


@pytest.mark.parametrize("name", sorted(name for name, known in FORMATS.items() if known == "llama3_json"))
@EXAMPLES
@given(calls=CALLS)
def test_llama_templates(name: str, calls: list[tuple[str, dict]]) -> None:
    """The call that Llama 3's templates write (they write one) comes back the same."""
    check_round_trip(name, calls[:1], header=LLAMA_HEADER)


@pytest.mark.parametrize("name", ["meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.3-70B-Instruct"])
def test_llama_built_in_tools(name: str) -> None:
    """Built-in tools are called behind the python tag; their calls come back, too."""
    calls = [("brave_search", {"query": "weather in Köln, today"})]
    check_round_trip(name, calls, header=LLAMA_HEADER, builtin_tools=["brave_search"])


@pytest.mark.parametrize("name", sorted(name for name, known in FORMATS.items() if known == "mistral"))
@EXAMPLES
@given(calls=CALLS)
def test_mistral_templates(name: str, calls: list[tuple[str, dict]]) -> None:
    """Calls that Mistral's templates write come back the same, with their ids where the template writes them."""
    turn = check_round_trip(name, calls, eos_token="</s>")
    if "Devstral" not in name:
        assert [call.id for call in turn.tool_calls] == [f"abcdefg{index:02}" for index in range(len(calls))]
    assert all(len(call.id) == 9 and call.id.isalnum() for call in turn.tool_calls)


@EXAMPLES
@given(calls=CALLS)
def test_lfm2_templates(calls: list[tuple[str, dict]]) -> None:
    """LFM2's templates write the content as it is: calls in it, spelled as Python spells them, come back the same."""
    calls = [(name, {f"a{index}": value for index, value in enumerate(given.values())}) for name, given in calls]
    written = [f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls]
    content = f"<|tool_call_start|>[{', '.join(written)}]<|tool_call_end|>"
    source = compiled("LFM2-8B-A1B")
    before, after = (
        source.render(messages=[{"role": "user", "content": "q"}, *more], tools=None, bos_token="")
        for more in ([], [{"role": "assistant", "content": content}])
    )
    turn = get_parser("pythonic").parse(after[len(before) :].removeprefix("<|im_start|>assistant\n"))
    assert [(call.name, call.arguments) for call in turn.tool_calls] == calls
    assert (turn.content, turn.errors) == ("", ())


# Formats whose arguments are text, typed by the tool's schema.

SCHEMAS = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}
SAFE_TEXTS = TEXTS.filter(lambda text: "<tool_call>" not in text)
"""No text that could begin a call: such a call is an error or the same (see the tests of those formats)."""
TYPED_VALUES = st.recursive(
    SCALARS | SAFE_TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SAFE_TEXTS, inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(NAMES, TYPED_VALUES, max_size=4)
TYPED_CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3, unique_by=lambda call: call[0])
CODE = ["    if x:\n        y\n", "\n", "", " a ", "5", "null", "True", "&lt;"]
TAGS_IN_TEXT = [
    "</parameter>",
    "</arg_value>",
    "</function> ",
    "</invoke>.",
    "</tool_call>",
    "<parameter=a>",
    "<arg_key>",
]


def typed_tools(calls: list[tuple[str, dict]]) -> list[dict]:
    """Return a tool for each call, with the types of its arguments."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "d",
                "parameters": {
                    "type": "object",
                    "properties": {
                        key: {"type": SCHEMAS.get(type(value), "object"), "description": "d"}
                        for key, value in arguments.items()
                    },
                },
            },
        }
        for name, arguments in calls
    ]


def check_typed_round_trip(name: str, calls: list[tuple[str, dict]]) -> None:
    """Render typed calls with reasoning, parse what the template wrote, and compare."""
    tools = typed_tools(calls)
    message = {"role": "assistant", "content": "Prose.", "reasoning_content": "why", "tool_calls": []}
    message["tool_calls"] = [
        {"type": "function", "function": {"name": called, "arguments": arguments}} for called, arguments in calls
    ]
    source, messages = compiled(name), [{"role": "user", "content": "q"}]
    options = {"tools": tools, "enable_thinking": True}
    before = source.render(messages=messages, **options)
    text = source.render(messages=[*messages, message], **options)[len(before) :]
    text = text[text.index("<think>") if "<think>why" in text or "<think>\nwhy" in text else 0 :]
    turn = get_parser(FORMATS[name]).parse(text, tools)
    assert [(call.name, call.arguments) for call in turn.tool_calls] == calls
    assert json.dumps([call.arguments for call in turn.tool_calls]) == json.dumps([arguments for _, arguments in calls])
    assert turn.errors == ()
    assert turn.content.endswith("Prose.")
    if name != "Qwen3-Coder":  # which writes no reasoning
        assert turn.reasoning == "why"


@pytest.mark.parametrize(
    "name", sorted(name for name, known in FORMATS.items() if known in ("qwen3_coder", "glm", "seed_oss"))
)
@EXAMPLES
@given(calls=TYPED_CALLS, more=st.lists(st.sampled_from([*CODE, *TAGS_IN_TEXT]), max_size=2))
def test_templates_of_typed_text(name: str, calls: list[tuple[str, dict]], more: list[str]) -> None:
    """Calls whose arguments templates write as text come back the same, with the types of the tool's schema."""
    calls[0][1].update({f"more_{index}": text for index, text in enumerate(more)})
    check_typed_round_trip(name, calls)


@EXAMPLES
@given(calls=TYPED_CALLS, more=st.lists(st.sampled_from([*CODE, *TAGS_IN_TEXT]), max_size=2))
def test_minimax_m2_template(calls: list[tuple[str, dict]], more: list[str]) -> None:
    """Calls that MiniMax M2's template writes into one section come back the same."""
    calls[0][1].update({f"more_{index}": text for index, text in enumerate(more)})
    check_typed_round_trip("MiniMax-M2", calls)


@EXAMPLES
@given(calls=CALLS)
def test_minimax_m1_template(calls: list[tuple[str, dict]]) -> None:
    """Calls that MiniMax M1's template writes as rows of JSON come back the same."""
    check_round_trip("MiniMax-M1", calls, header="<beginning_of_sentence>ai name=assistant\n")


@EXAMPLES
@given(calls=CALLS)
def test_gpt_oss_template(calls: list[tuple[str, dict]]) -> None:
    """The call that the template of gpt-oss writes (it writes one) comes back the same, with the analysis before it."""
    source = compiled("openai-gpt-oss-120b")
    name, arguments = calls[0]
    message = {
        "role": "assistant",
        "thinking": "why",
        "tool_calls": [{"function": {"name": name, "arguments": arguments}}],
    }
    messages = [{"role": "user", "content": "q"}]
    before = source.render(messages=messages, add_generation_prompt=True)
    after = source.render(messages=[*messages, message], add_generation_prompt=False)
    turn = get_parser("gpt_oss").parse(after[len(before) :])
    assert [(call.name, call.arguments) for call in turn.tool_calls] == [calls[0]]
    assert json.dumps(turn.tool_calls[0].arguments) == json.dumps(arguments)
    assert (turn.content, turn.reasoning, turn.errors) == ("", "why", ())
    final = source.render(messages=[*messages, {"role": "assistant", "thinking": "why", "content": " Hi.\n"}])
    turn = get_parser("gpt_oss").parse(final[len(before) :])
    assert (turn.content, turn.reasoning, turn.tool_calls, turn.errors) == (" Hi.\n", "why", (), ())
