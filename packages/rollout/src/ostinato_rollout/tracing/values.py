"""Any value as one that JSON can hold, in a defined way.

Numbers, text, lists and string-keyed mappings stay what they are. Else: NaN and infinities become the texts `NaN`, `Infinity` and
`-Infinity`, integers beyond 64 bits become hexadecimal text, bytes become `base64:...`, lone surrogates become `\\udXXX`, texts are cut at
`MAX_TEXT` characters with a note of their length, arrays and sets become lists, structs and dataclasses become mappings, and whatever
else there is becomes the text that Python prints. Nothing raises.
"""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Mapping, Set
from typing import Any, Final

import msgspec

MAX_TEXT: Final = 65_536
_MAX_PRINTED: Final = 1000
_MAX_DEPTH: Final = 32
_INTEGERS: Final = range(-(2**63), 2**63)


def storable(value: Any, *, depth: int = 0) -> Any:
    """Return `value` as JSON can hold it; see the module."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if isinstance(value, str):
        return storable_text(value)
    if kind is int:
        return value if value in _INTEGERS else hex(value)
    if kind is float:
        return value if math.isfinite(value) else _not_finite(value)
    if kind is bytes or kind is bytearray:
        return _cut("base64:" + base64.b64encode(value[:MAX_TEXT]).decode(), len(value))
    if depth >= _MAX_DEPTH:
        return _printed(value)
    try:
        return _container(value, depth + 1)
    except Exception:  # foreign objects may raise anything when they are looked at
        return _printed(value)


def storable_text(text: str) -> str:
    """Return `text` as UTF-8 can hold it, cut at MAX_TEXT characters."""
    shown = text[:MAX_TEXT]
    if not shown.isascii():
        shown = shown.encode("utf-8", "backslashreplace").decode("utf-8")
    return _cut(str(shown), len(text))


def _container(value: Any, depth: int) -> Any:
    if isinstance(value, Mapping):
        return {_key(key): storable(item, depth=depth) for key, item in value.items()}
    if isinstance(value, msgspec.Struct):
        return {name: storable(getattr(value, name), depth=depth) for name in value.__struct_fields__}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: storable(getattr(value, item.name), depth=depth) for item in dataclasses.fields(value)}
    if isinstance(value, Set):
        value = sorted(value, key=repr)
    if isinstance(value, list | tuple):
        return _items(list(value), depth)
    listed = getattr(value, "tolist", None)  # arrays, and numbers of numpy and torch
    if callable(listed):
        return storable(listed(), depth=depth)
    if isinstance(value, int):
        return storable(int(value), depth=depth)
    if isinstance(value, float):
        return storable(float(value), depth=depth)
    return _printed(value)


def _items(values: list, depth: int) -> list:
    """Token ids and log-probabilities are long; they are looked at as a whole."""
    kinds = set(map(type, values))
    if kinds == {int} and min(values) in _INTEGERS and max(values) in _INTEGERS:
        return values
    if kinds == {float} and math.isfinite(sum(values)):
        return values
    return [storable(value, depth=depth) for value in values]


def _key(key: Any) -> str:
    return storable_text(key) if isinstance(key, str) else _printed(key)


def _not_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _printed(value: Any) -> str:
    try:
        return storable_text(repr(value)[:_MAX_PRINTED])
    except Exception:  # a foreign __repr__, or one that recurses
        return f"<{type(value).__name__}>"


def _cut(shown: str, length: int) -> str:
    return shown if length <= MAX_TEXT else f"{shown}... [{length} in all]"
