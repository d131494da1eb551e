"""Types by schema: the bare text of an argument is what the parameter's schema allows it to be, and else the text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato_tools.parsers.literals import read_literal
from ostinato_tools.parsers.schema_types import ParameterTypes, ToolTypes

OBJECT = {"type": "object"}
DEFS = {
    "City": {"type": "object", "properties": {"name": {"type": "string"}}},
    "Count": {"anyOf": [{"$ref": "#/$defs/Whole"}, {"type": "null"}]},
    "Whole": {"type": "integer"},
    "a/b~c": {"type": "boolean"},
    "Loop": {"$ref": "#/$defs/Loop"},
    "Twins": {"anyOf": [{"$ref": "#/$defs/Twins"}, {"$ref": "#/$defs/Twins"}]},
}


def read(text: str, schema: object, **options: object) -> object:
    """Read a text under the schema of a parameter."""
    parameters = {"type": "object", "properties": {"p": schema}, "$defs": DEFS}
    return ParameterTypes(parameters).read("p", text, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("5", {"type": "number"}, 5),
        ("5.5", {"type": "number"}, 5.5),
        ("5.5", {"type": "integer"}, "5.5"),
        ("5.0", {"type": "integer"}, 5.0),
        ("05", {"type": "integer"}, "05"),
        ("five", {"type": "integer"}, "five"),
        ('"5"', {"type": "integer"}, '"5"'),
        ('"5"', {"type": "string"}, '"5"'),
        (" 5 ", {"type": "integer"}, 5),
        ("1", {"type": "boolean"}, "1"),
        ("true", {"type": "integer"}, "true"),
        ("false", {"type": "boolean"}, False),
        ("False", {"type": "boolean"}, False),
        ("false", {"type": "string"}, "false"),
        ("false", {"type": ["boolean", "null"]}, False),
        ("null", {"type": ["boolean", "null"]}, None),
        ("None", {"type": ["boolean", "null"]}, None),
        ("null", {"type": "string"}, "null"),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"type": "integer"}, "null"),
        ("null", {"type": "integer", "nullable": True}, None),
        ("5", {"type": "integer", "nullable": True}, 5),
        ("null", {"type": "string", "nullable": True}, None),
        ("5", {"type": "string", "nullable": True}, "5"),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 5),
        ("null", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ("x", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "x"),
        ("5", {"oneOf": [{"type": "integer"}, {"type": "string"}]}, 5),
        ('{"city":"Paris"}', {"anyOf": [OBJECT, OBJECT]}, {"city": "Paris"}),
        ('{"city":"Paris"}', {"type": "string"}, '{"city":"Paris"}'),
        ('{"city":"Paris"', OBJECT, '{"city":"Paris"'),
        ('{"city":"Paris"}', {"properties": {"city": {}}}, {"city": "Paris"}),
        ("[1]", {"items": {"type": "integer"}}, [1]),
        ("[1]", OBJECT, "[1]"),
        ('{"name":"Paris"}', {"$ref": "#/$defs/City"}, {"name": "Paris"}),
        ("5", {"$ref": "#/$defs/Count"}, 5),
        ("null", {"$ref": "#/$defs/Count"}, None),
        ("true", {"$ref": "#/$defs/a~1b~0c"}, True),
        ("5", {"allOf": [{"$ref": "#/$defs/Whole"}, {"minimum": 1}]}, 5),
        ("5", {"enum": [1, 5]}, 5),
        ("5", {"enum": ["1", "5"]}, "5"),
        ("5", {"enum": ["5", 5]}, "5"),
        ("2", {"enum": [1, 5]}, "2"),
        ("true", {"enum": [1]}, "true"),
        ("1", {"enum": [True]}, "1"),
        ("null", {"enum": ["a", None]}, None),
        ("5", {"const": 5}, 5),
        ("a", {"const": "a"}, "a"),
        ("[1,2]", {"const": [1, 2]}, [1, 2]),
        ("5", {"type": "integer", "enum": [5]}, 5),
        ("5", {}, "5"),
        ("5", True, "5"),
        ("5", None, "5"),
        ("5", {"type": "whatever"}, "5"),
        ("5", {"type": 7}, "5"),
        ("5", {"anyOf": [{"type": "integer"}, {}]}, "5"),
        ("5", {"$ref": "#/$defs/Missing"}, "5"),
        ("5", {"$ref": "https://example.org/schema"}, "5"),
        ("5", {"$ref": "#/$defs/Loop"}, "5"),
        ("5", {"$ref": "#/$defs/Twins"}, "5"),
        ("1e999", {"type": "number"}, "1e999"),
        ("NaN", {"type": "number"}, "NaN"),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
    ],
)
def test_a_text_is_read_as_the_schema_says(text: str, schema: object, value: object) -> None:
    """A text becomes a value of an allowed type if it is exactly that, and stays text otherwise."""
    got = read(text, schema)
    assert got == value
    assert type(got) is type(value)


def test_without_a_type_the_format_decides() -> None:
    """Where nothing is known, text is text, or JSON if the format says so and the text is JSON."""
    assert read("5", {}) == "5"
    assert read("5", {}, untyped_is_json=True) == 5
    assert read("five", {}, untyped_is_json=True) == "five"
    assert read("5", {"type": "string"}, untyped_is_json=True) == "5"


def test_literals_in_pythons_spelling_are_read_if_the_format_says_so() -> None:
    """A format that writes values as Python does gets them read as literals; JSON goes first, and a string is untouched."""
    assert read("{'a': True, 'b': [1]}", OBJECT, read_literal=read_literal) == {"a": True, "b": [1]}
    assert read("{'a': True}", OBJECT) == "{'a': True}"
    assert read('{"a": true}', OBJECT, read_literal=read_literal) == {"a": True}
    assert read("{'a': True}", {"type": "string"}, read_literal=read_literal) == "{'a': True}"
    assert read("{'a': open('b')}", OBJECT, read_literal=read_literal) == "{'a': open('b')}"


def test_parameters_are_found() -> None:
    """A tool's parameters are found by its name, further ones under `additionalProperties`; nothing known means text."""
    function = {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}, "additionalProperties": OBJECT}}
    types = ToolTypes(
        [{"type": "function", "function": function}, {"type": "function"}, {}, {"name": ["f"], "parameters": {}}, 5]
    )  # type: ignore[list-item]
    assert types.of("f").read("a", "5") == 5
    assert types.of("f").read("b", "{}") == {}
    assert types.of("g").read("a", "5") == "5"
    assert ToolTypes([function]).of("f").read("a", "5") == 5
    assert ToolTypes(None).of("f").read("a", "5") == "5"


@given(
    st.text(), st.recursive(st.sampled_from(["string", "integer", "null"]), lambda inner: st.lists(inner, max_size=3))
)
def test_any_text_and_schema_give_a_value(text: str, kind: object) -> None:
    """No text and no schema raises; under a string schema, the text is what it was."""
    read(text, {"type": kind, "enum": kind, "anyOf": kind, "$ref": text})
    read(text, {"anyOf": [{"type": kind}, {"allOf": [kind]}, {"$ref": "#/" + text}]}, read_literal=read_literal)
    assert read(text, {"type": "string"}) == text
