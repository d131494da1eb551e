"""Checkpoints are written one at a time beside the run, and no error of theirs is lost."""

import asyncio
import threading

import pytest

from ostinato_trainer.checkpoints.thread import CheckpointThread
from ostinato_trainer.errors import CheckpointError


async def test_the_event_loop_goes_on_while_a_job_runs():
    """A job that is under way blocks nothing but the next job and who waits for its end."""
    thread, gate, done = CheckpointThread(), threading.Event(), []
    await thread.start("first", lambda: done.append(gate.wait(30)))
    assert thread.is_busy
    thread.check()
    second = asyncio.ensure_future(thread.start("second", lambda: done.append("second")))
    await asyncio.sleep(0)
    assert done == []
    assert not second.done()
    gate.set()
    await second
    await thread.finish()
    assert done == [True, "second"]
    assert not thread.is_busy


@pytest.mark.parametrize("where", ["check", "start", "finish"])
async def test_an_error_is_raised_once_wherever_one_looks_next(where):
    """What a job failed with comes out of the next check, start or finish, and not again."""
    thread, done = CheckpointThread(), []

    def fail():
        raise CheckpointError("the disk is full")

    await thread.start("first", fail)
    await asyncio.wait_for(asyncio.to_thread(wait_until_idle, thread), 30)
    with pytest.raises(CheckpointError, match="the disk is full"):
        await look(thread, where, lambda: done.append(1))
    thread.check()
    await thread.finish()
    assert done == []
    await thread.start("third", lambda: done.append(3))
    await thread.finish()
    assert done == [3]


async def look(thread, where, job):
    """One of the ways to meet an error."""
    if where == "start":
        await thread.start("second", job)
    elif where == "finish":
        await thread.finish()
    else:
        thread.check()


def wait_until_idle(thread):
    """From another thread, without taking the error."""
    while thread.is_busy:
        pass


async def test_a_disk_that_does_not_answer_ends_the_wait():
    """A job that takes longer than allowed is named, and stays the job that the next one waits for."""
    thread, gate = CheckpointThread(deadline_s=0.01), threading.Event()
    await thread.start("checkpoint of step 3", lambda: gate.wait(30))
    with pytest.raises(CheckpointError, match=r"checkpoint of step 3 must be written within 0.01 s, got no end"):
        await thread.finish()
    with pytest.raises(CheckpointError, match="checkpoint of step 3"):
        await thread.start("checkpoint of step 4", lambda: None)
    assert thread.is_busy
    gate.set()
    await thread.finish(30)


async def test_a_wait_can_be_cancelled():
    """Who is cancelled while waiting leaves the job as it is."""
    thread, gate = CheckpointThread(), threading.Event()
    await thread.start("first", lambda: gate.wait(30))
    waiting = asyncio.ensure_future(thread.finish())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert thread.is_busy
    gate.set()
    await thread.finish()
    assert not thread.is_busy
