"""A run that is ready to be trained, and what must not be left of one that failed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ostinato_trainer.quickstart import run as quickstart_run


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the quickstart writes before it trains: model, data, tools, reward and configuration."""
    folder = tmp_path_factory.mktemp("failures") / "base"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart_run, "NUM_TRAIN_ROWS", 16)
        patch.setattr(quickstart_run, "NUM_VAL_ROWS", 4)
        quickstart_run.make_files(folder, seed=0)
    shutil.copytree(folder / "model", folder / "warm_start")
    return folder


@pytest.fixture
def small() -> tuple[str, ...]:
    """Overrides that make a run one step of a few tokens."""
    return (
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "data.train_batch_size=2",
        "data.max_response_length=24",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=2",
    )


@pytest.fixture
def must_hold_no_checkpoint() -> Callable[[Path], None]:
    """Checks that a run left no checkpoint, visible or hidden, and whole lines of metrics."""

    def check(folder: Path) -> None:
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
        assert set(names) <= {"metrics.jsonl", "engine.log"}, names
        for line in (folder / "metrics.jsonl").read_text().splitlines() if "metrics.jsonl" in names else ():
            json.loads(line)

    return check
