"""One row of a JSON file: its text as a mapping, and the key that its text gives twice."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from ostinato_trainer.errors import DatasetError

__all__ = ["decoded_json_row", "repeated_json_key"]


def decoded_json_row(text: bytes | msgspec.Raw, place: str) -> dict[str, Any]:
    """The row that stands at `place`.

    Raises:
        DatasetError: The text is no JSON, or no object.
    """
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        has_nan = any(word in bytes(text) for word in (b"NaN", b"Infinity"))
        cure = "JSON has no NaN and no Infinity: write null, or leave the key out" if has_nan else "mend that row"
        raise DatasetError(f"{place} must be a JSON object, got {error}; {cure}") from None
    if not isinstance(value, dict):
        raise DatasetError(f"{place} must be a JSON object, got {type(value).__name__}; write one object a row")
    return value


def repeated_json_key(text: bytes) -> str | None:
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
