"""A run whose agent gives its own rewards needs no scorer, and is trained with what the agent gave."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from ostinato_trainer.errors import RewardError
from ostinato_trainer.quickstart.run import run_quickstart
from ostinato_trainer.sft.steps import SftSettings

pytest.importorskip("plotille")
pytest.importorskip("starlette", reason="the gateway needs the extra gateway")
pytest.importorskip("uvicorn", reason="the gateway needs the extra gateway")

AGENT = "actor_rollout_ref.rollout.agent"
NO_SCORER = ("reward.custom_reward_function.path=null", f"{AGENT}.default_agent_loop=gateway_agent")
SHORT = ("trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.save_freq=-1", "data.train_batch_size=2")
SHORT += ("actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.val_before_train=false")
PROGRAM = '''
import asyncio, json, urllib.request


def post(url, key, content):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(content).encode(), headers)) as answer:
        return json.load(answer)


async def agent(base_url, api_key, row):
    """Ask once; a short answer is a good one."""
    answer = await asyncio.to_thread(post, f"{base_url}/chat/completions", api_key, {"messages": row["raw_prompt"]})
    said = answer["usage"]["completion_tokens"]
    await asyncio.to_thread(post, f"{base_url}/rl/set_reward", api_key, {"reward": -said, "extra": {"said": said}})
'''


def run(output: Path, *overrides: str) -> list[dict]:
    """Run two steps of the quickstart without its scorer; return their metrics."""
    console = Console(file=io.StringIO(), width=120)
    warm_start = SftSettings(steps=20, batch_size=8, lr=4e-3, warmup_steps=2)
    run_quickstart(output, seed=1, console=console, warm_start=warm_start, overrides=(*SHORT, *NO_SCORER, *overrides))
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "critic/score/mean" in record]


def test_an_agents_own_reward_is_trained_with(tmp_path: Path) -> None:
    """Rows whose data source has no scorer are run where the agent scores itself; what it measured beside it is a metric."""
    (tmp_path / "own.py").write_text(PROGRAM)
    function = f"{AGENT}.gateway.function={tmp_path / 'own.py'}:agent"
    steps = run(tmp_path / "run", function, f"{AGENT}.gateway.own_reward=true")
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["agent_loop/failures"] == 0
        assert step["critic/score/mean"] < 0
        assert step["critic/score/mean"] == pytest.approx(-step["response_length/mean"])


def test_a_scorer_that_is_not_asked_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Settings of `reward` that no row's agent leaves anything to do for are named, and change nothing."""
    (tmp_path / "own.py").write_text(PROGRAM)
    function = f"{AGENT}.gateway.function={tmp_path / 'own.py'}:agent"
    once = ("trainer.total_training_steps=1", "reward.timeout_s=7")
    [step] = run(tmp_path / "run", function, f"{AGENT}.gateway.own_reward=true", *once)
    assert "settings of reward have no effect" in caplog.text
    assert step["critic/score/mean"] < 0


def test_without_own_rewards_rows_need_a_scorer(tmp_path: Path) -> None:
    """The same rows are refused before anything starts where nobody would score them."""
    (tmp_path / "own.py").write_text(PROGRAM)
    with pytest.raises(RewardError, match="data_source"):
        run(tmp_path / "run", f"{AGENT}.gateway.function={tmp_path / 'own.py'}:agent")
