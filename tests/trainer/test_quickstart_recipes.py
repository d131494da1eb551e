"""The recipes of the quickstart's task: each is short, loads without a key that has no effect, and trains."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from ostinato_trainer.assembly import run_training
from ostinato_trainer.config.loading import load_config, load_tree
from ostinato_trainer.config.sft import SftConfig
from ostinato_trainer.sft.run import run_sft

FOLDER = Path(__file__).parents[2] / "recipes" / "quickstart"
RECIPES = sorted(FOLDER.glob("*.yaml"))
pytestmark = pytest.mark.skipif(not RECIPES, reason=f"needs the recipes in {FOLDER}")
BATCH = ("data.train_batch_size=8", "actor_rollout_ref.rollout.n=3", "data.max_response_length=48")
SHORT = (
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=0",
)
VARIED = "async def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return float(len(solution_str) % 7)\n"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_short_and_every_key_has_an_effect(
    path: Path, quickstart_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A recipe has at most a hundred lines, begins with what it is, and says nothing that is not read."""
    lines = path.read_text().splitlines()
    assert len(lines) <= 100
    assert lines[0].startswith("# ")
    load_config([quickstart_home / "config.yaml", path], [])
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains(path: Path, quickstart_home: Path, tmp_path: Path) -> None:
    """Two steps of each recipe give finite losses, move the policy, and train on as many groups as asked for."""
    reward = tmp_path / "varied.py"
    reward.write_text(VARIED)
    keys = (
        f"reward.custom_reward_function.path={reward}",
        f"trainer.default_local_dir={tmp_path}",
        "trainer.logger=[jsonl]",
    )
    run_training(load_config([quickstart_home / "config.yaml", path], [*SHORT, *BATCH, *keys]))
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert math.isfinite(step["actor/pg_loss"])
        assert step["actor/grad_norm"] > 0
        assert step["training/num_trajectories"] == 24.0


@pytest.mark.slow
def test_supervised_fine_tuning_and_then_a_recipe(quickstart_home: Path, tmp_path: Path) -> None:
    """The quickstart's dialogues are what the recipe of supervised fine-tuning reads, and its model is what a run starts from."""
    recipe = FOLDER.parent / "sft" / "quickstart.yaml"
    home, sft, run = quickstart_home, tmp_path / "sft", tmp_path / "run"
    settings = [
        f"model.path={home / 'model'}",
        f"data.train_files={home / 'dialogues.jsonl'}",
        f"trainer.default_local_dir={sft}",
        "trainer.total_training_steps=2",
        "optim.lr_warmup_steps=0",
    ]
    config, _ = load_tree(SftConfig, recipe, settings)
    run_sft(config, console=Console(quiet=True))
    keys = (f"trainer.default_local_dir={run}", f"actor_rollout_ref.model.path={sft}", "trainer.logger=[jsonl]")
    run_training(load_config([home / "config.yaml", FOLDER / "grpo.yaml"], [*SHORT, *BATCH, *keys]))
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
