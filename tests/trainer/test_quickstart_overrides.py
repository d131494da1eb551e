"""What `ostinato quickstart` is given beside its own settings."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ostinato_trainer.cli import app
from ostinato_trainer.errors import ConfigError

pytest.importorskip("plotille")
pytest.importorskip("matplotlib")


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("trainer.totl_epochs=1", "did you mean trainer.total_epochs?"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=3", "must be a multiple of"),
        ("algorithm.adv_estimator=GRPO", "adv_estimator must be one of"),
        ("trainer.n_gpus_per_node=2", "trainer.n_gpus_per_node must be 1"),
        ("actor_rollout_ref.rollout.name=sglang", "full_determinism must be left out"),
    ],
    ids=["unknown", "contradiction", "name", "devices", "engine"],
)
def test_an_override_that_cannot_be_used_is_said_before_anything_is_made(
    override: str, text: str, tmp_path: Path
) -> None:
    """Nobody waits for a warm start to learn of a misspelled key, and the folder is free for the next try."""
    result = CliRunner().invoke(app, ["quickstart", override, "--output", str(tmp_path / "run")])
    assert isinstance(result.exception, ConfigError)
    assert text in str(result.exception)
    assert not (tmp_path / "run").exists()
