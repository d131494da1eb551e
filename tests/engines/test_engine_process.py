"""An engine in a process of its own is the same server: calls, errors, cancellation, weights, and every way to end."""

import asyncio
import importlib.util
import os
import re
import signal
import sys
import tempfile

import pytest

from ostinato_engines import (
    EngineClosedError,
    EngineCrashedError,
    EngineInputError,
    EngineLoadError,
    EngineNotReadyError,
    EngineStartError,
    EngineState,
    MissingDependencyError,
    PauseMode,
    SamplingParams,
    SamplingParamsError,
    StopReason,
    UnsupportedError,
)
from ostinato_engines.engine_process import EngineProcess
from ostinato_engines.testing import WeightUpdate, check_server

SOURCE = '''
import asyncio, os
from ostinato_engines import (
    AsyncServerBase, Capabilities, EngineInputError, PolicySpan, StopReason, TokenOutput, UnsupportedError
)

class OwnError(EngineInputError):
    """Known here only."""

class Echo(AsyncServerBase):
    def __init__(self, model, *, max_model_len=99, fail="", flavour="plain"):
        self.max_model_len, self.flavour, self.slow, self.cancelled = max_model_len, flavour, [], 0
        if fail == "exit":
            print("ValueError: no room for this model", flush=True)
            os._exit(3)
        if fail == "raise":
            raise ValueError("the constructor says no")
    def capabilities(self):
        return Capabilities(engine=f"echo {self.flavour}", abort=True)
    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        if request_id == "own":
            raise OwnError("prompt must please, got displeasure; try again")
        if request_id == "bare":
            return list(prompt_ids)
        if request_id == "odd":
            raise KeyError("what")
        if request_id == "die":
            print("MemoryError: the host is full", flush=True)
            os._exit(9)
        if request_id == "slow":
            try:
                await asyncio.sleep(600)
            finally:
                self.cancelled += 1
        spans = (PolicySpan(0, 3), PolicySpan(1, 4, False))
        return TokenOutput(list(prompt_ids), [-0.5] * len(prompt_ids), StopReason.STOP, 7, spans, 5, self.cancelled)
    async def abort(self, request_ids=None):
        return 0 if request_ids is None else len(request_ids)
    async def chat_completion(self, raw_request):
        variable = os.environ.get(raw_request) if isinstance(raw_request, str) else None
        return {"echo": raw_request, "flavour": self.flavour, "variable": variable}
'''


@pytest.fixture
def echo(tmp_path):
    """The place of a server class that needs no torch."""
    file = tmp_path / "echo.py"
    file.write_text(SOURCE)
    return f"{file}:Echo"


async def test_calls_and_results_cross_whole(echo):
    """Arguments, results and settings arrive as they were, and the process tells its versions."""
    async with EngineProcess(echo, "model", settings={"max_model_len": 44, "flavour": "mint", "unknown": 1}) as server:
        assert (server.max_model_len, server.capabilities().engine) == (44, "echo mint")
        assert server.versions.startswith("Python ")
        params = SamplingParams(temperature=0.5, stop_token_ids=(7,), seed=3)
        outs = await asyncio.gather(*(server.generate([index, 2], params, f"r{index}") for index in range(50)))
        assert [out.token_ids for out in outs] == [[index, 2] for index in range(50)]
        out = outs[0]
        assert (out.logprobs, out.stop_reason, out.stop_token_id, out.num_cached_tokens) == (
            [-0.5] * 2,
            StopReason.STOP,
            7,
            5,
        )
        assert [(span.start, span.version, span.exact) for span in out.policy_versions] == [(0, 3, True), (1, 4, False)]
        bare = await server.generate([4, 2], params, "bare")
        assert (bare.token_ids, bare.logprobs) == ([4, 2], None)
        assert await server.abort(["a", "b"]) == 2
        assert await server.abort() == 0
        assert await server.chat_completion({"messages": [{"role": "user"}]}) == {
            "echo": {"messages": [{"role": "user"}]},
            "flavour": "mint",
            "variable": None,
        }
        assert (await server.health()).ready
    assert (await server.health()).state is EngineState.CLOSED
    with pytest.raises(EngineClosedError):
        await server.generate([1], {}, "late")


async def test_the_process_has_variables_of_its_own(echo, monkeypatch, tmp_path):
    """What is given is added to the environment, and another interpreter is not led to this one's packages."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with EngineProcess(echo, "model", environment={"OSTINATO_FLAVOUR": "lime"}) as server:
        told = (await server.chat_completion("OSTINATO_FLAVOUR"))["variable"]
        assert (told, (await server.chat_completion("PYTHONPATH"))["variable"]) == ("lime", str(tmp_path))
    # The same interpreter under another name.
    link = tmp_path / "python"
    link.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    link.chmod(0o755)
    async with EngineProcess(echo, "model", python=link) as server:
        assert (await server.chat_completion("PYTHONPATH"))["variable"] is None


async def test_errors_cross_as_what_they_are(echo):
    """Errors of the contract keep their class and message, also subclasses; others say what they were."""
    async with EngineProcess(echo, "model") as server:
        with pytest.raises(EngineInputError, match="must please, got displeasure"):
            await server.generate([1], {}, "own")
        with pytest.raises(EngineCrashedError, match="KeyError: 'what'"):
            await server.generate([1], {}, "odd")
        with pytest.raises(SamplingParamsError, match="tempertaure"):
            await server.generate([1], {"tempertaure": 1}, "a")
        with pytest.raises(EngineInputError, match="media must be empty"):
            await server.generate([1], {}, "a", media=[object()])
        with pytest.raises(EngineInputError, match="sequence of integers"):
            await server.generate([None], {}, "a")
        with pytest.raises(EngineInputError, match="must get plain values"):
            await server.chat_completion({"messages": object()})
        for refused in (server.sleep(), server.pause(PauseMode.WAIT), server.update_weights(None, [])):
            with pytest.raises(UnsupportedError):
                await refused
        assert (await server.generate([1], {}, "a")).token_ids == [1]


async def test_a_cancelled_request_has_ended_there_too(echo):
    """Cancelling the caller cancels the engine's work before the caller goes on."""
    async with EngineProcess(echo, "model") as server:
        task = asyncio.ensure_future(server.generate([1], {}, "slow"))
        await server.health()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await server.generate([1], {}, "after")).num_preempted == 1


async def test_a_process_that_dies_fails_everything_with_its_last_words(echo):
    """Requests in flight, later ones and health all tell of the death, with the line of the log that matters."""
    server = EngineProcess(echo, "model")
    await server.start()
    tasks = [asyncio.ensure_future(server.generate([1], {}, name)) for name in ("slow", "die")]
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(outcome, EngineCrashedError)
        assert "MemoryError: the host is full" in str(outcome)
    assert (await server.health()).state is EngineState.FAILED
    with pytest.raises(EngineCrashedError, match="the host is full"):
        await server.generate([1], {}, "late")
    await server.shutdown()
    await server.shutdown()


async def test_a_killed_process(echo):
    """A signal that leaves no last words is told as well, and shutdown still cleans up."""
    server = EngineProcess(echo, "model")
    await server.start()
    task = asyncio.ensure_future(server.generate([1], {}, "slow"))
    await server.health()
    os.kill(server._process.pid, signal.SIGKILL)
    with pytest.raises(EngineCrashedError, match="the process is gone"):
        await task
    folder = server._folder
    assert folder.is_dir()
    await server.shutdown()
    assert not folder.exists()


async def test_shutdown_ends_what_is_in_flight(echo):
    """Requests that still run when the server is shut down fail with the error that says so, and the process is gone."""
    server = EngineProcess(echo, "model")
    await server.start()
    pid = server._process.pid
    task = asyncio.ensure_future(server.generate([1], {}, "slow"))
    await server.health()
    await server.shutdown()
    with pytest.raises(EngineClosedError):
        await task
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("engine", "settings", "python", "kind", "words"),
    [
        ("nowhere.py:Echo", {}, sys.executable, EngineLoadError, "existing Python file"),
        ("ECHO", {"fail": "raise"}, sys.executable, EngineStartError, "ValueError: the constructor says no"),
        ("ECHO", {"fail": "exit"}, sys.executable, EngineStartError, "ValueError: no room for this model"),
        ("ECHO", {}, "/no/such/python", EngineStartError, "interpreter that runs here"),
        ("ECHO", {}, "/bin/false", EngineStartError, "must hold this package"),
    ],
)
async def test_a_start_that_fails_says_why(echo, engine, settings, python, kind, words):
    """No such class, an engine that raises or dies, no interpreter, no package in it: each is told, with the cure."""
    server = EngineProcess(echo if engine == "ECHO" else engine, "model", settings=settings, python=python)
    with pytest.raises(kind, match=words):
        await server.start()
    with pytest.raises(EngineNotReadyError):
        await server.generate([1], {}, "a")
    await server.shutdown()


async def test_a_setting_that_somebody_chose_is_not_lost(echo):
    """A required setting that the class there does not name keeps it from starting; one that it names arrives."""
    async with EngineProcess(echo, "model", settings={"flavour": "mint"}, required=["flavour"]) as server:
        assert server.capabilities().engine == "echo mint"
    server = EngineProcess(echo, "model", settings={"colour": "red"}, required=["colour"])
    with pytest.raises(EngineLoadError, match="Echo must take colour, which is set"):
        await server.start()
    await server.shutdown()


async def test_the_log_can_be_kept(echo, tmp_path):
    """What the process printed stays in the file that was named for it, which the error names too."""
    log = tmp_path / "new" / "engine.log"
    server = EngineProcess(echo, "model", settings={"fail": "exit"}, log_path=log)
    with pytest.raises(EngineStartError, match=f"(?s)no room for this model.*the whole log is in {log}"):
        await server.start()
    await server.shutdown()
    assert "ValueError: no room for this model" in log.read_text()
    async with EngineProcess(echo, "model", log_path=log):
        assert log.read_text() == ""
    (tmp_path / "file").touch()
    server = EngineProcess(echo, "model", log_path=tmp_path / "file" / "below")
    with pytest.raises(EngineStartError, match="log_path must be a file that can be written"):
        await server.start()
    await server.shutdown()


async def test_a_long_path_of_temporary_files(echo, monkeypatch, tmp_path):
    """Where the system's folder for temporary files is too deep for a socket, the ends meet elsewhere, and leave nothing."""
    deep = tmp_path / ("deep" * 30)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    server = EngineProcess(echo, "model")
    async with server:
        assert (await server.generate([1], {}, "a")).token_ids == [1]
        folder = server._folder
        assert not folder.is_relative_to(deep)
    assert not list(deep.iterdir())
    assert not folder.exists()


async def test_what_the_environment_lacks_is_told_with_its_interpreter(tmp_path):
    """An environment without this package, and one without the engine, are both named with what is to be installed."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -s "$@"\n')
    bare.chmod(0o755)
    server = EngineProcess("transformers", "model", python=bare)
    with pytest.raises(
        EngineStartError, match=f"(?s)under {re.escape(str(bare))}.*install this package|install it there"
    ):
        await server.start()
    await server.shutdown()
    if importlib.util.find_spec("vllm") is None:
        server = EngineProcess("vllm", "model")
        with pytest.raises(
            MissingDependencyError, match=f"under {re.escape(sys.executable)}, .*pip install 'ostinato-engines.*` there"
        ):
            await server.start()
        await server.shutdown()


async def test_nothing_is_left_of_a_server_that_did_not_start(echo, monkeypatch, tmp_path):
    """One that is never started makes no folder, one that fails to start removes its own, and can be tried again."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    server = EngineProcess(echo, "model", settings={"fail": "exit"})
    for _ in range(2):
        assert not list((tmp_path / "temporary").iterdir())
        with pytest.raises(EngineStartError, match="no room for this model"):
            await server.start()
    assert not list((tmp_path / "temporary").iterdir())
    await server.shutdown()


async def test_a_start_has_a_deadline(echo):
    """An engine that does not answer in time is ended, and that is told."""
    server = EngineProcess(echo, "model", start_timeout_s=0.0)
    with pytest.raises(EngineStartError, match=r"must start under .* within 0 s"):
        await server.start()
    await server.shutdown()


def test_settings_must_be_plain():
    """What cannot cross a process is refused at once."""
    with pytest.raises(EngineInputError, match="settings must be plain values"):
        EngineProcess("transformers", "model", settings={"model": object()})


@pytest.mark.slow
async def test_conformance_of_the_embedded_engine_elsewhere(make_model, forward_of, vocab_size, tmp_path):
    """The whole suite passes through a process, weight updates and exact spans included."""
    make_model(max_len=256).save_pretrained(tmp_path)
    await _conforms("transformers", tmp_path, {"dtype": "float32", "device": "cpu"}, make_model, forward_of, vocab_size)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_conformance_of_vllm_elsewhere(make_model, forward_of, vocab_size, tmp_path):
    """An engine with versions of its own serves a caller with others: the suite passes, and both versions are told."""
    python = os.environ.get("OSTINATO_VLLM_PYTHON")
    if not python:
        pytest.skip("OSTINATO_VLLM_PYTHON names no interpreter with vllm and this package")
    make_model(max_len=256, head_dim=32, hidden_size=64).save_pretrained(tmp_path)
    settings = {"dtype": "float32", "enforce_eager": True, "engine_args": {"block_size": 32}}
    shape = {"head_dim": 32, "hidden_size": 64}
    server = await _conforms("vllm", tmp_path, settings, make_model, forward_of, vocab_size, python=python, **shape)
    assert "vllm" in server.versions


async def _conforms(engine, folder, settings, make_model, forward_of, vocab_size, *, python=sys.executable, **shape):
    from ostinato_engines import WeightManifest

    new = make_model(max_len=256, seed=1, **shape)
    named = [(name, tensor.detach()) for name, tensor in new.named_parameters()]
    update = WeightUpdate(WeightManifest.from_tensors(1, named), lambda: iter(named), forward_of(new))
    server = EngineProcess(engine, folder, python=python, settings=settings)
    await server.start()
    await check_server(
        server, vocab_size=vocab_size, forward=forward_of(make_model(max_len=256, **shape)), weight_update=update
    )
    return server


async def test_a_process_that_stands_still_keeps_nobody_and_is_ended(echo, monkeypatch):
    """A call to a stopped process can be cancelled, and so can its shutdown, which ends the process all the same."""
    monkeypatch.setattr("ostinato_engines.engine_process.client._GIVE_UP_S", 0.1)
    server = EngineProcess(echo, "m")
    await server.start()
    process = server._process
    os.kill(process.pid, signal.SIGSTOP)
    for call in (server.generate([1], SamplingParams(), "r"), server.shutdown()):
        calling = asyncio.ensure_future(call)
        await asyncio.sleep(0.05)
        calling.cancel()
        async with asyncio.timeout(30):
            await asyncio.wait([calling])
        assert calling.cancelled()
    assert process.returncode == -signal.SIGKILL
