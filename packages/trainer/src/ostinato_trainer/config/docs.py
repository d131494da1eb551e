"""Every key of a configuration tree with its type, default and meaning, for `ostinato config` and for documentation.

The meaning is the docstring below the field, read from the source with `ast`; a key without one is an error of ours
that the tests find.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
import textwrap
from functools import cache
from typing import Any

import msgspec
from msgspec import Struct

from ostinato_trainer.config import Config
from ostinato_trainer.config.schema import Key, schema_keys, type_text

__all__ = ["ConfigRow", "config_rows"]


class ConfigRow(Struct, frozen=True):
    """One line of the reference of keys; all four are text ready to print."""

    key: str
    """Dotted path, as an override writes it."""
    type: str
    """What may stand there."""
    default: str
    """Value where nothing is written, as YAML."""
    meaning: str
    """One or two sentences."""


def config_rows(root: type[Struct] = Config) -> list[ConfigRow]:
    """The rows for every key below `root`, in the order of the tree."""
    return [
        ConfigRow(key.path, type_text(key.type), _default_text(key.default), _meaning(key))
        for key in schema_keys(root).values()
    ]


def _default_text(value: Any) -> str:
    plain = msgspec.to_builtins(value)
    if plain is None:
        return "null"
    if isinstance(plain, bool):
        return "true" if plain else "false"
    if isinstance(plain, list | tuple):
        return "[" + ", ".join(_default_text(item) for item in plain) + "]"
    if plain == "":
        return '""'
    return str(plain)


def _meaning(key: Key) -> str:
    """The docstring below the field, from the class that declares it or the one that it inherits it from."""
    for cls in key.owner.__mro__:
        if key.name in (docstrings := _field_docstrings(cls)):
            return docstrings[key.name]
    return ""


@cache
def _field_docstrings(cls: type) -> dict[str, str]:
    """Docstrings below the annotated fields in the body of `cls`, itself only; empty where there is no source."""
    if cls.__module__ in sys.builtin_module_names:
        return {}
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):
        return {}
    body = next((node.body for node in tree.body if isinstance(node, ast.ClassDef)), [])
    found = {}
    for field, after in itertools.pairwise(body):
        if not (
            isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr)
        ):
            continue
        if isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            found[field.target.id] = " ".join(after.value.value.split())
    return found
