"""A replica's service and remote servers: what crosses, what is kept, and every way in which either end can go."""

from __future__ import annotations

import asyncio
import copy
import re
from array import array
from contextlib import asynccontextmanager
from importlib.metadata import metadata
from pathlib import Path

import numpy as np
import pytest

from ostinato_engines import (
    AsyncServerBase,
    Capabilities,
    EngineClosedError,
    EngineCrashedError,
    EngineInputError,
    EngineNotReadyError,
    EngineState,
    PauseMode,
    PolicySpan,
    SamplingParams,
    SamplingParamsError,
    StopReason,
    TokenOutput,
    UnsupportedError,
)
from ostinato_engines.testing import ScriptedServer
from ostinato_rollout import ChatSession, LLMServerClient, RoundRobin, ServerPool, SessionBudget, SessionConfig

pytest.importorskip("zmq")

from ostinato_rollout.transport import (
    AddressError,
    RemoteServer,
    ReplicaLostError,
    ReplicaService,
    callers,
)

PARAMS = SamplingParams(max_tokens=8)


class OwnError(EngineInputError):
    """Known to one end only."""


class Watched(AsyncServerBase):
    """Answers with the number of ids and what it was told to; remembers what it was asked, and waits at its gate."""

    def __init__(self):
        self.max_model_len = 1 << 20
        self.prompts: list[tuple[str, list[int]]] = []
        self.calls: list[object] = []
        self.running: set[str] = set()
        self.released: list[str] = []
        self.num_starts = 0
        self.answers: dict[str, object] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.closed = asyncio.Event()

    async def start(self):
        self.num_starts += 1

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        if self.closed.is_set():
            raise EngineClosedError("server must be running, is shut down; create a new one")
        self.prompts.append((request_id, list(prompt_ids)))
        self.running.add(request_id)
        gates = [asyncio.ensure_future(gate.wait()) for gate in (self.gate, self.closed)]
        try:
            await asyncio.wait(gates, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.running.discard(request_id)
            for gate in gates:
                gate.cancel()
        if self.closed.is_set():
            raise EngineClosedError(f"request {request_id!r} must end before shutdown")
        answer = self.answers.get(request_id, [len(prompt_ids), 7])
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def chat_completion(self, raw_request):
        return {"echo": raw_request}

    async def abort(self, request_ids=None):
        self.calls.append(("abort", request_ids))
        return 0

    async def pause(self, mode=PauseMode.ABORT):
        self.calls.append(("pause", mode))

    async def wake_up(self, tags=None):
        self.calls.append(("wake_up", tags))

    async def release(self, request_id):
        self.released.append(request_id)

    async def shutdown(self):
        self.closed.set()

    def capabilities(self):
        return Capabilities(engine="watched", abort=True, media=True)


@asynccontextmanager
async def served(server=None, *, remote_options=None, **options):
    """A service and one started remote server."""
    async with ReplicaService(server or Watched(), **options) as replica:
        remote = RemoteServer(replica.address, **(remote_options or {}))
        try:
            await remote.start()
            yield remote, replica
        finally:
            await remote.disconnect()


async def until(condition):
    """Waits, as long as the test may take, until something holds."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  what is waited for has no event
            await asyncio.sleep(0.005)


async def listening(server, address):
    """A service at an address that was another's; a port is free a moment after its socket has been closed."""
    async with asyncio.timeout(20):
        while True:
            try:
                replica = ReplicaService(server, address)
                await replica.start()
            except AddressError:
                await asyncio.sleep(0.01)
            else:
                return replica


# What crosses


async def test_calls_and_results_cross_whole():
    """Arguments, results and the description of the server arrive as they were; media are not claimed, for they do not."""
    server = Watched()
    spans = (PolicySpan(0, 3), PolicySpan(1, 4, False))
    whole = TokenOutput([5, 6], [-0.5, -0.25], StopReason.STOP, 6, spans, 5, 2)
    server.answers["whole"] = whole
    async with served(server) as (remote, _):
        assert (remote.max_model_len, remote.capabilities().engine, remote.capabilities().abort) == (
            1 << 20,
            "watched",
            True,
        )
        assert not remote.capabilities().media
        assert remote.versions == server.versions
        assert await remote.generate([1, 2], {"max_tokens": 3}, "whole") == whole
        assert (await remote.generate([1, 2], PARAMS, "bare")).token_ids == [2, 7]
        await remote.pause(PauseMode.KEEP)
        await remote.wake_up(["weights"])
        await remote.wake_up()
        assert await remote.abort(["a", "b"]) == 0
        assert server.calls == [
            ("pause", PauseMode.KEEP),
            ("wake_up", ["weights"]),
            ("wake_up", None),
            ("abort", ["a", "b"]),
        ]
        await remote.resume()
        server.policy_version = 12
        assert (await remote.health()).policy_version == remote.policy_version == 12
        await remote.release("whole")
        assert server.released == ["whole"]
        with pytest.raises(EngineInputError, match="media"):
            await remote.generate([1], PARAMS, "m", [object()])


async def test_a_chat_request_crosses_as_its_body():
    """A mapping, or what has an awaitable json(), is answered; what are no plain values is refused at either end."""

    class Request:
        async def json(self):
            return {"messages": [1]}

    async with served() as (remote, _):
        assert await remote.chat_completion({"messages": []}) == {"echo": {"messages": []}}
        assert await remote.chat_completion(Request()) == {"echo": {"messages": [1]}}
        with pytest.raises(EngineInputError, match="chat_completion must get plain values"):
            await remote.chat_completion({"messages": object()})


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        (EngineNotReadyError("not now; wake me"), EngineNotReadyError, "^not now; wake me$"),
        (SamplingParamsError("odd"), SamplingParamsError, "^odd$"),
        (OwnError("mine"), EngineInputError, "^mine$"),
        (UnsupportedError("never"), UnsupportedError, "^never$"),
        (ValueError("plain"), ValueError, "^plain$"),
        (TimeoutError("late"), TimeoutError, "^late$"),
        (KeyError("what"), KeyError, "what"),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), EngineCrashedError, "UnicodeDecodeError: .*bad"),
        (type("Strange", (Exception,), {})(), EngineCrashedError, "Strange: Strange"),
        (asyncio.CancelledError(), EngineCrashedError, "nobody cancelled"),
        (RuntimeError(), RuntimeError, "^RuntimeError$"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
async def test_errors_cross_as_what_they_are(raised, kind, text):
    """An error of the engines or of Python is raised as the same class with the same words; others are named."""
    server = Watched()
    server.answers["bad"] = raised
    async with served(server) as (remote, replica):
        with pytest.raises(kind, match=text) as caught:
            await remote.generate([1], PARAMS, "bad")
        assert type(caught.value) is kind
        assert (await remote.generate([1], PARAMS, "good")).token_ids == [1, 7]
        assert replica.num_calls == remote.num_waiting == 0


@pytest.mark.parametrize("answer", [["text"], "text", None, TokenOutput([object()], None, StopReason.STOP)], ids=repr)
async def test_an_answer_that_is_none_is_an_error_of_that_call(answer):
    """What a server returns against its contract fails the call, not the service."""
    server = Watched()
    server.answers["bad"] = answer
    async with served(server) as (remote, _):
        with pytest.raises((EngineInputError, EngineCrashedError, TypeError)):
            await remote.generate([1], PARAMS, "bad")
        assert (await remote.generate([1], PARAMS, "good")).token_ids == [1, 7]


async def test_a_server_is_started_once_for_all():
    """Whoever comes first starts the replica's server; a service is started once."""
    server = Watched()
    async with served(server) as (_, replica):
        others = [RemoteServer(replica.address) for _ in range(3)]
        await asyncio.gather(*(other.start() for other in others))
        assert (server.num_starts, replica.num_callers) == (1, 4)
        await asyncio.gather(*(other.disconnect() for other in others))
        await until(lambda: replica.num_callers == 1)
        with pytest.raises(ValueError, match="started once"):
            await replica.start()


# Prompts


async def test_only_what_is_new_travels():
    """A turn sends the ids behind the last prompt and its output; a rewritten history and another conversation go whole."""
    server = Watched()
    async with served(server) as (remote, replica):
        prompt = array("i", range(100))
        for turn in range(3):
            out = await remote.generate(prompt, PARAMS, "talk")
            assert server.prompts[-1] == ("talk", list(prompt))
            prompt += array("i", [*out.token_ids, 1000 + turn])
        assert (remote.stats.num_sent_tokens, remote.stats.num_whole) == (102, 1)
        assert remote.stats.num_prompt_tokens == 100 + 103 + 106
        # The output left out, then a changed beginning, then less than before, then another conversation.
        for name, ids in (
            ("talk", [*prompt, 5]),
            ("talk", [*prompt, 5, 6]),
            ("talk", [9, *prompt]),
            ("talk", [9]),
            ("new", [9]),
        ):
            await remote.generate(ids, PARAMS, name)
            assert server.prompts[-1] == (name, ids)
        assert remote.stats.num_whole == 4
        assert remote.stats.num_resent == replica.stats.num_forgotten == 0


async def test_a_caller_may_change_its_prompt_while_it_waits():
    """The ids that count are those at the time of the call, and the caller's array is not held."""
    server = Watched()
    server.gate.clear()
    async with served(server) as (remote, _):
        prompt = array("i", [1, 2, 3])
        task = asyncio.ensure_future(remote.generate(prompt, PARAMS, "talk"))
        await until(lambda: server.running)
        prompt[0] = 9
        prompt.append(4)
        server.gate.set()
        assert (await task).token_ids == [3, 7]
        await remote.generate([1, 2, 3, 3, 7, 8], PARAMS, "talk")
        assert server.prompts == [("talk", [1, 2, 3]), ("talk", [1, 2, 3, 3, 7, 8])]
        assert remote.stats.num_sent_tokens == 4


async def test_what_the_replica_forgot_is_sent_again():
    """A replica without room for prompts asks for each of them whole; the server sees no difference, and it is counted."""
    server = Watched()
    async with served(server, max_kept_bytes=64) as (remote, replica):
        prompt = list(range(20))
        for _ in range(3):
            prompt += (await remote.generate(prompt, PARAMS, "talk")).token_ids
            assert server.prompts[-1][1] == prompt[:-2]
        assert (remote.stats.num_resent, replica.stats.num_forgotten, replica.num_kept_bytes) == (2, 2, 0)
        assert remote.stats.num_sent_tokens == 20 + 22 + 24


async def test_a_prompt_of_another_hash_is_sent_again():
    """A replica whose ids are not those that the caller sent is found out by the hash, and the server gets the right ones."""
    server = Watched()
    async with served(server) as (remote, replica):
        await remote.generate([1, 2, 3], PARAMS, "talk")
        kept, _ = next(iter(replica._prompts._kept.values()))
        kept.grow(b"\x05\0\0\0", with_output=False, turn=kept.turn)
        del kept.ids[:4]
        await remote.generate([1, 2, 3, 3, 7, 8], PARAMS, "talk")
        assert server.prompts[-1][1] == [1, 2, 3, 3, 7, 8]
        assert (remote.stats.num_resent, replica.stats.num_forgotten) == (1, 1)


async def test_a_caller_keeps_no_more_than_it_may():
    """What the caller has no room to keep is sent whole the next time."""
    async with served(remote_options={"max_kept_bytes": 64}) as (remote, replica):
        for _ in range(3):
            await remote.generate(list(range(20)), PARAMS, "talk")
        assert (remote.stats.num_whole, remote.num_kept, replica.stats.num_forgotten) == (3, 0, 0)


async def test_a_conversation_ends_with_its_release():
    """Both ends free what they keep, and the server is told."""
    server = Watched()
    async with served(server) as (remote, replica):
        for name in "abc":
            await remote.generate([1, 2, 3], PARAMS, name)
        assert (remote.num_kept, replica.num_conversations) == (3, 3)
        for name in "abc":
            await remote.release(name)
        await remote.release("unknown")
        assert (remote.num_kept, replica.num_conversations, replica.num_kept_bytes) == (0, 0, 0)
        assert server.released == ["a", "b", "c", "unknown"]


async def test_conversations_that_nobody_ends_are_bounded(monkeypatch):
    """One conversation too many ends the oldest, at the server as well."""
    monkeypatch.setattr(callers, "_MAX_CONVERSATIONS", 2)
    server = Watched()
    async with served(server) as (remote, replica):
        for name in "abcd":
            await remote.generate([1, 2, 3], PARAMS, name)
        await until(lambda: server.released == ["a", "b"])
        assert replica.num_conversations == 2


async def test_a_conversation_has_one_turn_at_a_time():
    """A second turn beside a first one is refused, as by an engine; the first goes on."""
    server = Watched()
    server.gate.clear()
    async with served(server) as (remote, _):
        first = asyncio.ensure_future(remote.generate([1], PARAMS, "talk"))
        await until(lambda: server.running)
        with pytest.raises(EngineInputError, match="'talk'"):
            await remote.generate([1, 2], PARAMS, "talk")
        server.gate.set()
        assert (await first).token_ids == [1, 7]


async def test_a_session_over_a_pool_sends_its_history_once(tokenizer, sampled):
    """ChatSession, client and pool see no difference, and its later turns send only what is new."""
    from ostinato_tokenization import ContinuousTokens

    scripted = ScriptedServer(["Hello!", "Twelve.", "Yes."], encode=sampled, end_token_id=tokenizer.stop_token_ids[0])
    async with ReplicaService(scripted) as replica:
        remote = RemoteServer(replica.address)
        pool = ServerPool([remote])
        await pool.start()
        session = ChatSession(
            client=pool.client(),
            tokens=ContinuousTokens(tokenizer),
            config=SessionConfig(),
            budget=SessionBudget(max_prompt_tokens=256, max_response_tokens=256),
        )
        async with session:
            for text in ("Hi.", "How many months has a year?", "Sure?"):
                await session.extend([{"role": "user", "content": text}])
                await session.generate(SamplingParams(max_tokens=32))
        (ledger,) = session.segments
        assert scripted.requests[-1].prompt_ids == ledger.snapshot().tolist()[: len(scripted.requests[-1].prompt_ids)]
        assert (remote.stats.num_whole, remote.stats.num_resent) == (1, 0)
        sampled_tokens = sum(ledger.response_mask)
        assert remote.stats.num_sent_tokens <= len(ledger.snapshot()) - sampled_tokens
        assert (replica.num_conversations, remote.num_kept) == (0, 0)
        await pool.shutdown()
        await asyncio.wait_for(replica.wait_closed(), 20)


async def test_a_turn_on_a_lost_replica_begins_again_on_another():
    """A client over two replicas takes the one that went out of service, and its caller gets an answer all the same."""
    servers = Watched(), Watched()
    for server in servers:
        server.gate.clear()
    async with ReplicaService(servers[0]) as first, ReplicaService(servers[1]) as second:
        remotes = [RemoteServer(replica.address, silence_s=0.5) for replica in (first, second)]
        await asyncio.gather(*(remote.start() for remote in remotes))
        client = LLMServerClient(remotes)
        task = asyncio.ensure_future(client.generate("talk", [1, 2, 3], PARAMS))
        await until(lambda: servers[0].running or servers[1].running)
        lost = 0 if servers[0].running else 1
        servers[1 - lost].gate.set()
        await (first, second)[lost].close()
        assert (await task).token_ids == [3, 7]
        assert client.num_in_flight == {1 - lost: 0}
        await client.release("talk")
        for remote in remotes:
            await remote.disconnect()


README = Path(__file__).parents[2] / "packages" / "rollout" / "README.md"


def test_the_example_of_the_readme_runs():
    """The README's block about other processes runs as it is written, its assertions included."""
    text = README.read_text() if README.exists() else str(metadata("ostinato-rollout").get_payload())
    blocks = re.findall(r"```py\n(.*?)```", text, re.DOTALL)
    (example,) = [block for block in blocks if "ostinato_rollout.transport" in block]
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})


# Cancelling, aborting, ending


async def test_a_cancelled_caller_cancels_the_request():
    """The server's request ends, its conversation can go on at once, and nothing is left of it at either end."""
    server = Watched()
    server.gate.clear()
    async with served(server) as (remote, replica):
        task = asyncio.ensure_future(remote.generate([1, 2], PARAMS, "talk"))
        await until(lambda: server.running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        again = asyncio.ensure_future(remote.generate([1, 2, 3], PARAMS, "talk"))
        server.gate.set()
        assert (await again).token_ids == [3, 7]
        assert (remote.num_waiting, replica.num_calls, server.running) == (0, 0, set())
        assert remote.stats.num_resent == 0


class Reluctant(Watched):
    """Refuses a conversation that is under way, and ends a cancelled turn once it is let go."""

    def __init__(self):
        super().__init__()
        self.under_way: set[str] = set()
        self.let_go = asyncio.Event()

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        if request_id in self.under_way:
            raise EngineInputError(f"request_id must not be in flight, got {request_id!r}; end it first")
        self.under_way.add(request_id)
        try:
            return await super().generate(prompt_ids, sampling_params, request_id)
        except asyncio.CancelledError:
            await self.let_go.wait()
            raise
        finally:
            self.under_way.discard(request_id)


async def test_a_turn_waits_for_all_that_were_cancelled_before_it():
    """The second is cancelled while it waits for the first to end; the third waits for the first all the same."""
    server = Reluctant()
    server.gate.clear()
    async with served(server) as (remote, replica):
        for num_calls in (1, 2):
            turn = asyncio.ensure_future(remote.generate([1] * num_calls, PARAMS, "talk"))
            await until(lambda wanted=num_calls: replica.num_calls == wanted)
            turn.cancel()
            with pytest.raises(asyncio.CancelledError):
                await turn
        await until(lambda: replica.num_calls == 1)
        third = asyncio.ensure_future(remote.generate([1, 2, 3], PARAMS, "talk"))
        await until(lambda: replica.num_calls == 2)
        server.gate.set()
        server.let_go.set()
        assert (await third).token_ids == [3, 7]


@pytest.mark.parametrize("end", ["stays", "cancels", "leaves"])
async def test_a_conversation_is_released_once_its_cancelled_turn_has_ended(end):
    """The server frees what the turn had, and not before; also where whoever releases gives up, or goes, meanwhile."""
    server = Reluctant()
    server.gate.clear()
    async with served(server) as (remote, replica):
        turn = asyncio.ensure_future(remote.generate([1], PARAMS, "talk"))
        await until(lambda: server.under_way)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        release = asyncio.ensure_future(remote.release("talk"))
        await until(lambda: replica.num_conversations == 0)
        if end == "cancels":
            release.cancel()
            await until(lambda: replica.num_calls == 1)
        elif end == "leaves":
            await remote.disconnect()
            await until(lambda: replica.num_callers == 0)
        assert server.released == []
        server.let_go.set()
        await until(lambda: server.released)
        assert (server.released, server.under_way) == (["talk"], set())
        await asyncio.gather(release, return_exceptions=True)
    assert server.released == ["talk"]


async def test_an_abort_reaches_a_prompt_that_is_on_its_way():
    """A generation whose prompt has to be sent again ends with an abort that was asked for meanwhile."""
    server = Watched()
    async with served(server, max_kept_bytes=4) as (remote, replica):
        await remote.generate([1, 2, 3], PARAMS, "talk")
        turn = asyncio.ensure_future(remote.generate([1, 2, 3, 4], PARAMS, "talk"))
        aborted = asyncio.ensure_future(remote.abort(["talk"]))
        out = await turn
        assert (out.stop_reason, out.token_ids, await aborted) == (StopReason.ABORTED, [], 1)
        assert len(server.prompts) == 1
        await until(lambda: replica.num_calls == 0)


async def test_a_shutdown_ends_the_replica_for_all():
    """Requests in flight fail with EngineClosedError at every caller, the service ends, and later calls are refused."""
    server = Watched()
    server.gate.clear()
    async with ReplicaService(server) as replica:
        one, other = RemoteServer(replica.address), RemoteServer(replica.address, silence_s=0.5)
        await asyncio.gather(one.start(), other.start())
        tasks = [asyncio.ensure_future(remote.generate([1], PARAMS, f"r{id(remote)}")) for remote in (one, other)]
        await until(lambda: len(server.running) == 2)
        await one.shutdown()
        for task in tasks:
            with pytest.raises(EngineClosedError):
                await task
        await asyncio.wait_for(replica.wait_closed(), 20)
        with pytest.raises(EngineClosedError):
            await one.generate([1], PARAMS, "late")
        await one.shutdown()
        with pytest.raises(ReplicaLostError):
            await other.generate([1], PARAMS, "late")
        await other.disconnect()


async def test_who_lets_go_leaves_nothing_behind():
    """Disconnecting ends the caller's requests and conversations; others go on, also with the same conversation."""
    server = Watched()
    async with served(server) as (remote, replica):
        leaving = RemoteServer(replica.address)
        await leaving.start()
        for name in ("own", "shared"):
            await leaving.generate([1], PARAMS, name)
        await remote.generate([1, 2], PARAMS, "shared")
        server.gate.clear()
        task = asyncio.ensure_future(leaving.generate([1], PARAMS, "running"))
        await until(lambda: server.running)
        await leaving.disconnect()
        with pytest.raises(EngineClosedError, match="let go"):
            await task
        await until(lambda: replica.num_callers == 1 and not server.running)
        await until(lambda: server.released == ["own", "running"])
        assert replica.num_conversations == 1
        server.gate.set()
        assert (await remote.generate([1, 2, 2, 7, 5], PARAMS, "shared")).token_ids == [5, 7]
        assert remote.stats.num_resent == 0


async def test_a_closed_service_ends_what_is_under_way():
    """Callers learn at once what they waited for, and the server's requests are cancelled, the server itself is not ended."""
    server = Watched()
    server.gate.clear()
    async with served(server, remote_options={"silence_s": 0.5}) as (remote, replica):
        task = asyncio.ensure_future(remote.generate([1, 2], PARAMS, "talk"))
        await until(lambda: server.running)
        await replica.close()
        with pytest.raises(
            ReplicaLostError, match=r"waited for generate of request 'talk' \(2 prompt tokens\) since .* last heard"
        ):
            await task
        assert not server.running
        assert server.released == ["talk"]
        assert not server.closed.is_set()
        await remote.release("talk")
        health = await remote.health()
        assert not health.ready
        assert "must answer within 0.5 s" in health.detail


async def test_a_replica_that_was_restarted_is_found_again(caplog):
    """What was under way fails, the next call connects anew and sends its prompt whole, and the log says it."""
    server = Watched()
    server.policy_version = 5
    server.gate.clear()
    async with served(server) as (remote, replica):
        address = replica.address
        task = asyncio.ensure_future(remote.generate([1, 2], PARAMS, "talk"))
        await until(lambda: server.running)
        await replica.close()
        with pytest.raises(ReplicaLostError):
            await task
        later = Watched()
        later.policy_version = 5
        restarted = await listening(later, address)
        try:
            outs = await asyncio.gather(*(remote.generate([1, 2, 3], PARAMS, f"r{index}") for index in range(5)))
            assert [out.token_ids for out in outs] == [[3, 7]] * 5
            assert (restarted.num_callers, later.num_starts, remote.policy_version) == (1, 1, 5)
            assert (remote.stats.num_lost, remote.stats.num_whole, remote.stats.num_replaced) == (1, 6, 1)
            assert "was restarted, and has version 5 of the policy as before" in caplog.text
            client = LLMServerClient([remote])
            assert (await client.generate("r0", [1, 2, 3, 3, 7], PARAMS)).token_ids == [5, 7]
            await client.release("r0")
        finally:
            await restarted.close()


async def test_a_replica_that_was_restarted_without_its_weights_is_lost():
    """A service that took the place of another one, and has other weights than that had, samples nothing: the replica is lost in words that
    say what happened, for its health too, until a new server is made for it."""
    server = Watched()
    server.policy_version = 5
    async with served(server) as (remote, replica):
        await remote.generate([1, 2], PARAMS, "talk")
        await replica.close()
        await until(lambda: not remote._link.is_up)
        later = Watched()
        restarted = await listening(later, replica.address)
        try:
            for _ in range(2):
                with pytest.raises(
                    ReplicaLostError,
                    match=r"with version 5 of the policy, got another service with version 0: .*create a new",
                ):
                    await remote.generate([1, 2, 2, 7, 3], PARAMS, "talk")
            health = await remote.health()
            assert (health.state, health.policy_version) == (EngineState.FAILED, 5)
            assert (later.prompts, restarted.num_conversations) == ([], 0)
            anew = RemoteServer(replica.address)
            await anew.start()
            assert (await anew.generate([1], PARAMS, "talk")).token_ids == [1, 7]
            await anew.disconnect()
        finally:
            await restarted.close()


async def test_a_connection_that_is_made_anew_is_no_restart():
    """The same service, whose policy has gone on meanwhile, is the same replica."""
    server = Watched()
    async with served(server) as (remote, _):
        remote._link.fail(ReplicaLostError("it was cut"))
        server.policy_version = 3
        await remote.generate([1, 2], PARAMS, "talk")
        assert (remote.policy_version, remote.stats.num_replaced) == (3, 0)


async def test_a_remote_server_that_is_not_started_asks_nothing():
    """Before start and after its end, calls are refused in words that name the cure; a start that fails can be tried again."""
    remote = RemoteServer("tcp://127.0.0.1:1", start_timeout_s=0.2)
    with pytest.raises(EngineNotReadyError, match=r"call start\(\) first"):
        await remote.generate([1], PARAMS, "early")
    await remote.release("early")
    for _ in range(2):
        with pytest.raises(ReplicaLostError, match=r"must answer within 0\.2 s, got nothing"):
            await remote.start()
    await remote.shutdown()
    with pytest.raises(EngineClosedError):
        await remote.start()


async def test_a_cancelled_start_leaves_no_connection():
    """Whoever gives up waiting for a replica can let go of it at once."""
    remote = RemoteServer("tcp://127.0.0.1:1")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await remote.start()
    await remote.disconnect()
    assert remote._connecting is None
    assert remote._link is None


async def test_a_new_connection_takes_the_place_of_the_last_one():
    """A remote server that has given its connection up, and asks again before the replica has noticed, gets its answer: its
    old turns end there first, and a conversation never has two turns under way."""

    class Strict(Watched):
        async def generate(self, prompt_ids, sampling_params, request_id, media=()):
            assert request_id not in self.running
            return await super().generate(prompt_ids, sampling_params, request_id, media)

    server = Strict()
    server.gate.clear()
    async with served(server) as (remote, replica), served_by(replica) as other:
        kept = asyncio.create_task(other.generate([1], PARAMS, "other"))
        lost = asyncio.create_task(remote.generate([1, 2], PARAMS, "talk"))
        await until(lambda: server.running == {"talk", "other"})
        remote._link.fail(ReplicaLostError("it was silent"))
        again = asyncio.create_task(remote.generate([1, 2], PARAMS, "talk"))
        await until(lambda: len(server.prompts) == 3)
        server.gate.set()
        assert [(await task).token_ids for task in (again, kept)] == [[2, 7], [1, 7]]
        with pytest.raises(ReplicaLostError, match="it was silent"):
            await lost
        assert (replica.num_callers, replica.stats.num_vanished) == (2, 1)


@asynccontextmanager
async def served_by(replica):
    """One more remote server of a service."""
    remote = RemoteServer(replica.address)
    await remote.start()
    yield remote
    await remote.disconnect()


async def test_copies_of_a_remote_server_do_not_take_each_others_place():
    """One that was copied, as into a worker, before it connected, is another one."""
    async with ReplicaService(Watched()) as replica:
        remotes = [copy.deepcopy(RemoteServer(replica.address)) for _ in range(2)]
        remotes.append(copy.deepcopy(remotes[0]))
        for remote in remotes:
            await remote.start()
        assert (replica.num_callers, replica.stats.num_vanished) == (3, 0)
        for remote in remotes:
            await remote.disconnect()


@pytest.mark.parametrize("request_id", [5, None, b"talk", "\ud800"])
async def test_a_name_that_cannot_cross_is_its_callers_matter(request_id):
    """It is refused before it is sent: the replica would part from the whole connection."""
    server = Watched()
    server.gate.clear()
    async with served(server) as (remote, replica):
        sound = asyncio.create_task(remote.generate([1, 2], PARAMS, "sound"))
        await until(lambda: server.running)
        with pytest.raises(EngineInputError, match="request_id must be Unicode text, got"):
            await remote.generate([1], PARAMS, request_id)
        server.gate.set()
        assert (await sound).token_ids == [2, 7]
        assert (remote.num_kept, replica.stats.num_malformed, remote.stats.num_lost) == (1, 0, 0)


@pytest.mark.parametrize("value", [object(), 2**70, "\ud800"])
async def test_a_value_that_cannot_cross_is_refused(value):
    """Whatever the reason is, the error says that plain values are needed."""
    async with served() as (remote, _):
        with pytest.raises(EngineInputError, match="chat_completion must get plain values"):
            await remote.chat_completion({"value": value})
        assert remote.num_waiting == 0


async def test_an_error_that_is_no_unicode_crosses():
    """Its caller gets it, instead of waiting for ever."""
    server = Watched()
    server.answers["talk"] = ValueError("not \ud800 text")
    async with served(server) as (remote, _):
        with pytest.raises(ValueError, match=r"not \\ud800 text"):
            await remote.generate([1], PARAMS, "talk")


async def test_a_version_of_another_kind_of_integer_crosses():
    """Servers may take it from an array; signs of life and answers tell it as a number."""
    server = Watched()
    async with served(server, silence_s=0.2) as (remote, _):
        server.policy_version = np.int64(3)
        await until(lambda: remote.policy_version == 3)
        assert (await remote.generate([1], PARAMS, "talk")).token_ids == [1, 7]


async def test_all_replicas_free_a_conversation_that_moved():
    """What each of them and its remote server kept of it is gone after one release."""
    async with served() as (first, one), served() as (second, two):
        client = LLMServerClient([first, second], policy=RoundRobin())
        for length in (1, 2, 3):
            await client.generate("talk", [1] * length, PARAMS)
        assert (one.num_conversations, two.num_conversations) == (1, 1)
        await client.release("talk")
        assert (one.num_conversations, two.num_conversations, first.num_kept, second.num_kept) == (0, 0, 0, 0)
        assert (one.num_kept_bytes, two.num_kept_bytes) == (0, 0)


async def test_who_waits_for_a_connection_that_is_let_go_of_is_told():
    """Nobody cancelled it, so it gets an error that says what happened."""
    remote = RemoteServer("tcp://127.0.0.1:1")
    starting = asyncio.create_task(remote.start())
    await until(lambda: remote._connecting is not None)
    await remote.disconnect()
    with pytest.raises(EngineClosedError, match="let go while it connected"):
        await starting
