"""The root README: its agent runs, by its class and its command, the example beside it learns, and its commands and links exist."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ostinato_agent_loop import AgentConfig, AgentLoopManager, AgentLoopOutput, RolloutConfig
from ostinato_engines.testing import ScriptedServer
from ostinato_rollout import ServerPool, SessionBudget
from ostinato_tokenization import ChatTokenizer, ContinuousTokens
from ostinato_tokenization.testing import tiny_chat_tokenizer
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.custom_code import load_object
from ostinato_trainer.errors import RewardError

REPO = Path(__file__).resolve().parents[2]
README = (REPO / "README.md").read_text()


@pytest.fixture
def agent_files(tmp_path: Path) -> Path:
    """A folder with the file that the README tells to write."""
    [code] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "my_agents.py").write_text(code)
    return tmp_path


async def answered(rollout: RolloutConfig, tokenizer: ChatTokenizer, reply: Callable | list[str]) -> AgentLoopOutput:
    """What an agent makes of one question that an engine answers so."""
    server = ScriptedServer(reply, encode=tokenizer.encode_text, end_token_id=tokenizer.stop_token_ids[0])
    pool = ServerPool([server])
    await pool.start()
    manager = AgentLoopManager(
        rollout,
        tokens=ContinuousTokens(tokenizer),
        budget=SessionBudget(max_prompt_tokens=800, max_response_tokens=800),
        pool=pool,
    )
    batch = await manager.generate_sequences([{"raw_prompt": [{"role": "user", "content": "3 + 4?"}]}], n=1, step=0)
    await pool.shutdown()
    [trajectory] = batch.trajectories
    assert trajectory.failure is None
    [output] = trajectory.segments
    return output


async def test_the_example_is_an_agent(agent_files: Path) -> None:
    """The class of the README, made known by its file, runs and returns both of its turns as sampled tokens."""
    tokenizer = tiny_chat_tokenizer()
    agent = AgentConfig(default_agent_loop="second_thoughts", agent_loop_config_path=str(agent_files / "my_agents.py"))
    output = await answered(RolloutConfig(agent=agent), tokenizer, lambda request: "7")
    sampled = [token_id for token_id, mask in zip(output.response_ids, output.response_mask, strict=True) if mask]
    assert tokenizer.decode(sampled, skip_special_tokens=True) == "77"


async def test_the_example_of_one_file_has_its_tool_its_reward_and_its_loop() -> None:
    """examples/own_agent.py, under its configuration: the call is answered by its tool, the answer scored by its function."""
    config = load_config(REPO / "examples" / "own_agent.yaml")
    replies = ['<tool_call>{"name": "calculator", "arguments": {"expression": "3+4"}}</tool_call>', "The answer is 7."]
    output = await answered(config.actor_rollout_ref.rollout, tiny_chat_tokenizer(), replies)
    said = [message["content"] for message in output.extra_fields["messages"]]
    assert said[-2:] == ["7", "The answer is 7."]
    custom = config.reward.custom_reward_function
    score = load_object(str(custom.path), custom.name, key="reward.custom_reward_function", error=RewardError)
    assert await score("", "", "7", {"sampled_text": said[-1]}) == 1.0
    assert await score("", "", "8", {"sampled_text": said[-1]}) == 0.2


@pytest.mark.slow
@pytest.mark.timeout(900)  # a deadline for what hangs, on a busy machine too
def test_the_agent_is_trained_by_the_command_that_is_shown(
    agent_files: Path, base: Path, small: tuple[str, ...]
) -> None:
    """From a folder with the file, the command of the README trains the agent on what the quickstart has made."""
    shutil.copytree(base, agent_files / "outputs" / "quickstart")
    [shown] = re.findall(
        r"uv run (ostinato train outputs/quickstart/config.yaml.*second_thoughts)\n```", README, re.DOTALL
    )
    script = Path(sys.executable).with_name("ostinato")
    command = shlex.split(shown.replace("\\\n", " "))[1:]
    # The model is not warmed up, and would not leave the first turn.
    room = ("data.max_response_length=120", "actor_rollout_ref.rollout.multi_turn.max_turn_tokens=16")
    done = subprocess.run(
        [str(script), *command, *small, *room],
        cwd=agent_files,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    records = (agent_files / "outputs" / "second_thoughts" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(records[-1])["num_turns/mean"] == 4


@pytest.mark.parametrize("command", sorted(set(re.findall(r"uv run ostinato (\w+(?: gsm8k)?)", README))))
def test_its_commands_exist(command: str) -> None:
    """Every `ostinato` command of the README answers to --help."""
    script = Path(sys.executable).with_name("ostinato")
    done = subprocess.run(
        [str(script), *command.split(), "--help"], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr


def test_its_links_lead_somewhere() -> None:
    """Every relative link of the README names a file or folder of the repository."""
    links = re.findall(r"\]\(([^)#]+)\)", README)
    missing = [link for link in links if not link.startswith("http") and not (REPO / link).exists()]
    assert links
    assert not missing
