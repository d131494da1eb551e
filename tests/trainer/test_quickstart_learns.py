"""The quickstart learns, repeats, and does not learn where nothing is to be learned from: whole runs, so all are slow but one."""

import io
import json
import random
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from rich.console import Console

from ostinato_agent_loop import AgentLoopManager, RolloutBatch
from ostinato_trainer.quickstart.report import ACCURACY
from ostinato_trainer.quickstart.run import WARM_START, run_quickstart
from ostinato_trainer.quickstart.task import first_steps
from ostinato_trainer.sft.steps import SftSettings

pytest.importorskip("plotille")

SHORT_WARM_START = SftSettings(steps=8, batch_size=8, lr=4e-3, warmup_steps=2)
SHORT = ("trainer.total_training_steps=3", "trainer.test_freq=3", "trainer.save_freq=3", "data.train_batch_size=4")
SHORT += ("actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=4")


class ShuffledRewards(AgentLoopManager):
    """Gives every trajectory of a training batch the reward of another one, chosen at random."""

    async def generate_sequences(self, rows: Any, *, step: int, validate: bool = False, **options: Any) -> RolloutBatch:
        """See AgentLoopManager."""
        batch = await super().generate_sequences(rows, step=step, validate=validate, **options)
        if not validate:
            rewards = [trajectory.reward for trajectory in batch.trajectories]
            random.Random(step).shuffle(rewards)
            for trajectory, reward in zip(batch.trajectories, rewards, strict=True):
                trajectory.reward = reward
        return batch


def run(
    output: Path, *, seed: int, warm_start: SftSettings = WARM_START, overrides: tuple[str, ...] = ()
) -> list[dict]:
    """Run the quickstart and return its metrics."""
    console = Console(file=io.StringIO(), width=120)
    run_quickstart(output, seed=seed, console=console, warm_start=warm_start, overrides=overrides)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def rewards_of(records: list[dict]) -> list[float]:
    """The mean reward of every step."""
    return [record["critic/score/mean"] for record in records if "critic/score/mean" in record]


def without_times(record: Mapping[str, Any]) -> dict[str, Any]:
    """A step's metrics that depend neither on the clock nor on what else the process holds."""
    clocked = ("timing_", "perf/time", "perf/throughput", "perf/cpu_memory", "agent_loop/")
    return {key: value for key, value in record.items() if not key.startswith(clocked)}


def test_same_seed_same_curve(tmp_path: Path) -> None:
    """Two runs with one seed agree in every metric but the clock's, bit for bit; another seed gives another run."""
    first = run(tmp_path / "first", seed=5, warm_start=SHORT_WARM_START, overrides=SHORT)
    again = run(tmp_path / "again", seed=5, warm_start=SHORT_WARM_START, overrides=SHORT)
    other = run(tmp_path / "other", seed=6, warm_start=SHORT_WARM_START, overrides=SHORT)
    assert [without_times(record) for record in first] == [without_times(record) for record in again]
    assert [without_times(record) for record in first] != [without_times(record) for record in other]
    assert [record["step"] for record in first] == [0, 1, 2, 3]
    for name in ("reward.png", "config.yaml", "tools.py", "reward.py", "global_step_3/huggingface/model.safetensors"):
        assert (tmp_path / "first" / name).stat().st_size > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_it_learns(tmp_path: Path, seed: int) -> None:
    """The mean reward of the last five steps exceeds that of the first five, which is at most 0.6, by 0.3 or more; the share of
    right answers on problems that were never trained on rises too."""
    records = run(tmp_path / "run", seed=seed)
    rewards = rewards_of(records)
    assert fmean(rewards[:5]) <= 0.6
    assert fmean(rewards[-5:]) - fmean(rewards[:5]) >= 0.3
    accuracies = [record[ACCURACY] for record in records if ACCURACY in record]
    assert accuracies[-1] - accuracies[0] >= 0.3
    assert not set(first_steps(held_out=True, seed=seed)) & set(first_steps(held_out=False, seed=seed))
    gaps = [record["training/rollout_log_probs_diff_max"] for record in records if "critic/score/mean" in record]
    assert max(gaps) < 1e-4, "sampler and trainer must agree about every token"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "control",
    [
        pytest.param("actor_rollout_ref.actor.optim.lr=0", id="learning rate 0"),
        pytest.param(
            f"actor_rollout_ref.rollout.agent.agent_loop_manager_class={__name__}.ShuffledRewards",
            id="shuffled rewards",
        ),
    ],
)
def test_it_does_not_learn_from_nothing(tmp_path: Path, control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a learning rate, or with rewards that belong to other trajectories, there is no gain."""
    if "ShuffledRewards" in control:
        module = tmp_path / "shuffled_rewards_for_test.py"
        module.write_text(Path(__file__).read_text())
        monkeypatch.syspath_prepend(str(tmp_path))
        control = f"{control.split('=')[0]}={module.stem}.ShuffledRewards"
    rewards = rewards_of(run(tmp_path / "run", seed=1, overrides=(control,)))
    assert fmean(rewards[-5:]) - fmean(rewards[:5]) < 0.1
