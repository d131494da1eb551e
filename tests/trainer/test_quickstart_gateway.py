"""The quickstart's task with a program that speaks OpenAI's API as the agent: exact, and learned as well."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from ostinato_trainer.quickstart.run import WARM_START, run_quickstart
from ostinato_trainer.sft.steps import SftSettings

pytest.importorskip("plotille")
pytest.importorskip("openai", reason="the example needs the official client")

EXAMPLE = Path(__file__).parents[2] / "examples" / "openai_agent.py"
AGENT = "actor_rollout_ref.rollout.agent"
GATEWAY = (f"{AGENT}.default_agent_loop=gateway_agent", f"{AGENT}.gateway.function={EXAMPLE}:agent")
SHORT = ("trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.save_freq=2", "data.train_batch_size=2")
SHORT += ("actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.val_before_train=false")

pytestmark = pytest.mark.skipif(not EXAMPLE.exists(), reason="the examples are not here")


def run(output: Path, *overrides: str, warm_start: SftSettings) -> list[dict]:
    """Run the quickstart with the example as its agent; return the steps' metrics."""
    console = Console(file=io.StringIO(), width=120)
    run_quickstart(output, seed=1, console=console, warm_start=warm_start, overrides=(*GATEWAY, *overrides))
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "critic/score/mean" in record]


def check_exact(steps: list[dict]) -> None:
    """No trajectory failed, every history went on as its tokens are, and the trainer finds the probabilities that were sampled with."""
    for step in steps:
        assert step["agent_loop/failures"] == 0
        assert step["agent_loop/exact_continuations"] == 1.0
        assert step["training/rollout_probs_diff_max"] < 1e-3


def test_a_program_is_trained_token_by_token(tmp_path: Path) -> None:
    """What the forty lines with the official client were answered is what is trained on."""
    steps = run(tmp_path / "run", *SHORT, warm_start=SftSettings(steps=40, batch_size=8, lr=4e-3, warmup_steps=2))
    assert [step["step"] for step in steps] == [1, 2]
    assert steps[-1]["num_turns/max"] > 2
    check_exact(steps)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_program_learns_as_the_tool_agent_does(tmp_path: Path) -> None:
    """Over the whole quickstart the reward rises by at least what the README's run gains."""
    steps = run(tmp_path / "run", warm_start=WARM_START)
    check_exact(steps)
    rewards = [step["critic/score/mean"] for step in steps]
    assert sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5 >= 0.3
