"""Resources servers of the real NeMo Gym under their own interpreter, as environments behind the gateway."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ostinato_agent_loop import GatewayConfig
from ostinato_rollout import FailureKind

pytestmark = pytest.mark.slow  # each trajectory starts a heavy program

SERVER = """
import importlib, sys
from pathlib import Path
import uvicorn
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf

module, name = sys.argv[1].split(":")
cls = getattr(importlib.import_module(module), name)
head = BaseServerConfig(host="127.0.0.1", port=1)
server = cls(
    config=cls.model_fields["config"].annotation(name=name, host="127.0.0.1", port=0, entrypoint="app.py"),
    server_client=ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({})),
)
listening = uvicorn.Server(uvicorn.Config(server.setup_webserver(), host="127.0.0.1", port=0, log_level="warning"))
startup = listening.startup

async def tell(sockets=None):
    await startup(sockets)
    print(listening.servers[0].sockets[0].getsockname()[1], flush=True)

listening.startup = tell
listening.run()
"""


class ResourcesServer:
    """One that is up, with the dataset of examples that it comes with as rows."""

    def __init__(self, url: str, rows: list[dict]) -> None:
        self.url, self.rows = url, rows


def serving(frameworks, module: str, name: str) -> Iterator[ResourcesServer]:
    """Start a server of the package; it ends with the tests."""
    python = frameworks.python_of("nemo-gym")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [python, "-c", SERVER, f"resources_servers.{module}.app:{name}"]
    where = "import resources_servers; print(list(resources_servers.__path__)[0])"
    found = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True, env=variables, timeout=60)
    data = Path(found.stdout.strip()) / module / "data" / "example.jsonl"
    made = subprocess.run(
        [sys.executable, frameworks.example("nemo_gym_agent.py"), "rows", str(data)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    rows = [json.loads(line) for line in made.stdout.splitlines()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert port.isdecimal(), "the server did not start; its errors are above"
        yield ResourcesServer(f"http://127.0.0.1:{port}", rows)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def counter(frameworks) -> Iterator[ResourcesServer]:
    """A server whose sessions each hold a counter: 3 at first, and to be 6 in the first row."""
    yield from serving(frameworks, "example_session_state_mgmt", "StatefulCounterResourcesServer")


@pytest.fixture
def play(frameworks):
    """Plays the first row of a server with a policy that says these turns."""

    async def run(server: ResourcesServer, turns: list, **multi_turn):
        command = [sys.executable, frameworks.example("nemo_gym_agent.py")]
        gateway = GatewayConfig(command=command, env={"NEMO_GYM_URL": server.url}, own_reward=True)
        row = server.rows[0] | {"raw_prompt": server.rows[0]["prompt"]}
        return await frameworks.run(turns, row, gateway, **multi_turn)

    return run


async def test_tools_and_verdict_are_the_servers(frameworks, counter, play):
    """The policy's calls are answered by the server in a session of its own, and its verdict is the reward; every token is recorded."""
    turns = [
        frameworks.call("increment_counter", count=1),
        frameworks.call("increment_counter", count=2),
        frameworks.call("get_counter_value"),
        "The count is 6.<|im_end|>",
    ]
    for _ in range(2):  # a session is not the one before
        trajectory = await play(counter, turns)
        assert trajectory.failure is None, trajectory.failure
        (segment,) = trajectory.segments
        assert frameworks.sampled_ids(segment) == [frameworks.encode(turn) for turn in turns]
        assert frameworks.metrics["agent_loop/exact_continuations"] == 1.0
        answers = [message["content"] for message in segment.extra_fields["messages"] if message["role"] == "tool"]
        assert json.loads(answers[-1]) == {"count": 6}
        assert trajectory.reward.score == 1.0


async def test_a_wrong_result_has_a_reward_of_0(frameworks, counter, play):
    """A policy that counts wrongly is scored; a tool that is not there and arguments that do not fit are answers like others."""
    turns = [
        frameworks.call("no_such_tool"),
        frameworks.call("increment_counter", count="many"),
        "Done.<|im_end|>",
    ]
    trajectory = await play(counter, turns)
    assert trajectory.failure is None, trajectory.failure
    answers = [message["content"] for message in trajectory.segments[0].extra_fields["messages"]]
    assert any("Not Found" in answer for answer in answers)
    assert any("int_parsing" in answer for answer in answers)
    assert trajectory.reward.score == 0.0


async def test_a_server_that_is_not_there_is_a_recorded_failure(play, counter):
    """Without its server a rollout fails, and has no reward."""
    gone = ResourcesServer("http://127.0.0.1:9", counter.rows)
    trajectory = await play(gone, ["Done.<|im_end|>"])
    assert trajectory.failure.kind is FailureKind.AGENT
    assert "refused" in trajectory.failure.message
    assert trajectory.reward is None
