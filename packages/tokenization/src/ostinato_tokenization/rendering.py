"""Chat templates: compiled once, in a sandbox, with the extensions that published templates expect.

Invariant: a template renders here to the same text as in the library that published templates are written for, and can
neither reach attributes outside its sandbox nor change what it is given. It knows nothing of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from ostinato_tokenization.errors import ChatTemplateError
from ostinato_tokenization.messages import RawArguments


class _GenerationTag(jinja2.ext.Extension):
    """Accepts `{% generation %}…{% endgeneration %}` and renders what is inside: masks come from the ledger."""

    tags = {"generation"}  # noqa: RUF012  # the name and kind that Jinja asks for

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
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
