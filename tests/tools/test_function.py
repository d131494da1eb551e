"""Function tools: how a function becomes one, and what it is refused for."""

import asyncio
import enum
import functools
import sys
import threading
from typing import Literal

import pytest

from ostinato_tools import FunctionTool, ToolDefinitionError, ToolImportError, ToolSchemaError, function_tool
from ostinato_tools.testing import make_schema


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

    class Colour(enum.Enum):
        RED = "red"

    def with_enum(x: list[Colour] | None = None) -> str:
        """Do.

        Args:
            x: It.
        """
        return str(x)

    for function in (without_hint, without_entry, without_docstring, with_enum):
        with pytest.raises(ToolSchemaError, match="schema="):
            function_tool(function).get_openai_tool_schema()


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
