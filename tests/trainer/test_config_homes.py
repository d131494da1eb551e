"""`~` means the same home for all who use a path, and a home of nobody is one message."""

from pathlib import Path

import pytest

from ostinato_trainer.checkpoints.export import export_model
from ostinato_trainer.checkpoints.manager import CheckpointManager
from ostinato_trainer.config import Config, TrainerConfig
from ostinato_trainer.config.loading import load_config, load_tree
from ostinato_trainer.config.sft import SftConfig
from ostinato_trainer.errors import CheckpointError, ConfigError, TrainerError
from ostinato_trainer.loggers.group import Loggers
from ostinato_trainer.model_files import check_model_folder

NOBODY = "~nobody-of-this-name/x"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of one's own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_values_that_name_files_have_the_home(home: Path) -> None:
    """Paths, lists of them and what begins with one are replaced when they are read, for a shell leaves them; other text is not."""
    config = load_config(
        [],
        [
            "trainer.default_local_dir=~/run",
            "data.train_files=[~/a.jsonl,b.jsonl,~/c/*.parquet]",
            "trainer.callbacks=[~/own.py:Own]",
            "actor_rollout_ref.rollout.agent.agent_loop_config_path=~/agents.yaml",
            "trainer.project_name=~/p",
        ],
    )
    assert config.trainer.default_local_dir == f"{home}/run"
    assert config.data.train_paths == (f"{home}/a.jsonl", "b.jsonl", f"{home}/c/*.parquet")
    assert config.trainer.callbacks == (f"{home}/own.py:Own",)
    assert config.actor_rollout_ref.rollout.agent.agent_loop_config_path == f"{home}/agents.yaml"
    assert config.trainer.project_name == "~/p"
    sft, _ = load_tree(SftConfig, [], ["trainer.default_local_dir=~/model"])
    assert sft.trainer.default_local_dir == f"{home}/model"


def test_metrics_and_checkpoints_are_in_the_same_home(home: Path) -> None:
    """Also where a program made the configuration."""
    config = Config(trainer=TrainerConfig(default_local_dir="~/run", logger=("jsonl",)))
    Loggers.from_config(config).close()
    with CheckpointManager("~/run") as manager:
        manager.save(1, lambda directory: None)
    assert sorted(path.name for path in (home / "run").iterdir()) == [
        "global_step_1",
        "latest_checkpointed_iteration.txt",
        "metrics.jsonl",
    ]


@pytest.mark.parametrize(
    "key", ["trainer.default_local_dir", "trainer.resume_from_path", "actor_rollout_ref.model.path", "data.cache_dir"]
)
def test_the_home_of_nobody_is_named_with_its_key(key: str) -> None:
    """The message has the key, where it was written, and the cure."""
    expected = rf"override '{key}=~nobody.*': {key} must begin with the home of a known user .*; write the whole path"
    with pytest.raises(ConfigError, match=expected):
        load_config([], [f"{key}={NOBODY}"])


def test_programs_and_commands_hear_it_too(tmp_path: Path) -> None:
    """Whoever is given such a path raises an error of the trainer's."""
    with pytest.raises(CheckpointError, match="default_local_dir must begin with the home"):
        CheckpointManager(NOBODY)
    with pytest.raises(ConfigError, match=r"actor_rollout_ref.model.path must begin with the home"):
        check_model_folder(NOBODY)
    for source, output in ((NOBODY, str(tmp_path)), (str(tmp_path), NOBODY)):
        with pytest.raises(TrainerError):
            export_model(Path(source), Path(output), best=False, dtype=None, console=None)  # pyright: ignore[reportArgumentType]
