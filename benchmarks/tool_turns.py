"""Texts for `benchmarks.tools`: the same calls as each format writes them, and texts that are made to be hard to read."""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import product

Call = tuple[str, dict]

JSON_FORMATS = {"deepseek_v3", "gpt_oss", "hermes", "kimi_k2", "llama3_json", "mistral"}
"""Formats whose arguments are JSON; in the others values are text, or in a notation of their own."""

GENERIC = ('"', "\\", '\\"', "{", "}", "[", "'", "<", '{"a":', '"a", ', "(", "a=")
"""What quoting and nesting are made of, in any format."""

TAGS: dict[str, tuple[str, ...]] = {
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "f<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "function<｜tool▁sep｜>f\n```json\n",
        "<think>",
        "</think>",
    ),
    "gemma4": ("<|tool_call>", "call:f{", '<|"|>', "<tool_call|>", "<|channel>thought", "<channel|>", "k:"),
    "glm": (
        "<tool_call>f\n",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "</tool_call>",
        "<think>",
        "</think>",
    ),
    "gpt_oss": (
        "<|start|>assistant",
        "<|channel|>commentary to=functions.f",
        "<|channel|>analysis",
        "<|message|>",
        "<|call|>",
        "<|end|>",
        "<|constrain|>json",
    ),
    "hermes": ("<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', "<think>", "</think>"),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "functions.f:0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        "<think>",
        "</think>",
    ),
    "llama3_json": ("<|python_tag|>", '{"name": "f", "parameters": ', "; ", "f.call(", "<think>", "</think>"),
    "minimax": (
        "<minimax:tool_call>",
        '<invoke name="f">',
        '<parameter name="k">',
        "</parameter>",
        "</invoke>",
        "</minimax:tool_call>",
        "<tool_calls>\n",
        "</tool_calls>",
        "<think>",
        "</think>",
    ),
    "mistral": ("[TOOL_CALLS]", "f[ARGS]", "[CALL_ID]", '[{"name": "f", "arguments": ', "[THINK]", "[/THINK]"),
    "pythonic": ("[f(", "<|tool_call_start|>", "<|tool_call_end|>", "<|python_start|>", "f(a=", "),", ")]", "<think>"),
    "qwen3_coder": (
        "<tool_call>",
        "<function=f>",
        "<parameter=k>",
        "</parameter>",
        "</function>",
        "</tool_call>",
        "<think>",
        "</think>",
    ),
    "seed_oss": (
        "<seed:tool_call>",
        "<function=f>",
        "<parameter=k>",
        "</parameter>",
        "</function>",
        "</seed:tool_call>",
        "<seed:think>",
        "</seed:think>",
    ),
}
"""The tags of each format, in the order in which a call has them."""


def example_calls(num_calls: int, num_lines: int) -> list[Call]:
    """Calls of a tool that writes files: code with quotes, backslashes and line ends, a number, a flag and a list."""
    line = 'value = {"key": "a\\tb", "n": [1, 2.5]}  # naïve, "quoted"\n'
    return [
        ("write_file", {"path": f"src/part_{index}.py", "text": line * num_lines, "mode": 420, "overwrite": True})
        for index in range(num_calls)
    ]


TOOL = {
    "type": "function",
    "function": {
        "name": "write_file",
        "description": "Write a file.",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "text": {"type": "string"},
                "mode": {"type": "integer"},
                "overwrite": {"type": "boolean"},
            },
            "required": ["path", "text"],
        },
    },
}


def render(name: str, calls: Sequence[Call]) -> str:
    """Write calls as the format `name` does.

    Raises:
        KeyError: nobody has written down how; add it to `_WRITERS`.
    """
    return _WRITERS[name](calls)


def hostile_texts(name: str, num_characters: int) -> Iterator[tuple[str, str]]:
    """Yield a label and a text of about so many characters, for each thing that a reader of this format could stumble over.

    Each tag, quote or bracket again and again, alone and behind the begin of a call; and pairs of them.
    """
    tags = TAGS[name]
    whole = render(name, [("write_file", {"path": "a", "text": "b", "mode": 1, "overwrite": True})])
    begin = whole[: whole.index("a", whole.index("path"))]
    pieces = (*tags, *GENERIC)
    for piece in pieces:
        yield f"{piece!r}", piece * (num_characters // len(piece))
        yield f"call, {piece!r}", begin + piece * (num_characters // len(piece))
    for first, second in product(tags, pieces):
        if first != second:
            pair = first + second
            yield f"{first!r} {second!r}", pair * (num_characters // len(pair))
    for first in tags:
        count = num_characters // (2 * len(first))
        yield f"{first!r}, text", first * count + "x" * (num_characters // 2)
    yield "calls", whole * (num_characters // len(whole))
    yield "calls, the last one open", whole * (num_characters // len(whole)) + begin


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: object) -> str:
    return value if isinstance(value, str) else _json(value)


def _tagged(arguments: dict, before: str, between: str, after: str) -> str:
    return "".join(f"{before}{key}{between}{_text(value)}{after}" for key, value in arguments.items())


def _deepseek_v3(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def _gemma4(calls: Sequence[Call]) -> str:
    def value(given: object) -> str:
        return f'<|"|>{given}<|"|>' if isinstance(given, str) else _json(given)

    return "".join(
        f"<|tool_call>call:{name}{{{','.join(f'{key}:{value(given)}' for key, given in arguments.items())}}}<tool_call|>"
        for name, arguments in calls
    )


def _glm(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + _tagged(arguments, "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
        + "</tool_call>"
        for name, arguments in calls
    )


def _gpt_oss(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}<|call|>"
        for name, arguments in calls
    )


def _hermes(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n{_json({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in calls
    )


def _kimi_k2(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def _llama3_json(calls: Sequence[Call]) -> str:
    return "; ".join(_json({"name": name, "parameters": arguments}) for name, arguments in calls)


def _minimax(calls: Sequence[Call]) -> str:
    inner = "".join(
        f'<invoke name="{name}">\n{_tagged(arguments, "<parameter name=" + chr(34), chr(34) + ">", "</parameter>" + chr(10))}'
        "</invoke>\n"
        for name, arguments in calls
    )
    return f"<minimax:tool_call>\n{inner}</minimax:tool_call>"


def _mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)


def _pythonic(calls: Sequence[Call]) -> str:
    inner = ", ".join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls
    )
    return f"[{inner}]"


def _qwen3_coder(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + _tagged(arguments, "<parameter=", ">\n", "\n</parameter>\n")
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def _seed_oss(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<seed:tool_call>\n<function={name}>\n"
        + _tagged(arguments, "<parameter=", ">", "</parameter>\n")
        + "</function>\n</seed:tool_call>"
        for name, arguments in calls
    )


_WRITERS: dict[str, Callable[[Sequence[Call]], str]] = {
    "deepseek_v3": _deepseek_v3,
    "gemma4": _gemma4,
    "glm": _glm,
    "gpt_oss": _gpt_oss,
    "hermes": _hermes,
    "kimi_k2": _kimi_k2,
    "llama3_json": _llama3_json,
    "minimax": _minimax,
    "mistral": _mistral,
    "pythonic": _pythonic,
    "qwen3_coder": _qwen3_coder,
    "seed_oss": _seed_oss,
}
