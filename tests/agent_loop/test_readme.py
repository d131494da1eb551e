"""The README's examples run."""

from __future__ import annotations

import re
from importlib.metadata import metadata
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "packages" / "agent_loop" / "README.md"
TEXT = README.read_text() if README.exists() else str(metadata("ostinato-agent-loop").get_payload())
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_readme_has_an_example():
    """There is at least one Python block to run."""
    assert EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples_of_the_readme_run(example):
    """Every Python block of the README runs as it is written, its assertions included."""
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
