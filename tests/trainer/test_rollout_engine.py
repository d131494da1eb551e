"""From keys to an engine: what is set reaches it, what is not set stays its own choice."""

import asyncio
import sys
from pathlib import Path
from typing import get_args

import pytest

from ostinato_engines import EngineLoadError
from ostinato_engines.engine_process import EngineProcess
from ostinato_engines.loading import ENGINES
from ostinato_engines.sglang_server import SGLangServer
from ostinato_engines.transformers_server import TransformersServer
from ostinato_engines.vllm_server import VLLMServer
from ostinato_rollout import Failure, FailureKind, ReplicaState
from ostinato_trainer.config import Config
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.config.schema import schema_keys
from ostinato_trainer.errors import ConfigError
from ostinato_trainer.rollout_engine import ENGINE_LOG, build_pool, build_server

ROLLOUT = "actor_rollout_ref.rollout"
BASE = ("actor_rollout_ref.model.path=m", "data.train_files=a.parquet", "trainer.device=cpu")

SERVER = """
from ostinato_engines import AsyncServerBase

class Own(AsyncServerBase):
    def __init__(self, model, *, seed, enforce_eager=False):
        self.got = {"model": model, "seed": seed, "enforce_eager": enforce_eager}
    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        return [0]
    async def chat_completion(self, raw_request):
        return {}
"""


@pytest.fixture
def own(tmp_path: Path) -> tuple[str, str]:
    """A third party's server, named by path."""
    (tmp_path / "own.py").write_text(SERVER)
    prefix = f"{ROLLOUT}.agent.custom_async_server"
    return f"{prefix}.path={tmp_path / 'own.py'}", f"{prefix}.name=Own"


def test_every_name_of_an_engine_has_an_adapter() -> None:
    """What the key may say is what the engines package knows."""
    names = schema_keys(Config)[f"{ROLLOUT}.name"].type
    assert set(get_args(names)) == set(ENGINES)


def test_the_embedded_engine_is_the_default() -> None:
    """Without a word about engines the model is served in this process."""
    assert isinstance(build_server(load_config([], BASE)), TransformersServer)


def test_every_key_reaches_vllm() -> None:
    """Each key that vLLM's adapter reads is the option of the same meaning; without it the adapter's default stands."""
    named = f"{ROLLOUT}.name=vllm"
    plain = build_server(load_config([], [*BASE, named]))
    assert isinstance(plain, VLLMServer)
    options = plain._options
    assert (options.gpu_memory_utilization, options.enforce_eager, options.max_num_batched_tokens) == (
        None,
        False,
        None,
    )
    keys = {
        "tensor_model_parallel_size": 2,
        "gpu_memory_utilization": 0.4,
        "enforce_eager": "true",
        "max_num_batched_tokens": 512,
        "max_num_seqs": 7,
        "max_model_len": 2048,
        "engine_kwargs.vllm.block_size": 32,
    }
    server = build_server(load_config([], [*BASE, named, *(f"{ROLLOUT}.{key}={value}" for key, value in keys.items())]))
    assert isinstance(server, VLLMServer)
    options = server._options
    assert (options.tensor_parallel_size, options.gpu_memory_utilization, options.enforce_eager) == (2, 0.4, True)
    assert (options.max_num_batched_tokens, options.max_num_seqs, options.max_model_len) == (512, 7, 2048)
    assert (dict(options.more), options.dtype, options.cast_weights) == ({"block_size": 32}, "float32", True)


def test_an_engine_that_starts_its_own_process_gets_the_interpreter() -> None:
    """A class that takes an interpreter is not put into a process of ours: it is told which one to start."""
    keys = (
        f"{ROLLOUT}.name=sglang",
        f"{ROLLOUT}.engine_python=/envs/sglang/bin/python",
        f"{ROLLOUT}.enforce_eager=true",
    )
    server = build_server(load_config([], [*BASE, *keys, f"{ROLLOUT}.engine_kwargs.sglang.log_level=info"]))
    assert isinstance(server, SGLangServer)
    options = server._options
    assert (options.python, options.enforce_eager, options.cast_weights) == ("/envs/sglang/bin/python", True, True)
    assert dict(options.more) == {"log_level": "info"}


def test_a_server_of_one_s_own_takes_what_it_names_of_what_is_set(own: tuple[str, str]) -> None:
    """It is made with the run's settings; a key that somebody set and it does not take is refused, not lost."""
    server = build_server(load_config([], [*BASE, *own, f"{ROLLOUT}.seed=5", f"{ROLLOUT}.enforce_eager=true"]))
    assert server.got == {"model": "m", "seed": 5, "enforce_eager": True}  # type: ignore[attr-defined]
    with pytest.raises(EngineLoadError, match="Own must take gpu_memory_utilization, which is set"):
        build_server(load_config([], [*BASE, *own, f"{ROLLOUT}.gpu_memory_utilization=0.5"]))


async def test_an_interpreter_puts_any_engine_into_a_process_of_its_own(own: tuple[str, str], tmp_path: Path) -> None:
    """With engine_python the same class is made by the same rules elsewhere, and its log lies in the run's folder."""
    elsewhere = (f"{ROLLOUT}.engine_python={sys.executable}", f"trainer.default_local_dir={tmp_path / 'run'}")
    server = build_server(load_config([], [*BASE, *own, *elsewhere]))
    assert isinstance(server, EngineProcess)
    async with server:
        assert await server.generate([1], {}, "a") == await server.generate([1], {}, "b")
        assert "torch" in server.versions
    assert (tmp_path / "run" / ENGINE_LOG).is_file()
    server = build_server(load_config([], [*BASE, *own, *elsewhere, f"{ROLLOUT}.gpu_memory_utilization=0.5"]))
    with pytest.raises(EngineLoadError, match="Own must take gpu_memory_utilization, which is set"):
        await server.start()
    await server.shutdown()


async def test_every_key_reaches_the_pool(own: tuple[str, str]) -> None:
    """The keys of `rollout.pool` are the pool's; an engine that is lost is made anew from the same keys, unless that is forbidden."""
    pool_of = f"{ROLLOUT}.pool"
    keys = ("restarts.max_restarts=5", "restarts.first_backoff_s=0", "health_interval_s=null", "no_replica_timeout_s=7")
    pool = build_pool(load_config([], [*BASE, *own, *(f"{pool_of}.{key}" for key in keys)]))
    await pool.start()
    try:
        (first,) = pool.servers
        pool.take_out(first, Failure("replica 0", FailureKind.ENGINE, "it died"))
        async with asyncio.timeout(20):
            while pool.states[0] is not ReplicaState.SERVING:  # noqa: ASYNC110  a restart has no event of its own
                await asyncio.sleep(0.001)
        (second,) = pool.servers
        assert second is not first
        assert second.got == first.got
        assert (pool._watching, pool._fleet._no_replica_timeout_s) == (None, 7)
        assert pool._revival._budget._policy.max_restarts == 5
    finally:
        await pool.shutdown()
    bare = build_pool(load_config([], [*BASE, *own, f"{pool_of}.restarts.max_restarts=0"]))
    assert not bare._fleet.restarts


def test_each_engine_process_has_a_log_of_its_own(tmp_path: Path) -> None:
    """What a dead engine has printed is not overwritten by the one in its place."""
    keys = (f"{ROLLOUT}.engine_python={sys.executable}", f"trainer.default_local_dir={tmp_path}")
    pool = build_pool(load_config([], [*BASE, *keys]))
    make_server = pool._make_server
    assert make_server is not None
    servers = [*pool.servers, make_server(0), make_server(0)]
    assert [server._kept_log.name for server in servers] == [ENGINE_LOG, "engine.1.log", "engine.2.log"]


@pytest.mark.parametrize(
    "key", ["restarts.max_restarts=-1", "restarts.jitter=2", "health_interval_s=0", "sync_pause=stop"]
)
def test_values_that_no_pool_can_have_are_refused(key: str) -> None:
    """A wrong value is an error that names its key."""
    with pytest.raises(ConfigError, match=key.partition("=")[0].rpartition(".")[2]):
        load_config([], [*BASE, f"{ROLLOUT}.pool.{key}"])
