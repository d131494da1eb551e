"""How SGLang is started: its arguments, its environment, and our plugin beside it."""

import importlib.resources
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ostinato_engines.errors import EngineInputError
from ostinato_engines.launch_options import EngineOptions
from ostinato_engines.sglang_engine.checkpoint_config import CheckpointConfig
from ostinato_engines.sglang_engine.http import LOOPBACK
from ostinato_engines.sglang_engine.plugin.lifeline import VARIABLE as LIFELINE
from ostinato_engines.vllm_engine.endpoint import has_tokenizer

BACKEND = "ostinato"
"""The sampling backend that our plugin registers."""
PLUGIN = "ostinato_sglang_plugin"
_SPARE_POSITIONS = 8
"""SGLang keeps back six of its context's positions; the model never sees them."""
_OURS = (
    "api_key",
    "admin_api_key",
    "config",
    "context_length",
    "enable_deterministic_inference",
    "host",
    "model",
    "model_path",
    "port",
    "rl_on_policy_target",
    "sampling_backend",
    "sampling_defaults",
    "skip_tokenizer_init",
)
"""Arguments that the contract or this adapter decides."""
_ENVIRONMENT = {
    # One answer per request, not one every 50 tokens.
    "SGLANG_FORCE_STREAM_INTERVAL": str(1 << 30),
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    # Whether it lives is seen from its process; a request to find out would be in the way of an update.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
}
_FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables that would lead another interpreter to this one's packages."""


class LaunchOptions(EngineOptions, frozen=True, kw_only=True):
    """What `SGLangServer` was given; see there.

    Raises:
        EngineInputError: A number below 1, or an argument that is not for the user to set.
    """

    python: str
    launcher: tuple[str, ...]
    own_chat: bool
    """Whether chat requests are answered without SGLang's endpoint."""
    environment: Mapping[str, str]

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.more:
            if name.replace("-", "_") in _OURS:
                raise EngineInputError(f"engine_args must leave {name} to SGLangServer, got a value; remove it")

    @property
    def has_chat(self) -> bool:
        """Whether SGLang is to load the tokenizer, which its chat endpoint needs."""
        return not self.own_chat and has_tokenizer(self.model)


def server_arguments(options: LaunchOptions, config: CheckpointConfig, *, port: int) -> dict[str, Any]:
    """SGLang's arguments by name, but for the key."""
    arguments: dict[str, Any] = {
        "model_path": options.model,
        "host": LOOPBACK,
        "port": port,
        # SGLang's own "auto" would halve float32.
        "dtype": config.dtype if options.dtype == "auto" else options.dtype,
        "context_length": (options.max_model_len or config.max_model_len) + _SPARE_POSITIONS,
        "random_seed": options.seed % 2**31,
        "tensor_parallel_size": options.tensor_parallel_size,
        "sampling_backend": BACKEND,
        "sampling_defaults": "openai",
        "enable_memory_saver": True,
        "skip_server_warmup": True,
        "log_level": "info",
        "log_level_http": "warning",
    }
    if not options.has_chat:
        arguments["skip_tokenizer_init"] = True
    if options.enforce_eager:
        arguments["disable_cuda_graph"] = True
    chosen = {
        "max_running_requests": options.max_num_seqs,
        "chunked_prefill_size": options.max_num_batched_tokens,
        "mem_fraction_static": options.gpu_memory_utilization,
    }
    arguments |= {name: value for name, value in chosen.items() if value is not None}
    arguments |= {name.replace("-", "_"): value for name, value in options.more.items()}
    return arguments


def write_key(folder: Path, key: str) -> Path:
    """The file that `--config` names: the key shows in no list of processes. JSON is YAML."""
    path = folder / "arguments.yaml"
    path.touch(mode=0o600)
    path.write_bytes(msgspec.json.encode({"api-key": key}))
    return path


def command(options: LaunchOptions, arguments: Mapping[str, Any], key_file: Path) -> list[str]:
    """The command line; flags are given where they are true, lists and mappings as SGLang reads them."""
    line = [*(options.launcher or (options.python, "-m", "sglang.launch_server")), "--config", str(key_file)]
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            line.append(flag)
        elif isinstance(value, list | tuple):
            line += [flag, *map(str, value)]
        elif isinstance(value, Mapping):
            line += [flag, msgspec.json.encode(value).decode()]
        elif value is not None and value is not False:
            line += [flag, str(value)]
    return line


def process_environment(options: LaunchOptions, folder: Path) -> dict[str, str]:
    """The variables of SGLang's processes, our plugin on their path; what the user has set counts."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _FOREIGN or options.launcher or options.python == sys.executable
    }
    wanted = {**_ENVIRONMENT, **kept, **options.environment}
    path = wanted.get("PYTHONPATH")
    return {**wanted, "PYTHONPATH": f"{folder}{os.pathsep}{path}" if path else str(folder), LIFELINE: "1"}


def write_plugin(folder: Path) -> None:
    """Lays our plugin into a folder as an installed package, as which SGLang finds it in each of its processes."""
    source = importlib.resources.files("ostinato_engines.sglang_engine") / "plugin"
    with importlib.resources.as_file(source) as files:
        shutil.copytree(files, folder / PLUGIN, ignore=shutil.ignore_patterns("__pycache__"))
    about = folder / f"{PLUGIN}-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nostinato = {PLUGIN}:register\n")


def new_key() -> str:
    """A secret for one server; it never looks like an option, as which SGLang reads what begins with a dash."""
    return secrets.token_hex(32)


def free_port() -> int:
    """A port of the loopback interface that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
