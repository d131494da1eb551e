"""The package as a whole: light to import, errors that travel, a README that runs."""

import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ostinato_tools
from ostinato_tools import ToolError, errors

README = Path(__file__).parents[2] / "packages" / "tools" / "README.md"


def test_import_and_decoration_are_light() -> None:
    """Importing the package and its ready tools, and decorating, loads no torch, transformers, jsonschema or multiprocessing."""
    code = (
        "import sys, ostinato_tools, ostinato_tools.calculator, ostinato_tools.gsm8k, ostinato_tools.testing\n"
        "@ostinato_tools.function_tool\n"
        "def f(x: int): ...\n"
        "print([name for name in ('torch', 'transformers', 'mcp', 'jsonschema', 'numpy', 'multiprocessing') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


def test_exports_are_sorted_and_real() -> None:
    """`__all__` is sorted and every name in it exists."""
    assert list(ostinato_tools.__all__) == sorted(ostinato_tools.__all__, key=lambda name: (name[0].islower(), name))
    assert all(hasattr(ostinato_tools, name) for name in ostinato_tools.__all__)


LEAVES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, ToolError) and value is not ToolError
]


@pytest.mark.parametrize("error", LEAVES)
def test_errors_are_standard_errors_and_travel(error: type[ToolError]) -> None:
    """Each leaf is also a standard error and survives pickling with its message."""
    assert any(base.__module__ == "builtins" and base is not Exception for base in error.__mro__[2:-3])
    again = pickle.loads(pickle.dumps(error("x must be y, got z; do w")))
    assert type(again) is error
    assert str(again) == "x must be y, got z; do w"


EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL) if README.is_file() else []


@pytest.mark.skipif(not README.is_file(), reason="the README is not beside the tests")
def test_the_readme_has_examples() -> None:
    """The README shows a function, a tool with state, a parser by itself, policies, and the sandbox."""
    for shown in ("@function_tool\n", "(BaseTool)", ".parse(", "ToolPolicy(", "PythonTool"):
        assert any(shown in example for example in EXAMPLES), shown


@pytest.mark.parametrize("example", EXAMPLES)
def test_readme_examples_run(example: str) -> None:
    """Every Python example of the README runs as it stands."""
    if extra := re.match(r"# needs the extra: (\w+)", example):
        pytest.importorskip(extra.group(1), reason=f"extra {extra.group(1)} is not installed")
    subprocess.run([sys.executable, "-c", example], check=True, timeout=120)
