"""Parts of the SGLang adapter that need no server: its command line, its plugin's folder, its HTTP, its weights."""

import asyncio
import json
import sys
from importlib.metadata import distributions

import pytest

from ostinato_engines import EngineCrashedError, EngineLoadError, TokenOutput, WeightManifest, WeightUpdateError
from ostinato_engines.sglang_engine.checkpoint_config import read_config
from ostinato_engines.sglang_engine.http import LOOPBACK, LocalClient
from ostinato_engines.sglang_engine.launch import (
    BACKEND,
    LaunchOptions,
    command,
    process_environment,
    server_arguments,
    write_key,
    write_plugin,
)
from ostinato_engines.sglang_engine.protocol import FinishReason, Generated, MetaInfo
from ostinato_engines.sglang_engine.turn import Halt, Turn
from ostinato_engines.types import SamplingParams, StopReason


def options(**changed):
    """What a server was given."""
    fields = {
        "model": "/m",
        "python": sys.executable,
        "launcher": (),
        "dtype": "auto",
        "max_model_len": None,
        "max_num_seqs": None,
        "max_num_batched_tokens": None,
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": None,
        "enforce_eager": False,
        "seed": 0,
        "cast_weights": False,
        "own_chat": True,
        "environment": {},
        "more": {},
    }
    return LaunchOptions(**{**fields, **changed})


@pytest.fixture
def config(tmp_path):
    """Of a checkpoint whose text model is one of several."""
    text = {"vocab_size": 9, "max_position_embeddings": 64, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": True, "text_config": text}))
    return read_config(str(tmp_path))


def test_the_command_line(config, tmp_path):
    """Flags, lists and mappings are given as SGLang reads them, what is unset is not given, and the key is in a file alone."""
    more = {"mem-fraction-static": 0.5, "enable_memory_saver": False, "lora_paths": ["a", "b"], "json_args": {"x": 1}}
    arguments = server_arguments(options(more=more, enforce_eager=True), config, port=7)
    line = command(options(), arguments, write_key(tmp_path, "secret"))
    text = " ".join(line)
    assert line[:3] == [sys.executable, "-m", "sglang.launch_server"]
    assert "--context-length 72" in text
    assert "--dtype bfloat16" in text
    assert "--mem-fraction-static 0.5" in text
    assert "--lora-paths a b" in text
    assert line[line.index("--json-args") + 1] == '{"x":1}'
    assert "--disable-cuda-graph" in line
    assert "--enable-memory-saver" not in line
    assert "--max-running-requests" not in line
    assert "secret" not in text
    assert json.loads((tmp_path / "arguments.yaml").read_text()) == {"api-key": "secret"}


def test_another_interpreter_gets_none_of_our_packages(tmp_path, monkeypatch):
    """What leads Python to this environment's packages stays here; what the user sets for SGLang's processes counts."""
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("VIRTUAL_ENV", "/ours")
    elsewhere = process_environment(options(python="/other/bin/python", environment={"SGLANG_X": "1"}), tmp_path)
    assert elsewhere["PYTHONPATH"] == str(tmp_path)
    assert "VIRTUAL_ENV" not in elsewhere
    assert elsewhere["SGLANG_X"] == "1"
    here = process_environment(options(environment={"PYTHONPATH": "/theirs"}), tmp_path)
    assert here["PYTHONPATH"].endswith(":/theirs")


def test_the_plugin_is_an_installed_package(tmp_path):
    """A Python that has the folder on its path finds one entry point of SGLang's plugins there, and the name that it registers."""
    write_plugin(tmp_path)
    (found,) = distributions(path=[str(tmp_path)])
    (point,) = found.entry_points
    assert (point.group, point.attr) == ("sglang.srt.plugins", "register")
    assert f'BACKEND = "{BACKEND}"' in (tmp_path / point.module / "hooks.py").read_text()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"vocab_size": 3}', '{"vocab_size": "many", "max_position_embeddings": 4}']
)
def test_a_folder_that_is_no_checkpoint(tmp_path, text):
    """A config that is missing, damaged or of something else is refused with the folder's name."""
    if text:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(EngineLoadError, match=r"must be a folder with a config\.json of a language model"):
        read_config(str(tmp_path))


@pytest.mark.parametrize(
    ("reply", "status", "text"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ntrue", 200, "true"),
        (b'HTTP/1.1 400 X\r\ncontent-length: 32\r\n\r\n{"error":{"message":"too much"}}', 400, "too much"),
        (b'HTTP/1.1 404 X\r\ncontent-length: 22\r\n\r\n{"detail":"Not Found"}', 404, "Not Found"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n", 200, "abc"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", None, "broke off"),
        (b"nonsense\r\n\r\n", None, "broke off"),
        (b"", None, "broke off"),
    ],
)
async def test_http(reply, status, text):
    """Whole and chunked answers are read, errors give their message, and what breaks off is a broken connection."""

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, LOOPBACK, 0)
    async with server:
        client = LocalClient(server.sockets[0].getsockname()[1], "key")
        if status is None:
            with pytest.raises(ConnectionError, match=text):
                await client.get("/", timeout_s=10)
            return
        found = await client.get("/", timeout_s=10)
        assert found.status == status
        assert found.text == text


def answered(token_ids, kind, **meta):
    """SGLang's answer to a leg."""
    told = [(-0.5, token_id, None) for token_id in token_ids]
    return Generated(token_ids, MetaInfo(FinishReason(kind), output_token_logprobs=told, **meta))


def turn(**params):
    """A request of six tokens."""
    return Turn([1, 2], SamplingParams(**params), 6, 0)


def test_legs_make_one_answer():
    """Tokens, logprobs and spans of several legs are one output; a foreign end of text and an interruption go on."""
    request = turn(stop_token_ids=(9,))
    request.begin_leg("a", 3)
    assert request.take(answered([4, 5], "stop", cached_tokens=1)) is None
    request.halt = Halt.INTERRUPT
    assert request.take(answered([6], "abort", cached_tokens=2)) is None
    request.end_leg()
    request.begin_leg("b", 4)
    assert request.take(answered([7, 9], "stop")) is StopReason.STOP
    output = request.output(StopReason.STOP)
    assert isinstance(output, TokenOutput)
    assert output.token_ids == [4, 5, 6, 7, 9]
    assert output.logprobs == [-0.5] * 5
    assert [(span.start, span.version) for span in output.policy_versions] == [(0, 3), (3, 4)]
    assert (output.stop_token_id, output.num_cached_tokens, output.num_preempted) == (9, 1, 1)


def test_how_a_leg_ends_a_request():
    """An abort that was asked for ends with the tokens so far, one that was not is an error, and a stop id counts in any leg, once its logprob is
    told."""
    aborted = turn()
    aborted.halt = Halt.ABORT
    assert aborted.take(answered([4], "abort")) is StopReason.ABORTED
    stopped = turn(stop_token_ids=(4,))
    stopped.halt = Halt.INTERRUPT
    assert stopped.take(answered([4], "abort")) is StopReason.STOP
    full = turn()
    full.halt = Halt.ABORT
    assert full.take(answered([4] * 6, "abort")) is StopReason.LENGTH
    untold = turn(stop_token_ids=(4,))
    untold.halt = Halt.INTERRUPT
    assert untold.take(Generated([4], MetaInfo(FinishReason("abort"), output_token_logprobs=[]))) is None
    assert untold.token_ids == []
    with pytest.raises(EngineCrashedError, match="got an abort from sglang"):
        turn().take(answered([], "abort"))
    with pytest.raises(EngineCrashedError, match="must be those of the tokens"):
        turn().take(Generated([5], MetaInfo(FinishReason("length"), output_token_logprobs=[(-1.0, 6, None)])))
    only = turn(top_k=1)
    only.take(answered([4], "length"))
    assert only.logprobs == [0.0]


async def test_weights_that_are_on_no_shared_device():
    """With share_device, tensors of the host are refused before anything is sent, and a stream's failure is told."""
    torch = pytest.importorskip("torch")
    from ostinato_engines.sglang_engine.device_weights import DeviceWeights

    named = [("w", torch.zeros(2))]
    manifest = WeightManifest.from_tensors(1, named)
    with pytest.raises(WeightUpdateError, match="w must lie on a device that shares memory"):
        await DeviceWeights(manifest, named).next_bucket()

    def failing():
        raise OSError("gone")
        yield

    with pytest.raises(WeightUpdateError, match="gone"):
        await DeviceWeights(manifest, failing()).next_bucket()
