"""SGLangServer against a server that speaks SGLang's protocol with the embedded engine behind it."""

import asyncio
import importlib.util
import json
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from ostinato_engines import (  # noqa: E402
    EngineClosedError,
    EngineCrashedError,
    EngineInputError,
    EngineLoadError,
    EngineNotReadyError,
    EngineStartError,
    EngineState,
    ManifestError,
    MissingDependencyError,
    PauseMode,
    SamplingParams,
    StopReason,
    UnsupportedError,
    WeightManifest,
    WeightUpdateError,
)
from ostinato_engines.loading import engine_class  # noqa: E402
from ostinato_engines.sglang_engine.http import LocalClient  # noqa: E402
from ostinato_engines.sglang_engine.staging import MEMORY  # noqa: E402
from ostinato_engines.sglang_server import SGLangServer  # noqa: E402
from ostinato_engines.testing import WeightUpdate, check_server, reference_distribution  # noqa: E402

STUB = (sys.executable, "-m", "ostinato_engines.testing.sglang_stub")
TEMPLATE = "{% for m in messages %}w3 {{ m['content'] }} w4 {% endfor %}{% if add_generation_prompt %}w5{% endif %}"


@pytest.fixture
def checkpoint(make_model, tmp_path):
    """A folder with a tiny model whose config has an end of text, and whose generation config names many."""
    folder = tmp_path / "model"
    make_model(max_len=512).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(40)), "temperature": 0.1}))
    return folder


@pytest.fixture
def update_for(make_model, forward_of):
    """A weight update to another model of the same shape."""

    def make(version, seed=1):
        model = make_model(seed=seed, max_len=512)
        named = [(name, tensor.detach()) for name, tensor in model.named_parameters()]
        return WeightUpdate(WeightManifest.from_tensors(version, named), lambda: iter(named), forward_of(model))

    return make


@asynccontextmanager
async def serving(checkpoint, **options):
    """A started server."""
    server = SGLangServer(checkpoint, launcher=STUB, **options)
    await server.start()
    try:
        yield server
    finally:
        await server.shutdown()


def true_to(output, prompt, forward_by_version, params=None):
    """Whether every logprob is that of a plain forward of the version that its span names."""
    ids = [*prompt, *output.token_ids]
    logits = {version: forward(ids) for version, forward in forward_by_version.items()}
    spans = {span.start: span.version for span in output.policy_versions}
    version = None
    for place, token_id in enumerate(output.token_ids):
        version = spans.get(place, version)
        wanted = reference_distribution(logits[version][len(prompt) + place - 1], params or SamplingParams())
        if abs(output.logprobs[place] - float(wanted[token_id])) > 1e-4:
            return False
    return True


async def until_begun(server):
    """Returns once a leg is under way and has had time for some tokens."""
    traffic = server._traffic
    while not any(turn.rid for turn in traffic.turns.values()):  # noqa: ASYNC110  a few turns of the loop
        await asyncio.sleep(0)
    await server.generate([1, 2, 3], {"max_tokens": 3}, f"beside-{id(object())}")


async def test_conformance(checkpoint, make_model, forward_of, update_for, vocab_size):
    """The whole suite passes through SGLang's protocol: nothing is skipped, and logprobs are true."""
    async with serving(checkpoint, max_model_len=128) as server:
        assert isinstance(server, engine_class("sglang"))
        report = await check_server(
            server,
            vocab_size=vocab_size,
            forward=forward_of(make_model(max_len=512)),
            weight_update=update_for(3),
        )
        assert [result.name for result in report.results if result.skipped] == []
        assert (await server.health()).state is EngineState.CLOSED


async def test_requests_in_every_situation(checkpoint, make_model, forward_of, update_for, vocab_size):
    """One server: ends of text, updates under way, too few connections, sleep in parts, a wrong key, what is refused."""
    old = forward_of(make_model(max_len=512))
    prompt = [7, 8, 9]
    async with serving(checkpoint) as server:
        health = await server.health()
        assert health.ready
        assert health.detail == server.versions == "sglang 0.5.17"
        assert server.capabilities().kv_capacity_tokens == server._engine.running.info.max_total_num_tokens
        assert server.max_model_len == 512
        with pytest.raises(UnsupportedError, match="chat_codec"):
            await server.chat_completion({"messages": [{"role": "user", "content": "hi"}]})
        await self_made_end_of_text(server, prompt, old)
        await key_is_needed(server)
        await too_few_connections(server, prompt)
        await updates_under_way(server, prompt, old, update_for(5))
        await an_update_that_is_cancelled(server, update_for(6))
        await sleep_in_parts(server, prompt, update_for(7, seed=0))
        await weights_that_do_not_fit(server, update_for(8))
    assert not list(MEMORY.glob("ostinato-weights-*"))


async def self_made_end_of_text(server, prompt, forward):
    """The checkpoint's own ends of text stop nothing, and its generation config counts for nothing."""
    out = await server.generate(prompt, {"max_tokens": 60, "seed": 4, "stop_token_ids": [95]}, "ends")
    assert len(out.token_ids) == 60 or out.token_ids[-1] == 95
    assert any(token_id < 40 for token_id in out.token_ids[:-1])
    assert true_to(out, prompt, {0: forward})
    plain = await server.generate(prompt, {"max_tokens": 60, "seed": 4}, "no stops")
    assert plain.token_ids[: len(out.token_ids)] == out.token_ids
    assert len(plain.token_ids) == 60


async def key_is_needed(server):
    """Another user of this machine gets nothing, and does not see the key among the processes."""
    engine = server._engine
    stranger = LocalClient(engine.running.client._port, "guessed")
    assert (await stranger.post("/generate", {"input_ids": [1]}, timeout_s=10)).status == 401
    line = Path(f"/proc/{engine.process._process.pid}/cmdline").read_bytes().decode()
    assert engine.running.client._key not in line
    assert "--config" in line
    assert (engine.process.folder / "arguments.yaml").stat().st_mode & 0o077 == 0


async def too_few_connections(server, prompt):
    """Requests beyond the connections there may be wait their turn, and can be aborted while they do."""
    engine = server._engine
    engine.max_legs, before = 2, engine.max_legs
    tasks = [
        asyncio.ensure_future(server.generate(prompt, {"max_tokens": 8, "temperature": 0}, f"few-{index}"))
        for index in range(12)
    ]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (await server.health()).num_waiting == 10
    assert await server.abort(["few-11"]) == 1
    outs = await asyncio.gather(*tasks)
    engine.max_legs = before
    assert outs[11].stop_reason is StopReason.ABORTED
    assert {tuple(out.token_ids) for out in outs[:11]} == {tuple(outs[0].token_ids)}
    assert len(outs[0].token_ids) == 8


async def updates_under_way(server, prompt, old, update):
    """A request goes on over an update: its spans say where, its logprobs are true to each, and its seed's stream goes on."""
    params = {"max_tokens": 300, "seed": 1, "temperature": 0.9}
    task = asyncio.ensure_future(server.generate(prompt, params, "kept"))
    await until_begun(server)
    await server.update_weights(update.manifest, update.make_weights())
    out = await task
    assert len(out.token_ids) == 300
    assert [span.version for span in out.policy_versions] == [0, 5]
    assert all(span.exact for span in out.policy_versions)
    assert out.num_preempted == 1
    forwards = {0: old, 5: update.forward}
    assert true_to(out, prompt, forwards, SamplingParams(temperature=0.9))
    task = asyncio.ensure_future(server.generate(prompt, params, "reset"))
    await until_begun(server)
    await server.reset_prefix_cache()
    whole = await server.generate(prompt, params, "undisturbed")
    assert (await task).token_ids == whole.token_ids


async def an_update_that_is_cancelled(server, update):
    """An update that nobody waits for any more leaves no file, and the server asks for a complete one."""
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow():
        for item in update.make_weights():
            loop.call_soon_threadsafe(begun.set)
            yield item

    task = asyncio.ensure_future(server.update_weights(update.manifest, slow()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not list(MEMORY.glob("ostinato-weights-*"))
    if server.policy_version != update.manifest.version:
        assert (await server.health()).state is EngineState.STALE
        with pytest.raises(EngineNotReadyError):
            await server.generate([1, 2], {"max_tokens": 2}, "stale")
    await server.update_weights(update.manifest, update.make_weights())


async def sleep_in_parts(server, prompt, update):
    """After level 2 the weights wake first, get their update, and then the cache; what was in flight ended aborted."""
    doomed = asyncio.ensure_future(server.generate(prompt, {"max_tokens": 400}, "doomed"))
    await until_begun(server)
    await server.sleep(2)
    assert (await doomed).stop_reason is StopReason.ABORTED
    await server.sleep(1)
    with pytest.raises(EngineNotReadyError, match="weights must be awake"):
        await server.update_weights(update.manifest, update.make_weights())
    await server.wake_up(["weights"])
    await server.update_weights(update.manifest, update.make_weights())
    assert (await server.health()).state is EngineState.ASLEEP
    await server.wake_up(["kv_cache"])
    await server.wake_up()
    out = await server.generate(prompt, {"max_tokens": 5}, "awake")
    assert true_to(out, prompt, {7: update.forward})
    with pytest.raises(EngineInputError, match="tags must be among"):
        await server.wake_up(["everything"])
    with pytest.raises(EngineInputError, match="level must be 1 or 2"):
        await server.sleep(3)


async def weights_that_do_not_fit(server, update):
    """A wrong manifest changes nothing; a stream that breaks off asks for a complete update and fails what is in flight."""
    first, *rest = update.manifest.tensors
    with pytest.raises(ManifestError):
        await server.update_weights(WeightManifest(8, tuple(rest)), update.make_weights())
    part = update.manifest.resting_on("base", [rest[-1].name]).partial()
    assert part is not None
    with pytest.raises(ManifestError, match="send the whole model"):
        await server.update_weights(part, update.make_weights())
    wrong = msgspec.structs.replace(first, dtype="float16")
    with pytest.raises(ManifestError, match="must have dtype float32"):
        await server.update_weights(WeightManifest(8, (wrong, *rest)), update.make_weights())
    task = asyncio.ensure_future(server.generate([1, 2, 3], {"max_tokens": 500}, "in flight"))
    await until_begun(server)

    def breaking_off():
        yield next(update.make_weights())
        raise OSError("the sender went away")

    with pytest.raises(WeightUpdateError, match="the sender went away"):
        await server.update_weights(update.manifest, breaking_off())
    with pytest.raises(EngineNotReadyError, match="complete weights"):
        await task


@pytest.mark.slow
async def test_chat(checkpoint):
    """SGLang's endpoint renders the checkpoint's template; what it does not know is refused, and a pause ends what it does."""
    words = {f"w{index}" if index else "<unk>": index for index in range(96)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", eos_token="w2")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(checkpoint)
    request = {"messages": [{"role": "user", "content": "w10 w11"}], "max_tokens": 3, "temperature": 0}
    async with serving(checkpoint, enforce_eager=True, max_num_batched_tokens=64) as server:
        assert server.capabilities().chat_completion
        answer = await server.chat_completion({**request, "ignore_eos": True})
        params = {"max_tokens": 3, "temperature": 0}
        ids = (await server.generate([3, 10, 11, 4, 5], params, "same")).token_ids
        assert answer["choices"][0]["message"]["content"].split() == [f"w{index}" for index in ids]
        assert answer["usage"]["prompt_tokens"] == 5
        for wrong in ({"tempertaure": 1.0}, {"stream": True}, {"messages": []}):
            with pytest.raises(EngineInputError):
                await server.chat_completion({**request, **wrong})
        with pytest.raises(EngineInputError, match="must be a mapping"):
            await server.chat_completion("hello")


async def test_a_dead_engine(checkpoint):
    """Where SGLang's process dies, everything in flight fails with the cause, and so does whatever comes later."""
    async with serving(checkpoint) as server:
        tasks = [
            asyncio.ensure_future(server.generate([1, 2, 3], {"max_tokens": 400}, f"doomed-{index}"))
            for index in range(4)
        ]
        await until_begun(server)
        os.killpg(server._engine.process._process.pid, signal.SIGKILL)
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, EngineCrashedError), outcome
            assert "must not crash" in str(outcome)
        assert (await server.health()).state is EngineState.FAILED
        with pytest.raises(EngineCrashedError):
            await server.generate([1, 2], {"max_tokens": 2}, "late")
        with pytest.raises(EngineCrashedError):
            await server.pause(PauseMode.ABORT)
        await server.shutdown()
        with pytest.raises(EngineClosedError):
            await server.generate([1, 2], {"max_tokens": 2}, "later")
        with pytest.raises(EngineClosedError):
            await server.start()


def is_alive(pid):
    """Whether a process computes still; one that only waits to be reaped does not."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except FileNotFoundError:
        return False


@pytest.mark.slow
async def test_the_engine_ends_with_its_owner(checkpoint, tmp_path):
    """A killed owner, which can clean up nothing, takes the whole engine with it."""
    program = tmp_path / "owner.py"
    program.write_text(
        "import asyncio, sys\n"
        "from ostinato_engines.sglang_server import SGLangServer\n"
        "async def main():\n"
        f"    server = SGLangServer({str(checkpoint)!r}, launcher={STUB!r})\n"
        "    await server.start()\n"
        "    print(server._engine.process._process.pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    owner = await asyncio.create_subprocess_exec(sys.executable, str(program), stdout=asyncio.subprocess.PIPE)
    assert owner.stdout is not None
    pid = int(await owner.stdout.readline())
    assert Path(f"/proc/{pid}").exists()
    owner.kill()
    await owner.wait()
    async with asyncio.timeout(30):
        while is_alive(pid):  # noqa: ASYNC110  nobody tells of the end of a process that is not ours
            await asyncio.sleep(0.01)


async def test_an_engine_that_does_not_start(checkpoint, tmp_path):
    """The error names what is wrong: the model, the interpreter, its environment, an argument, or SGLang's own words."""
    for options, error, words in (
        ({"model": tmp_path}, EngineLoadError, "config.json"),
        ({"python": tmp_path / "python"}, EngineStartError, "must be an interpreter that runs here"),
        ({"launcher": ("/bin/echo", "no server")}, EngineStartError, r"its process ended"),
        ({"engine_args": {"attention-backend-of-mine": "x"}}, EngineStartError, "unrecognized arguments"),
        ({"start_timeout_s": 0.01}, EngineStartError, "no answer within 0.01 s"),
    ):
        server = SGLangServer(
            options.get("model", checkpoint),
            python=options.get("python", sys.executable),
            launcher=() if "python" in options else options.get("launcher", STUB),
            engine_args=options.get("engine_args"),
            start_timeout_s=options.get("start_timeout_s", 60.0),
        )
        with pytest.raises(error, match=words):
            await server.start()
        assert (await server.health()).state is EngineState.NEW
        await server.shutdown()
    with pytest.raises(EngineInputError, match="must leave sampling-backend to SGLangServer"):
        SGLangServer(checkpoint, engine_args={"sampling-backend": "pytorch"})
    with pytest.raises(EngineInputError, match="max_model_len must be an integer"):
        SGLangServer(checkpoint, max_model_len=0)


async def test_an_engine_that_cannot_compute(checkpoint, tmp_path):
    """A server that comes up and dies at its first request has not started: its log says why, before anybody needs it."""
    program = tmp_path / "dying.py"
    program.write_text(
        "import asyncio, os, sys\n"
        "from ostinato_engines.sglang_engine.running import REQUIRED\n"
        "from ostinato_engines.testing.sglang_stub.arguments import load_plugins, read_arguments\n"
        "from ostinato_engines.testing.sglang_stub.web import Response, WebServer\n"
        "arguments = read_arguments(sys.argv[1:], load_plugins())\n"
        "info = {'version': '0', 'max_req_input_len': 9, 'max_total_num_tokens': 9, 'sampling_backend': 'ostinato'}\n"
        "def says(content):\n"
        "    async def answer(request):\n"
        "        return Response(content)\n"
        "    return answer\n"
        "async def dies(request):\n"
        "    print('RuntimeError: failed to dispatch data type Float', file=sys.stderr, flush=True)\n"
        "    os._exit(1)\n"
        "routes = {('GET', '/model_info'): says({'model_path': 'm'}), ('GET', '/server_info'): says(info),\n"
        "    ('GET', '/openapi.json'): says({'paths': dict.fromkeys(REQUIRED, {})}), ('POST', '/generate'): dies}\n"
        "asyncio.run(WebServer(routes, arguments.api_key).serve(arguments.host, arguments.port))\n"
    )
    server = SGLangServer(checkpoint, launcher=(sys.executable, str(program)))
    with pytest.raises(EngineStartError, match=r"must compute with model(?s:.*)failed to dispatch data type Float"):
        await server.start()
    assert (await server.health()).state is EngineState.NEW
    await server.shutdown()


async def test_an_interpreter_without_sglang(checkpoint):
    """An environment without SGLang is told with the command that would install it there."""
    if importlib.util.find_spec("sglang") is not None:
        pytest.skip("sglang is installed here")
    with pytest.raises(MissingDependencyError, match=r"-m pip install sglang"):
        await SGLangServer(checkpoint).start()
