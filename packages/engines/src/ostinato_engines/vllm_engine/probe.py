"""What the installed vLLM has: the one place that knows where its parts are and which of them come and go.

No version is compared anywhere: a part is there or it is not. Loading vLLM takes many seconds, so that it happens when
an engine starts and not before.
"""

import dataclasses
import functools
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from ostinato_engines.errors import MissingDependencyError, UnsupportedError

OLDEST = "0.25"
"""The oldest release that has everything required here."""
_REQUIRED_ARGS = (
    "enable_prefix_caching",
    "generation_config",
    "logits_processors",
    "logprobs_mode",
    "worker_extension_cls",
)
_REQUIRED_SAMPLING = ("detokenize", "extra_args", "flat_logprobs", "ignore_eos", "logprobs", "output_kind", "seed")
_REQUIRED_METHODS = (
    "abort",
    "collective_rpc",
    "generate",
    "get_supported_tasks",
    "pause_generation",
    "reset_prefix_cache",
    "resume_generation",
    "shutdown",
    "sleep",
    "wake_up",
)
_APP_STATE = (
    "vllm.entrypoints.launchers.api_server.app_state:init_app_state",
    "vllm.entrypoints.openai.api_server:init_app_state",
)
_ARG_PARSER = (
    "vllm.entrypoints.launchers.cli_args:make_arg_parser",
    "vllm.entrypoints.openai.cli_args:make_arg_parser",
)
_FLEXIBLE_PARSER = (
    "vllm.utils.argparse_utils:FlexibleArgumentParser",
    "vllm.utils:FlexibleArgumentParser",
)
_CHAT_REQUEST = (
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest",
    "vllm.entrypoints.openai.protocol:ChatCompletionRequest",
)


@dataclass(frozen=True, kw_only=True)
class ChatParts:
    """What vLLM's own chat endpoint is made of."""

    init_app_state: Any
    make_arg_parser: Any
    flexible_parser: Any
    chat_request: Any


@dataclass(frozen=True, kw_only=True)
class VLLMParts:
    """The parts of the installed vLLM that an engine needs."""

    versions: str
    """For people: of vLLM and what it runs on."""
    version: str
    async_llm: Any
    engine_args: Any
    sampling_params: Any
    final_only: Any
    tokens_input: Any
    lora_request: Any
    dead_error: type[Exception]
    refusals: tuple[type[Exception], ...]
    """What it raises where a request is wrong."""
    device_type: str
    """The kind of device that vLLM found."""
    device_count: int
    weight_versions: bool
    """Whether outputs say which tokens came from which weights."""
    usage_context: Any
    """What an engine is started for; None where it cannot be started from a configuration."""
    chat: ChatParts | None
    """None where the chat endpoint is not where it is looked for."""

    @property
    def arg_names(self) -> frozenset[str]:
        """What the engine can be told at its start."""
        return frozenset(field.name for field in dataclasses.fields(self.engine_args))


@functools.cache
def find_vllm() -> VLLMParts:
    """Loads vLLM and looks for everything.

    Raises:
        MissingDependencyError: It is not installed.
        UnsupportedError: It is there, but lacks a part, or does not import.
    """
    _import_vllm()
    async_llm = _part("vllm.v1.engine.async_llm:AsyncLLM")
    engine_args = _part("vllm.engine.arg_utils:AsyncEngineArgs")
    sampling_params = _part("vllm:SamplingParams")
    _require("AsyncLLM", _REQUIRED_METHODS, dir(async_llm))
    _require("AsyncEngineArgs", _REQUIRED_ARGS, [field.name for field in dataclasses.fields(engine_args)])
    _require("SamplingParams", _REQUIRED_SAMPLING, sampling_params.__struct_fields__)
    device = _part("vllm.platforms:current_platform")
    return VLLMParts(
        versions=", ".join(_versions()),
        version=metadata_version(),
        async_llm=async_llm,
        engine_args=engine_args,
        sampling_params=sampling_params,
        final_only=_part("vllm.sampling_params:RequestOutputKind").FINAL_ONLY,
        tokens_input=_part("vllm.inputs.engine:tokens_input"),
        lora_request=_part("vllm.lora.request:LoRARequest"),
        dead_error=_part("vllm.v1.engine.exceptions:EngineDeadError"),
        refusals=(ValueError, *_refusals()),
        device_type=str(device.device_type),
        device_count=int(device.device_count()) if hasattr(device, "device_count") else 1,
        weight_versions=hasattr(async_llm, "update_weight_version"),
        usage_context=_usage_context(async_llm, engine_args),
        chat=_chat_parts(),
    )


def metadata_version() -> str:
    """The version of the installed vLLM, under whichever name its build goes."""
    return str(getattr(import_module("vllm"), "__version__", "unknown"))


def _import_vllm() -> None:
    try:
        import_module("vllm")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise UnsupportedError(
                f"vllm must import cleanly, got {error}; install what it lacks into its environment"
            ) from error
        raise MissingDependencyError(
            "vllm must be installed for VLLMServer; run `pip install 'ostinato-engines[vllm]'`"
        ) from error
    except (ImportError, OSError, RuntimeError) as error:
        raise UnsupportedError(
            f"vllm must import cleanly, got {type(error).__name__}: {error}; install the build of vllm for this torch and driver"
        ) from error


def _versions() -> list[str]:
    found = [f"vllm {metadata_version()}"]
    for name in ("torch", "transformers"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} unknown")
    return [*found, f"Python {platform.python_version()}"]


def _part(place: str) -> Any:
    """What is at `module:name`."""
    found = _first((place,))
    if found is None:
        raise UnsupportedError(
            f"vllm must have {place}, got version {metadata_version()} without it; install {OLDEST} or newer"
        )
    return found


def _first(places: Iterable[str]) -> Any:
    """The first of several places where there is something; None if there is none."""
    for place in places:
        module, _, name = place.partition(":")
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError):
            continue
    return None


def _require(owner: str, names: Iterable[str], present: Iterable[str]) -> None:
    missing = sorted(set(names) - set(present))
    if missing:
        raise UnsupportedError(
            f"vllm's {owner} must have {', '.join(missing)}, got version {metadata_version()} without; "
            f"install {OLDEST} or newer"
        )


def _usage_context(async_llm: Any, engine_args: Any) -> Any:
    kinds = _first(("vllm.usage.usage_lib:UsageContext",))
    if hasattr(async_llm, "from_vllm_config") and hasattr(engine_args, "create_engine_config"):
        return getattr(kinds, "ENGINE_CONTEXT", None)
    return None


def _refusals() -> list[type[Exception]]:
    names = ("VLLMClientError", "VLLMValidationError")
    found = [_first((f"vllm.exceptions:{name}",)) for name in names]
    return [kind for kind in found if kind is not None]


def _chat_parts() -> ChatParts | None:
    found = [_first(places) for places in (_APP_STATE, _ARG_PARSER, _FLEXIBLE_PARSER, _CHAT_REQUEST)]
    return None if None in found else ChatParts(**dict(zip(ChatParts.__dataclass_fields__, found, strict=True)))
