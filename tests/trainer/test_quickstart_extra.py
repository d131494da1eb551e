"""The quickstart without its extra."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ostinato_trainer.cli import app
from ostinato_trainer.errors import MissingExtraError


@pytest.mark.parametrize("missing", ["plotille", "matplotlib"])
def test_a_missing_extra_is_said_before_the_run(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who lacks what draws the curve learns it, and the line that installs it, before anything is made."""
    monkeypatch.setitem(sys.modules, missing, None)
    result = CliRunner().invoke(app, ["quickstart", "--output", str(tmp_path / "run")])
    assert isinstance(result.exception, MissingExtraError)
    assert missing in str(result.exception)
    assert "pip install 'ostinato-trainer[quickstart]'" in str(result.exception)
    assert not (tmp_path / "run").exists()
