"""mini-swe-agent under an interpreter of its own, behind the gateway: the real package, a scripted policy, a real task."""

from __future__ import annotations

import json

import pytest

from ostinato_agent_loop import GatewayConfig, TrajectoryEnd
from ostinato_rollout import FailureKind

pytestmark = pytest.mark.slow  # each trajectory starts a heavy program

TASK = {
    "task": "add(2, 3) in adder.py must be 5, and is -1.",
    "files": {"adder.py": "def add(a, b):\n    return a - b\n"},
    "test": "python3 -c 'import adder; assert adder.add(2, 3) == 5'",
}
MEND = "sed -i 's/a - b/a + b/' adder.py && cat adder.py"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


@pytest.fixture
def bash(frameworks):
    """Makes a turn in which the model runs a command."""
    return lambda command: frameworks.call("bash", command=command)


@pytest.fixture
def solve(frameworks, bash):
    """Runs the example on the task, with a policy that says these turns; a text that is no command is said as it is."""
    python = frameworks.python_of("mini-swe-agent")

    async def run(*commands: str, task=None, **options):
        turns = [bash(command) if not command.endswith("<|im_end|>") else command for command in commands]
        gateway = GatewayConfig(command=[python, frameworks.example("mini_swe_agent.py")], own_reward=True)
        trajectory = await frameworks.run(turns, {"extra_info": TASK | (task or {})}, gateway, **options)
        return turns, trajectory

    return run


async def test_it_solves_a_task_and_every_token_is_recorded(frameworks, solve):
    """The agent looks, mends and submits; what was sampled is one exact segment, and the task's test is its reward."""
    turns, trajectory = await solve("cat adder.py", MEND, SUBMIT)
    assert trajectory.failure is None, trajectory.failure
    (segment,) = trajectory.segments
    assert frameworks.sampled_ids(segment) == [frameworks.encode(turn) for turn in turns]
    assert frameworks.metrics["agent_loop/exact_continuations"] == 1.0
    assert segment.stop_reason is TrajectoryEnd.PROGRAM_ENDED
    answers = [message["content"] for message in segment.extra_fields["messages"] if message["role"] == "tool"]
    assert "return a - b" in answers[0]
    assert "return a + b" in answers[1]
    assert trajectory.reward.score == 1.0
    assert trajectory.reward.extra == {"exit_status": "Submitted", "submitted": True}


async def test_a_task_that_is_not_solved_has_a_reward_of_0(solve):
    """An agent that submits without having mended anything is scored, not failed."""
    _, trajectory = await solve(SUBMIT)
    assert trajectory.failure is None, trajectory.failure
    assert trajectory.reward.score == 0.0


async def test_a_test_that_hangs_has_not_passed(solve):
    """What the agent has broken so that its test does not end is a reward of 0, not a failure."""
    _, trajectory = await solve(SUBMIT, task={"test": "sleep 600", "test_timeout_s": 1})
    assert trajectory.failure is None, trajectory.failure
    assert trajectory.reward.score == 0.0


async def test_a_step_limit_is_an_end_like_any_other(frameworks, solve):
    """At its own step limit the agent ends, what it did is tested, and the reward says how it ended."""
    turns, trajectory = await solve("ls", MEND, task={"step_limit": 2})
    assert trajectory.failure is None, trajectory.failure
    assert [frameworks.encode(turn) for turn in turns] == frameworks.sampled_ids(trajectory.segments[0])
    assert trajectory.reward.score == 1.0
    assert trajectory.reward.extra["exit_status"] == "LimitsExceeded"


async def test_a_limit_of_the_trajectory_ends_it_there(solve):
    """A request beyond the run's turns is refused once, without waiting, and what was done until then is scored."""
    _, trajectory = await solve(MEND, "ls", "ls", max_assistant_turns=2)
    assert trajectory.failure is None, trajectory.failure
    assert trajectory.segments[0].stop_reason is TrajectoryEnd.MAX_ASSISTANT_TURNS
    assert trajectory.reward.score == 1.0
    assert trajectory.reward.extra["exit_status"].startswith("refused: ")


async def test_a_turn_that_it_forgets_is_a_segment_of_its_own(frameworks, solve):
    """The agent leaves a turn without a command out of its history; both histories are trained on, each sampled token once."""
    turns, trajectory = await solve("I do not know.<|im_end|>", MEND, SUBMIT)
    assert trajectory.failure is None, trajectory.failure
    assert [frameworks.sampled_ids(segment) for segment in trajectory.segments] == [
        [frameworks.encode(turns[0])],
        [frameworks.encode(turn) for turn in turns[1:]],
    ]
    assert trajectory.reward.score == 1.0


async def test_an_agent_that_is_killed_is_a_recorded_failure(solve):
    """A command of the model that kills the agent's process fails the trajectory, and no reward is made up."""
    _, trajectory = await solve("kill -9 $PPID")
    assert trajectory.failure.kind is FailureKind.AGENT
    assert "SIGKILL" in trajectory.failure.message
    assert trajectory.reward is None


async def test_an_engine_that_fails_is_not_scored(frameworks, solve, bash):
    """Where the engine fails, the trajectory has the engine's failure and no reward, whatever the agent makes of it."""
    gateway_turns = [bash("ls"), RuntimeError("out of memory")]
    python = frameworks.python_of("mini-swe-agent")
    gateway = GatewayConfig(command=[python, frameworks.example("mini_swe_agent.py")], own_reward=True)
    trajectory = await frameworks.run(gateway_turns, {"extra_info": TASK}, gateway)
    assert trajectory.failure.kind is FailureKind.ENGINE
    assert trajectory.reward is None


async def test_the_models_commands_do_not_see_the_key(solve):
    """The key that opens the reward is not in the environment of what the model runs."""
    _, trajectory = await solve("env", SUBMIT)
    shown = json.dumps(trajectory.segments[0].extra_fields["messages"])
    assert "PATH=" in shown
    assert "OPENAI_API_KEY" not in shown
