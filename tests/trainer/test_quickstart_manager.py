"""The quickstart's task under a manager that derives from none of ours: named by its path, checked, and trained on exactly."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from ostinato_trainer.quickstart.run import run_quickstart
from ostinato_trainer.sft.steps import SftSettings

pytest.importorskip("plotille")

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_manager.py"
MANAGER = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
SHORT = ("trainer.total_training_steps=2", "trainer.test_freq=2", "trainer.save_freq=-1", "data.train_batch_size=2")
SHORT += ("actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.val_before_train=false")

pytestmark = pytest.mark.skipif(not EXAMPLE.exists(), reason="the examples are not here")


def run(output: Path, *overrides: str) -> list[dict]:
    """Run two steps of the quickstart; return their metrics."""
    console = Console(file=io.StringIO(), width=120)
    warm_start = SftSettings(steps=40, batch_size=8, lr=4e-3, warmup_steps=2)
    run_quickstart(output, seed=1, console=console, warm_start=warm_start, overrides=(*SHORT, *overrides))
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "critic/score/mean" in record]


def test_a_manager_of_ones_own_is_trained_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps and a validation go through the example's manager, and the trainer finds the probabilities that were sampled with."""
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    steps = run(tmp_path / "run", f"{MANAGER}=own_manager.OwnManager")
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["num_turns/max"] == 2
        assert step["agent_loop/failures"] == 0
        assert step["training/rollout_probs_diff_max"] < 1e-3
    assert any(name.startswith("val-core/") for name in steps[-1])
