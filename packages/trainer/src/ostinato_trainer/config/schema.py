"""The configuration tree seen as a table of dotted keys: what loading checks against and what `ostinato config` prints.

Everything is derived from the structs; nothing here names a key.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from enum import Enum
from functools import cache
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

__all__ = ["Key", "is_free_form", "schema_keys", "schema_sections", "type_text"]


class Key(Struct, frozen=True):
    """One leaf of the tree."""

    path: str
    """Dotted path."""
    type: Any
    """The annotation of its field."""
    default: Any
    """Value where nothing is written."""
    owner: type[Struct]
    """The struct that declares it."""

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.path.rpartition(".")[2]


def is_section(annotation: object) -> bool:
    """Whether a field of this annotation is a node of the tree."""
    return isinstance(annotation, type) and issubclass(annotation, Struct)


def is_free_form(annotation: object) -> bool:
    """Whether a field of this annotation is a mapping with keys of the user's own."""
    return get_origin(annotation) is dict


def _walk(cls: type[Struct], prefix: str) -> Iterator[Key | str]:
    for field in msgspec.structs.fields(cls):
        path = f"{prefix}{field.name}"
        if is_section(field.type):
            yield path
            yield from _walk(field.type, f"{path}.")
        else:
            default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            yield Key(path, field.type, default, cls)


@cache
def schema_keys(root: type[Struct]) -> dict[str, Key]:
    """Every leaf below `root` by dotted path, in the order of the tree."""
    return {entry.path: entry for entry in _walk(root, "") if isinstance(entry, Key)}


@cache
def schema_sections(root: type[Struct]) -> frozenset[str]:
    """The dotted paths of the inner nodes below `root`."""
    return frozenset(entry for entry in _walk(root, "") if isinstance(entry, str))


def type_text(annotation: Any) -> str:
    """An annotation as a reader of YAML would say it, such as `int >= 1 | null` or `left | right`."""
    if annotation is type(None) or annotation is None:
        return "null"
    if annotation is Any:
        return "anything"
    origin = get_origin(annotation)
    if origin is Literal:
        return " | ".join(str(value) for value in get_args(annotation))
    if origin is typing.Annotated:
        base, *extras = get_args(annotation)
        return type_text(base) + "".join(_bounds_text(extra) for extra in extras if isinstance(extra, Meta))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(type_text(arg) for arg in get_args(annotation))
    if origin in (tuple, list):
        args = [arg for arg in get_args(annotation) if arg is not Ellipsis]
        if origin is tuple and len(args) == len(get_args(annotation)):
            return f"list of {len(args)} ({', '.join(type_text(arg) for arg in args)})"
        return f"list of ({type_text(args[0])})" if " | " in type_text(args[0]) else f"list of {type_text(args[0])}"
    if is_free_form(annotation):
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " | ".join(str(member.value) for member in annotation)
    return getattr(annotation, "__name__", str(annotation))


def _bounds_text(meta: Meta) -> str:
    bounds = ((">=", meta.ge), (">", meta.gt), ("<=", meta.le), ("<", meta.lt))
    return "".join(f" {sign} {bound}" for sign, bound in bounds if bound is not None)
