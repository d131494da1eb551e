"""Rows of JSON text: where they stand in an array, and each as a mapping. What is wrong with one is said of that one."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from ostinato_trainer.errors import DatasetError

__all__ = ["JsonText", "decoded_json_row", "json_array_rows"]

JsonText = bytes | msgspec.Raw
_SPACE: Final = re.compile(r"[ \t\r\n]*")


def json_array_rows(data: bytes, name: str) -> Sequence[JsonText]:
    """The texts of an array's values. What only one of them makes no JSON, such as NaN, is left to `decoded_json_row`.

    Raises:
        DatasetError: A value does not end, or there is something between two of them; with the row's number.
    """
    try:
        return msgspec.json.decode(data, type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _separated(data.decode("utf-8", "surrogateescape"), name)


def _separated(array: str, name: str) -> list[JsonText]:
    """As `json_array_rows`, slowly, by a decoder that takes NaN and any text."""
    decoder = json.JSONDecoder()
    rows: list[JsonText] = []
    position = array.index("[")
    while not rows or array[position : position + 1] == ",":
        start = _after_space(array, position + 1)
        try:
            _, end = decoder.raw_decode(array, start)
        except (ValueError, RecursionError) as error:
            raise DatasetError(
                f"{name}, row {len(rows) + 1} must be a JSON object, got {error}; mend that row"
            ) from None
        rows.append(array[start:end].encode("utf-8", "surrogateescape"))
        position = _after_space(array, end)
    if array[position:].strip() != "]":
        raise DatasetError(
            f"{name}, row {len(rows)} must be followed by a comma or by the end of the array, got "
            f"{array[position : position + 20]!r}; mend what follows that row"
        )
    return rows


def _after_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None  # no space is also a match
    return match.end()


def decoded_json_row(text: JsonText, place: str) -> dict[str, Any]:
    """The row that stands at `place`.

    Raises:
        DatasetError: The text is no JSON, no object, or has an object with a key that stands there twice.
    """
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        has_nan = any(word in bytes(text) for word in (b"NaN", b"Infinity"))
        cure = "JSON has no NaN and no Infinity: write null, or leave the key out" if has_nan else "mend that row"
        raise DatasetError(f"{place} must be a JSON object, got {error}; {cure}") from None
    if not isinstance(value, dict):
        raise DatasetError(f"{place} must be a JSON object, got {type(value).__name__}; write one object a row")
    repeated = _repeated_key(bytes(text))
    if repeated is not None:
        raise DatasetError(f"{place}: {repeated} must be there once, got it more than once in an object; remove one")
    return value


def _repeated_key(text: bytes) -> str | None:
    """The first key that stands twice in one object of a valid JSON text; readers would keep only one of its values."""
    try:
        json.loads(text, object_pairs_hook=_unrepeated)
    except _RepeatedKey as found:
        return str(found)
    except (ValueError, RecursionError):  # numbers and depths that only the other decoder takes
        return None
    return None


class _RepeatedKey(Exception):
    pass


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        seen: set[str] = set()
        raise _RepeatedKey(next(key for key, _ in pairs if key in seen or seen.add(key)))
    return mapping
