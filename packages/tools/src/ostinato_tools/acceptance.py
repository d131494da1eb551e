"""A quick yes for values that fit a JSON schema, many times faster than the general validator.

What is accepted here, the validator accepts, too. What is not accepted is not yet wrong: the validator says, and says why. A
schema with a keyword that is not understood here has no quick yes at all.
"""

from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], bool]

_TYPES: dict[str, frozenset[type]] = {
    "string": frozenset({str}),
    "integer": frozenset({int}),
    "number": frozenset({int, float}),
    "boolean": frozenset({bool}),
    "null": frozenset({type(None)}),
    "array": frozenset({list}),
    "object": frozenset({dict}),
}
_BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    # As the validator words them, which matters for NaN.
    "minimum": lambda value, bound: not value < bound,
    "maximum": lambda value, bound: not value > bound,
    "exclusiveMinimum": lambda value, bound: not value <= bound,
    "exclusiveMaximum": lambda value, bound: not value >= bound,
}
_LENGTHS: dict[str, tuple[type, bool]] = {
    "minLength": (str, True),
    "maxLength": (str, False),
    "minItems": (list, True),
    "maxItems": (list, False),
    "minProperties": (dict, True),
    "maxProperties": (dict, False),
}
_UNDERSTOOD = {
    *("type", "enum", "const", "anyOf", "items", "properties", "required", "additionalProperties"),
    *_BOUNDS,
    *_LENGTHS,
}
_NOTES = frozenset({"format"})
"""Keywords of the validator that, without a checker of formats, say nothing about a value."""
_SCALARS = frozenset({str, int, float, bool, type(None)})


class _NotUnderstood(Exception):
    """The schema has a keyword whose meaning is not known here."""


def compile_acceptance(schema: Any, keywords: Mapping[str, Any]) -> Check | None:
    """Compile a schema that is known to be valid.

    Args:
        schema: The JSON schema.
        keywords: Those that mean something to the validator; it ignores all others.

    Returns:
        From a value to True only if it fits; None where the schema has keywords that are not understood here.
    """
    meaningful = frozenset(keywords) - _UNDERSTOOD - _NOTES
    try:
        return _compile(schema, meaningful)
    except (_NotUnderstood, RecursionError):
        return None


def _compile(schema: Any, refused: frozenset[str]) -> Check:
    if isinstance(schema, bool):
        return lambda value: schema
    if not refused.isdisjoint(schema):
        raise _NotUnderstood
    types = _allowed_types(schema)
    checks = [
        *_choice_checks(schema),
        *_size_checks(schema),
        *_nested_checks(schema, refused),
    ]
    admits_null = schema.get("nullable") is True
    if len(checks) == 1 and types is not None and not admits_null:
        (only,) = checks
        return lambda value: type(value) in types and only(value)

    def accepts(value: Any) -> bool:
        if value is None and admits_null:
            return True
        if types is not None and type(value) not in types:
            return False
        return all(check(value) for check in checks)

    return accepts


def _allowed_types(schema: Mapping) -> frozenset[type] | None:
    kinds = schema.get("type")
    if kinds is None:
        return None
    return frozenset().union(*(_TYPES[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds)))


def _choice_checks(schema: Mapping) -> list[Check]:
    checks: list[Check] = []
    for key in ("enum", "const"):
        if key in schema:
            values = schema[key] if key == "enum" else [schema[key]]
            # With their types: 1, 1.0 and true are equal in Python.
            known = frozenset((type(value), value) for value in values if type(value) in _SCALARS)
            checks.append(lambda value, known=known: type(value) in _SCALARS and (type(value), value) in known)
    return checks


def _size_checks(schema: Mapping) -> list[Check]:
    checks: list[Check] = []
    for key, holds in _BOUNDS.items():
        if key in schema:
            bound = schema[key]
            checks.append(
                lambda value, holds=holds, bound=bound: type(value) not in (int, float) or holds(value, bound)
            )
    for key, (kind, is_least) in _LENGTHS.items():
        if key in schema:
            bound = schema[key]
            if is_least:
                checks.append(lambda value, kind=kind, bound=bound: type(value) is not kind or len(value) >= bound)
            else:
                checks.append(lambda value, kind=kind, bound=bound: type(value) is not kind or len(value) <= bound)
    return checks


def _nested_checks(schema: Mapping, refused: frozenset[str]) -> list[Check]:
    checks: list[Check] = []
    if "anyOf" in schema:
        options = [_compile(option, refused) for option in schema["anyOf"]]
        checks.append(lambda value: any(option(value) for option in options))
    if "items" in schema:
        item = _compile(schema["items"], refused)
        checks.append(lambda value: type(value) is not list or all(map(item, value)))
    if "required" in schema or "properties" in schema or "additionalProperties" in schema:
        checks.append(_object_check(schema, refused))
    return checks


def _object_check(schema: Mapping, refused: frozenset[str]) -> Check:
    required = frozenset(schema.get("required", ()))
    additional = schema.get("additionalProperties", True)
    other = None if additional is True else _compile(additional, refused)
    plain: dict[str, frozenset[type]] = {}
    nested: dict[str, Check | None] = {}
    for name, part in schema.get("properties", {}).items():
        nested[name] = _compile(part, refused)
        if isinstance(part, dict) and _UNDERSTOOD.isdisjoint(part.keys() - {"type"}):
            types = _allowed_types(part)
            if types is not None:
                plain[name] = types | {type(None)} if part.get("nullable") is True else types

    def check(value: Any) -> bool:
        if type(value) is not dict:
            return True
        for name, item in value.items():
            types = plain.get(name)
            if types is not None:
                if type(item) not in types:
                    return False
            else:
                accepts = nested.get(name, other)
                if accepts is not None and not accepts(item):
                    return False
        return required <= value.keys()

    return check
