"""A replica in another process keeps the whole contract, and is the same server as in this one."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from ostinato_engines import EngineClosedError, EngineState, SamplingParams, UnsupportedError, WeightManifest
from ostinato_engines.testing import WeightUpdate, check_server

pytest.importorskip("zmq")

from ostinato_rollout.transport import RemoteServer

VOCAB = 96
SCRIPTED = f"""
from ostinato_engines import Capabilities, EngineInputError
from ostinato_engines.testing import ScriptedServer

class Scripted(ScriptedServer):
    def __init__(self, model):
        super().__init__(lambda request: [(sum(request.prompt_ids) + place) % {VOCAB} for place in range(64)], max_model_len=128)
    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        if not all(0 <= token_id < {VOCAB} for token_id in prompt_ids):
            raise EngineInputError("prompt_ids must be in the vocabulary, got others; use the tokenizer of this model")
        return await super().generate(prompt_ids, sampling_params, request_id, media)
    def capabilities(self):
        return Capabilities(engine="scripted", logprobs=True, abort=True)
"""


@pytest.fixture
async def serve():
    """Starts replicas in processes of their own; gives a remote server for each, and ends those that are left."""
    processes = []

    async def start(engine, model="model", *, settings="{}"):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ostinato_rollout.transport", engine, str(model), "--settings", settings),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        processes.append(process)
        async with asyncio.timeout(60):
            address = (await process.stdout.readline()).decode().strip()
        return RemoteServer(address), process

    yield start
    for process in processes:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(20):
            await process.wait()


async def test_a_scripted_replica_in_another_process_passes_the_suite(serve, tmp_path):
    """The quick suite holds across the processes, and the replica's process ends with the server, in good order."""
    (tmp_path / "scripted.py").write_text(SCRIPTED)
    remote, process = await serve(f"{tmp_path}/scripted.py:Scripted")
    await remote.start()
    report = await check_server(remote, vocab_size=VOCAB)
    done = {result.name for result in report.results if not result.skipped}
    assert {"turns", "concurrency", "cancellation", "abort", "bad_requests", "shutdown"} <= done
    assert remote.stats.num_resent == 0
    async with asyncio.timeout(20):
        assert await process.wait() == 0


@pytest.fixture
def make_model():
    """A function that builds a tiny random model; the same seed gives the same weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)

    def make(seed):
        config = transformers.Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=48,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            initializer_range=0.2,
        )
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(config).eval()

    return make


def forward_of(model):
    """Ids to float64 logits [n, vocab] of a plain forward."""
    import torch

    def forward(ids):
        with torch.no_grad():
            return model(input_ids=torch.tensor([list(ids)])).logits[0].double().numpy()

    return forward


async def test_the_embedded_engine_in_another_process_passes_the_suite(serve, make_model, tmp_path):
    """Nothing of the contract is skipped: true logprobs, pauses, sleep, and weights that come through shared memory."""
    model, other = make_model(0), make_model(1)
    model.save_pretrained(tmp_path / "model")
    tensors = dict(other.named_parameters())
    update = WeightUpdate(
        WeightManifest.from_tensors(3, tensors.items()), lambda: iter(tensors.items()), forward_of(other)
    )
    remote, process = await serve("transformers", tmp_path / "model", settings='{"device": "cpu", "max_num_seqs": 16}')
    await remote.start()
    assert (remote.max_model_len, remote.capabilities().prefix_reuse) == (128, True)
    report = await check_server(remote, vocab_size=VOCAB, forward=forward_of(model), weight_update=update)
    assert [result.name for result in report.results if result.skipped] == []
    async with asyncio.timeout(20):
        assert await process.wait() == 0


async def test_a_replica_that_is_told_to_end_tells_its_callers(serve, tmp_path):
    """A service that is terminated ends its callers' calls at once, and its process ends in good order."""
    (tmp_path / "scripted.py").write_text(SCRIPTED)
    remote, process = await serve(f"{tmp_path}/scripted.py:Scripted")
    assert (await remote.health()).state is EngineState.NEW
    await remote.start()
    assert (await remote.health()).ready
    with pytest.raises(UnsupportedError, match="cannot update its weights"):
        await remote.update_weights(WeightManifest(1, ()), [])
    process.terminate()
    async with asyncio.timeout(20):
        assert await process.wait() == 0
    await remote.disconnect()
    with pytest.raises(EngineClosedError, match="is shut down"):
        await remote.generate([1], SamplingParams(), "late")
