"""Strangers, silence, limits and keys: what either end does where the other does not do its part."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import suppress

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato_engines import EngineClosedError, EngineCrashedError, EngineInputError, SamplingParams
from ostinato_engines.testing import ScriptedServer
from ostinato_rollout import RolloutError

pytest.importorskip("zmq")

import zmq
import zmq.asyncio

from ostinato_rollout.transport import (
    AddressError,
    RemoteServer,
    ReplicaLostError,
    ReplicaService,
    TransportInputError,
    callers,
    service,
    wire,
)

PARAMS = SamplingParams(max_tokens=8)
KEY = "a key of sixteen bytes"
HELLO = wire.Hello(wire.PROTOCOL, b"", "a test")


def scripted(**options):
    """A server that answers with the number of ids."""
    return ScriptedServer(lambda request: [len(request.prompt_ids), 7], **options)


@pytest.fixture
async def dial():
    """Opens bare connections to a service; gives functions that send frames and read a reply."""
    sockets = []

    def connect(address):
        socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        sockets.append(socket)
        socket.connect(address)

        async def say(*frames):
            await socket.send_multipart([frame if isinstance(frame, bytes) else wire.encode(frame) for frame in frames])

        async def hear():
            async with asyncio.timeout(20):
                (frame,) = await socket.recv_multipart()
            return wire.decode_reply(frame)

        return say, hear

    yield connect
    for socket in sockets:
        socket.close(linger=0)


@pytest.fixture
async def service_socket():
    """The socket of a service that the test plays itself, and its address."""
    socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    yield socket, f"tcp://127.0.0.1:{port}"
    socket.close(linger=0)


async def until(condition):
    """Waits, as long as the test may take, until something holds."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  what is waited for has no event
            await asyncio.sleep(0.005)


async def serves(replica):
    """Whether a service still does what it should."""
    remote = RemoteServer(replica.address, key=KEY if replica._key else None)
    await remote.start()
    out = await remote.generate([1, 2, 3], PARAMS, "sound")
    await remote.disconnect()
    return out.token_ids == [3, 7]


def generate(ids, *, number=1, known=0, length=None, digest=None, again=False):
    """The frames of a generation, true unless told otherwise."""
    from ostinato_rollout.transport.prompts import KeptPrompt, id_bytes

    kept = KeptPrompt()
    kept.grow(id_bytes(ids), with_output=False, turn=0)
    header = wire.Generate(number, "talk", known, False, length or len(ids), digest or kept.digest, PARAMS, again)
    return header, bytes(id_bytes(ids))


# Malformed messages

GARBAGE = st.one_of(
    st.lists(st.binary(max_size=40), min_size=1, max_size=4),
    st.recursive(st.none() | st.integers(0, 9) | st.text(max_size=8), st.lists, max_leaves=8).map(
        lambda value: [msgspec.msgpack.encode(value)]
    ),
)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(GARBAGE, min_size=1, max_size=5), st.booleans())
def test_garbage_is_answered_and_ends_nothing(messages, as_caller):
    """Frames that are no messages are refused and counted, whoever sends them; the service serves on."""

    async def scenario():
        async with ReplicaService(scripted()) as replica:
            socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
            socket.connect(replica.address)
            if as_caller:
                await socket.send(wire.encode(HELLO))
            for frames in messages:
                await socket.send_multipart(frames)
            await until(lambda: replica.stats.num_malformed == len(messages))
            assert await serves(replica)
            await until(lambda: replica.num_callers == 0)
            socket.close(linger=0)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "frames",
    [
        generate([1, 2], digest=b"another hash    "),
        generate([1, 2], length=3),
        (generate([1, 2])[0], b"odd"),
        (generate([1, 2])[0],),
        (*generate([1, 2]), b"more"),
        (wire.Ping(1), b"more"),
        (b"\x94\xa4call\x01\xa5abort" + b"\x91" * 100_000,),
    ],
    ids=["hash", "length", "bytes", "no ids", "frames", "ping", "depth"],
)
async def test_a_message_that_cannot_be_served_ends_its_connection(dial, frames):
    """The sender is told, and what it had is freed; it may come again."""
    async with ReplicaService(scripted()) as replica:
        say, hear = dial(replica.address)
        await say(HELLO)
        assert (await hear()).silence_s == wire.SILENCE_S
        await say(*frames)
        assert isinstance(await hear(), wire.Refused)
        await say(wire.Ping(9))
        assert await hear() == wire.Stranger(9)
        assert (replica.stats.num_malformed, replica.num_callers, replica.num_calls) == (1, 0, 0)
        assert await serves(replica)


async def test_two_calls_of_one_number_are_refused(dial):
    """A number that is under way is no other call's."""
    gate = asyncio.Event()
    async with ReplicaService(scripted(gate=gate)) as replica:
        say, hear = dial(replica.address)
        await say(HELLO)
        await hear()
        await say(*generate([1, 2]))
        await say(*generate([1, 2]))
        assert isinstance(await hear(), wire.Refused)
        await until(lambda: replica.num_calls == 0)


@pytest.mark.parametrize(
    ("method", "argument"),
    [("no_such", None), ("abort", 7), ("pause", "sideways"), ("sleep", "deep"), ("release", 1), ("wake_up", {"a": 1})],
)
async def test_a_call_that_is_none_gets_an_error(dial, method, argument):
    """Unknown methods and arguments of another type fail their call; the connection goes on."""
    async with ReplicaService(scripted()) as replica:
        say, hear = dial(replica.address)
        await say(HELLO)
        await hear()
        await say(wire.Call(5, method, wire.encode_raw(argument)))
        answer = await hear()
        assert (type(answer), answer.number, answer.error) == (wire.Failed, 5, "EngineInputError")
        await say(wire.Cancel(5))
        await say(wire.Cancel(99))
        await say(*generate([1, 2], number=6))
        assert (await hear()).output.token_ids == [2, 7]


async def test_a_prompt_that_nobody_asked_to_send_again_is_dropped(dial):
    """A late answer to `Forgotten` begins nothing."""
    server = scripted()
    async with ReplicaService(server) as replica:
        say, hear = dial(replica.address)
        await say(HELLO)
        await hear()
        await say(*generate([1, 2], again=True))
        await say(wire.Ping(9))
        assert await hear() == wire.Pong(0)
        assert server.requests == []


async def test_a_stranger_is_told_so(dial):
    """Who has not said hello is asked to, and gets nothing."""
    server = scripted()
    async with ReplicaService(server) as replica:
        say, hear = dial(replica.address)
        for frames in (generate([1]), (wire.Ping(1),), (wire.Call(1, "shutdown", wire.encode_raw(None)),)):
            await say(*frames)
            assert await hear() == wire.Stranger(1)
        await say(wire.Goodbye())
        assert server.requests == []
        assert await serves(replica)


async def test_a_call_that_was_not_begun_is_asked_again():
    """A replica that forgot the connection while nothing was under way there is asked again, and no caller notices."""
    server = scripted()
    async with ReplicaService(server) as replica:
        remote = RemoteServer(replica.address)
        await remote.start()
        await remote.generate([1, 2], PARAMS, "talk")
        replica._callers.part_from(next(iter(replica._callers)))
        asked = [
            remote.generate([1, 2, 2, 7, 5], PARAMS, "talk"),
            remote.generate([1], PARAMS, "other"),
            remote.health(),
        ]
        talk, other, health = await asyncio.gather(*asked)
        assert (talk.token_ids, other.token_ids, health.ready) == ([5, 7], [1, 7], True)
        assert (remote.stats.num_lost, len(server.requests)) == (1, 3)
        await remote.disconnect()


async def test_a_call_that_may_have_begun_is_not_asked_again():
    """What was under way when the replica forgot the connection fails, and is not sampled twice."""
    server = scripted(gate=asyncio.Event())
    async with ReplicaService(server) as replica:
        remote = RemoteServer(replica.address)
        await remote.start()
        early = asyncio.ensure_future(remote.generate([1, 2], PARAMS, "talk"))
        await until(lambda: server.requests)
        replica._callers.part_from(next(iter(replica._callers)))
        assert (await remote.health()).ready
        with pytest.raises(ReplicaLostError, match="waited for generate of request 'talk'"):
            await early
        assert len(server.requests) == 1
        await remote.disconnect()


async def test_garbage_of_a_service_is_counted(service_socket):
    """A caller drops what it cannot read, and loses a service that says nothing else."""
    socket, address = service_socket
    remote = RemoteServer(address, start_timeout_s=2.0)
    starting = asyncio.ensure_future(remote.start())
    identity, _ = await socket.recv_multipart()
    for frames in ([b"\xc1"], [wire.encode(wire.Welcome(1.0)), b"more"], [wire.encode(wire.Ping(1))]):
        await socket.send_multipart([identity, *frames])
    with pytest.raises(ReplicaLostError):
        await starting
    assert remote.stats.num_malformed == 3
    await remote.disconnect()


async def test_an_answer_of_another_kind_is_an_error(service_socket):
    """A call whose answer is not what the method gives fails, and says which."""
    socket, address = service_socket
    remote = RemoteServer(address)
    starting = asyncio.ensure_future(remote.start())
    identity, _ = await socket.recv_multipart()
    await socket.send_multipart([identity, wire.encode(wire.Welcome(1.0))])
    call = None
    while not isinstance(call, wire.Call):
        call = wire.decode_request((await socket.recv_multipart())[1])
    await socket.send_multipart([identity, wire.encode(wire.Answer(call.number, 0, wire.encode_raw([1])))])
    with pytest.raises(ReplicaLostError, match="start must be answered with Description"):
        await starting
    await remote.disconnect()


async def test_a_hello_that_is_lost_is_said_again(service_socket):
    """A service that takes a hello with it as it ends does not keep its successor from being found."""
    socket, address = service_socket
    remote = RemoteServer(address)
    starting = asyncio.ensure_future(remote.start())
    identity, first = await socket.recv_multipart()
    again = await socket.recv_multipart()
    assert again == [identity, first]
    remote._link = None
    await remote.disconnect()
    with pytest.raises(EngineClosedError, match="was let go while it connected"):
        await starting
    async with ReplicaService(scripted()) as replica:
        other = RemoteServer(replica.address)
        await other.start()
        other._link._send(HELLO)
        assert (await other.health()).ready
        await other.disconnect()


async def test_a_service_that_ends_as_it_welcomes_is_lost(service_socket):
    """A connection that is lost between its welcome and its first call fails that call instead of waiting for ever."""
    socket, address = service_socket
    remote = RemoteServer(address)
    starting = asyncio.ensure_future(remote.start())
    identity, _ = await socket.recv_multipart()
    for reply in (wire.Welcome(1.0), wire.Closing()):
        await socket.send_multipart([identity, wire.encode(reply)])
    with pytest.raises(ReplicaLostError, match="got its end"):
        async with asyncio.timeout(20):
            await starting
    assert remote.num_waiting == 0
    await remote.disconnect()


# Silence


CALLER = """
import asyncio, sys
from ostinato_engines import SamplingParams
from ostinato_rollout.transport import RemoteServer

async def main():
    remote = RemoteServer(sys.argv[1])
    await remote.start()
    await remote.generate([1, 2], SamplingParams(), "talk")

asyncio.run(main())
"""


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_caller_that_vanishes_leaves_nothing_behind(signal_number):
    """The requests of a killed or stopped process end, its conversations are released, it is counted; others stay."""
    gate = asyncio.Event()
    server = scripted(gate=gate)
    async with ReplicaService(server, silence_s=0.5) as replica:
        living = RemoteServer(replica.address)
        await living.start()
        caller = await asyncio.create_subprocess_exec(sys.executable, "-c", CALLER, replica.address)
        try:
            await until(lambda: server.requests)
            caller.send_signal(signal_number)
            await until(lambda: replica.stats.num_vanished == 1)
            await until(lambda: server.released == ["talk"])
        finally:
            with suppress(ProcessLookupError):
                caller.kill()
            await caller.wait()
        assert (replica.num_calls, replica.num_conversations, (await server.health()).num_running) == (0, 0, 0)
        assert (replica.num_callers, (await living.health()).ready) == (1, True)
        await living.disconnect()


async def test_a_caller_that_stands_still_is_not_gone(launch):
    """A process that trains on its event loop, and so says nothing for long, keeps its requests and is not told off."""
    address, start = launch
    start()
    remote = RemoteServer(address, silence_s=1.5)
    await remote.start()
    slow = asyncio.ensure_future(remote.generate([1, 2], PARAMS, "slow"))
    await remote.generate([1, 2], PARAMS, "quick")
    time.sleep(4)  # noqa: ASYNC251  the event loop stands still for longer than either end's bound
    await remote.generate([1, 2, 2, 5], PARAMS, "quick")
    assert not slow.done()
    assert (remote.stats.num_lost, remote.stats.num_sent_tokens) == (0, 5)
    slow.cancel()
    await remote.shutdown()


async def test_a_caller_that_stands_still_for_ever_is_gone(dial, monkeypatch):
    """A process whose event loop says nothing for very long loses its requests in the end, though it is there."""
    monkeypatch.setattr(service, "_STUCK_TICKS", 4)
    server = scripted(gate=asyncio.Event())
    async with ReplicaService(server, silence_s=0.2) as replica:
        say, _ = dial(replica.address)
        await say(HELLO)
        await say(*generate([1, 2]))
        await until(lambda: replica.num_calls == 1)
        await until(lambda: replica.stats.num_vanished == 1)
        await until(lambda: server.released == ["talk"])


class NeverReleases(ScriptedServer):
    """A server on which the end of a conversation hangs."""

    async def release(self, request_id):
        await asyncio.Event().wait()


async def test_an_engine_that_does_not_release_is_not_waited_for(monkeypatch):
    """What a caller that has gone leaves behind is given up after a while, and counted."""
    monkeypatch.setattr(callers, "_END_S", 0.05)
    server = NeverReleases(lambda request: [5])
    async with ReplicaService(server) as replica:
        remote = RemoteServer(replica.address)
        await remote.start()
        for name in ("one", "other"):
            await remote.generate([1, 2], PARAMS, name)
        await remote.disconnect()
        await until(lambda: replica.stats.num_release_failures == 2)
        assert (replica.num_calls, replica.num_conversations) == (0, 0)


async def test_a_silent_replica_fails_what_waits_for_it(service_socket):
    """A replica that says nothing more is lost within the bound, and the error says what was waited for and since when."""
    socket, address = service_socket
    remote = RemoteServer(address, silence_s=0.2)
    starting = asyncio.ensure_future(remote.start())
    identity, _ = await socket.recv_multipart()
    await socket.send_multipart([identity, wire.encode(wire.Welcome(1.0))])
    with pytest.raises(
        ReplicaLostError,
        match=r"sign of life within 0\.2 s, got silence; see its log; waited for start since \d\d:\d\d:\d\d \(.* s\), last heard",
    ):
        await starting
    await remote.disconnect()


SLOW = """
import asyncio
from ostinato_engines import AsyncServerBase

class Slow(AsyncServerBase):
    def __init__(self, model):
        pass
    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        if request_id == "slow":
            await asyncio.sleep(600)
        return [len(prompt_ids)]
    async def chat_completion(self, raw_request):
        return {}
"""


STUCK = """
import asyncio

from ostinato_engines import AsyncServerBase


class Stuck(AsyncServerBase):
    def __init__(self, model):
        pass

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        return [1]

    async def chat_completion(self, raw_request):
        return {}

    async def shutdown(self):
        print("shutting down", flush=True)
        await asyncio.Event().wait()
"""


@pytest.fixture
def launch(tmp_path):
    """Starts replica processes at one address, and kills those that are left."""
    (tmp_path / "slow.py").write_text(SLOW)
    address = f"ipc://{tmp_path}/replica"
    processes = []

    def start():
        command = (sys.executable, "-m", "ostinato_rollout.transport", f"{tmp_path}/slow.py:Slow", "model")
        process = subprocess.Popen([*command, "--address", address, "--silence-s", "1.5"], stdout=subprocess.DEVNULL)
        processes.append(process)
        return process

    yield address, start
    for process in processes:
        process.kill()
        process.wait()


async def test_a_killed_replica_is_noticed_and_its_successor_found(launch):
    """What waits for a killed process fails; calls meanwhile fail as well; a new process at the address serves the next."""
    address, start = launch
    process = start()
    remote = RemoteServer(address, silence_s=1.5)
    await remote.start()
    slow = asyncio.ensure_future(remote.generate([1, 2], PARAMS, "slow"))
    assert (await remote.generate([1, 2], PARAMS, "quick")).token_ids == [2]
    process.kill()
    with pytest.raises(ReplicaLostError, match="waited for generate of request 'slow'"):
        await slow
    with pytest.raises(ReplicaLostError, match="got nothing"):
        await remote.generate([1, 2, 2, 5], PARAMS, "quick")
    start()
    await _eventually(lambda: remote.generate([1, 2, 2, 5], PARAMS, "quick"))
    assert (remote.stats.num_lost, remote.stats.num_whole, remote.num_waiting) == (1, 3, 0)
    await remote.shutdown()


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_replica_process_can_be_ended_though_its_engine_does_not_end(tmp_path, signal_number):
    """The first signal asks the engine to shut down, and the second one waits for it no longer."""
    (tmp_path / "stuck.py").write_text(STUCK)
    command = (sys.executable, "-m", "ostinato_rollout.transport", f"{tmp_path}/stuck.py:Stuck", "model")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout.readline().startswith("tcp://127.0.0.1:")
            process.send_signal(signal_number)
            assert process.stdout.readline() == "shutting down\n"
            process.send_signal(signal_number)
            assert process.wait(timeout=20) != 0
        finally:
            process.kill()


async def test_a_replica_that_stood_still_is_found_again(launch):
    """A stopped process is lost like a dead one; when it goes on, it frees what was under way and serves again."""
    address, start = launch
    process = start()
    remote = RemoteServer(address, silence_s=1.5)
    await remote.start()
    slow = asyncio.ensure_future(remote.generate([1, 2], PARAMS, "slow"))
    await remote.health()
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(ReplicaLostError, match="silence"):
        await slow
    os.kill(process.pid, signal.SIGCONT)
    out = await _eventually(lambda: remote.generate([1, 2, 3], PARAMS, "quick"))
    assert out.token_ids == [3]
    await remote.shutdown()
    assert await asyncio.to_thread(process.wait, 20) == 0


async def _eventually(ask):
    """The answer of a replica that is coming up."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await ask()
            except ReplicaLostError:
                continue


# Limits


async def test_a_prompt_beyond_the_limit_is_refused_here():
    """Nothing that the service would not read is sent; what is new counts, so a long conversation goes on."""
    async with ReplicaService(scripted(), max_frame_bytes=1000) as replica:
        remote = RemoteServer(replica.address, max_frame_bytes=1000)
        await remote.start()
        with pytest.raises(EngineInputError, match="at most 1000 bytes, got 1004"):
            await remote.generate(range(251), PARAMS, "long")
        prompt = [1] * 200
        for _ in range(3):
            prompt += (await remote.generate(prompt, PARAMS, "talk")).token_ids
            prompt += [1] * 200
        # It cannot be sent whole any more, when the replica has forgotten it.
        replica._prompts.forget(next(iter(replica._prompts._kept)))
        with pytest.raises(EngineInputError, match="raise max_frame_bytes"):
            await remote.generate(prompt, PARAMS, "talk")
        await until(lambda: replica.num_calls == 0)
        with pytest.raises(EngineInputError, match="at most 1000 bytes"):
            await remote.chat_completion({"text": "x" * 2000})
        assert remote.num_waiting == 0
        await remote.disconnect()


async def test_an_answer_beyond_the_limit_is_an_error():
    """What the caller would not read is not sent; it is told instead."""
    server = ScriptedServer([list(range(500)), [1]])
    async with ReplicaService(server, max_frame_bytes=1000) as replica:
        remote = RemoteServer(replica.address)
        await remote.start()
        with pytest.raises(EngineInputError, match="answer must have at most 1000 bytes"):
            await remote.generate([1], SamplingParams(), "long")
        assert (await remote.generate([1], SamplingParams(), "short")).token_ids == [1]
        await remote.disconnect()


async def test_a_frame_beyond_the_limit_is_not_read(dial):
    """A sender of too much is cut off before it is in memory; the service serves others on."""
    async with ReplicaService(scripted(), max_frame_bytes=1000) as replica:
        say, _ = dial(replica.address)
        await say(b"x" * 100_000)
        assert await serves(replica)
        assert replica.stats.num_malformed == 0


async def test_what_is_gone_is_counted():
    """An answer for a caller that has left goes nowhere, and nothing breaks."""
    gate = asyncio.Event()
    async with ReplicaService(scripted(gate=gate)) as replica:
        assert not replica._mailbox.send([b"nobody", b"x"])
        replica._send(b"nobody", wire.Pong(0))
        assert replica.stats.num_undelivered == 1


# Who may call


async def test_a_shared_key_lets_in_who_has_it():
    """With the key calls are served; without it, or with another, nobody answers."""
    async with ReplicaService(scripted(), key=KEY) as replica:
        assert await serves(replica)
        for key in (None, "another key, as long as the first"):
            remote = RemoteServer(replica.address, key=key, start_timeout_s=0.4)
            with pytest.raises(ReplicaLostError, match="same key"):
                await remote.start()
        assert (replica.num_callers, replica.stats.num_refused) == (0, 0)
        assert await serves(replica)


async def test_a_caller_with_a_key_does_not_talk_to_a_service_without():
    """Who has a key does not tell its prompts to a service that cannot show it."""
    async with ReplicaService(scripted()) as replica:
        remote = RemoteServer(replica.address, key=KEY, start_timeout_s=0.4)
        with pytest.raises(ReplicaLostError):
            await remote.start()
        assert replica.num_callers == 0


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (wire.Hello(wire.PROTOCOL, b"proof of something", "x"), "key must be the service's"),
        (wire.Hello(wire.PROTOCOL + 1, b"", "x"), "protocol must be"),
    ],
)
async def test_a_hello_that_does_not_fit_is_refused(dial, hello, reason):
    """Another key or another protocol is refused with the reason, and counted."""
    async with ReplicaService(scripted()) as replica:
        say, hear = dial(replica.address)
        await say(hello)
        answer = await hear()
        assert isinstance(answer, wire.Refused)
        assert reason in answer.reason
        assert (replica.stats.num_refused, replica.num_callers) == (1, 0)


@pytest.mark.parametrize(
    ("address", "key", "text"),
    [
        ("tcp://0.0.0.0:*", None, "loopback where there is no key"),
        ("tcp://*:*", None, "loopback where there is no key"),
        ("tcp://[::]:*", None, "loopback where there is no key"),
        ("http://127.0.0.1:80", None, "begin with tcp:// or ipc://"),
        ("tcp://", None, "begin with tcp:// or ipc://"),
        ("tcp://127.0.0.1:*", "short", "at least 16 bytes"),
    ],
)
async def test_an_address_or_key_that_is_not_safe_is_refused(address, key, text):
    """Without a key a service listens on this host only; what is no address or no secret is refused before it is used."""
    with pytest.raises(TransportInputError, match=text):
        async with ReplicaService(scripted(), address, key=key):
            pass


async def test_a_service_beyond_this_host_needs_a_key():
    """With a key any address will do."""
    async with ReplicaService(scripted(), "tcp://0.0.0.0:*", key=KEY) as replica:
        port = replica.address.rpartition(":")[2]
        remote = RemoteServer(f"tcp://127.0.0.1:{port}", key=KEY.encode())
        await remote.start()
        assert (await remote.generate([1], PARAMS, "a")).token_ids == [1, 7]
        await remote.disconnect()


async def test_an_address_that_is_taken_is_an_error():
    """Two services do not share an address, and one that is no place is told at once."""
    async with ReplicaService(scripted()) as replica:
        with pytest.raises(AddressError, match="must be free"):
            await ReplicaService(scripted(), replica.address).start()
    with pytest.raises(TransportInputError, match="must be that of a service"):
        await RemoteServer("tcp://127.0.0.1:*").start()
    with pytest.raises(TransportInputError, match="begin with"):
        await RemoteServer("127.0.0.1:5000").start()


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_a_bound_that_is_none_is_refused(value):
    """Silence and start have an end."""
    with pytest.raises(TransportInputError, match="silence_s must be positive"):
        RemoteServer("tcp://127.0.0.1:1", silence_s=value)
    with pytest.raises(TransportInputError, match="start_timeout_s must be positive"):
        RemoteServer("tcp://127.0.0.1:1", start_timeout_s=value)
    with pytest.raises(TransportInputError, match="silence_s must be positive"):
        ReplicaService(scripted(), silence_s=value)


@pytest.mark.parametrize(
    ("error", "kinds"),
    [
        (ReplicaLostError("m"), (EngineCrashedError, ConnectionError)),
        (TransportInputError("m"), (RolloutError, ValueError)),
        (AddressError("m"), (RolloutError, OSError)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_errors_are_standard_errors_that_survive_pickling(error, kinds):
    """Each is of its tree and of Python's, and crosses processes."""
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), "m")
    assert isinstance(error, kinds[0])
    assert isinstance(error, kinds[1])
