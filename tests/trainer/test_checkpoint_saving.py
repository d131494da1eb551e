"""A run's checkpoints are of one moment, are waited for where they must be, and fail where somebody hears of it."""

import asyncio
import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest

from ostinato_trainer.assembly import run_training
from ostinato_trainer.checkpoints.manager import CheckpointManager, check_complete
from ostinato_trainer.checkpoints.resume import resume_point
from ostinato_trainer.checkpoints.saving import RunCheckpoints, restore_run
from ostinato_trainer.config import Config, TrainerConfig
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.errors import CheckpointError
from ostinato_trainer.loggers.group import Loggers


class Counter:
    """A part of a run."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        """See Stateful."""
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        """See Stateful."""
        self.count = state["count"]


class PlainBackend:
    """A backend of somebody's own, which is saved as it is; its state is a word."""

    def __init__(self, word: str, gate: threading.Event | None = None, error: Exception | None = None) -> None:
        self.word, self.gate, self.error = word, gate, error

    def save(self, directory: Path) -> None:
        """See TrainingBackend."""
        directory.mkdir()
        if self.gate is not None:
            assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        (directory / "word").write_text(self.word)

    def load(self, directory: Path) -> None:
        """See TrainingBackend."""
        self.word = (directory / "word").read_text()

    def save_hf(self, directory: Path) -> None:
        """See TrainingBackend."""
        directory.mkdir()


class CopyingBackend(PlainBackend):
    """One that can be copied."""

    def snapshot(self) -> PlainBackend:
        """What it is now."""
        return PlainBackend(self.word, self.gate, self.error)


def checkpoints(manager: CheckpointManager, backend: Any, part: Counter, **keys: Any) -> RunCheckpoints:
    """Of a run with one part."""
    return RunCheckpoints(manager, Config(trainer=TrainerConfig(**keys)), backend, Loggers([]), parts={"part": part})


def word_of(root: Path, step: int) -> str:
    """What the backend was in a checkpoint."""
    check_complete(root / f"global_step_{step}")
    return (root / f"global_step_{step}" / "actor" / "word").read_text()


async def test_a_checkpoint_is_of_one_moment(tmp_path: Path) -> None:
    """The run goes on while it is written; models and parts are what they were at the save, and so they come back."""
    gate, part = threading.Event(), Counter()
    backend = CopyingBackend("then", gate)
    with CheckpointManager(tmp_path) as manager:
        async with checkpoints(manager, backend, part) as saving:
            part.count = 1
            await saving.save(1, {"critic/score/mean": 0.5})
            assert manager.steps() == []
            backend.word, part.count = "later", 2
            saving.check()
            gate.set()
        assert word_of(tmp_path, 1) == "then"
        point = resume_point(TrainerConfig(), manager)
    assert point is not None
    assert point.inventory.metrics == {"critic/score/mean": 0.5}
    restore_run(point, Config(), backend, None, {"part": part})  # pyright: ignore[reportArgumentType]
    assert (backend.word, part.count) == ("then", 1)


@pytest.mark.parametrize("kind", ["no copy", "async_save=false"])
async def test_who_cannot_be_copied_is_waited_for(tmp_path: Path, kind: str) -> None:
    """A backend that makes no copy, or a run that asks for it, has its checkpoint complete when the save returns."""
    backend = PlainBackend("then") if kind == "no copy" else CopyingBackend("then")
    with CheckpointManager(tmp_path) as manager:
        async with checkpoints(manager, backend, Counter(), async_save=kind == "no copy") as saving:
            await saving.save(1, {})
            assert word_of(tmp_path, 1) == "then"


async def test_a_save_that_failed_is_heard_of_at_the_next_step_and_at_the_end(tmp_path: Path) -> None:
    """The error comes out of the next check; of the last checkpoint, out of the end; the earlier one is unharmed."""
    backend = CopyingBackend("word")
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(CheckpointError, match=r"checkpoint of step 3 .*the disk is full"):  # noqa: PT012  (the end of the context raises)
            async with checkpoints(manager, backend, Counter()) as saving:
                await saving.save(1, {})
                backend.error = OSError("the disk is full")
                await saving.save(2, {})
                with pytest.raises(CheckpointError, match=r"checkpoint of step 2 .*the disk is full"):
                    await until_raised(saving)
                saving.check()
                await saving.save(3, {})
        assert manager.steps() == [1]
    assert word_of(tmp_path, 1) == "word"


async def until_raised(saving: RunCheckpoints) -> None:
    """What a run does at the beginning of each step."""
    async with asyncio.timeout(30):
        while True:
            saving.check()
            await asyncio.sleep(0.001)


async def test_a_run_that_failed_keeps_its_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where both the run and its last save fail, the run's error is the one that ends it, and the other is logged."""
    backend = CopyingBackend("word", error=OSError("the disk is full"))
    with CheckpointManager(tmp_path) as manager, pytest.raises(ValueError, match="the run"):  # noqa: PT012
        async with checkpoints(manager, backend, Counter()) as saving:
            await saving.save(1, {})
            raise ValueError("the run")
    assert "the disk is full" in caplog.text


async def test_an_interrupted_run_finishes_a_checkpoint_that_is_nearly_there(tmp_path: Path) -> None:
    """Ctrl-C while a checkpoint is written that ends soon: it is complete."""
    gate = threading.Event()
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(asyncio.CancelledError):  # noqa: PT012  (the end of the context raises)
            async with checkpoints(manager, CopyingBackend("word", gate), Counter()) as saving:
                await saving.save(1, {})
                gate.set()
                raise asyncio.CancelledError
        assert manager.steps() == [1]


async def test_the_last_checkpoint_survives_an_interrupt_of_the_wait_for_it(tmp_path: Path) -> None:
    """Ctrl-C after the last step, while nothing but its checkpoint is waited for: it is complete."""
    gate, has_ended = threading.Event(), asyncio.Event()
    with CheckpointManager(tmp_path) as manager:

        async def run() -> None:
            async with checkpoints(manager, CopyingBackend("word", gate), Counter()) as saving:
                await saving.save(1, {})
                has_ended.set()

        running = asyncio.ensure_future(run())
        await has_ended.wait()
        running.cancel()
        await asyncio.sleep(0)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert manager.steps() == [1]


async def test_an_interrupted_run_leaves_one_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a disk does not answer: the run ends, and nothing of the checkpoint is left or appears later."""
    gate = threading.Event()
    monkeypatch.setattr("ostinato_trainer.checkpoints.saving._GRACE_S", 0.01)
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012  (the end of the context raises)
            async with checkpoints(manager, CopyingBackend("word", gate), Counter()) as saving:
                await saving.save(1, {})
                raise KeyboardInterrupt
        assert list(tmp_path.iterdir()) == []
        gate.set()
        with pytest.raises(CheckpointError, match="checkpoint of step 1 must be written"):
            await saving._thread.finish(30)
        assert list(tmp_path.iterdir()) == []


async def test_a_missing_best_metric_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A name that no step has is warned of, with those that there are."""
    with CheckpointManager(tmp_path, best_metric="val-core/a/acc/mean@1") as manager:
        async with checkpoints(
            manager, CopyingBackend("word"), Counter(), best_metric="val-core/a/acc/mean@1"
        ) as saving:
            for step in (1, 2):
                await saving.save(step, {"val-core/b/acc/mean@1": 1.0})
        assert manager.best() is None
    expected = "has no finite metric val-core/a/acc/mean@1 (trainer.best_metric), got none of that name; it has val-core/b/acc/mean@1"
    assert caplog.text.count(expected) == 1


async def test_a_best_metric_that_is_no_number_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A value that is not finite is no reason to keep a checkpoint, and is not passed over in silence."""
    with CheckpointManager(tmp_path, best_metric="val") as manager:
        async with checkpoints(manager, CopyingBackend("word"), Counter(), best_metric="val") as saving:
            await saving.save(1, {"val": 0.5})
            assert not caplog.text
            await saving.save(2, {"val": math.nan})
        assert manager.best() == manager.path_of(1)
    assert "The checkpoint of step 2 cannot be the best" in caplog.text
    assert "got nan" in caplog.text


async def test_a_critic_that_was_not_saved_is_named(tmp_path: Path) -> None:
    """A run that needs a critic does not go on from a checkpoint without, with an untrained one, in silence."""
    with CheckpointManager(tmp_path) as manager:
        async with checkpoints(manager, CopyingBackend("word"), Counter()) as saving:
            await saving.save(1, {})
        point = resume_point(TrainerConfig(), manager)
    assert point is not None
    critic: Any = CopyingBackend("critic")
    with pytest.raises(CheckpointError, match=r"must hold a critic for algorithm.adv_estimator=grpo, got none"):
        restore_run(point, Config(), critic, critic, {"part": Counter()})


SPOILER = '''
import json, pathlib, shutil

class Spoiler:
    """Takes the run's folder away while the last step samples, and writes down how the run ended."""

    def on_sample_end(self, step, trajectories, validate):
        shutil.rmtree("{root}")
        pathlib.Path("{root}").write_text("in the way")

    def on_train_end(self, step, error):
        pathlib.Path("{told}").write_text(json.dumps([step, type(error).__name__]))
'''


def test_whoever_is_told_of_the_end_hears_of_the_last_checkpoint(quickstart_home: Path, tmp_path: Path) -> None:
    """A save of the last step that fails, beside the run, is what the run ended with: callbacks are not told that all went well."""
    root, told, own = tmp_path / "run", tmp_path / "told.json", tmp_path / "spoiler.py"
    own.write_text(SPOILER.format(root=root, told=told))
    overrides = [
        f"trainer.default_local_dir={root}",
        f"trainer.callbacks=[{own}:Spoiler]",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.logger=[]",
        "data.train_batch_size=2",
        "data.max_response_length=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=2",
    ]
    with pytest.raises(CheckpointError, match="checkpoint of step 1 must be written"):
        run_training(load_config([quickstart_home / "config.yaml"], overrides))
    assert json.loads(told.read_text()) == [1, "CheckpointError"]
