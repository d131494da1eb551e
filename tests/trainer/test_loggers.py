"""Metrics reach their places, and a place that fails stops nothing."""

import io
import json
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ostinato_trainer.config import Config, TrainerConfig
from ostinato_trainer.errors import LoggerError
from ostinato_trainer.loggers.base import RunEnd
from ostinato_trainer.loggers.group import ConsoleLogger, JsonlLogger, Loggers

METRICS = {
    "critic/score/mean": 0.5,
    "actor/pg_loss": float("nan"),
    "training/global_step": 3,
    "val-core/s/acc/mean@1": 1.0,
}


def test_jsonl_is_one_line_a_step_on_disk_at_once(tmp_path: Path) -> None:
    """Every step is one JSON object, written out before log returns; NaN becomes null."""
    log = JsonlLogger(tmp_path / "run" / "metrics.jsonl")
    for step in (1, 2):
        log.log(step, METRICS)
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == step
    assert json.loads(lines[1]) == {"step": 2, **METRICS, "actor/pg_loss": None}
    log.close()


def test_the_first_line_says_what_the_run_is_made_with(tmp_path: Path) -> None:
    """What describes the run is in the first line of its file and on the console, once."""
    stream = io.StringIO()
    log = Loggers([JsonlLogger(tmp_path / "m.jsonl"), ConsoleLogger(Console(file=stream, width=20))])
    log.describe({"versions/engine": "Python 3.12.8, vllm 0.32.0, torch 2.13.0"})
    assert stream.getvalue() == "versions/engine  Python 3.12.8, vllm 0.32.0, torch 2.13.0\n"
    for step in (1, 2):
        log.log(step, {"x": 1.0})
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 1, "versions/engine": "Python 3.12.8, vllm 0.32.0, torch 2.13.0", "x": 1.0},
        {"step": 2, "x": 1.0},
    ]
    log.close()


def test_an_earlier_run_s_file_is_kept(tmp_path: Path) -> None:
    """A new run does not write into the file of an earlier one; resuming does."""
    path = tmp_path / "metrics.jsonl"
    for _ in range(3):
        log = JsonlLogger(path)
        log.log(1, {})
        log.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl"]
    log = JsonlLogger(path, resume=True)
    log.log(2, {})
    log.close()
    assert len(path.read_text().splitlines()) == 2


def test_the_console_line_is_short() -> None:
    """A step is one line with score and validation, however narrow the terminal is."""
    stream = io.StringIO()
    ConsoleLogger(Console(file=stream, width=20)).log(3, METRICS)
    assert stream.getvalue() == "step 3  score 0.5  loss nan  val-core/s/acc/mean@1 1\n"


class Broken:
    """A logger that fails from its second step on."""

    name = "broken"

    def __init__(self) -> None:
        self.steps: list[int] = []

    def describe(self, facts: Mapping[str, str]) -> None:
        raise AssertionError("not asked here")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(step)
        if step == 2:
            raise OSError("disk full")

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        raise AssertionError("not asked here")

    def close(self, end: object = None) -> None:
        raise OSError("gone")


def test_a_failing_logger_is_reported_and_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A logger that fails is reported once and gets no further metrics; the others go on."""
    broken = Broken()
    log = Loggers([broken, JsonlLogger(tmp_path / "m.jsonl")])
    with caplog.at_level(logging.ERROR, logger="ostinato_trainer"):
        for step in (1, 2, 3):
            log.log(step, {"x": 1.0})
    assert broken.steps == [1, 2]
    assert log.names == ("jsonl",)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "broken failed at step 2" in caplog.text
    assert "disk full" in caplog.text
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 3
    log.close()
    Loggers([broken]).close()
    assert "gone" in caplog.text


def test_the_configuration_names_the_loggers(tmp_path: Path) -> None:
    """trainer.logger decides which loggers there are, default_local_dir where the file is."""
    config = Config(trainer=TrainerConfig(logger=("console", "jsonl"), default_local_dir=str(tmp_path)))
    log = Loggers.from_config(config, console=Console(file=io.StringIO()))
    log.log(1, METRICS)
    log.close()
    assert log.names == ("console", "jsonl")
    assert (tmp_path / "metrics.jsonl").exists()


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """A metrics file that cannot be made is an error with the key to change, before anything is trained."""
    (tmp_path / "file").write_text("")
    config = Config(trainer=TrainerConfig(logger=("jsonl",), default_local_dir=str(tmp_path / "file")))
    with pytest.raises(LoggerError, match=r"trainer.default_local_dir"):
        Loggers.from_config(config)


def test_a_missing_extra_prints_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra, the logger mlflow is an error with the line that installs it."""
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.delitem(sys.modules, "ostinato_trainer.loggers.mlflow_logger", raising=False)
    config = Config(trainer=TrainerConfig(logger=("mlflow",)))
    with pytest.raises(LoggerError, match=r"pip install 'ostinato-trainer\[mlflow\]'"):
        Loggers.from_config(config)


@pytest.mark.usefixtures("mlflow_store")
def test_mlflow_records_metrics_and_settings() -> None:
    """With the extra, metrics and every key of the configuration are in the tracking store."""
    mlflow = pytest.importorskip("mlflow")
    log = Loggers.from_config(Config(trainer=TrainerConfig(logger=("mlflow",), project_name="p", experiment_name="e")))
    log.describe({"versions/engine": "vllm 0.32.0"})
    log.log(1, METRICS | {"val-core//data/../" + "x" * 300 + "/acc/mean@1": 0.25})
    log.log(2, {f"many/{number}": 1.0 for number in range(1001)})
    log.close()
    assert log.names == ("mlflow",)
    run = mlflow.search_runs(experiment_names=["p"], output_format="list")[0]
    assert run.data.metrics["critic/score/mean"] == 0.5
    assert run.data.metrics["val-core/s/acc/mean_at_1"] == 1.0
    assert 0.25 in run.data.metrics.values()
    assert sum(name.startswith("many/") for name in run.data.metrics) == 1001
    assert run.data.params["trainer.experiment_name"] == "e"
    assert run.data.tags["versions/engine"] == "vllm 0.32.0"


@given(name=st.one_of(st.text(), st.text("ab./@:% ", min_size=1, max_size=600)))
def test_mlflow_takes_every_name(name: str) -> None:
    """Whatever a source of data is called, MLflow takes the name of its metric."""
    pytest.importorskip("mlflow")
    from mlflow.utils.validation import _validate_metric_name

    from ostinato_trainer.loggers.mlflow_logger import mlflow_name

    taken = mlflow_name(name)
    _validate_metric_name(taken)
    assert 0 < len(taken) <= 250
    assert mlflow_name(name + "x") != taken


def test_names_that_mlflow_takes_stay_as_they_are() -> None:
    """Only `@` changes in the names of the table."""
    pytest.importorskip("mlflow")
    from ostinato_trainer.loggers.mlflow_logger import mlflow_name

    assert mlflow_name("timing_s/step") == "timing_s/step"
    assert mlflow_name("val-core/openai/gsm8k/acc/mean@4") == "val-core/openai/gsm8k/acc/mean_at_4"


def test_a_console_that_nobody_reads_ends_no_run(tmp_path: Path) -> None:
    """Where the reader of its output has gone, the process goes on; the console alone gets no more."""
    code = """
import sys
from ostinato_trainer.loggers.group import ConsoleLogger, Loggers
log = Loggers([ConsoleLogger()])
sys.stdin.readline()
for step in (1, 2):
    log.log(step, {"x": 1.0})
print(log.names, file=sys.stderr)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        _, said = process.communicate("go\n", timeout=120)
    assert said.endswith("()\n")
    assert process.returncode == 0


def test_the_console_shows_what_its_encoding_does_not_have() -> None:
    """A sample in another script is shown by escapes, and the console stays."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    log = Loggers([ConsoleLogger(Console(file=stream))])
    log.log_generations(1, [{"output": "\u00e9\ud800"}])
    assert log.names == ("console",)
    assert stream.buffer.getvalue() == b"[step 1] output: \\xe9\\ud800\n"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("fails", "end"), [(True, "failed"), (False, "finished")])
def test_loggers_are_told_how_a_run_has_ended(
    quickstart_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool, end: str
) -> None:
    """A run that a callback ends with an error is a failed one to its loggers, and one that comes to its end a finished one."""
    from ostinato_trainer.assembly import run_training
    from ostinato_trainer.config.loading import load_config
    from ostinato_trainer.errors import CallbackError

    (tmp_path / "failing.py").write_text(
        f"class Callback:\n    def on_train_begin(self, step, total):\n        if {fails}:\n            raise ValueError\n"
    )
    told = []
    close = Loggers.close

    def remember(self: Loggers, end: RunEnd) -> None:
        told.append(end)
        close(self, end)

    monkeypatch.setattr(Loggers, "close", remember)
    overrides = [
        "trainer.val_only=true",
        "data.val_max_samples=1",
        "data.max_response_length=16",
        "trainer.logger=[jsonl]",
    ]
    places = [
        f"trainer.default_local_dir={tmp_path / 'run'}",
        f"trainer.callbacks=[{tmp_path / 'failing.py'}:Callback]",
    ]
    config = load_config([quickstart_home / "config.yaml"], [*overrides, *places])
    with pytest.raises(CallbackError) if fails else nullcontext():
        run_training(config)
    assert told == [end]
