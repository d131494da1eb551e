"""The README's examples run."""

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "packages" / "engines" / "README.md"


def test_the_examples_run():
    """Every Python block of the README runs, in order, in one namespace."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    if not README.is_file():
        pytest.skip("the README lies in the source tree only")
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 5
    namespace: dict = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
