"""Whatever conversations, cancellations, aborts, forgotten prompts and restarts follow each other, prompts arrive as meant."""

from __future__ import annotations

import asyncio
import random
import zlib
from array import array
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_engines import AsyncServerBase, Capabilities, PolicySpan, SamplingParams, StopReason, TokenOutput

pytest.importorskip("zmq")

from ostinato_rollout.transport import AddressError, RemoteServer, ReplicaLostError, ReplicaService

NAMES = ("a", "b", "c", "d")
SLOW = 99
"""A prompt that ends with it waits until it is aborted or cancelled."""

STEP = st.one_of(
    st.tuples(
        st.just("turn"),
        st.sampled_from(NAMES),
        st.sampled_from(("on", "on", "without", "rewritten", "shorter", "slow")),
    ),
    st.tuples(st.sampled_from(("cancel", "abort", "await", "release")), st.sampled_from(NAMES), st.just("")),
    st.tuples(st.sampled_from(("forget there", "forget here")), st.sampled_from(NAMES), st.just("")),
    st.tuples(st.sampled_from(("abort all", "pass", "restart")), st.just(""), st.just("")),
)


def mark_of(ids):
    """What an answer says of the prompt that the server saw."""
    return zlib.crc32(array("i", ids).tobytes()) & 0x7FFFFFFF


class Marking(AsyncServerBase):
    """Answers each prompt with its mark and a few ids more."""

    def __init__(self):
        self.waiting: dict[str, asyncio.Future[None]] = {}
        self.num_running = 0

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        self.num_running += 1
        try:
            for _ in range(len(prompt_ids) % 4):
                await asyncio.sleep(0)
            if prompt_ids[-1] == SLOW:
                self.waiting[request_id] = asyncio.get_running_loop().create_future()
                await self.waiting[request_id]
                return TokenOutput([], [], StopReason.ABORTED, policy_versions=(PolicySpan(0, 0),))
            return [mark_of(prompt_ids), *range(len(prompt_ids) % 3)]
        finally:
            self.waiting.pop(request_id, None)
            self.num_running -= 1

    async def chat_completion(self, raw_request):
        raise NotImplementedError

    async def abort(self, request_ids=None):
        doomed = [name for name in self.waiting if request_ids is None or name in request_ids]
        for name in doomed:
            if not self.waiting[name].done():
                self.waiting[name].set_result(None)
        return len(doomed)

    def capabilities(self):
        return Capabilities(engine="marking", abort=True)


class World:
    """A server, its service, a remote server, and conversations over it."""

    def __init__(self, seed, *, max_kept_bytes):
        self.random = random.Random(seed)
        self.server = Marking()
        self.max_kept_bytes = max_kept_bytes
        self.service = self.new_service("tcp://127.0.0.1:*")
        self.ids: dict[str, list[int]] = {name: [] for name in NAMES}
        self.turns: dict[str, asyncio.Task[None]] = {}
        self.num_answers = 0

    def new_service(self, address):
        return ReplicaService(self.server, address, max_kept_bytes=self.max_kept_bytes)

    async def restart(self):
        await self.service.close()
        # The port is free a moment after its socket has been closed.
        async with asyncio.timeout(20):
            while True:
                self.service = self.new_service(self.service.address)
                try:
                    return await self.service.start()
                except AddressError:
                    await asyncio.sleep(0.01)

    def next_prompt(self, name, kind):
        ids = self.ids[name]
        if kind == "rewritten" and ids:
            ids = [ids[0] ^ 1, *ids[1:]]
        if kind == "shorter":
            ids = ids[: len(ids) // 2]
        if kind == "without" and ids:
            ids = ids[:-1]
        return [
            *ids,
            *(self.random.randrange(50) for _ in range(self.random.randrange(1, 5))),
            *([SLOW] if kind == "slow" else []),
        ]

    def begin_turn(self, remote, name, kind):
        self.ids[name] = self.next_prompt(name, kind)
        self.turns[name] = asyncio.ensure_future(self.turn(remote, name, self.ids[name]))

    async def turn(self, remote, name, prompt):
        form = self.random.choice((list, tuple, lambda ids: array("i", ids), lambda ids: array("q", ids)))
        try:
            out = await remote.generate(form(prompt), SamplingParams(), name)
        except ReplicaLostError:
            return
        if out.stop_reason is StopReason.ABORTED:
            assert out.token_ids == []
            return
        assert out.token_ids == [mark_of(prompt), *range(len(prompt) % 3)]
        self.num_answers += 1
        self.ids[name] = [*prompt, *out.token_ids]

    async def settle(self, name):
        task = self.turns.pop(name, None)
        if task is not None:
            await task

    async def step(self, remote, what, name, kind):
        match what:
            case "turn" if name not in self.turns or self.turns[name].done():
                await self.settle(name)
                self.begin_turn(remote, name, kind)
            case "cancel" if name in self.turns:
                task = self.turns.pop(name)
                task.cancel()
                await asyncio.wait([task])
                assert task.cancelled() or task.exception() is None
            case "abort":
                await remote.abort([name])
            case "abort all":
                await remote.abort()
            case "await" if self.ids[name][-1:] != [SLOW]:
                await self.settle(name)
            case "release" if name not in self.turns:
                await remote.release(name)
                self.ids[name] = []
            case "forget there":
                for key in [key for key in self.service._prompts._kept if key[1] == name]:
                    self.service._prompts.forget(key)
            case "forget here" if remote._link is not None:
                remote._link.forget(name)
            case "restart":
                await self.restart()
            case "notice":
                async with asyncio.timeout(20):
                    while not remote.stats.num_lost:  # noqa: ASYNC110  it has no event
                        await asyncio.sleep(0.001)
            case "pass":
                await asyncio.sleep(0)

    async def end(self, remote):
        """Everybody gets an answer; then nothing is left."""
        async with asyncio.timeout(20):
            while any(not task.done() for task in self.turns.values()):
                with suppress(ReplicaLostError):
                    await remote.abort()
            for name in list(self.turns):
                await self.settle(name)
            for name in NAMES:
                await remote.release(name)
            while self.service.num_calls or self.server.num_running:  # noqa: ASYNC110  it has no event
                await asyncio.sleep(0)
        assert (remote.num_waiting, remote.num_kept) == (0, 0)
        assert (self.service.num_conversations, self.service.num_kept_bytes) == (0, 0)
        assert self.service.stats.num_malformed == remote.stats.num_malformed == 0


async def play(steps, seed, max_kept_bytes):
    """Runs steps against a world of their own."""
    world = World(seed, max_kept_bytes=max_kept_bytes)
    await world.service.start()
    remote = RemoteServer(world.service.address)
    try:
        await remote.start()
        for what, name, kind in steps:
            try:
                async with asyncio.timeout(20):
                    await world.step(remote, what, name, kind)
            except ReplicaLostError:
                assert what in ("abort", "abort all", "release")
        await world.end(remote)
    finally:
        await remote.disconnect()
        await world.service.close()
    return world, remote


@settings(deadline=None, max_examples=60)
@given(st.lists(STEP, max_size=30), st.integers(0, 2**16), st.sampled_from((1 << 20, 1 << 20, 60)))
def test_each_generation_gets_the_prompt_that_was_meant(steps, seed, max_kept_bytes):
    """In any order of turns, cancellations, aborts, lost memories and restarts, and nothing is left at the end."""
    asyncio.run(play(steps, seed, max_kept_bytes))


def test_the_steps_reach_what_they_are_about():
    """A fixed play sends prompts in part, whole and again, loses connections, and gets answers all the same."""
    steps = [("turn", name, "on") for name in NAMES] + [("await", name, "") for name in NAMES]
    steps += [
        *steps,
        ("forget there", "a", ""),
        *steps,
        ("turn", "b", "slow"),
        ("restart", "", ""),
        ("notice", "", ""),
        *steps,
    ]
    world, remote = asyncio.run(play(steps, 0, 1 << 20))
    assert world.num_answers == 16
    assert (remote.stats.num_resent, remote.stats.num_lost) == (1, 1)
    assert remote.stats.num_sent_tokens < remote.stats.num_prompt_tokens
