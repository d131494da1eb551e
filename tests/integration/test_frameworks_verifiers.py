"""An environment of the real `verifiers` under its own interpreter, behind the gateway: its rows, its harness, its rewards."""

from __future__ import annotations

import io
import json
import os
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from ostinato_agent_loop import GatewayConfig, TrajectoryEnd
from ostinato_rollout import FailureKind
from ostinato_trainer.quickstart.run import run_quickstart
from ostinato_trainer.sft.steps import SftSettings

pytestmark = pytest.mark.slow  # each trajectory starts a heavy program

TASKSET = '''
import openai
import verifiers.v1 as vf


class Sums(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class SumConfig(vf.TaskConfig):
    with_tools: bool = False


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData, vf.State, SumConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Sums(vf.ToolsetConfig())] if config.with_tools else []

    @vf.reward(weight=2.0)
    async def is_right(self, task: SumData, trace: vf.Trace) -> float:
        if "broken" in trace.last_reply:
            raise LookupError("the rubric broke")
        return float(str(task.answer) in trace.last_reply)

    @vf.metric
    async def num_characters(self, trace: vf.Trace) -> float:
        return len(trace.last_reply)


class SumTasksetConfig(vf.TasksetConfig):
    task: SumConfig = SumConfig()


class SumTaskset(vf.Taskset[SumTask, SumTasksetConfig]):
    def load(self):
        for a in range(3):
            yield SumTask(SumData(prompt=f"What is {a} + 2?", answer=a + 2), self.config.task)


class AskTwice(vf.Harness[vf.HarnessConfig]):
    """In this process: asks, doubts, asks again."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for doubt in ("Are you sure?", None):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                messages.append({"role": "user", "content": doubt})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["AskTwice", "SumTaskset"]

if __name__ == "__main__":  # where its tools are served
    Sums.run()
'''


class Environment:
    """The taskset above as a package, and the rows that the example makes of an environment of it."""

    def __init__(self, folder: Path, python: str, example: str) -> None:
        self.folder, self._command = folder, [python, example]
        (folder / "sums_v1.py").write_text(TASKSET)
        config = {"taskset": {"id": "sums-v1"}, "agent": {"runtime": {"type": "subprocess"}}}
        (folder / "config.json").write_text(json.dumps(config))
        command = [*self._command, "rows", str(folder / "config.json")]
        variables = {**os.environ, "PYTHONPATH": str(folder)}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True, timeout=120)
        self.rows = [json.loads(line) for line in done.stdout.splitlines()]

    def row(self, index: int, *, with_tools: bool = False, env_id: str = "", **agent) -> dict:
        """A row whose environment has further settings."""
        given = json.loads(self.rows[index]["extra_info"]["verifiers"])
        given["env"]["id"] = env_id
        given["env"]["agent"] |= agent
        given["env"]["taskset"]["task"] = {"with_tools": with_tools}
        row = self.rows[index]
        return row | {"raw_prompt": row["prompt"], "extra_info": {"verifiers": json.dumps(given)}}

    @property
    def gateway(self) -> GatewayConfig:
        """Runs the example. What verifiers keeps in the home folder goes with the test; uv's cache stays."""
        uv_cache = os.environ.get("UV_CACHE_DIR") or str(Path.home() / ".cache" / "uv")
        return GatewayConfig(
            command=self._command,
            env={"PYTHONPATH": str(self.folder), "HOME": str(self.folder), "UV_CACHE_DIR": uv_cache},
            pass_env=[name for name in os.environ if name.startswith(("UV_", "SSL_", "PIP_"))],
            own_reward=True,
        )


@pytest.fixture(scope="module")
def environment(tmp_path_factory, frameworks) -> Environment:
    """See Environment."""
    python, example = frameworks.python_of("verifiers"), frameworks.example("verifiers_agent.py")
    return Environment(tmp_path_factory.mktemp("verifiers"), python, example)


async def test_an_environment_is_played_and_scored_by_its_own_rewards(environment, frameworks):
    """A row of a taskset is played by its harness, token-exactly, and its weighted rewards and metrics come back."""
    assert [row["prompt"] for row in environment.rows] == [
        [{"role": "user", "content": f"What is {a} + 2?"}] for a in range(3)
    ]
    turns = ["It is 4.<|im_end|>", "It  is 3.<|im_end|>"]
    trajectory = await frameworks.run(turns, environment.row(1), environment.gateway)
    assert trajectory.failure is None, trajectory.failure
    (segment,) = trajectory.segments
    assert frameworks.sampled_ids(segment) == [frameworks.encode(turn) for turn in turns]
    assert frameworks.metrics["agent_loop/exact_continuations"] == 1.0
    assert segment.stop_reason is TrajectoryEnd.PROGRAM_ENDED
    assert trajectory.reward.score == 2.0
    assert trajectory.reward.extra == {"is_right": 1.0, "num_characters": 9.0, "stop_condition": "agent_completed"}


async def test_the_harness_of_verifiers_with_tools(environment, frameworks):
    """The built-in chat harness, which streams and calls the task's tools over MCP, is one exact segment as well."""
    row = environment.row(2, with_tools=True, harness={"id": "null"})
    turns = [frameworks.call("sums_add", a=2, b=2), "It is 4.<|im_end|>"]
    trajectory = await frameworks.run(turns, row, environment.gateway)
    assert trajectory.failure is None, trajectory.failure
    (segment,) = trajectory.segments
    assert frameworks.sampled_ids(segment) == [frameworks.encode(turn) for turn in turns]
    answers = [message["content"] for message in segment.extra_fields["messages"] if message["role"] == "tool"]
    assert answers == ["4"]
    assert trajectory.reward.score == 2.0


async def test_its_own_limit_ends_a_rollout_that_is_scored(environment, frameworks):
    """At the environment's own limit of turns the rollout ends, and its rewards are those of what was said until then."""
    row = environment.row(1, max_turns=1)
    trajectory = await frameworks.run(["It is 3.<|im_end|>"], row, environment.gateway)
    assert trajectory.failure is None, trajectory.failure
    assert trajectory.reward.score == 2.0
    assert trajectory.reward.extra["stop_condition"] == "max_turns"


@pytest.mark.parametrize(
    ("turns", "options", "kind", "said"),
    [
        (["It is broken.<|im_end|>"] * 2, {}, FailureKind.AGENT, "the rubric broke"),
        (["It is 3.<|im_end|>"] * 2, {"max_assistant_turns": 1}, FailureKind.AGENT, "at most 1 turns"),
        ([RuntimeError("out of memory")] * 9, {}, FailureKind.ENGINE, "out of memory"),
    ],
)
async def test_a_rollout_that_fails_has_no_reward(environment, frameworks, turns, options, kind, said):
    """A rubric that raises, a limit of the run and an engine that fails are the trajectory's failure, with the cause by name."""
    trajectory = await frameworks.run(turns, environment.row(1), environment.gateway, **options)
    assert trajectory.failure.kind is kind
    assert said in trajectory.failure.message
    assert trajectory.reward is None


async def test_an_episode_of_several_traces_has_no_one_reward(environment, frameworks):
    """An environment whose agent plays several times is refused: which of its rewards would be the trajectory's?"""
    row = environment.row(1, env_id="best-of-n", max_turns=1)
    trajectory = await frameworks.run(["It is 3.<|im_end|>"] * 9, row, environment.gateway)
    assert trajectory.failure.kind is FailureKind.AGENT
    assert "an episode must have one trace, whose reward it is, got 4" in trajectory.failure.message


def test_rows_of_an_environment_are_trained_on(environment, tmp_path):
    """Two steps of the quickstart's model on the rows that the example wrote: sampled by the harness, scored by the rewards, trained exactly."""
    pytest.importorskip("plotille")
    rows = [environment.row(index, max_turns=1) for index in range(3)]
    for row in rows:
        row.pop("raw_prompt", None)  # the dataset's own, made of the prompt
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    agent = "actor_rollout_ref.rollout.agent"
    overrides = (
        f"data.train_files={tmp_path / 'rows.jsonl'}",
        "data.val_files=[]",
        "data.train_batch_size=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "actor_rollout_ref.rollout.n=2",
        f"{agent}.default_agent_loop=gateway_agent",
        *(
            f"{agent}.gateway.{name}={json.dumps(getattr(environment.gateway, name))}"
            for name in ("command", "env", "pass_env", "own_reward")
        ),
        "reward.custom_reward_function.path=null",
        "trainer.total_training_steps=2",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.val_before_train=false",
    )
    warm_start = SftSettings(steps=20, batch_size=8, lr=4e-3, warmup_steps=2)
    console = Console(file=io.StringIO(), width=120)
    run_quickstart(tmp_path / "run", seed=1, console=console, warm_start=warm_start, overrides=overrides)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "critic/score/mean" in record]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["agent_loop/failures"] == 0
        assert step["training/rollout_probs_diff_max"] < 1e-3
