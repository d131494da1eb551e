"""Schemas: carried whole, refused early, and validated against without converting anything."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato_tools import ToolRegistry, ToolSchemaError, function_tool
from ostinato_tools.schema import check_tool_schema, compile_validator
from ostinato_tools.testing import CounterTool

RICH = {
    "type": "function",
    "strict": True,
    "function": {
        "name": "rich",
        "description": "All there is.",
        "x-own": [1],
        "parameters": {
            "type": "object",
            "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
            "properties": {
                "list": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "default": [1]},
                "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "point": {"$ref": "#/$defs/point"},
                "deep": {"type": "object", "properties": {"a": {"type": "string", "minimum": 3}}, "required": ["a"]},
                "perhaps": {"type": "integer", "nullable": True},
                "choice": {"enum": [1, 2], "nullable": True},
            },
        },
    },
}


def problems(parameters: dict, arguments: dict) -> list[str]:
    schema = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return compile_validator(schema, "here")(arguments)


def test_a_schema_is_carried_whole() -> None:
    """What the registry hands out equals what the author wrote, unknown keywords and all, for functions and classes."""
    written = copy.deepcopy(RICH)
    registry = ToolRegistry([function_tool(schema=written)(lambda list=None: "")])
    assert registry.schemas() == [RICH]
    registry = ToolRegistry()
    registry.add_class(CounterTool, tool_schema=written)
    assert registry.schemas(["rich"]) == [RICH]
    assert json.dumps(registry.schemas()[0]) == json.dumps(RICH)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, None),
        ({"list": [1], "either": None, "point": {"x": 1.5}, "deep": {"a": "b"}, "perhaps": None, "choice": None}, None),
        ({"unknown": 1}, None),
        ({"list": []}, "list: "),
        ({"list": ["1"]}, "list.0: '1' is not of type 'integer'"),
        ({"either": "5"}, "either: "),
        ({"point": {}}, "point: 'x' is a required property"),
        ({"deep": {"a": 5}}, "deep.a: "),
        ({"perhaps": "5"}, "perhaps: "),
        ({"perhaps": True}, "perhaps: "),
        ({"choice": 3}, "choice: "),
    ],
)
def test_arguments_are_checked_where_they_are(arguments: dict, said: str | None) -> None:
    """Each fault is named with its path; `nullable` admits null; nothing is converted."""
    found = problems(RICH["function"]["parameters"], arguments)
    assert (found == []) == (said is None)
    assert said is None or found[0].startswith(said)


KINDS = {"string": str, "integer": int, "number": float, "boolean": bool, "null": type(None)}
VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.just([])
)
PROPERTY = st.fixed_dictionaries(
    {
        "type": st.sampled_from(list(KINDS))
        | st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=2, unique=True)
    },
    optional={"nullable": st.booleans(), "description": st.text()},
)


@given(
    st.dictionaries(st.sampled_from("abc"), PROPERTY),
    st.dictionaries(st.sampled_from("abcd"), VALUES),
    st.booleans(),
    st.lists(st.sampled_from("abcd"), unique=True),
)
def test_the_quick_check_agrees_with_the_validator(properties, arguments, additional, required) -> None:
    """The shortcut for flat schemas never changes the verdict."""
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": additional}
    slow = {**parameters, "minProperties": 0}  # a keyword that means nothing here and rules the shortcut out
    assert problems(parameters, arguments) == problems(slow, arguments)


@pytest.mark.parametrize(
    "schema",
    [
        None,
        [],
        {},
        {"type": "object"},
        {"type": "function"},
        {"type": "function", "function": {"name": ""}},
        {"type": "function", "function": {"name": " f"}},
        {"type": "function", "function": {"name": 5}},
        {"type": "function", "function": {"name": "f", "parameters": []}},
        {"type": "function", "function": {"name": "f", "parameters": {"default": {1}}}},
        {"type": "function", "function": {"name": "f", "parameters": {"default": float("nan")}}},
    ],
)
def test_a_wrong_form_is_refused(schema) -> None:
    """What is no OpenAI-style schema is refused, naming the place and the form."""
    with pytest.raises(ToolSchemaError, match=r"of here must be .*; write"):
        check_tool_schema(schema, "here")


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "objekt"},
        {"properties": {"x": {"type": 5}}},
        {"properties": {"x": {"$ref": "#/$defs/missing"}}},
        {"properties": {"x": {"$ref": "https://example.com/schema.json"}}},
        {"required": "x"},
    ],
)
def test_a_wrong_json_schema_is_refused(parameters: dict) -> None:
    """A fault inside the parameters, or a reference that leads out of them, is refused before any call; nothing is fetched."""
    with pytest.raises(ToolSchemaError, match="of here"):
        problems(parameters, {})


def test_deep_arguments_are_an_error_not_a_crash() -> None:
    """Arguments nested beyond all reason are answered."""
    value: list = []
    for _ in range(100_000):
        value = [value]
    parameters = {
        "$defs": {"l": {"type": "array", "items": {"$ref": "#/$defs/l"}}},
        "properties": {"x": {"$ref": "#/$defs/l"}},
    }
    assert problems(parameters, {"x": value}) == ["the arguments are nested too deeply"]
