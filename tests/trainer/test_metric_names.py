"""The table of metrics and what runs write agree."""

import itertools
import json
import re
from pathlib import Path

import pytest

from ostinato_trainer.assembly import run_training
from ostinato_trainer.config.loading import load_config

TABLE = Path(__file__).parents[2] / "docs" / "metrics.md"
SMALL = (
    "trainer.total_training_steps=2",
    "trainer.test_freq=1",
    "trainer.save_freq=2",
    "trainer.logger=[jsonl]",
    "data.train_batch_size=2",
    "data.max_response_length=48",
    "data.val_max_samples=3",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=3",
    "actor_rollout_ref.rollout.val_kwargs.n=2",
)
PLACEHOLDERS = {"SOURCE": ".+", "NAME": "[^/]+", "KIND": "[a-z_0-9/]+", "N": "[0-9]+", "k": "[0-9]+"}


def patterns() -> list[tuple[str, str]]:
    """Regular expressions of the names in the table, each with the last column of its row."""
    if not TABLE.exists():
        pytest.skip("the table of metrics is in the repository, not in the package")
    found = []
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) != 5 or not cells[1].startswith("`"):
            continue
        for name in re.findall(r"`([^`]+)`", cells[1]):
            parts = [part.split(",") for part in re.split(r"[{}]", name)]
            for choice in itertools.product(*parts):
                text = re.escape("".join(choice))
                for word, pattern in PLACEHOLDERS.items():
                    text = re.sub(
                        rf"(?<![A-Za-z_0-9]){word}(?![A-Za-z_0-9])|(?<=_){word}$", lambda _, p=pattern: p, text
                    )
                found.append((text, cells[3]))
    return found


def written(home: Path, output: Path, *overrides: str) -> list[dict]:
    """The lines of a short run."""
    run_training(load_config([home / "config.yaml"], [*SMALL, f"trainer.default_local_dir={output}", *overrides]))
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (
            "algorithm.adv_estimator=gae",
            "algorithm.use_kl_in_reward=true",
            "actor_rollout_ref.actor.entropy_coeff=0.01",
        ),
        (
            "trainer.max_staleness=1",
            "algorithm.rollout_correction.rollout_is=token",
            "actor_rollout_ref.actor.use_kl_loss=true",
        ),
    ],
    ids=["grpo", "critic", "asynchronous"],
)
def test_runs_write_the_names_of_the_table(quickstart_home: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """Every name that a run writes is in the table, and every name that the table promises for a step is written in each."""
    table = patterns()
    lines = written(quickstart_home, tmp_path, *overrides)
    names = {name for line in lines for name in line if name != "step" and not name.startswith("versions/")}
    unknown = [name for name in names if not any(re.fullmatch(pattern, name) for pattern, _ in table)]
    assert sorted(unknown) == []
    promised = [pattern for pattern, where in table if where == "step"]
    for line in lines[1:]:
        assert [pattern for pattern in promised if not any(re.fullmatch(pattern, name) for name in line)] == []
    assert len(promised) > 60
