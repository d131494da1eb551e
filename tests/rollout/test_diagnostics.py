"""What everybody is doing, as data, as text, on a signal and when a deadline passes."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys

import msgspec
import pytest

from ostinato_engines import SamplingParams, StopReason, TokenOutput
from ostinato_rollout import (
    AdmissionConfig,
    ChatSession,
    Dump,
    LLMServerClient,
    RequestTimeoutError,
    RolloutScheduler,
    ServerPool,
    SessionBudget,
    SessionConfig,
    diagnostics,
    dump,
    dumps_on_signal,
)
from ostinato_rollout.activity import ConversationActivity
from ostinato_rollout.diagnostics import discard, register
from ostinato_tokenization import ContinuousTokens

PARAMS = SamplingParams(max_tokens=10)


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch):
    """Only what a test makes is in its dumps, and its first dump is logged."""
    monkeypatch.setattr(diagnostics, "_reporters", type(diagnostics._reporters)())
    monkeypatch.setattr(diagnostics, "_last_logged", -diagnostics._QUIET_S)


async def test_a_dump_shows_what_every_conversation_waits_for(stub_server):
    """One that generates, one between turns and one in the queue are told apart, with replica, length and place."""
    server = stub_server()
    client = LLMServerClient([server], admission=AdmissionConfig(max_sessions=2))
    await client.generate("idle", [1, 2], PARAMS)
    server.gate = asyncio.Event()
    server.answers = [TokenOutput([5, 6, 7], [0.0] * 3, StopReason.ABORTED)]
    tasks = [asyncio.create_task(client.generate(name, [1], PARAMS)) for name in ("busy", "next", "last")]
    await asyncio.sleep(0)
    server.gate.set()
    server.gate = asyncio.Event()
    for _ in range(6):
        await asyncio.sleep(0)
    (seen,) = dump().clients
    stages = {one.request_id: (one.stage, one.replica, one.place_in_queue) for one in seen.conversations}
    assert stages == {
        "idle": ("is between turns", 0, 0),
        "busy": ("generates", 0, 0),
        "next": ("waits for a place", None, 1),
        "last": ("waits for a place", None, 2),
    }
    busy = next(one for one in seen.conversations if one.request_id == "busy")
    assert (busy.num_aborts, busy.num_partial) == (1, 3)
    text = dump().text()
    assert "client: 4 conversations, 2 of them waiting" in text
    assert "replica 0: 1 in flight, 2 of 2 conversations" in text
    assert "last waits for a place as number 2 for " in text
    assert "3 tokens kept from 1 aborted attempts" in text
    for task in tasks:
        task.cancel()


async def test_sessions_schedulers_and_pools_are_shown(tokenizer, stub_server):
    """A session tells what it does and how much room it has, a scheduler which items hang, a pool which replica is awaited;
    closed sessions and ended runs are gone."""
    server = stub_server()
    pool = ServerPool([server, stub_server()])
    server.gate, woken = asyncio.Event(), asyncio.Event()

    async def wake_up(tags=None):
        await woken.wait()

    server.wake_up = wake_up
    waking = asyncio.create_task(pool.wake_up())
    session = ChatSession(
        client=LLMServerClient([server]),
        tokens=ContinuousTokens(tokenizer),
        config=SessionConfig(),
        budget=SessionBudget(100, 50),
        request_id="s1",
    )
    await session.extend([{"role": "user", "content": "hi"}])

    async def run_one(item):
        return item if item else await session.generate(PARAMS)

    running = asyncio.create_task(RolloutScheduler().run(range(2), run_one, concurrency=2))
    for _ in range(20):
        await asyncio.sleep(0)
    seen = dump()
    assert [(one.request_id, one.doing, one.num_messages, one.room) for one in seen.sessions] == [
        ("s1", "generates", 1, 50)
    ]
    assert [(one.num_done, list(one.under_way)) for one in seen.schedulers] == [(1, [0])]
    assert [(one.in_service, one.last_answer) for one in seen.pools] == [([0, 1], "replica 1 had to wake up")]
    assert [(one.replica, one.what) for one in seen.pools[0].operations] == [(0, "wake up")]
    assert msgspec.json.decode(msgspec.json.encode(seen), type=Dump) == seen
    text = seen.text()
    for words in ("session s1 generates for", "1 under way: 0 (", "replica 0 has to wake up for", "room for 50"):
        assert words in text
    woken.set()
    server.gate.set()
    await asyncio.gather(waking, running)
    await session.close()
    seen = dump()
    assert (seen.sessions, seen.schedulers, seen.pools[0].operations) == ([], [], [])
    del pool, seen
    gc.collect()
    assert dump().pools == []


async def test_a_long_list_is_cut_for_people_and_whole_as_data(stub_server):
    """The text says how many it leaves out; the data leaves out none."""
    client = LLMServerClient([stub_server()])
    for number in range(100):
        await client.generate(f"r{number}", [1], PARAMS)
    assert len(dump().clients[0].conversations) == 100
    assert "and 60 more" in dump().text()
    assert isinstance(dump().clients[0].conversations[0], ConversationActivity)


async def test_a_deadline_that_passes_logs_a_dump_and_many_log_one(stub_server, caplog):
    """Ten turns that time out together say so each, with what everybody is doing once."""
    server = stub_server()
    server.gate = asyncio.Event()
    client = LLMServerClient([server], timeout_s=0.03)
    with caplog.at_level(logging.ERROR):
        results = await asyncio.gather(
            *(client.generate(f"r{number}", [1], PARAMS) for number in range(10)), return_exceptions=True
        )
    assert all(isinstance(result, RequestTimeoutError) for result in results)
    messages = [
        record.getMessage() for record in caplog.records if "generate must finish within" in record.getMessage()
    ]
    assert len(messages) == 10
    assert ["client: 10 conversations" in message for message in messages] == [True] + [False] * 9


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no SIGUSR1")
async def test_a_signal_logs_a_dump(stub_server, caplog):
    """Within the context, SIGUSR1 logs what everybody is doing; afterwards the signal has its old handler."""
    client = LLMServerClient([stub_server()])
    await client.generate("r7", [1], PARAMS)
    before = signal.getsignal(signal.SIGUSR1)
    with dumps_on_signal():
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.sleep(0)
    assert "r7 is between turns on replica 0" in caplog.text
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no SIGUSR1")
async def test_a_signal_strikes_anywhere_and_disturbs_nothing(stub_server, caplog):
    """While a replica is being removed, at every line of it, a dump can be had; one that fails is logged, not raised."""
    client = LLMServerClient([stub_server(), stub_server()])
    await client.generate("r7", [1], PARAMS)
    num_lines = 0

    def strike(frame, event, arg):
        nonlocal num_lines
        if frame.f_code.co_filename.endswith(("placement.py", "admission.py")) and event in ("call", "line"):
            if frame.f_code.co_name in ("remove", "add", "_limits_changed"):
                num_lines += 1
                os.kill(os.getpid(), signal.SIGUSR1)
            return strike
        return None

    class Failing:
        def activity(self):
            raise RuntimeError("half written")

    with dumps_on_signal():
        sys.settrace(strike)
        try:
            client.remove_server(client._placement.servers[0])
            client.add_server(stub_server())
        finally:
            sys.settrace(None)
        assert num_lines > 10
        assert "a dump failed" not in caplog.text
        failing = Failing()
        register(failing)
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.sleep(0)
        discard(failing)
    assert "a dump failed; ask again" in caplog.text
    assert client.num_in_flight == {1: 0, 2: 0}


async def test_elsewhere_than_in_the_main_thread_a_signal_is_left_alone():
    """A program that runs its loop in another thread gets no error, and no handler."""
    before = signal.getsignal(signal.SIGINT)

    def enter():
        with dumps_on_signal(signal.SIGINT):
            return signal.getsignal(signal.SIGINT)

    assert await asyncio.to_thread(enter) is before
