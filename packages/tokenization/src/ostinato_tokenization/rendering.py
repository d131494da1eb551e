"""Chat templates: compiled once, in a sandbox, with the extensions that published templates expect.

Invariant: a template renders here to the same text as in the library that published templates are written for, and can
neither reach attributes outside its sandbox nor change what it is given. It knows nothing of tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from jinja2.runtime import LoopContext

from ostinato_tokenization.errors import ChatTemplateError
from ostinato_tokenization.messages import RawArguments

_GIVEN = frozenset(("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"))
_ESCAPED_MASK = re.compile(r"\\udb[89abAB][0-9a-fA-F]\\ud[c-fC-F][0-9a-fA-F]{2}")
"""What JSON in ASCII makes of the private-use characters that stand for hidden text, and must still be found there."""


class _GenerationTag(jinja2.ext.Extension):
    """Accepts `{% generation %}…{% endgeneration %}` and renders what is inside: masks come from the ledger."""

    tags = {"generation"}  # noqa: RUF012  # the name and kind that Jinja asks for

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_plain_json = json.JSONEncoder(ensure_ascii=False).encode
"""As `json.dumps` with these settings, which would make an encoder for every call."""


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(value, RawArguments):
        return value.text
    if indent is None and separators is None and not ensure_ascii and not sort_keys:
        return _plain_json(value)
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return _ESCAPED_MASK.sub(_unescape, text) if ensure_ascii else text


def _unescape(match: re.Match[str]) -> str:
    return json.loads(f'"{match.group()}"')


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


_DICT_ATTRIBUTES = frozenset(dir(dict))
_LOOP_ATTRIBUTES = frozenset(name for name in dir(LoopContext) if not name.startswith("_"))


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with a short way to what templates do most: `message.role` of a plain dict, and `loop.first`."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        # Jinja would come to the same, of a dict after an exception or two: it has no attributes beyond those of its class.
        if type(obj) is LoopContext and attribute in _LOOP_ATTRIBUTES:
            return getattr(obj, attribute)
        if type(obj) is not dict or attribute in _DICT_ATTRIBUTES:
            return super().getattr(obj, attribute)
        return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@lru_cache(maxsize=256)
def compile_template(source: str) -> jinja2.Template:
    """Compile a chat template; the same source compiles once.

    Raises:
        ChatTemplateError: The source is not valid.
    """
    try:
        return _environment().from_string(source)
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        raise ChatTemplateError(
            f"chat_template must be a valid Jinja template, got {error} (line {line}); correct the template"
        ) from error


@lru_cache(maxsize=256)
def own_variables(source: str) -> frozenset[str]:
    """The variables of a template that only its caller can give, such as `enable_thinking`."""
    environment = _environment()
    names = jinja2.meta.find_undeclared_variables(environment.parse(source))
    return frozenset(names - _GIVEN - environment.globals.keys())


@lru_cache(maxsize=256)
def compared_texts(source: str) -> frozenset[str]:
    """The constant texts of a template that it does more with than to write them: what it may look for in messages."""
    found: set[str] = set()

    def visit(node: jinja2.nodes.Node, written: bool) -> None:
        if isinstance(node, jinja2.nodes.Const):
            if isinstance(node.value, str) and not written:
                found.add(node.value)
            return
        passes_on = written and isinstance(node, (jinja2.nodes.Add, jinja2.nodes.Concat))
        for child in node.iter_child_nodes():
            visit(child, passes_on or isinstance(node, jinja2.nodes.Output))

    visit(_environment().parse(source), False)
    return frozenset(found - {""})


@lru_cache(maxsize=256)
def whole_numbers(source: str) -> frozenset[int]:
    """The whole numbers in a template: lengths, counts and places from which on it may act otherwise."""
    constants = _environment().parse(source).find_all(jinja2.nodes.Const)
    return frozenset(node.value for node in constants if type(node.value) is int)


@lru_cache(maxsize=256)
def counts_in_cycles(source: str) -> bool:
    """Whether a template does something at every third place, or more rarely."""
    tree = _environment().parse(source)
    if any(node.attr == "cycle" for node in tree.find_all(jinja2.nodes.Getattr)):
        return True
    if any(node.name == "divisibleby" for node in tree.find_all(jinja2.nodes.Test)):
        return True
    return any(
        not isinstance(node.left, (jinja2.nodes.Const, jinja2.nodes.TemplateData))
        and not (isinstance(node.right, jinja2.nodes.Const) and node.right.value in (1, 2))
        for node in tree.find_all(jinja2.nodes.Mod)
    )


def arguments_as_text(messages: Sequence[Any]) -> list[Any]:
    """The messages with the arguments of their calls as JSON text, for templates that paste them as they are."""

    def convert(part: Any) -> Any:
        arguments = part.get("arguments")
        if not isinstance(arguments, Mapping):
            return part
        text = arguments.text if isinstance(arguments, RawArguments) else json.dumps(arguments, ensure_ascii=False)
        return {**part, "arguments": text}

    return [
        {
            **message,
            "tool_calls": [
                {**call, "function": convert(call["function"])} if "function" in call else convert(call)
                for call in message["tool_calls"]
            ],
        }
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def contents_as_parts(messages: Sequence[Any]) -> list[Any]:
    """The messages with their contents as lists of one part of text, for templates that show nothing else."""
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


def render_template(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Render, with every failure of the template as one kind of error.

    Raises:
        ChatTemplateError: The template refused the conversation, or failed on it.
    """
    try:
        return template.render(variables)
    except jinja2.TemplateError as error:
        raise ChatTemplateError(
            f"messages must suit the chat template, got its refusal: {error}; change the messages or the template"
        ) from error
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
        raise ChatTemplateError(
            f"messages must suit the chat template, got {type(error).__name__} while rendering: {error};"
            " check the form of contents, tool calls and tools"
        ) from error
