"""Schemas from type hints and docstrings, by `transformers.utils.get_json_schema`, and arguments back to what the hints say.

What it cannot express in JSON is refused rather than described as something that no argument fits.
"""

import copy
import enum
import functools
import inspect
import operator
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from ostinato_tools.errors import ToolArgumentError, ToolImportError, ToolSchemaError
from ostinato_tools.schema import check_tool_schema

_PLAIN = (int, float, str, bool, list, dict, tuple, type(None))


def infer_schema(function: Callable, name: str, place: str) -> tuple[dict, dict[str, Callable[[Any], Any]]]:
    """Make the schema of a function.

    An `Enum` of strings or of integers is a choice between its values, and the function gets the member.

    Args:
        function: With a hint and a line under `Args:` for each parameter.
        name: The tool's name.
        place: Where the function was written, for messages.

    Returns:
        The schema, and by parameter, where its hint asks for it, a function from the JSON value to what the hint says (enum
        members, tuples, dicts whose keys are no strings); it raises ToolArgumentError.

    Raises:
        ToolImportError: transformers is missing.
        ToolSchemaError: hints or docstring do not give a schema.
    """
    try:
        from transformers.utils.chat_template_utils import get_json_schema
    except ImportError as error:
        raise ToolImportError(
            f"schema of {place} must be given or made by transformers, got neither ({error}); "
            "pip install 'ostinato-tools[transformers]' or pass schema=..."
        ) from error
    try:
        hints = {key: hint for key, hint in get_type_hints(function).items() if key != "return"}
        converted = {key: hint for key, hint in hints.items() if _wants_conversion(hint)}
        schema = copy.deepcopy(get_json_schema(_with_literals(function, hints)))
        converters = {key: _converter(key, hint) for key, hint in converted.items()}
    except Exception as error:  # a foreign function over foreign hints: everything it raises means the same here
        raise ToolSchemaError(
            f"schema of {place} must follow from its type hints and docstring, got: {error}; "
            "give every parameter a hint and a line under Args:, or pass schema=..."
        ) from error
    schema["function"]["name"] = name
    check_tool_schema(schema, place)
    return schema, converters


def _wants_conversion(hint: Any) -> bool:
    """Whether a JSON value differs from what the hint says; refuses hints that JSON cannot express at all."""
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin is Literal or hint is Any:
        return False
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        kinds = {type(member.value) for member in origin}
        if kinds not in ({str}, {int}):
            raise TypeError(f"the values of the Enum {origin.__name__} are neither all strings nor all integers")
        return True
    if isinstance(origin, type) and origin not in (*_PLAIN, types.UnionType) and not typing.is_typeddict(origin):
        raise TypeError(f"{origin.__name__} has no JSON schema")
    inner = [_wants_conversion(argument) for argument in arguments if argument is not Ellipsis]
    has_other_keys = origin is dict and bool(arguments) and arguments[0] is not str
    return any(inner) or has_other_keys or origin is tuple


def _with_literals(function: Callable, hints: dict[str, Any]) -> Callable:
    """A stand-in for `function` with the same signature and docstring, whose enums are literals."""
    if not any(_wants_conversion(hint) for hint in hints.values()):
        return function
    signature = inspect.signature(function)

    def stand_in() -> None: ...

    stand_in.__name__, stand_in.__doc__ = function.__name__, inspect.getdoc(function)
    stand_in.__annotations__ = {key: _as_literals(hint) for key, hint in hints.items()}
    stand_in.__signature__ = signature  # type: ignore[attr-defined]
    return stand_in


def _as_literals(hint: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return Literal[tuple(member.value for member in hint)]  # type: ignore[valid-type]
    if origin is None or origin is Literal:
        return hint
    inner = tuple(_as_literals(argument) for argument in arguments)
    return functools.reduce(operator.or_, inner) if origin in (Union, types.UnionType) else origin[inner]


def _converter(name: str, hint: Any) -> Callable[[Any], Any]:
    msgspec.json.Decoder(hint)  # refuses now what it could not convert later

    def convert(value: Any) -> Any:
        try:
            return msgspec.convert(value, hint, str_keys=True)
        except msgspec.ValidationError as error:
            raise ToolArgumentError(f"{name} is not valid: {error}") from error

    return convert
