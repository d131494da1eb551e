"""From options to a server that answers: what is looked at before, while and after SGLang starts."""

import asyncio
import json
import logging
import resource
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ostinato_engines.errors import (
    EngineError,
    EngineInputError,
    EngineStartError,
    MissingDependencyError,
    UnsupportedError,
)
from ostinato_engines.sglang_engine.checkpoint_config import CheckpointConfig, read_config
from ostinato_engines.sglang_engine.http import LocalClient
from ostinato_engines.sglang_engine.launch import (
    LaunchOptions,
    command,
    free_port,
    new_key,
    process_environment,
    server_arguments,
    write_key,
    write_plugin,
)
from ostinato_engines.sglang_engine.process import ServerProcess
from ostinato_engines.sglang_engine.protocol import sampling_body
from ostinato_engines.sglang_engine.running import RunningEngine, until_up
from ostinato_engines.types import SamplingParams, WeightManifest
from ostinato_engines.vllm_engine.checkpoint import CheckpointTensors
from ostinato_engines.vllm_engine.diagnosis import explain

logger = logging.getLogger(__name__)

_LOOK_S = 60.0
_LAST_WORD_S = 10.0
_SPARE_FILES = 256
_LOOK = """
import json, sys
from importlib import metadata
found = {"Python": sys.version.split()[0]}
for name in ("sglang", "torch", "transformers"):
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(kw_only=True)
class StartedEngine:
    """A server that answers, its process, and what is known of its model."""

    process: ServerProcess
    running: RunningEngine
    config: CheckpointConfig
    max_model_len: int
    max_legs: int
    """Requests that may be under way at a time: each has a connection of its own."""
    tensors: CheckpointTensors | None
    why_no_update: str
    """Why weights cannot be updated; empty where they can."""
    versions: str
    """For people."""

    @property
    def vocab_size(self) -> int:
        """Ids below are valid."""
        return self.config.vocab_size

    def check_manifest(self, manifest: WeightManifest) -> None:
        """Raises `ManifestError` unless it describes the checkpoint's tensors, `UnsupportedError` where none are taken."""
        if self.tensors is None:
            raise UnsupportedError(f"this engine cannot update its weights: {self.why_no_update}")
        self.tensors.check(manifest)

    def explain(self, error: BaseException) -> str:
        """What its log says of its end."""
        return explain(self.process.log_tail(), error)


async def start_engine(options: LaunchOptions, *, timeout_s: float) -> StartedEngine:
    """Starts SGLang; its processes are gone where this raises or is cancelled.

    Raises:
        MissingDependencyError: The interpreter has no SGLang.
        UnsupportedError: Its SGLang lacks something.
        EngineLoadError: The model is no checkpoint.
        EngineStartError: With the lines of its log that matter, and the likely cure.
    """
    config = read_config(options.model)
    process = ServerProcess()
    try:
        environment = process_environment(options, process.folder)
        versions = {} if options.launcher else await _look_at(options.python, environment)
        write_plugin(process.folder)
        port, key = free_port(), new_key()
        arguments = server_arguments(options, config, port=port)
        await process.start(command(options, arguments, write_key(process.folder, key)), environment)
        client = LocalClient(port, key)
        await _wait_for(process, client, options, timeout_s)
        running = await RunningEngine.of(client)
        await _warm_up(running, process, options, config, timeout_s)
        tensors, why_not = _tensors_of(options, config)
        return StartedEngine(
            process=process,
            running=running,
            config=config,
            max_model_len=min(options.max_model_len or config.max_model_len, running.info.max_req_input_len),
            max_legs=_max_legs(options),
            tensors=tensors,
            why_no_update=why_not,
            versions=_in_words({"sglang": running.info.version, **versions}),
        )
    except BaseException:
        await process.end()
        raise


async def _wait_for(process: ServerProcess, client: LocalClient, options: LaunchOptions, timeout_s: float) -> None:
    """Returns once it answers."""
    up, ended = asyncio.ensure_future(until_up(client)), asyncio.ensure_future(process.ended())
    try:
        await asyncio.wait([up, ended], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if up.done():
            return up.result()
        error = EngineError("its process ended" if ended.done() else f"no answer within {timeout_s:g} s")
        raise EngineStartError(
            f"sglang must start with model {options.model}, got an error:{explain(process.log_tail(), error)}"
        )
    finally:
        up.cancel()
        ended.cancel()


async def _warm_up(
    running: RunningEngine, process: ServerProcess, options: LaunchOptions, config: CheckpointConfig, timeout_s: float
) -> None:
    """One small request: what is compiled at first use, or cannot be computed at all, shows now."""
    params = sampling_body(SamplingParams(), max_new_tokens=2, seed=0, vocab_size=config.vocab_size)
    body = {"rid": "ostinato-warm-up", "input_ids": [0], "sampling_params": params, "return_logprob": True}
    try:
        await asyncio.wait_for(running.generate(body), timeout_s)
        await running.drop_cache()
    except (EngineError, OSError) as error:
        with suppress(TimeoutError):
            await asyncio.wait_for(process.ended(), _LAST_WORD_S)
        raise EngineStartError(
            f"sglang must compute with model {options.model}, got an error:{explain(process.log_tail(), error)}"
        ) from error


async def _look_at(python: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Versions in an interpreter's environment.

    Raises:
        EngineStartError: It does not run.
        MissingDependencyError: It has no SGLang.
    """
    try:
        look = await asyncio.create_subprocess_exec(
            *(python, "-c", _LOOK),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=dict(environment),
        )
    except OSError as error:
        raise EngineStartError(
            f"python must be an interpreter that runs here, got {python} ({error}); check the path"
        ) from error
    try:
        printed, _ = await asyncio.wait_for(look.communicate(), _LOOK_S)
        found: dict[str, str] = json.loads(printed)
    except (ValueError, TimeoutError) as error:
        raise EngineStartError(f"python must be a Python interpreter, got {python}; check the path") from error
    finally:
        with suppress(ProcessLookupError):
            look.kill()
    if "sglang" not in found:
        raise MissingDependencyError(
            f"sglang must be installed for {python}; run `{python} -m pip install sglang` in an environment of its own"
        )
    return found


def _in_words(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _tensors_of(options: LaunchOptions, config: CheckpointConfig) -> tuple[CheckpointTensors | None, str]:
    """What updates must name, or why there can be none."""
    if quantization := options.more.get("quantization"):
        return None, f"its weights are quantized ({quantization}); serve the checkpoint unquantized"
    dtype = config.dtype if options.dtype == "auto" else options.dtype
    try:
        tensors = CheckpointTensors(Path(options.model), dtype=dtype, tied=config.tied, cast=options.cast_weights)
    except (UnsupportedError, EngineInputError) as error:
        return None, str(error)
    return tensors, ""


def _max_legs(options: LaunchOptions) -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(64, soft - _SPARE_FILES) if soft != resource.RLIM_INFINITY else 1 << 16
    if options.max_num_seqs is not None and options.max_num_seqs > most:
        logger.warning(
            "open files are limited to %d: only %d of max_num_seqs=%d requests can be under way; raise `ulimit -n`",
            soft,
            most,
            options.max_num_seqs,
        )
    return most
