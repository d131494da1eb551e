"""Agents and rewards that do not end when they are cancelled."""

from __future__ import annotations

import asyncio

import pytest

from ostinato_agent_loop import AgentLoopBase, AgentLoopOutput, RewardResult, register
from ostinato_rollout import FailureKind, SessionStateError

DONE = "All done.<|im_end|>"
SHORT = {"trajectory_timeout_s": 1.0, "reward_timeout_s": 0.1, "cancel_grace_s": 0.05}


class Deaf:
    """Work that swallows every cancellation until it is let go."""

    def __init__(self, let_go: asyncio.Event) -> None:
        self.let_go, self.ended = let_go, asyncio.Event()

    async def __call__(self, result=None):
        while not self.let_go.is_set():
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:
                continue
        self.ended.set()
        return result


@pytest.fixture
def deaf(let_go):
    """Work that is let go when the test ends, also when it fails."""
    return Deaf(let_go)


async def test_a_deaf_agent_is_a_timeout_and_its_conversations_are_closed(world, deaf):
    """An agent that swallows cancellations costs its own trajectory only: a recorded timeout, its sessions closed, and it takes
    no other turn."""
    refused: list[Exception] = []
    was_refused = asyncio.Event()

    @register("overtime_test_deaf")
    class DeafAgent(AgentLoopBase):
        async def run(self, sampling_params, *, raw_prompt, deaf_row=False, **row):
            session = self.context.open_session(row)
            await session.extend(raw_prompt)
            await session.generate(sampling_params)
            if deaf_row:
                await deaf()
                try:
                    await self.context.open_session(row).extend(raw_prompt)
                except SessionStateError as error:
                    refused.append(error)
                    was_refused.set()
            return AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1])

    manager = world.build(lambda request: DONE, agent="overtime_test_deaf", agent_options=SHORT, num_workers=1)
    prompt = [{"role": "user", "content": "Please."}]
    rows = [{"raw_prompt": prompt, "deaf_row": True}, {"raw_prompt": prompt}]
    batch = await manager.generate_sequences(rows, n=1, step=0)
    failed, sibling = batch.trajectories
    assert (failed.failure.kind, failed.segments) == (FailureKind.TIMEOUT, [])
    assert "must end within 1 s" in failed.failure.message
    assert sibling.reward.score == 1.0
    assert (world.client.num_sticky, len(world.server.released)) == (0, 2)
    assert not deaf.ended.is_set()
    deaf.let_go.set()
    async with asyncio.timeout(30):
        await was_refused.wait()
    assert "before its trajectory is over" in str(refused[0])


async def test_a_deaf_reward_is_a_timeout(world, deaf):
    """A reward function that swallows cancellations gives no score, and holds nobody."""

    async def reward(row, outputs):
        return await deaf(RewardResult(1.0))

    manager = world.build(lambda request: DONE, agent="single_turn_agent", reward_fn=reward, agent_options=SHORT)
    batch = await manager.generate_sequences([{"raw_prompt": [{"role": "user", "content": "Hi"}]}], n=1, step=0)
    (trajectory,) = batch.trajectories
    assert (trajectory.failure.kind, trajectory.reward) == (FailureKind.TIMEOUT, None)
    deaf.let_go.set()
    await deaf.ended.wait()
    await asyncio.sleep(0)
    assert trajectory.reward is None


async def test_an_agent_that_asks_again_whatever_it_is_told_holds_nobody_up(world, let_go):
    """Once its trajectory is given up, its conversations take their time to refuse, so the event loop stays free."""

    @register("deaf_agents_test_stubborn")
    class Stubborn(AgentLoopBase):
        async def run(self, sampling_params, *, raw_prompt, **row):
            while not let_go.is_set():
                try:
                    session = self.context.open_session(row)
                    await session.extend(raw_prompt)
                    await session.generate(sampling_params)
                    await let_go.wait()
                except BaseException:
                    continue

    manager = world.build(lambda request: DONE, agent="deaf_agents_test_stubborn", agent_options=SHORT)
    rows = [{"raw_prompt": [{"role": "user", "content": "Please."}]}]
    (trajectory,) = (await manager.generate_sequences(rows, n=1, step=0)).trajectories
    assert trajectory.failure.kind is FailureKind.TIMEOUT
    assert world.client.num_sticky == 0
    let_go.set()
