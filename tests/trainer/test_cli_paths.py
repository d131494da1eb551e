"""Paths that are given to the `ostinato` command: modules of one's own, and folders that hold no model."""

import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from rich.console import Console

from ostinato_agent_loop import AgentLoopBase, load_agent_loops
from ostinato_agent_loop.registry import import_class
from ostinato_trainer import cli
from ostinato_trainer.backends.ranks.messages import Failure, error_of
from ostinato_trainer.chat import find_model
from ostinato_trainer.checkpoints.export import export_model
from ostinato_trainer.error_reporting import run_reporting_errors
from ostinato_trainer.errors import BackendError, CheckpointError


def test_an_agent_beside_the_command_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the working directory needs no PYTHONPATH, and one that is installed goes before it."""
    code = "from ostinato_agent_loop import AgentLoopBase\n\n\nclass Own(AgentLoopBase):\n    async def run(self, _, **row): ...\n"
    (tmp_path / "agents_beside_the_command.py").write_text(code)
    (tmp_path / "typer.py").write_text("raise RuntimeError")
    (tmp_path / "agents.yaml").write_text("- name: beside\n  _target_: agents_beside_the_command.Own\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setattr(sys, "argv", ["ostinato", "config", "trainer.seed"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert load_agent_loops("agents.yaml") == ("beside",)
    monkeypatch.delitem(sys.modules, "typer")
    assert import_class("typer.Typer", object, "a test").__name__ == "Typer"
    assert issubclass(import_class("agents_beside_the_command.Own", object, "a test"), AgentLoopBase)


def test_the_version_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`ostinato --version` names the installed version and ends well."""
    monkeypatch.setattr(sys, "argv", ["ostinato", "--version"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, capsys.readouterr().out) == (0, f"ostinato {version('ostinato-trainer')}\n")


def test_where_an_error_was_raised_is_said_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Which ranks have raised an error stands below its message; the traceback that is noted too does not."""
    failures = {1: Failure(BackendError("of rank 1"), "Traceback\n  line"), 2: Failure(BackendError("of rank 2"), "")}

    def fail() -> None:
        raise error_of(failures, 3)

    assert run_reporting_errors(fail) == 1
    assert capsys.readouterr().err.splitlines() == ["error: of rank 1", "  raised on ranks 1, 2 of 3"]


def test_a_folder_without_a_model_is_told_what_would_do(tmp_path: Path) -> None:
    """A folder that is not there, one that holds no model, and a run's are told apart; of a run the newest checkpoint is named."""
    with pytest.raises(CheckpointError, match="got no folder of that name"):
        find_model(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="got no folder of that name"):
        export_model(tmp_path / "nowhere", tmp_path / "out", best=False, dtype=None, console=Console(quiet=True))
    with pytest.raises(CheckpointError, match=r"holds no config.json; give a path that a run printed"):
        find_model(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12\n")
    with pytest.raises(CheckpointError, match=r"global_step_12$"):
        find_model(tmp_path)
