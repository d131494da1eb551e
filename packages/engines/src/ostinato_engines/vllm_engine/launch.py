"""Starts a vLLM engine: the arguments that our contract asks for, the environment of its processes, and its log."""

import asyncio
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ostinato_engines import device as devices
from ostinato_engines.errors import EngineInputError, EngineStartError
from ostinato_engines.launch_options import EngineOptions
from ostinato_engines.vllm_engine.diagnosis import explain
from ostinato_engines.vllm_engine.endpoint import has_tokenizer
from ostinato_engines.vllm_engine.engine_log import EngineLog
from ostinato_engines.vllm_engine.hold_choice import hold_outputs
from ostinato_engines.vllm_engine.probe import VLLMParts
from ostinato_engines.vllm_engine.sampling import OUR_PROCESSORS

_PACKAGE = __package__
_OURS = (
    "generation_config",
    "logprobs_mode",
    "model",
    "worker_extension_cls",
)
"""Arguments that the contract decides."""
_ENVIRONMENT = {
    # A forked engine hangs where torch has computed in this process before.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # `exact_filters` and `seeded_draw` are written for the other runner, whose order of filters is the one we know.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}


_FLOAT32_ENVIRONMENT = {
    # Triton's attention would round float32 to ten bits before it multiplies.
    "TRITON_F32_DEFAULT": "ieee",
}
_STARTING = threading.Lock()
"""One engine of a process starts at a time: the environment of its processes is that of this one."""


class LaunchOptions(EngineOptions, frozen=True, kw_only=True):
    """What `VLLMServer` was given; see there.

    Raises:
        EngineInputError: A number below 1, or an adapter that is not there.
    """

    lora: str | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora is not None and not (Path(self.lora) / "adapter_config.json").is_file():
            raise EngineInputError(
                f"lora must be a folder with an adapter_config.json, got {self.lora}; save the adapter there"
            )


def engine_arguments(options: LaunchOptions, parts: VLLMParts) -> dict[str, Any]:
    """vLLM's engine arguments.

    Raises:
        EngineInputError: One that vLLM does not know, that the contract decides, or that this machine cannot serve.
    """
    known = parts.arg_names
    for name in options.more:
        if name in _OURS:
            raise EngineInputError(f"engine_args must leave {name} to VLLMServer, got a value; remove it")
        if name not in known:
            raise EngineInputError(f"engine_args must be known to vllm {parts.version}, got {name!r}; mend the name")
    _check_parallel(options.tensor_parallel_size, parts)
    arguments: dict[str, Any] = {
        "model": options.model,
        "dtype": options.dtype,
        "seed": options.seed,
        "enforce_eager": options.enforce_eager,
        "tensor_parallel_size": options.tensor_parallel_size,
        "skip_tokenizer_init": not has_tokenizer(options.model),
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": f"{_PACKAGE}.worker.WeightExtension",
        "logits_processors": list(OUR_PROCESSORS),
    }
    if can_sleep(parts):
        arguments["enable_sleep_mode"] = True
    is_alone = options.tensor_parallel_size == options.more.get("pipeline_parallel_size", 1) == 1
    if is_alone and "distributed_executor_backend" in known:
        # On one device, too, the model gets a process of its own, which prepares a step while the next one is scheduled.
        arguments["distributed_executor_backend"] = "mp"
    if options.lora is not None:
        arguments["enable_lora"] = True
    if parts.device_type == devices.HOST and "enable_chunked_prefill" in known:
        # After a part of a prompt vLLM takes a seeded draw back, which generators on the CPU cannot: the engine would die.
        arguments["enable_chunked_prefill"] = False
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization"):
        if getattr(options, name) is not None:
            arguments[name] = getattr(options, name)
    more = dict(options.more)
    arguments["logits_processors"] += more.pop("logits_processors", None) or []
    return {**arguments, **more}


def can_sleep(parts: VLLMParts) -> bool:
    """Whether vLLM can free an engine's memory on this machine."""
    return parts.device_type != devices.HOST and "enable_sleep_mode" in parts.arg_names


def _check_parallel(size: int, parts: VLLMParts) -> None:
    if parts.device_type != devices.HOST and size > parts.device_count:
        raise EngineInputError(
            f"tensor_parallel_size must be at most the {parts.device_count} device(s) of this machine, got {size}; lower it"
        )


async def start_engine(options: LaunchOptions, parts: VLLMParts, log: EngineLog) -> tuple[Any, str]:
    """A running AsyncLLM, and why it cannot hold outputs; its processes are gone where this raises or is cancelled.

    Raises:
        EngineStartError: With the lines of its log that matter, and the likely cure.
    """
    arguments = engine_arguments(options, parts)

    def start() -> tuple[Any, str]:
        with _STARTING, _environment({**_ENVIRONMENT, **log.environment}):
            return _new_engine(parts, parts.engine_args(**arguments))

    starting = asyncio.ensure_future(asyncio.to_thread(start))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        # The thread cannot be stopped: what it starts is ended as soon as it is there.
        await asyncio.wait([starting])
        if not starting.exception():
            await asyncio.to_thread(starting.result()[0].shutdown)
        raise
    # vLLM raises what it likes: this is the border where it becomes one error.
    except Exception as error:
        text = explain(log.tail(), error)
        raise EngineStartError(f"vllm must start with model {options.model}, got an error:{text}") from error


def _new_engine(parts: VLLMParts, args: Any) -> tuple[Any, str]:
    if parts.usage_context is None:
        return parts.async_llm.from_engine_args(args), "this vllm cannot be started from a configuration"
    config = args.create_engine_config(parts.usage_context)
    why_not = hold_outputs(config)
    is_float32 = str(config.model_config.dtype) == "torch.float32"
    with _environment(_FLOAT32_ENVIRONMENT if is_float32 else {}):
        llm = parts.async_llm.from_vllm_config(
            config,
            usage_context=parts.usage_context,
            enable_log_requests=args.enable_log_requests,
            disable_log_stats=args.disable_log_stats,
        )
    return llm, why_not


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Variables for the processes that are started meanwhile; what the user has set counts."""
    added = [name for name in wanted if name not in os.environ]
    os.environ.update({name: wanted[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
