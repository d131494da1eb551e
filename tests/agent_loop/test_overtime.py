"""Agents and rewards that do not end when they are cancelled."""

from __future__ import annotations

import asyncio
import logging

import pytest

from ostinato_agent_loop import AgentLoopBase, AgentLoopOutput, RewardResult, register
from ostinato_agent_loop.overtime import NUM_CANCELLATIONS, Overtime
from ostinato_rollout import FailureKind, RequestTimeoutError, SessionStateError

DONE = "All done.<|im_end|>"
SHORT = {"trajectory_timeout_s": 0.1, "reward_timeout_s": 0.1, "cancel_grace_s": 0.05}


class Deaf:
    """Work that swallows so many cancellations."""

    def __init__(self, num_swallowed: int) -> None:
        self.num_swallowed, self.num_heard = num_swallowed, 0
        self.let_go = asyncio.Event()
        self.began, self.ended = asyncio.Event(), asyncio.Event()

    async def __call__(self, result=None):
        self.began.set()
        try:
            while not self.let_go.is_set():
                try:
                    await self.let_go.wait()
                except asyncio.CancelledError:
                    self.num_heard += 1
                    if self.num_heard > self.num_swallowed:
                        raise
            return result
        finally:
            self.ended.set()


@pytest.mark.parametrize("num_swallowed", [0, 1, 2, 3, 100])
async def test_work_is_cancelled_so_often_and_then_left_to_itself(num_swallowed, caplog):
    """Whatever work swallows, its deadline holds; it is cancelled up to three times, and what goes on then is watched to its end."""
    overtime, work = Overtime(0.02), Deaf(num_swallowed)
    with pytest.raises(RequestTimeoutError, match="deaf work must end within"):
        await overtime.within(asyncio.timeout(0.02), work, "deaf work", 0.02)
    is_left = num_swallowed >= NUM_CANCELLATIONS
    assert work.num_heard == min(num_swallowed + 1, NUM_CANCELLATIONS)
    assert (overtime.num_leftovers, work.ended.is_set()) == (int(is_left), not is_left)
    assert ("is left to itself" in caplog.text) is is_left
    work.let_go.set()
    await work.ended.wait()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert overtime.num_leftovers == 0
    assert ("which was left to itself, ended" in caplog.text) is is_left


@pytest.mark.parametrize("num_swallowed", [0, 1, 100])
async def test_a_cancellation_from_outside_is_raised_whatever_the_work_swallows(num_swallowed):
    """Who cancels the wait gets the cancellation back, within the same bound; cancelling it again shortens that."""
    for num_cancellations in (1, 2):
        overtime, work = Overtime(0.02 if num_cancellations == 1 else 60.0), Deaf(num_swallowed)
        waiting = asyncio.create_task(overtime.within(asyncio.timeout(60), work, "deaf work", 60))
        await work.began.wait()
        for _ in range(1 if num_cancellations == 1 else NUM_CANCELLATIONS + 1):
            waiting.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert overtime.num_leftovers == int(num_swallowed >= NUM_CANCELLATIONS)
        work.let_go.set()
        await work.ended.wait()


async def test_a_result_that_comes_after_the_deadline_is_not_taken():
    """Work that answers its cancellation with a result is late all the same."""

    async def late():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "better late than never"

    with pytest.raises(RequestTimeoutError):
        await Overtime(5.0).within(asyncio.timeout(0.01), late, "late work", 0.01)


async def test_what_work_raises_while_it_is_cancelled_is_logged(caplog):
    """A deadline stays a deadline where tidying up fails; the log has the traceback of that."""

    async def clumsy():
        try:
            await asyncio.Event().wait()
        finally:
            raise LookupError("lost the broom")

    with caplog.at_level(logging.ERROR), pytest.raises(RequestTimeoutError):
        await Overtime(5.0).within(asyncio.timeout(0.01), clumsy, "clumsy work", 0.01)
    assert "lost the broom" in caplog.text


async def test_errors_of_the_work_are_its_own():
    """TimeoutError and CancelledError that work raises by itself are no deadline and no cancellation from outside."""

    async def raising(error):
        raise error

    for error in (TimeoutError("mine"), LookupError("mine"), asyncio.CancelledError("mine")):
        with pytest.raises(type(error), match="mine"):
            await Overtime(5.0).within(asyncio.timeout(5), lambda error=error: raising(error), "work", 5)
    assert asyncio.current_task().cancelling() == 0


async def test_a_deaf_agent_is_a_timeout_and_its_conversations_are_closed(world):
    """An agent that swallows cancellations costs its own trajectory only: a recorded timeout, its sessions closed, and it opens
    no other."""
    refused: list[Exception] = []
    deaf = Deaf(100)

    @register("overtime_test_deaf")
    class DeafAgent(AgentLoopBase):
        async def run(self, sampling_params, *, raw_prompt, deaf_row=False, **row):
            session = self.context.open_session(row)
            await session.extend(raw_prompt)
            await session.generate(sampling_params)
            if deaf_row:
                await deaf()
                try:
                    self.context.open_session(row)
                except SessionStateError as error:
                    refused.append(error)
            return AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1])

    manager = world.build(lambda request: DONE, agent="overtime_test_deaf", agent_options=SHORT, num_workers=1)
    prompt = [{"role": "user", "content": "Please."}]
    rows = [{"raw_prompt": prompt, "deaf_row": True}, {"raw_prompt": prompt}]
    batch = await manager.generate_sequences(rows, n=1, step=0)
    failed, sibling = batch.trajectories
    assert (failed.failure.kind, failed.segments) == (FailureKind.TIMEOUT, [])
    assert "must end within 0.1 s" in failed.failure.message
    assert sibling.reward.score == 1.0
    assert (world.client.num_sticky, len(world.server.released)) == (0, 2)
    assert not deaf.ended.is_set()
    deaf.let_go.set()
    await deaf.ended.wait()
    await asyncio.sleep(0)
    assert len(refused) == 1
    assert "before its trajectory is over" in str(refused[0])


async def test_a_deaf_reward_is_a_timeout(world):
    """A reward function that swallows cancellations gives no score, and holds nobody."""
    deaf = Deaf(100)

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
