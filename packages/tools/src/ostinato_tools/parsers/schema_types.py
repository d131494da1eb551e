"""Types by schema: what the bare text of an argument means, for formats whose values are text without quotes.

A text is read as what the parameter's schema allows, and only if it is exactly that; otherwise it stays the text that it
is, for the executor's validation to judge. Where the schema allows a string beside other types, a text that is a value of
another type is read as that (`null` under string-or-null is None, `5` under integer-or-string is 5). Nothing is evaluated.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

_decode_json = msgspec.json.Decoder(strict=True).decode
_encode_json = msgspec.json.encode
_MAX_REFERENCES = 64
"""How many schemas one parameter's schema may lead through, so that circles end."""
_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_SPELLINGS = {"True": True, "False": False, "None": None}
_UNREADABLE = object()


class ToolTypes:
    """The parameters' schemas of a turn's tools."""

    def __init__(self, tools: Sequence[dict] | None) -> None:
        self._tools = tools
        self._by_name: dict[str, Mapping] | None = None

    def of(self, tool_name: str) -> "ParameterTypes":
        """Return the types of a tool's parameters; of an unknown tool nothing is known."""
        by_name = self._by_name
        if by_name is None:
            by_name = self._by_name = dict(_named_parameters(self._tools or ()))
        return ParameterTypes(by_name.get(tool_name, {}))


class ParameterTypes:
    """The types of one tool's parameters.

    Args:
        parameters: The tool's parameter schema: `{"type": "object", "properties": ..., "$defs": ...}`.
    """

    def __init__(self, parameters: Mapping) -> None:
        self._root = parameters

    @property
    def names(self) -> Sequence[str]:
        """The parameters that the schema names."""
        properties = self._root.get("properties")
        return list(properties) if isinstance(properties, Mapping) else []

    def schema(self, parameter: str) -> Any:
        """Return the schema of a parameter; None if nothing is known."""
        properties = self._root.get("properties")
        if isinstance(properties, Mapping) and parameter in properties:
            return properties[parameter]
        return self._root.get("additionalProperties")

    def read(
        self,
        parameter: str,
        text: str,
        *,
        untyped_is_json: bool = False,
        read_literal: Callable[[str], Any] | None = None,
    ) -> Any:
        """Return the value that `text` means under the schema of `parameter`.

        Args:
            parameter: Name of the parameter.
            text: The text, exactly as sampled.
            untyped_is_json: Without a known type, a text that is JSON is that JSON; else it is text.
            read_literal: For formats that write values in Python's spelling: reads a text that is no JSON, ValueError
                where it cannot (such as `read_literal` of the module of that name).
        """
        allowed = _Allowed(self._root, self.schema(parameter))
        if not allowed.is_known:
            return _read(text, read_literal, text) if untyped_is_json else text
        if allowed.only_strings or text in allowed.constants:
            return text
        value = _read(text, read_literal, _UNREADABLE)
        return value if value is not _UNREADABLE and allowed.has(value) else text


class _Allowed:
    """Which values a schema allows, as far as it matters for reading a text."""

    def __init__(self, root: Mapping, schema: Any) -> None:
        self._root = root
        self._left = _MAX_REFERENCES
        self.types: set[str] = set()
        self.constants: list[Any] = []
        self.is_known = self._add(schema)

    @property
    def only_strings(self) -> bool:
        return self.types <= {"string"} and all(isinstance(constant, str) for constant in self.constants)

    def has(self, value: Any) -> bool:
        if isinstance(value, str):  # quotes in bare text are part of the text
            return False
        if self.types & _types_of(value):
            return True
        encoded = _encode_json(value)
        return any(type(constant) is type(value) and _encode_json(constant) == encoded for constant in self.constants)

    def _add(self, schema: Any) -> bool:
        """Add what `schema` allows; False if it says nothing about types."""
        if not isinstance(schema, Mapping) or self._left <= 0:
            return False
        self._left -= 1
        is_known = self._add_own(schema)
        for key, counts in (("anyOf", all), ("oneOf", all), ("allOf", any)):
            options = schema.get(key)
            if isinstance(options, list | tuple) and options and not is_known:
                known = [self._add(option) for option in options]
                is_known = counts(known)
        reference = schema.get("$ref")
        if isinstance(reference, str) and not is_known:
            is_known = self._add(_resolve(self._root, reference))
        if schema.get("nullable") is True:
            self.types.add("null")
        return is_known

    def _add_own(self, schema: Mapping) -> bool:
        """Add what `schema` itself says: constants before types, since they say more."""
        if "const" in schema:
            self.constants.append(schema["const"])
            return True
        constants = schema.get("enum")
        if isinstance(constants, list | tuple) and constants:
            self.constants.extend(constants)
            return True
        named = schema.get("type")
        names = list(named) if isinstance(named, list | tuple) else [] if named is None else [named]
        if not names:
            names = [kind for key, kind in (("properties", "object"), ("items", "array")) if key in schema]
        if not names or not all(isinstance(name, str) and name in _TYPES for name in names):
            return False
        self.types.update(names)
        return True


def _named_parameters(tools: Sequence[dict]) -> Iterator[tuple[str, Mapping]]:
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping):
            name, parameters = function.get("name"), function.get("parameters")
            if isinstance(name, str) and isinstance(parameters, Mapping):
                yield name, parameters


def _resolve(root: Mapping, reference: str) -> Any:
    """Return what a reference within the parameter schema (`#/$defs/Name`) points to; None if it points nowhere."""
    if not reference.startswith("#"):
        return None
    found: Any = root
    for part in reference[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _read(text: str, read_literal: Callable[[str], Any] | None, otherwise: Any) -> Any:
    """Return the JSON value (or literal) that `text` is, `otherwise` if it is none."""
    try:
        return _decode_json(text)
    except (msgspec.DecodeError, RecursionError, ValueError):
        pass
    if read_literal is None:
        return _SPELLINGS.get(text.strip(), otherwise) if len(text) < 20 else otherwise
    try:
        return read_literal(text)
    except (ValueError, RecursionError):
        return otherwise


def _types_of(value: Any) -> frozenset[str]:
    """Return the names under which JSON Schema knows the type of `value`."""
    if value is None:
        return frozenset(("null",))
    if isinstance(value, bool):
        return frozenset(("boolean",))
    if isinstance(value, int):
        return frozenset(("integer", "number"))
    if isinstance(value, float):
        return frozenset(("integer", "number")) if value.is_integer() else frozenset(("number",))
    return frozenset(("array",)) if isinstance(value, list) else frozenset(("object",))
