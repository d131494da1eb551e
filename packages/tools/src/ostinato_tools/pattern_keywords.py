"""The keywords of JSON schema that search for patterns, by `schema_patterns`: where nothing is found out, they object to nothing."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ostinato_tools.schema_patterns import is_found

Keyword = Callable[[Any, Any, Any, Any], Any]


def pattern_keywords(known: Mapping[str, Keyword]) -> dict[str, Keyword]:
    """Their implementations, by name.

    Args:
        known: Those of the validator.
    """
    from jsonschema import ValidationError

    def pattern(validator: Any, wanted: str, instance: Any, schema: Any) -> Iterator[Any]:
        if isinstance(instance, str) and is_found(wanted, instance) is False:
            yield ValidationError(f"{instance!r} does not match {wanted!r}")

    def pattern_properties(validator: Any, patterns: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if not isinstance(instance, dict):
            return
        for wanted, subschema in patterns.items():
            for name, value in instance.items():
                if is_found(wanted, name):
                    yield from validator.descend(value, subschema, path=name, schema_path=wanted)

    def additional_properties(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        patterns = schema.get("patternProperties")
        if patterns and isinstance(instance, dict):  # leave out those that fit a pattern, or may do so
            instance = {
                name: item
                for name, item in instance.items()
                if all(is_found(wanted, name) is False for wanted in patterns)
            }
            schema = {key: item for key, item in schema.items() if key != "patternProperties"}
        yield from known["additionalProperties"](validator, value, instance, schema) or ()

    return {
        "pattern": pattern,
        "patternProperties": pattern_properties,
        "additionalProperties": additional_properties,
    }
