"""TensorBoard, wandb and Trackio record a run for real, without a network, and go on with it."""

import asyncio
import json
import math
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ostinato_trainer.config import Config, TrainerConfig
from ostinato_trainer.errors import LoggerError
from ostinato_trainer.loggers.base import STEP_METRIC, RunEnd
from ostinato_trainer.loggers.group import Loggers

METRICS = {"critic/score/mean": 0.5, "actor/pg_loss": math.nan, "val-core/s/acc/mean@8": 1.0}


def config_for(folder: Path, *loggers: str) -> Config:
    """A run whose files are all below a folder."""
    trainer = TrainerConfig(logger=loggers, project_name="p", experiment_name="e", default_local_dir=str(folder))  # pyright: ignore[reportArgumentType]
    return Config(trainer=trainer)


def record(
    config: Config,
    steps: tuple[int, ...],
    state: dict[str, str] | None = None,
    *,
    steps_done: int | None = None,
    end: RunEnd = RunEnd.FINISHED,
) -> dict[str, str]:
    """Record some steps; returns the ids of the runs."""
    log = Loggers.from_config(config, state=state, steps_done=steps_done)
    log.describe({"versions/trainer": "torch 9"})
    for step in steps:
        log.log(step, METRICS | {STEP_METRIC: float(step)})
    log.log_generations(steps[-1], [{"input": "How much?", "output": "Seven", "score": 1.0}])
    ids = log.state_dict()
    log.close(end)
    assert log.names == config.trainer.logger
    return ids


@pytest.fixture
def wandb_mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets wandb's mode, which it reads once for a process, and ends its service."""
    wandb = pytest.importorskip("wandb")

    def set_mode(mode: str) -> None:
        wandb.teardown()
        monkeypatch.setenv("WANDB_MODE", mode)

    yield set_mode
    wandb.teardown()


def test_tensorboard_has_the_curve_and_the_configuration(tmp_path: Path) -> None:
    """Event files hold every metric by step and the configuration as text; steps that a resumed run does again are there once."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config_for(tmp_path, "tensorboard")
    record(config, (1, 2, 3, 4))
    record(config, (3,), steps_done=2)
    events = EventAccumulator(str(tmp_path / "tensorboard" / "e"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("critic/score/mean")] == [
        (1, 0.5),
        (2, 0.5),
        (3, 0.5),
    ]
    assert "val-core/s/acc/mean@8" in events.Tags()["scalars"]
    texts = events.Tags()["tensors"]
    assert any("config" in tag for tag in texts)
    assert any("val_generations/0" in tag for tag in texts)


def test_wandb_offline_records_and_goes_on_with_its_run(tmp_path: Path, wandb_mode: Callable[[str], None]) -> None:
    """Without a network, wandb writes below the run's folder; with the id of a run it goes on with that one."""
    wandb_mode("offline")
    config = config_for(tmp_path, "wandb")
    ids = record(config, (1, 2))
    assert record(config, (3,), state=ids) == ids
    wandb_mode(
        "offline"
    )  # ends wandb's service, as the end of a process does; finishing a run alone may leave its last lines in flight
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*-{ids['wandb']}/run-*.wandb"))
    assert files
    assert all(b"critic/score/mean" in path.read_bytes() for path in files)
    tables = sorted((tmp_path / "wandb").glob("offline-run-*/files/media/table/val/*.json"))
    assert any("Seven" in path.read_text() for path in tables)


def test_wandb_without_an_account_is_an_error_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb_mode: Callable[[str], None]
) -> None:
    """Where wandb refuses to begin a run, the message names the way out."""
    wandb_mode("online")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LoggerError, match="WANDB_MODE=offline"):
        Loggers.from_config(config_for(tmp_path, "wandb"))


@pytest.fixture
def trackio_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Trackio keeps its databases."""
    pytest.importorskip("trackio")
    from trackio import sqlite_storage, utils

    monkeypatch.setattr(utils, "TRACKIO_DIR", tmp_path)
    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path)
    return tmp_path


@pytest.mark.usefixtures("trackio_folder")
def test_trackio_records_and_goes_on_with_its_run(tmp_path: Path) -> None:
    """Trackio's database has every step of the run, before and after it was taken up again."""
    config = config_for(tmp_path, "trackio")
    ids = record(config, (1, 2))
    assert record(config, (3,), state=ids) == ids == {"trackio": "e"}
    with sqlite3.connect(tmp_path / "p.db") as database:
        rows = database.execute("SELECT step, metrics FROM metrics WHERE run_name = 'e' ORDER BY id").fetchall()
    steps = [step for step, metrics in rows if json.loads(metrics).get("critic/score/mean") == 0.5]
    assert steps == [1, 2, 3]


@pytest.mark.usefixtures("trackio_folder")
def test_steps_that_trackio_has_are_recorded_again_in_a_run_of_another_name(tmp_path: Path) -> None:
    """Taken up after step 1 of 3, twice: every run has each of its steps once."""
    config = config_for(tmp_path, "trackio")
    ids = record(config, (1, 2, 3))
    again = [record(config, (2, 3), state=ids, steps_done=1) for _ in range(2)]
    assert again == [{"trackio": "e-after-step-1"}, {"trackio": "e-after-step-1-2"}]
    assert record(config, (4,), state=again[0], steps_done=3) == again[0]
    with sqlite3.connect(tmp_path / "p.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    steps: dict[str, list[int]] = {}
    for name, step, metrics in rows:
        if json.loads(metrics).get("critic/score/mean") == 0.5:
            steps.setdefault(name, []).append(step)
    assert steps == {"e": [1, 2, 3], "e-after-step-1": [2, 3, 4], "e-after-step-1-2": [2, 3]}


SERVER = """
import trackio
_, _, _, url = trackio.show(open_browser=False, block_thread=False)
print("serves", url, flush=True)
input()
"""


def test_steps_that_a_server_of_trackio_has_are_known(trackio_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the records are not on this machine, a run whose later steps are there is not gone on with either."""
    config = config_for(trackio_folder, "trackio")
    ids = record(config, (1, 2, 3))
    environment = {**os.environ, "TRACKIO_DIR": str(trackio_folder)}
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as server:
        try:
            assert server.stdout is not None
            url = next(line.split()[1] for line in server.stdout if line.startswith("serves "))
            monkeypatch.setenv("TRACKIO_SERVER_URL", url)
            for module in ("utils", "sqlite_storage"):
                monkeypatch.setattr(f"trackio.{module}.TRACKIO_DIR", trackio_folder / "of another machine")
            for steps_done, expected in ((1, "e-after-step-1"), (3, "e")):
                log = Loggers.from_config(config, state=ids, steps_done=steps_done)
                assert log.state_dict() == {"trackio": expected}
                log.close()
        finally:
            server.kill()


@pytest.mark.parametrize(("end", "level"), [(RunEnd.FAILED, "error"), (RunEnd.KILLED, "warn"), (RunEnd.FINISHED, None)])
def test_trackio_has_an_alert_of_a_run_that_did_not_finish(
    trackio_folder: Path, end: RunEnd, level: str | None
) -> None:
    """Its dashboard shows, at the last step, that the run has failed or was ended; of one that has finished there is nothing to say."""
    record(config_for(trackio_folder, "trackio"), (1, 2), end=end)
    import trackio

    alerts = trackio.Api().alerts("p")
    assert [(alert["run"], alert["level"], alert["step"]) for alert in alerts] == ([("e", level, 2)] if level else [])


@pytest.mark.slow
@pytest.mark.usefixtures("mlflow_store")
def test_mlflow_shows_how_a_run_has_ended_and_each_step_once(tmp_path: Path) -> None:
    """A run that failed is FAILED, one that was killed KILLED; taken up where it stood it goes on and can finish, taken up before that the steps
    that are done again are those of a run below it."""
    mlflow = pytest.importorskip("mlflow")
    config = config_for(tmp_path, "mlflow")

    def of(ids: dict[str, str]) -> tuple[str, list[int], dict[str, str]]:
        client = mlflow.MlflowClient()
        run = client.get_run(ids["mlflow"])
        history = client.get_metric_history(ids["mlflow"], "critic/score/mean")
        return run.info.status, [point.step for point in history], run.data.tags

    ids = record(config, (1, 2), end=RunEnd.FAILED)
    assert of(ids)[:2] == ("FAILED", [1, 2])
    assert record(config, (3,), state=ids, steps_done=2, end=RunEnd.KILLED) == ids
    assert of(ids)[:2] == ("KILLED", [1, 2, 3])
    below = record(config, (3, 4), state=ids, steps_done=2)
    assert below != ids
    assert of(ids)[:2] == ("KILLED", [1, 2, 3])
    status, steps, tags = of(below)
    assert (status, steps) == ("FINISHED", [3, 4])
    assert (tags["mlflow.parentRunId"], tags["continues_after_step"]) == (ids["mlflow"], "2")
    assert record(config, (5,), state=below, steps_done=4) == below
    assert of(below)[:2] == ("FINISHED", [3, 4, 5])


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (None, RunEnd.FINISHED),
        (ValueError("x"), RunEnd.FAILED),
        (KeyboardInterrupt(), RunEnd.KILLED),
        (asyncio.CancelledError(), RunEnd.KILLED),
    ],
)
def test_an_error_is_an_end(error: BaseException | None, end: RunEnd) -> None:
    """Nothing is a finished run, an error a failed one, an interrupt a killed one."""
    assert RunEnd.of(error) is end


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_extra_is_said_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Without its package a logger is an error with the line that installs it, and those made before it are closed."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    monkeypatch.delitem(sys.modules, f"ostinato_trainer.loggers.{name}_logger", raising=False)
    with pytest.raises(LoggerError, match=rf"pip install 'ostinato-trainer\[{name}\]'"):
        Loggers.from_config(config_for(tmp_path, "jsonl", name))
