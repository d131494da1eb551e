"""Loading: both files, every fault with its file and cure, and twice without harm."""

import textwrap
from pathlib import Path

import pytest

from ostinato_tools import (
    DuplicateToolError,
    ToolConfigError,
    ToolDefinitionError,
    ToolError,
    ToolFileNotFoundError,
    ToolImportError,
    ToolRegistry,
    ToolSchemaError,
    UnknownToolError,
    load_tools,
)
from ostinato_tools.calculator import calculator
from ostinato_tools.testing import CounterTool, echo, make_schema

SCHEMA = "{type: function, function: {name: counter, parameters: {type: object, properties: {}, x-own: 1}}}"
CONFIG = f"""
tools:
  - class_name: ostinato_tools.testing.CounterTool
    config: {{type: native, own: [1, 2]}}
    tool_schema: {SCHEMA}
  - class_name: ostinato_tools.gsm8k.CalcGsm8kReward
    config: {{type: native}}
"""
FUNCTIONS = """
from __future__ import annotations
from dataclasses import dataclass
from ostinato_tools import function_tool
from ostinato_tools.calculator import calculator

LOADED = []
LOADED.append(1)

@dataclass
class Point:
    x: int

@function_tool(schema={"type": "function", "function": {"name": "own"}})
async def own() -> str:
    return "own"

alias = own
"""


def write(path: Path, text: str) -> Path:
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def test_both_files_together(tmp_path: Path) -> None:
    """YAML tools come first, then those of the Python file, imported ones too, aliases once; twice gives the same."""
    config, functions = write(tmp_path / "tools.yaml", CONFIG), write(tmp_path / "functions.py", FUNCTIONS)
    registry = load_tools(config, functions)
    assert registry.names == ("counter", "calc_gsm8k_reward", "calculator", "own")
    assert registry.schemas(["counter"])[0]["function"]["parameters"]["x-own"] == 1
    assert registry.get("counter").config == {"type": "native", "own": [1, 2]}
    again = load_tools(str(config), str(functions))
    assert again.schemas() == registry.schemas()
    own = registry.get("own").function
    assert own is again.get("own").function
    assert own is not None
    assert own.function.__globals__["LOADED"] == [1]
    assert load_tools().names == ()
    assert load_tools(function_tool_path=functions).names == ("calculator", "own")


def test_a_changed_file_is_loaded_anew(tmp_path: Path) -> None:
    """A Python file is remembered by its text, so a change is seen at once."""
    functions = write(tmp_path / "functions.py", FUNCTIONS)
    load_tools(None, functions)
    write(functions, FUNCTIONS.replace('"name": "own"', '"name": "renamed"'))
    assert load_tools(None, functions).names == ("calculator", "renamed")


def test_yaml_may_name_a_function_tool(tmp_path: Path) -> None:
    """A function tool can be listed by its dotted path."""
    config = write(tmp_path / "tools.yaml", "tools: [{class_name: ostinato_tools.calculator.calculator}]")
    assert load_tools(config).get("calculator").function is calculator


def test_collisions_name_both_places(tmp_path: Path) -> None:
    """One name in two places is refused, naming both."""
    config = write(tmp_path / "tools.yaml", CONFIG)
    functions = write(tmp_path / "functions.py", FUNCTIONS.replace('"name": "own"', '"name": "counter"'))
    with pytest.raises(
        DuplicateToolError, match=r"'counter' in .*tools\.yaml, tools\[0\] and in .*functions\.py, own \(.*:14\)"
    ):
        load_tools(config, functions)
    twice = write(
        tmp_path / "twice.yaml",
        CONFIG + f"  - {{class_name: ostinato_tools.testing.CounterTool, tool_schema: {SCHEMA}}}",
    )
    with pytest.raises(DuplicateToolError, match=r"tools\[0\] and in .*tools\[2\]"):
        load_tools(twice)
    registry = ToolRegistry([echo, echo])
    registry.merge(ToolRegistry([calculator]))
    assert registry.names == ("echo", "calculator")
    with pytest.raises(DuplicateToolError):
        registry.merge(ToolRegistry([echo]))


ENTRY = "tools: [{class_name: %s, config: {type: native}, tool_schema: " + SCHEMA + "}]"


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("tools: [", ToolConfigError, "must be YAML"),
        ("tools: \xff", None, ""),
        ("", ToolConfigError, "'tools'"),
        ("tools:", ToolConfigError, "got NoneType"),
        ("- a", ToolConfigError, "'tools'"),
        ("tools: []\nother: 1", ToolConfigError, "other"),
        ("tools: []\ntools: []", ToolConfigError, "written twice"),
        ("tools: [5]", ToolConfigError, r"tools\[0\]"),
        ("tools: [{config: {}}]", ToolConfigError, "class_name"),
        ("tools: [{class_name: a.B, clas: 1}]", ToolConfigError, "clas"),
        ("tools: [{class_name: a.B, config: [1]}]", ToolConfigError, "config of"),
        ("tools: [{class_name: a.B, config: {type: mcp}}]", ToolConfigError, "'mcp'"),
        (ENTRY % "Nope", ToolImportError, "dotted path"),
        (ENTRY % "no_such_module_here.Tool", ToolImportError, "no_such_module_here"),
        (ENTRY % "ostinato_tools.testing.Nope", ToolImportError, "has no Nope"),
        (ENTRY % "ostinato_tools.ToolRegistry", ToolConfigError, "BaseTool subclass"),
        (ENTRY % "ostinato_tools.BaseTool", ToolConfigError, "abstract"),
        (ENTRY % "ostinato_tools.calculator.calculator", ToolConfigError, "neither tool_schema nor config"),
        (
            "tools: [{class_name: ostinato_tools.testing.CounterTool, tool_schema: {type: function}}]",
            ToolSchemaError,
            "function",
        ),
        (
            "tools: [{class_name: ostinato_tools.testing.CounterTool, "
            "tool_schema: {type: function, function: {name: f, parameters: {default: 2020-01-01}}}}]",
            ToolSchemaError,
            "JSON",
        ),
    ],
)
def test_a_wrong_config_names_file_and_cure(
    tmp_path: Path, text: str, error: type[ToolError] | None, said: str
) -> None:
    """Every fault of the YAML file is one error that names the file and ends with the cure."""
    path = tmp_path / "tools.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(error or ToolConfigError, match=rf"(?s)tools\.yaml.*{said}|{said}.*tools\.yaml") as caught:
        load_tools(path)
    assert "; " in str(caught.value)


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("x = 1", ToolConfigError, "got none"),
        ("def f(:", ToolImportError, "SyntaxError"),
        ("import no_such_module_here", ToolImportError, "no_such_module_here"),
        ("1 / 0", ToolImportError, "ZeroDivisionError"),
        ("from ostinato_tools import function_tool\n@function_tool\ndef f(*args): ...", ToolDefinitionError, r"\*args"),
    ],
)
def test_a_wrong_python_file_names_itself(tmp_path: Path, text: str, error: type[ToolError], said: str) -> None:
    """A Python file that does not run or holds no tool is one error naming it, each time it is loaded."""
    path = write(tmp_path / "functions.py", text)
    for _ in range(2):
        with pytest.raises(error, match=rf"(?s)functions\.py.*{said}|{said}.*functions\.py"):
            load_tools(None, path)


def test_missing_files(tmp_path: Path) -> None:
    """A path to nothing or to a directory is named with its key."""
    with pytest.raises(ToolFileNotFoundError, match=r"tool_config_path .*nope\.yaml"):
        load_tools(tmp_path / "nope.yaml")
    with pytest.raises(ToolFileNotFoundError, match=r"function_tool_path .*directory"):
        load_tools(None, tmp_path)
    with pytest.raises(FileNotFoundError):
        load_tools("")
    with pytest.raises(
        ToolFileNotFoundError, match=r"tool_config_path must begin with the home of a known user .*; write"
    ):
        load_tools("~nobody-of-this-name/tools.yaml")


def test_registry_answers() -> None:
    """Names, membership, length and a clear error for what is not there."""
    registry = ToolRegistry([echo])
    registry.add_class(CounterTool)
    assert registry.names == ("echo", "counter")
    assert "echo" in registry
    assert len(registry) == 2
    assert registry.schemas(["counter"]) == [make_schema("counter")]
    with pytest.raises(UnknownToolError, match=r"\(echo, counter\), got 'nope'"):
        registry.schemas(["nope"])
    with pytest.raises(ToolDefinitionError, match="@function_tool"):
        registry.add_function(lambda: "")  # type: ignore[arg-type]
    with pytest.raises(ToolDefinitionError, match="BaseTool"):
        registry.add_class(dict)  # type: ignore[arg-type]
