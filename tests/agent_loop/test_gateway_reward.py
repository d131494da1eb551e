"""The reward that a program gives its own trajectory: once, finite, only where it is asked for, and a failure where it is missing."""

from __future__ import annotations

import json
import math
import sys

import pytest

pytest.importorskip("starlette", reason="the gateway needs the extra gateway")
pytest.importorskip("uvicorn", reason="the gateway needs the extra gateway")

from hypothesis import given
from hypothesis import strategies as st

from ostinato_agent_loop import AgentConfig, GatewayConfig, RolloutConfig, TrajectoryEnd, agent_loop_class
from ostinato_agent_loop.gateway.own_reward import OwnReward
from ostinato_rollout import FailureKind
from ostinato_rollout.openai_app import ApiError

ASK = """
import json, os, sys, urllib.request, urllib.error

def post(path, content, key=os.environ["OPENAI_API_KEY"], base_url=os.environ["OPENAI_BASE_URL"]):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with urllib.request.urlopen(urllib.request.Request(base_url + path, body, headers)) as answer:
        return json.load(answer)

def refused(content, **more):
    try:
        post("/rl/set_reward", content, **more)
    except urllib.error.HTTPError as error:
        return f"{error.code} {json.load(error)['error']['message']}"

row = json.load(sys.stdin)
post("/chat/completions", {"messages": row["raw_prompt"]})
"""


def program(text: str, *, own_reward: bool = True) -> dict:
    """Settings of an agent that asks once and then does what `text` says."""
    return {"gateway": GatewayConfig(command=[sys.executable, "-c", ASK + text], own_reward=own_reward)}


async def test_a_program_gives_its_reward(world):
    """What a program posts is the score of its trajectory, with what it measured beside it; the run's reward function is not asked."""
    text = 'print(post("/rl/set_reward", {"reward": 0.25, "extra": {"passed": 1, "why": "half"}}))'
    trajectory = await world.run_one(["Yes.<|im_end|>"], agent="gateway_agent", agent_options=program(text))
    assert trajectory.failure is None, trajectory.failure
    assert trajectory.reward.score == 0.25
    assert trajectory.reward.extra == {"passed": 1.0, "why": "half"}
    assert trajectory.segments[0].reward_score == 0.25
    assert trajectory.segments[0].extra_fields["program_output"] == "{'reward': 0.25}\n"
    assert world.rewarded == []


async def test_a_reward_that_is_not_given_is_a_failure(world):
    """A program that was asked for its reward and ends without one has failed; what it sampled can be looked at, and nothing is 0."""
    trajectory = await world.run_one(["Yes.<|im_end|>"], agent="gateway_agent", agent_options=program(""))
    assert trajectory.failure.kind is FailureKind.REWARD
    assert "OPENAI_BASE_URL/rl/set_reward" in trajectory.failure.message
    assert trajectory.reward is None
    assert len(trajectory.segments) == 1
    assert world.rewarded == []


async def test_a_reward_that_was_refused_is_told_as_such(world):
    """A program that does not look at its answer, and posted NaN, has given no reward; the failure says why it was not taken."""
    text = 'refused({"reward": float("nan")})'
    trajectory = await world.run_one(["Yes.<|im_end|>"], agent="gateway_agent", agent_options=program(text))
    assert trajectory.reward is None
    assert trajectory.failure.kind is FailureKind.REWARD
    assert "got one that was refused (the body must be JSON" in trajectory.failure.message
    assert "without NaN or Infinity" in trajectory.failure.message


async def test_a_program_that_fails_after_its_reward_has_failed(world):
    """A reward does not make up for a program that ends badly."""
    text = 'post("/rl/set_reward", {"reward": 1}); sys.exit("it broke")'
    trajectory = await world.run_one(["Yes.<|im_end|>"], agent="gateway_agent", agent_options=program(text))
    assert trajectory.failure.kind is FailureKind.AGENT
    assert "it broke" in trajectory.failure.message
    assert trajectory.reward is None


async def test_a_program_that_owes_a_reward_at_a_limit_has_failed(world):
    """One that breaks when it is refused for a limit fails with its own last words, unless it has given its reward before."""
    ask = 'post("/chat/completions", {"messages": row["raw_prompt"]})'
    options = program(ask)
    trajectory = await world.run_one(
        ["Yes.<|im_end|>"], agent="gateway_agent", agent_options=options, max_assistant_turns=1
    )
    assert trajectory.failure.kind is FailureKind.AGENT
    assert "400" in trajectory.failure.message
    options = program(f'post("/rl/set_reward", {{"reward": 0.5}}); {ask}')
    trajectory = await world.run_one(
        ["Yes.<|im_end|>"], agent="gateway_agent", agent_options=options, max_assistant_turns=1
    )
    assert trajectory.failure is None, trajectory.failure
    assert trajectory.reward.score == 0.5
    assert trajectory.segments[0].stop_reason is TrajectoryEnd.MAX_ASSISTANT_TURNS


async def test_a_reward_without_a_turn_is_no_trajectory(world):
    """A program that scores itself without ever having asked the model has failed."""
    text = """
import json, os, urllib.request
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/rl/set_reward"
urllib.request.urlopen(urllib.request.Request(url, b'{"reward": 1}', headers)).close()
"""
    gateway = GatewayConfig(command=[sys.executable, "-c", text], own_reward=True)
    trajectory = await world.run_one([], agent="gateway_agent", agent_options={"gateway": gateway})
    assert trajectory.failure.kind is FailureKind.AGENT
    assert "at least once" in trajectory.failure.message
    assert trajectory.reward is None


async def test_a_session_that_a_framework_names_leads_nowhere_else(world):
    """An X-Session-ID, as frameworks send it for their routers, is no error, and the turn is the trajectory's."""
    text = """
body = json.dumps({"messages": row["raw_prompt"]}).encode()
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
headers["X-Session-ID"] = "0123456789abcdef"
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
urllib.request.urlopen(request).close()
"""
    options = program(text, own_reward=False)
    trajectory = await world.run_one(["One.<|im_end|>", "Two.<|im_end|>"], agent="gateway_agent", agent_options=options)
    assert trajectory.failure is None, trajectory.failure
    assert sum(sum(segment.response_mask) for segment in trajectory.segments) == len(
        world.encode("One.<|im_end|>Two.<|im_end|>")
    )


async def test_a_reward_is_given_once(world):
    """Another reward is refused and the first one holds; the same one again, as a client that tries again sends it, is taken."""
    text = """
post("/rl/set_reward", {"reward": 0.5})
post("/rl/set_reward", {"reward": 0.5})
print(refused({"reward": 1.0}))
"""
    trajectory = await world.run_one(["Yes.<|im_end|>"], agent="gateway_agent", agent_options=program(text))
    assert trajectory.reward.score == 0.5
    assert "409 the reward must be given once" in trajectory.segments[0].extra_fields["program_output"]


async def test_a_reward_that_nobody_asked_for_is_refused(world):
    """Without `own_reward` the run's function scores, and a program that gives a reward is told so."""
    options = program('print(refused({"reward": 9}))', own_reward=False)
    trajectory = await world.run_one(["Yes.<|im_end|>"], agent="gateway_agent", agent_options=options)
    assert trajectory.reward.score == 1.0
    assert "409 agent.gateway.own_reward must be true" in trajectory.segments[0].extra_fields["program_output"]


async def test_only_the_key_opens_the_reward(world):
    """A reward without the trajectory's key is refused and not taken."""
    text = 'print(refused({"reward": 9}, key="another")); post("/rl/set_reward", {"reward": 0.5})'
    trajectory = await world.run_one(["Yes.<|im_end|>"], agent="gateway_agent", agent_options=program(text))
    assert trajectory.segments[0].extra_fields["program_output"].startswith("401 ")
    assert trajectory.reward.score == 0.5


async def test_the_official_client_gives_a_reward(world, tmp_path):
    """A coroutine gives its reward through the client that it asks with."""
    pytest.importorskip("openai", reason="the official client is not installed")
    (tmp_path / "agent.py").write_text('''
from openai import AsyncOpenAI

async def agent(base_url, api_key, row):
    """Ask once and score the answer."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        answer = await client.chat.completions.create(model="policy", messages=row["raw_prompt"])
        score = len(answer.choices[0].message.content)
        await client.post("/rl/set_reward", cast_to=object, body={"reward": score})
''')
    options = {"gateway": GatewayConfig(function=f"{tmp_path / 'agent.py'}:agent", own_reward=True)}
    trajectory = await world.run_one(["Yes.<|im_end|>"], agent="gateway_agent", agent_options=options)
    assert trajectory.failure is None, trajectory.failure
    assert trajectory.reward.score == 4.0


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"reward": NaN}', "must be JSON"),
        (b'{"reward": 1e999}', "out of range"),
        (b'{"reward": true}', "reward must fit"),
        (b'{"reward": "1"}', "reward must fit"),
        (b'{"reward": null}', "required field `reward`"),
        (b"[1]", "must be a JSON object"),
        (b"", "must be JSON"),
        (b'{"reward": 1, "extra": {"a": [1]}}', "extra"),
        (b'{"reward": 1, "rewards": 2}', "unknown field `rewards`"),
        (json.dumps({"reward": 1, "extra": {str(n): 1 for n in range(65)}}).encode(), "at most 64"),
        (b'{"reward": 1' + b"0" * 400 + b"}", "out of range"),
    ],
)
def test_what_is_no_reward_is_refused_by_name(body, said):
    """Text, truth values, infinities, unknown fields and too many values are refused, and no reward is set."""
    own = OwnReward(is_wanted=True)
    with pytest.raises(ApiError, match=said) as refusal:
        own.take(body)
    assert refusal.value.status == 400
    assert own.result is None
    assert own.missing() is not None


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_number_is_a_reward(number):
    """A finite number is taken as it is, its sign and its last digit included."""
    own = OwnReward(is_wanted=True)
    own.take(json.dumps({"reward": number}).encode())
    assert own.result is not None
    assert math.copysign(1, own.result.score) == math.copysign(1, number)
    assert own.result.score == number
    assert own.missing() is None


def test_an_agent_says_whether_it_gives_its_reward():
    """Who prepares a run can ask whether an agent's rows need a scorer."""
    gateway = agent_loop_class("gateway_agent")
    asked = RolloutConfig(agent=AgentConfig(gateway=GatewayConfig(own_reward=True)))
    assert gateway.gives_reward(asked)
    assert not gateway.gives_reward(RolloutConfig())
    assert not agent_loop_class("tool_agent").gives_reward(asked)
