"""The formats llama3_json, mistral, deepseek_v3 and kimi_k2: what is particular to each."""

import json

import pytest

from ostinato_tools import ParsedTurn
from ostinato_tools.parsers import get_parser

LLAMA, MISTRAL = get_parser("llama3_json"), get_parser("mistral")
DEEPSEEK, KIMI = get_parser("deepseek_v3"), get_parser("kimi_k2")


def good(turn: ParsedTurn) -> list[tuple[str, dict | None]]:
    """Return the calls of a turn that have no error."""
    return [(call.name, call.arguments) for call in turn.tool_calls if call.error is None]


def test_llama_calls_stand_at_the_beginning() -> None:
    """A call is read where content begins, behind another call, and behind the python tag, with "arguments" too."""
    for text in (
        '{"name": "f", "parameters": {"x": 1}}',
        '\n\n{"name": "f", "parameters": {"x": 1}}<|eom_id|>',
        '<|python_tag|>{"name": "f", "parameters": {"x": 1}}<|eot_id|>',
        '{"type": "function", "name": "f", "parameters": {"x": 1}}',
        '{"name": "f", "arguments": {"x": 1}}',
        '<think>{"name": "no", "parameters": {}}</think>\n{"name": "f", "parameters": {"x": 1}}',
    ):
        turn = LLAMA.parse(text)
        assert good(turn) == [("f", {"x": 1})]
        assert (turn.content, turn.errors) == ("", ())
    turn = LLAMA.parse(
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}\n{"name": "h", "parameters": {}} ok'
    )
    assert good(turn) == [("f", {}), ("g", {}), ("h", {})]
    assert turn.content == "ok"
    assert LLAMA.stop_tokens == ("<|eom_id|>",)


def test_llama_4_writes_content_before_calls() -> None:
    """What Llama 4 says before a call stands between tags of its own; several calls have nothing between them."""
    call = '{"name": "f", "parameters": {"x": 1}}'
    turn = LLAMA.parse(f"<|python_start|>I will look.<|python_end|>{call}{call}<|eom|>")
    assert (good(turn), turn.content, turn.errors) == ([("f", {"x": 1})] * 2, "I will look.", ())
    assert good(LLAMA.parse(f"<|python_start|>{call}<|python_end|><|eot|>")) == [("f", {"x": 1})]


@pytest.mark.parametrize(
    "text",
    [
        'I would call {"name": "f", "parameters": {}}',
        '{"name": "Alice", "age": 3}',
        '{"answer": {"name": "f", "parameters": {}}}',
        '[{"name": "f", "parameters": {}}]',
        "{}",
        "{ not json",
        "",
    ],
)
def test_llama_json_that_is_no_call_is_content(text: str) -> None:
    """JSON elsewhere, or without arguments, is content to the character."""
    turn = LLAMA.parse(text)
    assert (turn.content, turn.tool_calls, turn.errors) == (text, (), ())


def test_llama_broken_calls() -> None:
    """A broken call is a call with an error, one that never ends is an error; neither takes its sibling along."""
    sibling = '; {"name": "g", "parameters": {"x": ";"}}'
    for broken in (
        '{"name": "f", "parameters": {"x": }}',
        '{"name": "f", "parameters": {"x": 1}',
        '{"name": "f", "parameters": [1]}',
        '{"name": "f", "parameters": {"x": True}}',
    ):
        turn = LLAMA.parse(broken + sibling)
        assert [call.name for call in turn.tool_calls] == ["f", "g"]
        assert good(turn) == [("g", {"x": ";"})]
        assert turn.errors == ()
    for cut in ('{"name": "f", "parameters": {"x": 1}', '{"name": "f", "parameters": {"x": "1}}'):
        turn = LLAMA.parse(cut)
        assert turn.tool_calls == ()
        assert "never closed" in turn.errors[0]


def test_llama_built_in_tools_and_code() -> None:
    """A built-in tool is called by its name behind the python tag; other code is an error and stays visible."""
    turn = LLAMA.parse('<|python_tag|>brave_search.call(query="a (b)", n=3)<|eom_id|>')
    assert good(turn) == [("brave_search", {"query": "a (b)", "n": 3})]
    assert turn.tool_calls[0].raw_arguments == '(query="a (b)", n=3)'
    (bad,) = LLAMA.parse("<|python_tag|>f.call(x=open('a'))").tool_calls
    assert "expected a value" in (bad.error or "")
    turn = LLAMA.parse("<|python_tag|>print(1)")
    assert (turn.tool_calls, turn.content) == ((), "print(1)")
    assert "not by code" in turn.errors[0]


MISTRAL_LIST = '[TOOL_CALLS][{"name": "f", "arguments": {"x": "]"}, "id": "abcdefghi"}, {"name": "g", "arguments": {}}]'


def test_mistral_writes_calls_in_several_ways() -> None:
    """A list of objects, a name with an id, a name with its arguments, and a name with arguments right behind are calls."""
    turn = MISTRAL.parse("Well. " + MISTRAL_LIST + "</s>")
    assert good(turn) == [("f", {"x": "]"}), ("g", {})]
    assert (turn.content, turn.tool_calls[0].id, turn.errors) == ("Well.", "abcdefghi", ())
    turn = MISTRAL.parse(
        '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}[TOOL_CALLS]h{"y": "[ARGS]"}'
    )
    assert good(turn) == [("f", {"x": 1}), ("g", {}), ("h", {"y": "[ARGS]"})]
    assert turn.tool_calls[0].id == "123456789"
    turn = MISTRAL.parse("[THINK]maybe [TOOL_CALLS]f[ARGS]{}[/THINK]no")
    assert (turn.tool_calls, turn.content, turn.reasoning) == ((), "no", "maybe [TOOL_CALLS]f[ARGS]{}")


def test_mistral_ids_have_nine_characters() -> None:
    """Where the model wrote no id, a bad one or one twice, the id is made: nine letters or digits, other in another turn."""
    text = "[TOOL_CALLS]f[CALL_ID]short[ARGS]{}[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{}[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{}"
    first, second = (MISTRAL.parse(text, id_prefix=prefix).tool_calls for prefix in ("a", "b"))
    assert all(len(call.id) == 9 and call.id.isalnum() for call in first)
    assert len({call.id for call in (*first, *second)}) == 5
    assert first == MISTRAL.parse(text, id_prefix="a").tool_calls


@pytest.mark.parametrize(
    "broken",
    [
        '[TOOL_CALLS]f[ARGS]{"x": "oops}',
        '[TOOL_CALLS]f[ARGS]{"x": 1',
        '[TOOL_CALLS]f[ARGS]{"x": }',
        "[TOOL_CALLS]f[ARGS][1, 2]",
        '[TOOL_CALLS]f[ARGS]"text"',
        "[TOOL_CALLS]f[ARGS]",
        '[TOOL_CALLS][{"name": "f", "arguments": {"x": }}]',
        '[TOOL_CALLS][{"name": "f", "arguments": 7}]',
        '[TOOL_CALLS][{"name": "f"}]',
        '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}',
    ],
)
def test_mistral_broken_calls(broken: str) -> None:
    """A broken call is a call with an error and its name, and the next one runs."""
    turn = MISTRAL.parse(broken + '[TOOL_CALLS]g[ARGS]{"y": "[TOOL_CALLS]"}')
    assert [call.name for call in turn.tool_calls] == ["f", "g"]
    assert good(turn) == [("g", {"y": "[TOOL_CALLS]"})]
    assert turn.errors == ()


@pytest.mark.parametrize(
    "text", ["[TOOL_CALLS]", "[TOOL_CALLS]f", "[TOOL_CALLS]f[ARGS]{", "[TOOL_CALLS][]", "[TOOL_CALLS][1"]
)
def test_mistral_sections_without_a_call(text: str) -> None:
    """An opening without a call behind it is an error and runs nothing."""
    turn = MISTRAL.parse(text)
    assert turn.tool_calls == ()
    assert len(turn.errors) == 1


def test_mistral_lists_keep_their_good_calls() -> None:
    """In a list, one bad call leaves the others, also if the list never ends."""
    calls = '{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"x": True}}, {"name": "c", "arguments": {}}'
    turn = MISTRAL.parse(f"[TOOL_CALLS][{calls}]")
    assert ([name for name, _ in good(turn)], len(turn.tool_calls), turn.errors) == (["a", "c"], 3, ())
    turn = MISTRAL.parse(f"[TOOL_CALLS][{calls}")
    assert [name for name, _ in good(turn)] == ["a", "c"]
    assert "never closed" in turn.errors[0]


def deepseek(*calls: str) -> str:
    """Write calls in DeepSeek's section."""
    inner = "\n".join(f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>" for call in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"


def test_deepseek_writes_calls_in_two_ways() -> None:
    """V3's fenced call and V3.1's bare one are both read, together too; fences and tags in strings are text."""
    text = {"x": "```json\n{}\n``` <｜tool▁call▁end｜> <｜tool▁sep｜>"}
    fenced, bare = f"function<｜tool▁sep｜>f\n```json\n{json.dumps(text)}\n```", f"g<｜tool▁sep｜>{json.dumps(text)}"
    turn = DEEPSEEK.parse("Hm.\n" + deepseek(fenced, bare))
    assert good(turn) == [("f", text), ("g", text)]
    assert (turn.content, turn.errors) == ("Hm.", ())
    assert good(DEEPSEEK.parse(deepseek("function<｜tool▁sep｜>{}"))) == [("function", {})]


@pytest.mark.parametrize(
    "broken",
    [
        'f<｜tool▁sep｜>{"x": "oops}',
        "f<｜tool▁sep｜>[1]",
        "f<｜tool▁sep｜>",
        "f",
        "function<｜tool▁sep｜>f\n```json\n{'x': 1}\n```",
        "function<｜tool▁sep｜>f",
    ],
)
def test_deepseek_broken_calls(broken: str) -> None:
    """A broken call is a call with an error and its name, and its siblings run."""
    turn = DEEPSEEK.parse(deepseek("a<｜tool▁sep｜>{}", broken, "b<｜tool▁sep｜>{}"))
    assert [call.name for call in turn.tool_calls] == ["a", "f", "b"]
    assert good(turn) == [("a", {}), ("b", {})]
    assert turn.errors == ()


def kimi(*calls: str) -> str:
    """Write calls in Kimi's section."""
    inner = "".join(f"<|tool_call_begin|>{call}<|tool_call_end|>" for call in calls)
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|><|im_end|>"


def test_kimi_ids_carry_the_name() -> None:
    """The name is read out of the id, dots and colons in it are kept; an id that comes twice is used once."""
    given = "<|tool_call_argument_begin|>{}"
    turn = KIMI.parse(
        kimi(f"functions.f:0{given}", f"functions.a.b:c:12{given}", f" functions.f:0 {given}", f"g{given}")
    )
    assert [call.name for call in turn.tool_calls] == ["f", "a.b:c", "f", "g"]
    assert [call.id for call in turn.tool_calls] == ["functions.f:0", "functions.a.b:c:12", "call_2", "call_3"]
    assert turn.errors == ()


def test_ids_that_a_format_does_not_have_are_not_used() -> None:
    """An id in the JSON of a format without ids is no id; an id that looks like a made one does not collide with it."""
    body = '{"name": "f", "arguments": {}, "id": "same"}'
    (call,) = get_parser("hermes").parse(f"<tool_call>{body}</tool_call>", id_prefix="turn1_").tool_calls
    assert call.id == "turn1_0"
    (call,) = LLAMA.parse(body, id_prefix="turn1_").tool_calls
    assert call.id == "turn1_0"
    given = "<|tool_call_argument_begin|>{}"
    turn = KIMI.parse(kimi(f"functions.f:1{given}", f"g{given}"), id_prefix="functions.f:")
    assert len({call.id for call in turn.tool_calls}) == 2


def test_kimi_sections() -> None:
    """A section may lack its end, calls may lack a section, a section may not lack calls; prose around them is content."""
    call = '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": "<|tool_call_end|>"}<|tool_call_end|>'
    for text in (f"<|tool_calls_section_begin|>{call}", call, f"a{call}b"):
        assert good(KIMI.parse(text)) == [("f", {"x": "<|tool_call_end|>"})]
        assert KIMI.parse(text).errors == ()
    assert KIMI.parse(f"a {call} b").content == "a\nb"
    for text in (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_begin|><|tool_calls_section_end|>",
        "a<|tool_call_end|>",
    ):
        turn = KIMI.parse(text)
        assert turn.tool_calls == ()
        assert len(turn.errors) == 1


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        ('functions.f:1<|tool_call_argument_begin|>{"x": "oops}', "f"),
        ("functions.f:1<|tool_call_argument_begin|>null", "f"),
        ("functions.f:1<|tool_call_argument_begin|>", "f"),
        ("functions.f:1", "f"),
        ("<|tool_call_argument_begin|>{}", ""),
        ("functions.:1<|tool_call_argument_begin|>{}", ""),
    ],
)
def test_kimi_broken_calls(broken: str, name: str) -> None:
    """A broken call is a call with an error, and its siblings run."""
    given = "<|tool_call_argument_begin|>{}"
    turn = KIMI.parse(kimi(f"functions.a:0{given}", broken, f"functions.b:2{given}"))
    assert [call.name for call in turn.tool_calls] == ["a", name, "b"]
    assert good(turn) == [("a", {}), ("b", {})]
    assert turn.errors == ()
