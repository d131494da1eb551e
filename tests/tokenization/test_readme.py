"""The README's examples run."""

import re
from pathlib import Path

import pytest

from ostinato_tokenization.testing import check_template, tiny_chat_tokenizer

README = Path(__file__).resolve().parents[2] / "packages" / "tokenization" / "README.md"


def test_the_readme_example_runs():
    """Each Python block of the README runs as it stands."""
    if not README.is_file():
        pytest.skip(f"no {README}: the package is installed without its sources")
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(README), "exec"), {})


def test_the_readme_shows_the_report_as_it_is_printed():
    """The report of `check_template` in the README is what the block above it prints."""
    if not README.is_file():
        pytest.skip(f"no {README}: the package is installed without its sources")
    assert str(check_template(tiny_chat_tokenizer())) in README.read_text(encoding="utf-8")
