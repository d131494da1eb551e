"""`ostinato sft` goes on where it was stopped, with the numbers of a run that never was."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ostinato_trainer.checkpoints.manager import CheckpointManager
from ostinato_trainer.checkpoints.run_state import RunState
from ostinato_trainer.config.loading import load_tree
from ostinato_trainer.config.sft import SftConfig
from ostinato_trainer.errors import CheckpointError
from ostinato_trainer.interrupts import TERMINATED
from ostinato_trainer.quickstart.tiny_model import save_model, save_tokenizer
from ostinato_trainer.sft.reporting import StepReports
from ostinato_trainer.sft.run import run_sft

ANSWERS = ("yes", "no", "yes yes", "no no", "yes no", "no yes", "yes yes no")
KEYS = (
    "optim.lr=1e-2",
    "data.train_batch_size=2",
    "data.max_length=100",
    "trainer.device=cpu",
    "trainer.total_epochs=2",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model` and `data.jsonl`: seven conversations, so in batches of two an epoch ends within a batch."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "model").mkdir()
    save_tokenizer(folder / "model", ["user\nsay it", "assistant\nyes", "assistant\nno"] * 3)
    save_model(folder / "model", seed=0)
    write_rows(folder / "data.jsonl", ANSWERS)
    return folder


def write_rows(path: Path, answers: tuple[str, ...]) -> None:
    roles = ("user", "assistant")
    rows = [
        [{"role": role, "content": text} for role, text in zip(roles, ("say it", each), strict=True)]
        for each in answers
    ]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))


def overrides(files: Path, output: Path, *more: str) -> list[str]:
    places = (
        f"model.path={files / 'model'}",
        f"data.train_files={files / 'data.jsonl'}",
        f"data.val_files={files / 'data.jsonl'}",
    )
    return [*KEYS, *places, f"trainer.default_local_dir={output}", *more]


def run(files: Path, output: Path, *more: str) -> None:
    run_sft(load_tree(SftConfig, [], overrides(files, output, *more))[0], console=Console(quiet=True))


def stopped(monkeypatch: pytest.MonkeyPatch, step: int, *arguments: Any) -> None:
    """As `run`, interrupted when the step is over, before its metrics are written."""
    with monkeypatch.context() as patched:
        show = StepReports.show

        def stop(self: StepReports, done: Any, metrics: Any, **options: Any) -> None:
            if done.step == step:
                raise KeyboardInterrupt
            show(self, done, metrics, **options)

        patched.setattr(StepReports, "show", stop)
        with pytest.raises(KeyboardInterrupt):
            run(*arguments)


def metrics(output: Path) -> list[dict[str, Any]]:
    """The records, without what time and place decide."""
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in each.items() if name not in ("timing_s/step", "resumed_from")}
        for each in records
    ]


def contents(output: Path) -> dict[str, bytes]:
    """All that must be alike in two runs: the model, and the checkpoints without configuration and inventory, which name places."""
    names = ("config.yaml", "checkpoint.json", "run_state.json")
    found = [
        path for path in output.rglob("*") if path.is_file() and path.name not in names and path.suffix != ".jsonl"
    ]
    return {path.relative_to(output).as_posix(): path.read_bytes() for path in found}


def steps(output: Path) -> list[int]:
    with CheckpointManager(output) as manager:
        return manager.steps()


@pytest.mark.parametrize(
    ("stop_at", "more"),
    [(1, ()), (5, ()), (4, ("model.lora_rank=2", "optim.lr=0.1"))],
    ids=["first", "between", "lora"],
)
def test_a_run_that_was_stopped_is_one_that_never_was(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int, more: tuple[str, ...]
) -> None:
    """Stopped before its first checkpoint, on one, or between two, it ends with the bytes and the metrics of a run that was not; there is no
    model before."""
    if more:
        pytest.importorskip("peft")
    more = (*more, "trainer.save_freq=2", "trainer.test_freq=3")
    run(files, tmp_path / "whole", *more)
    stopped(monkeypatch, stop_at, files, tmp_path / "parts", *more)
    assert not (tmp_path / "parts" / "config.json").exists()
    run(files, tmp_path / "parts", *more)
    assert steps(tmp_path / "parts") == [2, 4, 6, 7]
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


DIES_AT_A_RENAME = """
import os, signal, sys
from ostinato_trainer.cli import main

fatal = sys.argv[1]

def hook(event, arguments):
    if event == "os.rename" and fatal in str(arguments[0]):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(hook)
sys.argv[1] = "sft"
main()
"""
"""The command, killed when it is about to rename a file or folder whose path contains the first argument."""


@pytest.mark.usefixtures("usual_handlers")
def test_sigterm_stops_a_run_as_ctrl_c_does(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Terminated after step 3 it ends with status 143, keeps the checkpoint of step 2 and lets the folder go; the same run goes on from there."""
    more = ("trainer.save_freq=2",)
    with monkeypatch.context() as patched:

        def terminate(self: StepReports, done: Any, metrics: Any, **options: Any) -> None:
            if done.step == 3:
                signal.raise_signal(signal.SIGTERM)

        patched.setattr(StepReports, "show", terminate)
        with pytest.raises(SystemExit) as ended:
            run(files, tmp_path / "parts", *more)
    assert ended.value.code == TERMINATED
    assert steps(tmp_path / "parts") == [2]
    assert not [path for path in (tmp_path / "parts").iterdir() if path.name.startswith(".writing")]
    run(files, tmp_path / "parts", *more)
    assert steps(tmp_path / "parts") == [2, 4, 6, 7]


@pytest.mark.slow
def test_a_run_that_is_killed_twice_is_one_that_never_was(files: Path, tmp_path: Path) -> None:
    """Killed before a checkpoint gets its name, and again between two files of the model, it ends with the bytes and metrics of one that
    was not, and leaves nothing else behind."""
    more = ("trainer.save_freq=5", "trainer.total_training_steps=15", "trainer.max_ckpt_to_keep=2")
    run(files, tmp_path / "whole", *more)
    output = tmp_path / "parts"

    def end_of(fatal: str) -> tuple[int, str]:
        command = [sys.executable, "-c", DIES_AT_A_RENAME, fatal, *overrides(files, output, *more)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        return ended.returncode, ended.stderr

    code, message = end_of(".writing-global_step_10-")
    assert code == -signal.SIGKILL, message
    assert steps(output) == [5]
    code, message = end_of("/tokenizer_config.json")
    assert code == -signal.SIGKILL, message
    assert steps(output) == [10, 15]
    assert not (output / "config.json").exists()
    code, message = end_of("nothing")
    assert code == 0, message
    assert contents(output) == contents(tmp_path / "whole")
    assert metrics(output) == metrics(tmp_path / "whole")


def test_checkpoints_are_where_they_are_asked_for(files: Path, tmp_path: Path) -> None:
    """By default there are none, -1 makes the last only, after_each_epoch one for each of them, and no more are kept than are wanted; each
    holds an ordinary model."""
    for name, more, expected in (
        ("none", (), []),
        ("last", ("trainer.save_freq=-1",), [7]),
        ("epochs", ("trainer.save_freq=after_each_epoch", "trainer.total_epochs=3"), [4, 7, 11]),
        ("kept", ("trainer.save_freq=1", "trainer.max_ckpt_to_keep=2"), [6, 7]),
    ):
        run(files, tmp_path / name, *more)
        assert steps(tmp_path / name) == expected
    last = tmp_path / "last"
    for name in ("model.safetensors", "tokenizer.json"):
        assert (last / "global_step_7" / "huggingface" / name).read_bytes() == (last / name).read_bytes()


def test_a_run_that_is_over_may_be_made_longer(files: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same command says that nothing is left and changes nothing; more epochs go on, and the model is that of as many at once."""
    constant = ("optim.lr_scheduler_type=constant", "trainer.save_freq=-1")
    run(files, tmp_path / "parts", *constant)
    before = contents(tmp_path / "parts")
    run(files, tmp_path / "parts", *constant)
    assert "Nothing is left to do" in caplog.text
    assert contents(tmp_path / "parts") == before
    run(files, tmp_path / "parts", *constant, "trainer.total_epochs=4")
    run(files, tmp_path / "whole", *constant, "trainer.total_epochs=4")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("parts", "whole")]
    assert weights[0] == weights[1] != before["model.safetensors"]


def test_what_was_not_written_at_the_end_is_written_then(files: Path, tmp_path: Path) -> None:
    """A run that was killed between its last checkpoint and the model writes the model when it is started again, and takes no step."""
    run(files, tmp_path / "out", "trainer.save_freq=-1")
    before, records = contents(tmp_path / "out"), metrics(tmp_path / "out")
    (tmp_path / "out" / "config.json").unlink()
    (tmp_path / "out" / ".writing-files-0123abcd").mkdir()
    run(files, tmp_path / "out", "trainer.save_freq=-1")
    assert contents(tmp_path / "out") == before
    assert metrics(tmp_path / "out") == records
    assert not list(tmp_path.glob("out/.*"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("trainer.seed=1", r"trainer\.seed must be that of the checkpoint, 0, got 1"),
        ("data.train_batch_size=3", r"data\.train_batch_size must be that of the checkpoint, 2, got 3"),
        ("data.train_files={other}", r"the conversations must be the 7 of the checkpoint, got 2, not the same"),
        (
            "trainer.total_training_steps=2",
            r"the conversations must be the 7 of the checkpoint, got 4, .*total_training_steps",
        ),
        ("model.lora_rank=2", r"model\.lora_rank must be 0 to go on from .*, got 2"),
        ("trainer.resume_mode=disable", r"must hold no checkpoints for a run that begins anew"),
    ],
)
def test_another_run_does_not_go_on(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, message: str
) -> None:
    """Another seed, batch size, file, choice of conversations or kind of training is refused by its key, and the folder stays as it was."""
    if "lora" in changed:
        pytest.importorskip("peft")
    write_rows(tmp_path / "other.jsonl", ANSWERS[:2])
    stopped(monkeypatch, 3, files, tmp_path / "out", "trainer.save_freq=2")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    with pytest.raises(CheckpointError, match=message):
        run(files, tmp_path / "out", "trainer.save_freq=2", changed.format(other=tmp_path / "other.jsonl"))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


def test_a_folder_of_reinforcement_learning_is_refused(files: Path, tmp_path: Path) -> None:
    """A checkpoint of another kind of run is named as such."""

    def write(directory: Path) -> None:
        RunState(step=2, parts={"sampling": {}}, loggers={}, random={}).write(directory)

    with CheckpointManager(tmp_path / "out") as manager:
        manager.save(2, write)
    with pytest.raises(
        CheckpointError, match=r"must be a folder of `ostinato sft`, got .*global_step_2 of another kind"
    ):
        run(files, tmp_path / "out")


def test_a_run_keeps_the_date_that_it_began_with(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a template that prints the date a run that is taken up days later goes on with the conversations that it had."""
    template = tmp_path / "dated.jinja"
    own = (files / "model" / "chat_template.jinja").read_text()
    template.write_text("{{ strftime_now('%d') }}" + own)
    more = ("trainer.save_freq=2", f"model.chat_template={template}")
    stopped(monkeypatch, 3, files, tmp_path / "out", *more)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3 * 86400)
    run(files, tmp_path / "out", *more)
    assert (tmp_path / "out" / "config.json").is_file()


def test_two_runs_do_not_share_a_folder(files: Path, tmp_path: Path) -> None:
    """While a run holds the folder another one is refused before its first step."""
    with CheckpointManager(tmp_path / "out") as manager:
        manager.hold()
        with pytest.raises(CheckpointError, match="must belong to one run"):
            run(files, tmp_path / "out")
