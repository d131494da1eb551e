"""An engine that follows a sender in another process or task: the old policy, the new one, or none."""

import asyncio
import socket
import subprocess
import sys
import tempfile

import pytest

from ostinato_engines import (
    EngineNotReadyError,
    EngineState,
    ManifestError,
    SamplingParams,
    TensorSpec,
    WeightManifest,
    WeightPeerLostError,
    WeightUpdateError,
)

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ostinato_engines.transformers_server import TransformersServer  # noqa: E402
from ostinato_engines.weight_transfer import (  # noqa: E402
    StoredWeights,
    WeightListener,
    WeightReceiver,
    WeightSender,
    connect,
    send_weights,
    serve_weight_updates,
    write_weights,
)

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPT = [3, 14, 15, 92, 65, 35]


async def answer_of(server):
    """What it says to the prompt."""
    return (await server.generate(PROMPT, GREEDY, "ask")).token_ids


@pytest.fixture
async def follow(make_model):
    """Starts an engine and a sender that it follows; returns both, and the task that follows."""
    ends = []

    async def start(model=None, **settings):
        server = TransformersServer(make_model() if model is None else model, **{"device": "cpu", **settings})
        await server.start()
        ends.append((server, *again(server)))
        return ends[-1]

    yield start
    for server, sender, task in ends:
        sender.close()
        await asyncio.wait([task])
        await server.shutdown()


def again(server):
    """A new sender for a running engine, and the task that follows it."""
    ours, theirs = socket.socketpair()
    task = asyncio.ensure_future(serve_weight_updates(server, WeightReceiver(theirs, timeout_s=20)))
    return WeightSender(ours, bucket_bytes=4096, timeout_s=20), task


@pytest.fixture
def weights_of(make_model):
    """A manifest and tensors, by seed and version."""

    def make(seed, version):
        tensors = dict(make_model(seed=seed).named_parameters())
        return WeightManifest.from_tensors(version, tensors.items()), tensors

    return make


@pytest.fixture
async def answer_with(make_model):
    """What a cold engine with the weights of a seed answers."""

    async def ask(seed):
        async with TransformersServer(make_model(seed=seed), device="cpu") as server:
            return await answer_of(server)

    return ask


@pytest.mark.parametrize("full_determinism", [False, True])
async def test_an_engine_follows_its_sender(follow, weights_of, answer_with, full_determinism):
    """Update after update the engine, which steps in a thread or on the event loop, answers as a cold engine with the
    weights that were sent, under their version."""
    server, sender, _ = await follow(full_determinism=full_determinism)
    assert await answer_of(server) == await answer_with(0)
    for seed, version in ((1, 4), (2, 5)):
        manifest, tensors = weights_of(seed, version)
        await send_weights(sender, manifest, tensors.items())
        assert server.policy_version == version
        assert await answer_of(server) == await answer_with(seed)


async def test_a_wrong_manifest_leaves_the_old_policy_serving(follow, weights_of):
    """The sender gets the engine's own refusal, no tensor is taken, and the engine answers as before."""
    server, sender, _ = await follow()
    before = await answer_of(server)
    manifest, tensors = weights_of(1, 4)
    first, *rest = manifest.tensors
    taken = []

    def source():
        taken.append(True)
        yield from tensors.items()

    for wrong, words in (
        (rest, "without"),
        ([TensorSpec(first.name, (1, 2, 3), first.dtype), *rest], "shape"),
        ([TensorSpec(first.name, first.shape, "bfloat16"), *rest], "cast_weights"),
        ([first, *rest, TensorSpec("no.such", (1,), "float32")], "no.such"),
    ):
        with pytest.raises(ManifestError, match=words):
            await send_weights(sender, WeightManifest(4, tuple(wrong)), source())
        assert (await server.health()).ready
        assert server.policy_version == 0
        assert await answer_of(server) == before
    assert not taken


async def test_a_broken_stream_leaves_no_policy_until_a_complete_one(follow, weights_of, answer_with):
    """After a stream that broke off the engine refuses to serve; a complete update makes it whole."""
    server, sender, _ = await follow()
    manifest, tensors = weights_of(1, 4)
    with pytest.raises(WeightUpdateError, match="1 missing"):
        await send_weights(sender, manifest, list(tensors.items())[:-1])
    assert (await server.health()).state is EngineState.STALE
    with pytest.raises(EngineNotReadyError, match="update_weights"):
        await answer_of(server)
    await send_weights(sender, manifest, tensors.items())
    assert await answer_of(server) == await answer_with(1)


async def test_a_sender_that_vanishes_leaves_no_policy_until_another_comes(follow, weights_of, answer_with):
    """A sender that is gone in the middle ends the following with an error; the engine serves after another's update."""
    server, sender, task = await follow()
    manifest, tensors = weights_of(1, 4)

    def source():
        for index, pair in enumerate(tensors.items()):
            if index == 5:
                sender.abort()
            yield pair

    with pytest.raises(WeightPeerLostError):
        await send_weights(sender, manifest, source())
    with pytest.raises(WeightPeerLostError):
        await task
    assert (await server.health()).state is EngineState.STALE
    another, following = again(server)
    await send_weights(another, manifest, tensors.items())
    assert await answer_of(server) == await answer_with(1)
    another.close()
    await following


async def test_cancelling_either_end_ends_both(follow, weights_of):
    """A cancelled sender ends the engine's following, a cancelled follower the sender's update; nobody waits."""
    server, sender, task = await follow()
    manifest, tensors = weights_of(1, 4)
    reached, loop = asyncio.Event(), asyncio.get_running_loop()

    def endless():
        for index, pair in enumerate(tensors.items()):
            if index == 5:
                loop.call_soon_threadsafe(reached.set)
            yield pair
        while True:
            sender._channel.receive()
            yield None

    sending = asyncio.ensure_future(send_weights(sender, manifest, endless()))
    await reached.wait()
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    with pytest.raises(WeightPeerLostError):
        await task
    another, following = again(server)
    await asyncio.sleep(0)
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    with pytest.raises(WeightPeerLostError):
        await send_weights(another, manifest, tensors.items())
    another.close()


async def test_casting_is_asked_for(follow, weights_of, make_model):
    """Float32 weights for a bfloat16 engine are refused, or rounded where the engine was started with cast_weights."""
    manifest, tensors = weights_of(1, 4)
    _, sender, _ = await follow(dtype="bfloat16")
    with pytest.raises(ManifestError, match="cast_weights=True"):
        await send_weights(sender, manifest, tensors.items())
    model = make_model()
    _, sender, _ = await follow(model, dtype="bfloat16", cast_weights=True)
    await send_weights(sender, manifest, tensors.items())
    assert torch.equal(model.lm_head.weight, tensors["model.embed_tokens.weight"].to(torch.bfloat16))


async def test_weights_come_from_a_file(make_model, weights_of, answer_with, tmp_path):
    """An engine takes a stored update as it takes a stream; a damaged one leaves it not ready, a wrong one ready."""
    path = tmp_path / "weights.safetensors"
    manifest, tensors = weights_of(1, 4)
    write_weights(path, manifest, tensors.items())
    async with TransformersServer(make_model(), device="cpu") as server:
        with StoredWeights(path) as stored:
            await server.update_weights(stored.manifest, stored)
        assert (server.policy_version, await answer_of(server)) == (4, await answer_with(1))
        write_weights(path, WeightManifest(5, manifest.tensors[:1]), list(tensors.items())[:1])
        with StoredWeights(path) as stored, pytest.raises(ManifestError):
            await server.update_weights(stored.manifest, stored)
        assert (server.policy_version, await answer_of(server)) == (4, await answer_with(1))
        write_weights(path, manifest, tensors.items())
        path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
        with StoredWeights(path) as stored, pytest.raises(WeightUpdateError, match="damaged"):
            await server.update_weights(stored.manifest, stored)
        assert (await server.health()).state is EngineState.STALE


ENGINE = """
import asyncio, socket, sys, torch, transformers
from ostinato_engines import SamplingParams
from ostinato_engines.transformers_server import TransformersServer
from ostinato_engines.weight_transfer import WeightReceiver, serve_weight_updates
async def main():
    torch.set_num_threads(1)
    config = transformers.AutoConfig.for_model(**eval(sys.argv[2]))
    async with TransformersServer(transformers.AutoModelForCausalLM.from_config(config), device="cpu") as server:
        await serve_weight_updates(server, WeightReceiver(socket.socket(fileno=int(sys.argv[1]))))
        output = await server.generate([3, 14, 15, 92, 65, 35], SamplingParams(temperature=0, max_tokens=8), "ask")
        print(output.token_ids, server.policy_version)
asyncio.run(main())
"""


async def test_an_engine_in_another_process_follows(make_model, weights_of, answer_with):
    """An engine in a process of its own answers, after an update, as one here that was loaded with those weights."""
    ours, theirs = socket.socketpair()
    with theirs:
        engine = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            ENGINE,
            str(theirs.fileno()),
            repr(make_model().config.to_dict()),
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
        )
    sender = WeightSender(ours, timeout_s=120)
    manifest, tensors = weights_of(1, 4)
    await send_weights(sender, manifest, tensors.items())
    sender.close()
    said, _ = await engine.communicate()
    assert said.decode().strip() == f"{await answer_with(1)} 4"
    assert engine.returncode == 0


def test_a_meeting_place_where_paths_are_long(monkeypatch, tmp_path):
    """A listener finds a place for its socket where the path of temporary files is too long for one, and leaves none behind."""
    deep = tmp_path / ("deep" * 30)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with WeightListener() as listener:
        connect(listener.path).close()
    assert not list(deep.iterdir())
    assert not listener.path.parent.exists()
