"""The quickstart's task with the agent as a LangGraph graph is the same run."""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ostinato_engines.device import host_threads
from ostinato_trainer.assembly import run_training
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.quickstart.run import WARM_START, run_quickstart
from ostinato_trainer.sft.steps import SftSettings

pytest.importorskip("plotille")
pytest.importorskip("langgraph", reason="needs the extra langgraph")

REACT = "actor_rollout_ref.rollout.agent.default_agent_loop=react_agent"
SHORT = ("trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.save_freq=2", "data.train_batch_size=2")
SHORT += ("actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.val_before_train=false")
SHORT_WARM_START = SftSettings(steps=40, batch_size=8, lr=4e-3, warmup_steps=2)


def run(output: Path, *overrides: str, seed: int, warm_start: SftSettings = SHORT_WARM_START) -> list[dict]:
    """Run the quickstart; return what was measured."""
    console = Console(file=io.StringIO(), width=120)
    run_quickstart(output, seed=seed, console=console, warm_start=warm_start, overrides=overrides)
    return measured(output)


def train_again(folder: Path, output: Path, *overrides: str) -> list[dict]:
    """Train once more from the warm start of another run; return what was measured."""
    overrides = (f"trainer.default_local_dir={output}", "trainer.logger=[jsonl]", *overrides)
    with host_threads(1):
        run_training(load_config([folder / "config.yaml"], overrides))
    return measured(output)


def measured(output: Path) -> list[dict]:
    """What a run measured of tokens, rewards and training."""
    return [of_tokens(json.loads(line)) for line in (output / "metrics.jsonl").read_text().splitlines()]


def of_tokens(record: Mapping[str, Any]) -> dict[str, Any]:
    """A step's metrics that follow from the tokens: not those of the clock, nor those of the sampler's log-probabilities, whose
    last digits depend on which requests were in a batch together."""
    others = (
        "timing_",
        "perf/time",
        "perf/throughput",
        "perf/cpu_memory",
        "agent_loop/",
        "rollout_corr/",
        "training/rollout_",
    )
    return {key: value for key, value in record.items() if not key.startswith(others)}


def test_react_agent_is_the_same_run(tmp_path: Path) -> None:
    """With one seed, tool_agent and react_agent give the same metrics, bit for bit: the same tokens were sampled and trained on."""
    tool = run(tmp_path / "tool", *SHORT, seed=3)
    react = train_again(tmp_path / "tool", tmp_path / "react", *SHORT, REACT)
    assert tool == react
    assert [record["step"] for record in react if "critic/score/mean" in record] == [1, 2]
    assert react[-1]["num_turns/max"] > 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_react_agent_gains_what_tool_agent_gains(tmp_path: Path) -> None:
    """Over the whole quickstart the reward of every step is that of tool_agent, and it rises."""
    tool = run(tmp_path / "tool", seed=1, warm_start=WARM_START)
    react = train_again(tmp_path / "tool", tmp_path / "react", REACT)
    assert tool == react
    rewards = [record["critic/score/mean"] for record in react if "critic/score/mean" in record]
    assert sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5 >= 0.3
