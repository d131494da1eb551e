"""Routing, admission and deadlines: from the configuration to the trajectories."""

from __future__ import annotations

import asyncio

import pytest

from ostinato_agent_loop import (
    AgentConfig,
    AgentLoopBase,
    AgentLoopManager,
    AgentLoopMetrics,
    MultiTurnConfig,
    RolloutConfig,
    TrajectoryEnd,
    outputs_from_session,
    register,
)
from ostinato_engines import Capabilities
from ostinato_engines.testing import ScriptedServer
from ostinato_rollout import (
    AdmissionConfig,
    FailureKind,
    RoundRobin,
    RoutingConfig,
    RoutingPolicy,
    ServerPool,
    SessionBudget,
    replay,
)
from ostinato_tokenization import ContinuousTokens

USER = {"role": "user", "content": "Please."}
ROW = {"raw_prompt": [USER]}


class Small(ScriptedServer):
    """A scripted server that keeps two conversations, and whose turns take a moment."""

    async def generate(self, *args, **options):
        output = await super().generate(*args, **options)
        await asyncio.sleep(0)
        return output

    def capabilities(self):
        return Capabilities(kv_capacity_sessions=2)


@register("asks_a_helper")
class AsksAHelper(AgentLoopBase):
    """Opens a second conversation while the first one is under way."""

    most_open = num_open = 0

    async def run(self, sampling_params, **row):
        async with self.context.open_session(row) as mine:
            await mine.extend([USER])
            await mine.generate(sampling_params)
            AsksAHelper.num_open += 1
            AsksAHelper.most_open = max(AsksAHelper.most_open, AsksAHelper.num_open)
            async with self.context.open_session(row) as helper:
                await helper.extend([USER])
                await helper.generate(sampling_params)
            AsksAHelper.num_open -= 1
        return outputs_from_session(mine, num_turns=2, stop_reason=TrajectoryEnd.STOP, metrics=AgentLoopMetrics())


@pytest.fixture
def managed(world):
    """Makes a manager whose client comes from the configuration."""

    def make(servers, **rollout):
        config = RolloutConfig(multi_turn=MultiTurnConfig(enable=True), **rollout)
        return AgentLoopManager(
            config,
            tokens=ContinuousTokens(world.tokenizer),
            budget=SessionBudget(100, 100),
            pool=ServerPool(servers),
        )

    return make


async def test_trajectories_with_two_conversations_each_do_not_wait_for_each_other(world, managed):
    """Where replicas keep two conversations, twenty trajectories that open a second one in the middle of their first all end:
    what belongs to one trajectory is one group. Never more than two have begun, and what they waited is a metric."""
    server = Small(lambda request: "hello<|im_end|>", encode=world.encode)
    manager = managed([server], agent=AgentConfig(default_agent_loop="asks_a_helper"))
    batch = await asyncio.wait_for(manager.generate_sequences([ROW] * 20, n=1, step=0), 60)
    assert [trajectory.failure for trajectory in batch.trajectories] == [None] * 20
    assert AsksAHelper.most_open <= 2
    assert len(server.requests) == len(server.released) == 40
    assert batch.metrics["agent_loop/admission/max"] > batch.metrics["agent_loop/admission/min"]


@register("takes_a_while")
class TakesAWhile(AgentLoopBase):
    """One turn, and a third of the time that a trajectory may take."""

    async def run(self, sampling_params, **row):
        async with self.context.open_session(row) as session:
            await session.extend([USER])
            await session.generate(sampling_params)
            await asyncio.sleep(1.0)
        return outputs_from_session(session, num_turns=1, stop_reason=TrajectoryEnd.STOP, metrics=AgentLoopMetrics())


async def test_the_wait_for_a_place_is_no_part_of_a_trajectory_s_time(world, managed):
    """Where two places serve ten trajectories, the last ones wait longer than a trajectory may take, and all of them end."""
    server = Small(lambda request: "hello<|im_end|>", encode=world.encode)
    manager = managed([server], agent=AgentConfig(default_agent_loop="takes_a_while", trajectory_timeout_s=3.0))
    batch = await manager.generate_sequences([ROW] * 10, n=1, step=0)
    assert [trajectory.failure for trajectory in batch.trajectories] == [None] * 10
    assert batch.metrics["agent_loop/admission/max"] > 3.0


async def test_a_trajectory_that_has_its_place_is_bounded(world, managed):
    """After its wait the clock runs on: what hangs then ends as a timeout, and its place goes to the next one."""
    server = Small(lambda request: "hello<|im_end|>", encode=world.encode)
    manager = managed([server], agent=AgentConfig(default_agent_loop="takes_a_while", trajectory_timeout_s=0.3))
    batch = await manager.generate_sequences([ROW] * 4, n=1, step=0)
    assert [trajectory.failure.kind for trajectory in batch.trajectories] == [FailureKind.TIMEOUT] * 4
    assert len(server.released) == 4


async def test_choices_are_logged_by_the_policy_of_the_configuration(world, managed, tmp_path):
    """The named policy chooses, and its log replays."""
    path = tmp_path / "decisions.jsonl"
    servers = [ScriptedServer(lambda request: "hello<|im_end|>", encode=world.encode) for _ in range(3)]
    manager = managed(servers, routing=RoutingConfig(policy=RoutingPolicy.ROUND_ROBIN, decision_log_path=str(path)))
    await manager.generate_sequences([ROW] * 9, n=1, step=0)
    assert [len(server.requests) for server in servers] == [3, 3, 3]
    result = replay(path, RoundRobin())
    assert (len(result.choices), result.difference) == (9, None)


async def test_a_turn_has_the_configured_deadline(world, managed):
    """A turn that hangs fails its trajectory as a timeout after `generate_timeout_s`."""
    server = ScriptedServer(lambda request: "x", encode=world.encode, gate=asyncio.Event())
    manager = managed([server], generate_timeout_s=0.05)
    batch = await manager.generate_sequences([ROW], n=1, step=0)
    failure = batch.trajectories[0].failure
    assert failure.kind is FailureKind.TIMEOUT
    assert "generate must finish within 0.05 s" in failure.message


async def test_a_wait_for_a_place_has_the_configured_deadline(world, managed):
    """A trajectory that gets no place in time fails as a timeout that says who holds the places; the others end."""
    gate = asyncio.Event()
    server = ScriptedServer(lambda request: "hello<|im_end|>", encode=world.encode, gate=gate)
    manager = managed([server], admission=AdmissionConfig(max_sessions=1, timeout_s=0.05))
    asyncio.get_running_loop().call_later(2.0, gate.set)
    batch = await manager.generate_sequences([ROW] * 2, n=1, step=0)
    failures = [trajectory.failure for trajectory in batch.trajectories]
    assert [failure is None or failure.kind for failure in failures] == [True, FailureKind.TIMEOUT]
    assert "1 of 1 conversations" in failures[1].message


@pytest.mark.parametrize("value", [0, -1.0])
def test_a_deadline_of_nothing_is_refused(value):
    """A turn cannot end in no time."""
    with pytest.raises(ValueError, match="generate_timeout_s must be positive"):
        RolloutConfig(generate_timeout_s=value)
