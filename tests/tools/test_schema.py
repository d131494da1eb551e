"""Schemas: carried whole, refused early, and validated against without converting anything."""

import copy
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato_tools import ToolRegistry, ToolSchemaError, function_tool
from ostinato_tools.acceptance import compile_acceptance
from ostinato_tools.schema import _nullable_validator_class, check_tool_schema, compile_validator
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


KINDS = ["string", "integer", "number", "boolean", "null", "array", "object"]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(-3, 3).filter(lambda value: not value.is_integer())  # 1.0 is an integer, too: the quick check leaves it
    | st.text("ab", max_size=3)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=4),
    max_leaves=8,
)
SIZES = st.integers(0, 3)


def schemas_over(inner: st.SearchStrategy) -> st.SearchStrategy:
    """JSON schemas of the keywords that the quick check understands, and of some that it need not."""
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(KINDS) | st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True),
            "nullable": st.booleans(),
            "description": st.text(),
            "format": st.just("date"),
            "x-own": SCALARS,
            "enum": st.lists(SCALARS, min_size=1, max_size=4),
            "const": SCALARS,
            "minimum": st.integers(-3, 3),
            "exclusiveMaximum": st.integers(-3, 3),
            "minLength": SIZES,
            "maxItems": SIZES,
            "minProperties": SIZES,
            "anyOf": st.lists(inner, min_size=1, max_size=2),
            "items": inner,
            "properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            "required": st.lists(st.sampled_from("abcd"), unique=True, max_size=2),
            "additionalProperties": inner,
        },
    )


SCHEMAS = st.recursive(st.booleans() | schemas_over(st.booleans()), schemas_over, max_leaves=5)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SCHEMAS, VALUES)
def test_the_quick_check_agrees_with_the_validator(schema: dict | bool, value: object) -> None:
    """The shortcut, where there is one, never changes the verdict of the general validator."""
    validator_class = _nullable_validator_class()
    accepts = compile_acceptance(schema, validator_class.VALIDATORS)
    assert accepts is not None
    assert accepts(value) == (not list(validator_class(schema).iter_errors(value)))


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "a"},
        {"oneOf": [{"type": "integer"}]},
        {"properties": {"x": {"items": {"not": {}}}}},
        {"$ref": "#/$defs/x", "$defs": {"x": {}}},
        {"prefixItems": [{}], "items": {}},
    ],
)
def test_there_is_no_shortcut_for_what_is_not_understood(schema: dict) -> None:
    """A keyword beyond the shortcut, however deep, leaves everything to the general validator."""
    assert compile_acceptance(schema, _nullable_validator_class().VALIDATORS) is None


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


def _definitions(**definitions: dict) -> dict:
    return {"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": definitions}


@pytest.mark.parametrize(
    "parameters",
    [
        _definitions(a={"$ref": "#/$defs/a"}),
        _definitions(a={"$ref": "#/$defs/b"}, b={"$ref": "#/$defs/a"}),
        _definitions(a={"anyOf": [{"type": "null"}, {"allOf": [{"$ref": "#/$defs/a"}]}]}),
        _definitions(a={"not": {"$ref": "#/$defs/a"}}),
        {"$ref": "#"},
    ],
)
def test_references_in_a_circle_are_refused(parameters: dict) -> None:
    """A reference that leads back to itself before it goes into the value is refused at once: no call could ever fit it."""
    with pytest.raises(ToolSchemaError, match=r"\$ref of here must lead to a schema, got a circle .*; correct"):
        compile_validator({"function": {"name": "f", "parameters": parameters}}, "here")


def test_schemas_of_trees_are_no_circles() -> None:
    """A reference to what holds it, a level further down in the value, is what trees are made of; shared parts are none either."""
    node = {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}}]}
    doubled = {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}
    parameters = _definitions(a=node, b=doubled) | {"required": ["x"]}
    problems = compile_validator({"function": {"name": "f", "parameters": parameters}}, "here")
    assert problems({"x": {"x": {"x": None}}}) == []
    assert problems({"x": {"x": 5}})


def test_a_schema_that_is_too_deep_is_refused() -> None:
    """A schema of more levels than can be followed is an error of the schema, not a crash."""
    parameters: dict = {"type": "integer"}
    for _ in range(2000):
        parameters = {"anyOf": [parameters]}
    with pytest.raises(ToolSchemaError, match=r"parameters of here must be nested less deeply"):
        compile_validator({"function": {"name": "f", "parameters": parameters}}, "here")


@pytest.mark.parametrize("name", ["", " f", "a b", "a\nb", "a\u200bb", "a\x00", 5])
def test_a_name_is_one_word(name: object) -> None:
    """A name that a format could not write, or that would break a prompt's line, is refused with the place."""
    with pytest.raises(ToolSchemaError, match="name of here must be a name without white space, got"):
        check_tool_schema({"type": "function", "function": {"name": name}}, "here")


def test_a_long_value_is_not_repeated_whole() -> None:
    """What the model reads about a very long value is short, and still says where it is and what is wrong."""
    (sentence,) = problems({"properties": {"x": {"type": "integer"}}}, {"x": "long" * 10_000})
    assert len(sentence) < 250
    assert sentence.startswith("x: 'long")
    assert sentence.endswith("is not of type 'integer'")


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
