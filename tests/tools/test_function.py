"""Function tools: how a function becomes one, and what it is refused for."""

import asyncio
import enum
import functools
import sys
import threading
from typing import Any, Literal, Optional

import pytest

from ostinato_tools import (
    FunctionTool,
    ToolDefinitionError,
    ToolExecutor,
    ToolImportError,
    ToolRegistry,
    ToolSchemaError,
    function_tool,
)
from ostinato_tools.testing import make_call, make_schema


def test_three_ways_to_decorate() -> None:
    """Bare, named, and with a schema; the decorated function can still be called."""

    @function_tool
    def add(x: int, y: int = 1) -> str:
        """Add."""
        return str(x + y)

    @function_tool("plus")
    def other(x: int) -> str:
        return str(x)

    @function_tool(schema=make_schema("third"))
    def another() -> str:
        return ""

    assert [tool.name for tool in (add, other, another)] == ["add", "plus", "third"]
    assert add(1, y=2) == "3"
    assert add.__doc__ == "Add."
    assert all(isinstance(tool, FunctionTool) for tool in (add, other, another))
    assert another.get_openai_tool_schema() == make_schema("third")


@pytest.mark.parametrize(
    "function",
    [lambda *args: "", lambda **kwargs: "", eval("lambda x, /: ''"), eval("lambda: (yield)"), dict, len],
)
def test_functions_that_cannot_be_tools(function) -> None:
    """Variable and positional-only parameters, generators and classes are refused at decoration with the cure."""
    with pytest.raises(ToolDefinitionError, match="; "):
        function_tool("name")(function)


@pytest.mark.parametrize("argument", [5, ""])
def test_wrong_use_of_the_decorator(argument) -> None:
    """A number or an empty name is refused."""
    with pytest.raises(ToolDefinitionError):
        function_tool(argument)


def test_names_must_agree() -> None:
    """A name beside a schema must be the schema's; a lambda needs one; a tool is not decorated twice."""
    with pytest.raises(ToolDefinitionError, match="'a' and 'b'"):
        function_tool("a", schema=make_schema("b"))(lambda: "")
    with pytest.raises(ToolDefinitionError, match="lambda"):
        function_tool(lambda: "")
    with pytest.raises(ToolDefinitionError, match="decorate once"):
        function_tool(function_tool("a")(lambda: ""))
    with pytest.raises(ToolSchemaError):
        function_tool(schema={"name": "a"})(lambda: "")


def test_schema_follows_from_hints_and_docstring() -> None:
    """The schema is what transformers makes of the function, under the tool's name."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils", reason="extra transformers is not installed")

    def search(
        query: str, kind: Literal["web", "news"] = "web", limit: int | None = None, scale: int | float = 1
    ) -> str:
        """Search.

        Args:
            query: What to look for.
            kind: Where.
            limit: How many.
            scale: How much.
        """
        return query + kind + str(limit) + str(scale)

    tool = function_tool("find")(search)
    expected = utils.get_json_schema(search)
    expected["function"]["name"] = "find"
    schema = tool.get_openai_tool_schema()
    assert schema == expected
    parameters = schema["function"]["parameters"]
    assert parameters["required"] == ["query"]
    assert parameters["properties"]["kind"]["enum"] == ["web", "news"]
    assert parameters["properties"]["limit"]["nullable"] is True
    assert parameters["properties"]["scale"]["type"] == ["integer", "number"]
    assert tool.get_openai_tool_schema() is schema


def test_what_a_schema_cannot_be_made_from() -> None:
    """A missing hint or docstring entry is an error that names the cure, never a dropped parameter."""
    pytest.importorskip("transformers", reason="extra transformers is not installed")

    def without_hint(x) -> str:
        """Do.

        Args:
            x: It.
        """
        return x

    def without_entry(x: int) -> str:
        """Do."""
        return str(x)

    def without_docstring(x: int) -> str:
        return str(x)

    class Mixed(enum.Enum):
        ONE = 1
        TWO = "two"

    def with_mixed_enum(x: list[Mixed] | None = None) -> str:
        """Do.

        Args:
            x: It.
        """
        return str(x)

    def with_bytes(x: dict[str, bytes]) -> str:
        """Do.

        Args:
            x: It.
        """
        return str(x)

    for function in (without_hint, without_entry, without_docstring, with_mixed_enum, with_bytes):
        with pytest.raises(ToolSchemaError, match="schema="):
            function_tool(function).get_openai_tool_schema()


class Colour(enum.Enum):
    """A choice."""

    RED = "red"
    BLUE = "blue"


HINTS = [
    (str, {"type": "string"}),
    (bool, {"type": "boolean"}),
    (list[int], {"type": "array", "items": {"type": "integer"}}),
    (dict[str, list[int]], {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "integer"}}}),
    (tuple[int, str], {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}),
    (Optional[int], {"type": "integer", "nullable": True}),  # noqa: UP045 - the older spelling is meant
    (int | None, {"type": "integer", "nullable": True}),
    (list[int | None], {"type": "array", "items": {"type": "integer", "nullable": True}}),
    (int | float, {"type": ["integer", "number"]}),
    (int | float | None, {"type": ["integer", "number"], "nullable": True}),
    (Literal["x", "y"], {"type": "string", "enum": ["x", "y"]}),
    (Literal[1, 2, None], {"type": ["integer", "null"], "enum": [1, 2, None]}),
    (Optional[Literal[1, "a"]], {"type": ["integer", "string"], "enum": [1, "a"], "nullable": True}),  # noqa: UP045 - as above
    (list[Literal["a", "b"]], {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}}),
    (Colour, {"type": "string", "enum": ["red", "blue"]}),
    (Colour | None, {"type": "string", "enum": ["red", "blue"], "nullable": True}),
    (dict[str, list[Colour]], None),
    (Any, {}),
]


@pytest.mark.parametrize(("hint", "expected"), HINTS)
def test_each_kind_of_hint_has_its_schema(hint: Any, expected: dict | None) -> None:
    """Generics, optional and union types, literals and enums come out as JSON schemas whose choices keep their types."""
    pytest.importorskip("transformers", reason="extra transformers is not installed")

    def f(*, x, y=None) -> str:
        """Do.

        Args:
            x: It.
            y: Not
                that.
        """
        return f"{x}{y}"

    f.__annotations__ = {"x": hint, "y": hint}
    tool = function_tool(f)
    parameters = tool.get_openai_tool_schema()["function"]["parameters"]
    assert parameters["required"] == ["x"]
    if expected is not None:
        assert parameters["properties"]["x"] == {**expected, "description": "It."}
    assert parameters["properties"]["y"]["description"] == "Not that."
    ToolRegistry([tool])


def test_a_function_without_parameters_and_choices_in_the_docstring() -> None:
    """No parameters give an empty object that requires nothing; `(choices: [...])` in the docstring is an enum."""
    pytest.importorskip("transformers", reason="extra transformers is not installed")

    @function_tool
    def nothing() -> str:
        """Do nothing."""
        return ""

    @function_tool
    def chosen(x: int) -> str:
        """Do.

        Args:
            x: It (choices: [1, 2])
        """
        return str(x)

    parameters = nothing.get_openai_tool_schema()["function"]["parameters"]
    assert (parameters["properties"], parameters.get("required", [])) == ({}, [])
    assert chosen.get_openai_tool_schema()["function"]["parameters"]["properties"]["x"]["enum"] == [1, 2]


async def test_arguments_are_what_the_hints_say() -> None:
    """Enum members, tuples and dicts with other keys than strings reach the function as such; what does not fit is refused."""
    pytest.importorskip("transformers", reason="extra transformers is not installed")
    seen = []

    @function_tool
    async def f(colour: Colour | None, pair: tuple[int, str], names: dict[int, list[Colour]]) -> str:
        """Do.

        Args:
            colour: One.
            pair: Two.
            names: Three.
        """
        seen.append((colour, pair, names))
        return "done"

    executor = ToolExecutor(ToolRegistry([f]))
    good = {"colour": "red", "pair": [1, "a"], "names": {"3": ["blue"]}}
    async with executor.open("t") as tools:
        outcomes = await tools.run(
            [
                make_call("f", good),
                make_call("f", {**good, "colour": None}),
                make_call("f", {**good, "colour": "green"}),
                make_call("f", {**good, "names": {"three": []}}),
            ]
        )
    assert [item.kind for item in outcomes] == ["ok", "ok", "bad_arguments", "bad_arguments"]
    assert seen == [
        (Colour.RED, (1, "a"), {3: [Colour.BLUE]}),
        (None, (1, "a"), {3: [Colour.BLUE]}),
    ]
    assert "names is not valid" in outcomes[3].message["content"]


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without transformers the error prints the line that installs it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)

    @function_tool
    def f() -> str:
        """Do."""
        return ""

    with pytest.raises(ToolImportError, match=r"pip install 'ostinato-tools\[transformers\]'"):
        f.get_openai_tool_schema()


async def test_where_functions_run() -> None:
    """A synchronous function runs in another thread, every kind of asynchronous callable on the loop."""

    class Callable_:
        async def __call__(self) -> int:
            return threading.get_ident()

    async def asynchronous() -> int:
        await asyncio.sleep(0)
        return threading.get_ident()

    here = threading.get_ident()
    assert await function_tool("a")(lambda: threading.get_ident()).invoke({}) != here
    assert await function_tool("b")(asynchronous).invoke({}) == here
    assert await function_tool("c")(functools.partial(asynchronous)).invoke({}) == here
    assert await function_tool("d")(Callable_()).invoke({}) == here
    assert await function_tool("e")(lambda: asynchronous()).invoke({}) == here
