"""What a forwarding server asks is what the table at the other end answers."""

import asyncio
import time

import msgspec
import pytest

from ostinato_engines import (
    AsyncServerBase,
    Capabilities,
    EngineClosedError,
    EngineCrashedError,
    EngineInputError,
    ManifestError,
    PauseMode,
    TensorSpec,
    UnsupportedError,
    WeightManifest,
    WeightPeerLostError,
)
from ostinato_engines.forwarding import ForwardingServer, answers_of, error_name, error_named


class Told(AsyncServerBase):
    """Notes what it is told."""

    def __init__(self):
        self.calls = []
        self.can_update = True

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        raise NotImplementedError

    async def chat_completion(self, raw_request):
        self.calls.append(("chat_completion", raw_request))
        return {"answer": 1}

    async def wake_up(self, tags=None):
        self.calls.append(("wake_up", tags))

    async def sleep(self, level=1):
        self.calls.append(("sleep", level))

    async def pause(self, mode=PauseMode.ABORT):
        self.calls.append(("pause", mode))

    async def resume(self):
        self.calls.append(("resume",))

    async def abort(self, request_ids=None):
        self.calls.append(("abort", request_ids))
        return 3

    async def reset_prefix_cache(self):
        self.calls.append(("reset_prefix_cache",))

    async def update_weights(self, manifest, weights):
        self.calls.append(("update_weights", manifest.version))
        raise ManifestError("version must please, got displeasure; send another")

    def capabilities(self):
        return Capabilities(weight_update=self.can_update)


class Forwarding(ForwardingServer):
    """Asks a table in this process, through encoded arguments."""

    def __init__(self, server):
        self.server = server
        self.answers = answers_of(server)

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        raise NotImplementedError

    async def _ask(self, method, argument, kind):
        result = await self.answers[method](msgspec.Raw(msgspec.msgpack.encode(argument)))
        return msgspec.convert(result, kind)

    def capabilities(self):
        return self.server.capabilities()


class Body:
    """A web framework's request."""

    def __init__(self, value):
        self.value = value

    async def json(self):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


async def test_each_method_is_called_with_what_was_given():
    """Arguments and results are the same at both ends, defaults included."""
    told = Told()
    server = Forwarding(told)
    assert await server.chat_completion({"a": [1]}) == await server.chat_completion(Body({"a": [1]})) == {"answer": 1}
    await server.wake_up()
    await server.wake_up(("weights",))
    await server.sleep()
    await server.sleep(2)
    await server.pause()
    await server.pause(PauseMode.KEEP)
    await server.resume()
    assert await server.abort() == await server.abort(iter(["x"])) == 3
    await server.reset_prefix_cache()
    assert told.calls == [
        ("chat_completion", {"a": [1]}),
        ("chat_completion", {"a": [1]}),
        ("wake_up", None),
        ("wake_up", ["weights"]),
        ("sleep", 1),
        ("sleep", 2),
        ("pause", PauseMode.ABORT),
        ("pause", PauseMode.KEEP),
        ("resume",),
        ("abort", None),
        ("abort", ["x"]),
        ("reset_prefix_cache",),
    ]


async def test_a_body_that_is_no_json_is_refused():
    """The error is the caller's, not the other end's."""
    with pytest.raises(EngineInputError, match="raw_request must be JSON"):
        await Forwarding(Told()).chat_completion(Body(ValueError("no")))


@pytest.mark.parametrize("method", ["wake_up", "sleep", "pause", "abort", "release"])
async def test_an_argument_of_another_type_is_an_error(method):
    """The table takes what the method takes, and nothing else."""
    with pytest.raises(msgspec.ValidationError):
        await answers_of(Told())[method](msgspec.Raw(msgspec.msgpack.encode({"no": 1})))


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (ManifestError("m"), "ManifestError"),
        (KeyError("m"), "KeyError"),
        (type("Own", (EngineInputError,), {})("m"), "EngineInputError"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_error_crosses_as_the_nearest_class_that_is_known(error, name):
    """Classes of the engines' tree come back as themselves, others as a crash that names them."""
    assert error_name(error) == name
    again = error_named(name, "words")
    assert type(again).__name__ == (name if name != "KeyError" else "EngineCrashedError")
    assert "words" in str(again)
    assert isinstance(error_named("SystemExit", "m"), EngineCrashedError)
    assert isinstance(error_named("Any", "m"), EngineCrashedError)


MANIFEST = WeightManifest(1, (TensorSpec("w", (1,), "float32"),))


async def test_a_refused_update_ends_at_once():
    """What the engine says of a manifest is raised, and nothing waits for what does not come."""
    torch = pytest.importorskip("torch")
    told = Told()
    with pytest.raises(ManifestError, match="version must please"):
        await Forwarding(told).update_weights(MANIFEST, [("w", torch.zeros(1))])
    assert told.calls == [("update_weights", 1)]
    told.can_update = False
    with pytest.raises(UnsupportedError, match="cannot update its weights"):
        await Forwarding(told).update_weights(MANIFEST, [])


async def test_an_engine_may_take_longer_to_load_than_a_single_answer(monkeypatch):
    """What both ends wait for by default is for one message between programs that have nothing else to do; here one loads, the other gathers."""
    torch = pytest.importorskip("torch")
    from ostinato_engines.weight_transfer import WeightReceiver, WeightSender

    for end in (WeightSender, WeightReceiver):
        monkeypatch.setitem(end.__init__.__kwdefaults__, "timeout_s", 0.2)

    class Loading(Told):
        async def update_weights(self, manifest, weights):
            await asyncio.to_thread(list, weights)
            await asyncio.sleep(0.5)
            self.policy_version = manifest.version

    def gathered():
        time.sleep(0.5)
        yield "w", torch.zeros(1)

    loading = Loading()
    await Forwarding(loading).update_weights(MANIFEST, gathered())
    assert loading.policy_version == 1


async def test_an_end_that_does_not_come_for_the_weights_is_not_waited_for():
    """Where the other end fails before it has connected, its error is raised and the thread that listens is let go."""
    pytest.importorskip("torch")

    class Closed(Forwarding):
        async def _ask(self, method, argument, kind):
            raise EngineClosedError("server must be running, is shut down")

    async with asyncio.timeout(20):
        with pytest.raises(EngineClosedError):
            await Closed(Told()).update_weights(MANIFEST, [])
        await asyncio.get_running_loop().shutdown_default_executor()


async def test_why_an_update_failed_is_raised_though_the_thread_that_listens_cannot_be_let_go(monkeypatch):
    """It ends with its own deadline then, and the error of the other end comes out."""
    transfer = pytest.importorskip("ostinato_engines.weight_transfer", exc_type=ImportError)
    monkeypatch.setattr("ostinato_engines.forwarding._CONNECT_S", 0.2)

    def nobody(path):
        raise WeightPeerLostError(f"path must be that of a WeightListener, got {path}")

    class Closed(Forwarding):
        async def _ask(self, method, argument, kind):
            monkeypatch.setattr(transfer, "connect", nobody)
            raise EngineClosedError("server must be running, is shut down")

    with pytest.raises(EngineClosedError):
        await Closed(Told()).update_weights(MANIFEST, [])
