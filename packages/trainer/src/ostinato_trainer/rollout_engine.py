"""From a configuration to the engine that samples: which class, with which settings, in which process, and what if it dies.

Invariant: what somebody has set reaches the engine, or is refused by its key; what nobody has set is the engine's own choice.
"""

from __future__ import annotations

import importlib.util
import itertools
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ostinato_engines import AsyncServerBase
from ostinato_engines.device import CUDA, HOST, device_kind, pick_device
from ostinato_engines.engine_process import EngineProcess
from ostinato_engines.loading import construct_server, engine_class, load_server_class, names_not_taken
from ostinato_rollout import ServerPool
from ostinato_trainer.config import Config, RolloutConfig
from ostinato_trainer.home_paths import home_path

if TYPE_CHECKING:
    from ostinato_trainer.placement.places import Places

__all__ = ["ENGINE_LOG", "build_pool", "build_server", "engine_problems"]

ENGINE_LOG: Final = "engine.log"
"""What an engine's process prints, in the run's folder."""

_ROLLOUT: Final = "actor_rollout_ref.rollout"


def build_pool(config: Config, places: Places | None = None) -> ServerPool:
    """The pool of the run's engines, not started; an engine that dies is made and started again.

    Args:
        config: The whole tree.
        places: Where replicas go as actors; None: one engine, of this process.

    Raises:
        EngineError: As `build_server`.
    """
    pool, restarts = config.actor_rollout_ref.rollout.pool, itertools.count(1)

    def make_server(index: int) -> AsyncServerBase:
        if places is not None:
            return _replica(config, places, index)
        # What the one before has printed may say why it died.
        return build_server(config, log_name=f"engine.{next(restarts)}.log")

    servers = [build_server(config)] if places is None else [make_server(i) for i in range(len(places.replicas))]
    return ServerPool(
        servers,
        make_server=make_server,
        restarts=pool.restarts,
        seed=config.rollout_seed,
        health_interval_s=pool.health_interval_s,
        no_replica_timeout_s=pool.no_replica_timeout_s,
    )


def build_server(config: Config, *, log_name: str = ENGINE_LOG) -> AsyncServerBase:
    """The engine, not started: one of ours by name or a third party's by class path, here or under `engine_python`.

    Args:
        config: The whole tree.
        log_name: Where an engine in a process of its own prints, in the run's folder.

    Raises:
        EngineError: The class cannot be loaded, or does not take what is set.
    """
    rollout = config.actor_rollout_ref.rollout
    model_path = str(config.actor_rollout_ref.model.path)
    chosen = {parameter: value for _, parameter, value in _chosen(rollout)}
    settings = {**_settings(config, pick_device(config.trainer.device or "auto")), **chosen}
    custom = rollout.agent.custom_async_server
    if rollout.engine_python is None:
        if custom.path is not None and custom.name is not None:
            server_class = load_server_class(custom.path, custom.name)
        else:
            server_class = engine_class(rollout.name)
        return construct_server(server_class, model_path, settings, required=chosen)
    python = _interpreter(rollout.engine_python)
    if custom.path is None and not names_not_taken(engine_class(rollout.name), ["python"]):
        # Its class starts a process itself, and needs nothing of ours there.
        return construct_server(
            engine_class(rollout.name), model_path, {**settings, "python": python}, required=[*chosen, "python"]
        )
    return EngineProcess(
        rollout.name if custom.path is None else f"{custom.path}:{custom.name}",
        model_path,
        python=python,
        settings=settings,
        required=chosen,
        log_path=Path(config.trainer.local_dir) / log_name,
    )


def _replica(config: Config, places: Places, index: int) -> AsyncServerBase:
    """The engine of one replica as an actor, not started."""
    from ostinato_rollout.ray_cluster import RayReplica  # an extra

    rollout = config.actor_rollout_ref.rollout
    chosen = {parameter: value for _, parameter, value in _chosen(rollout)}
    if rollout.engine_python is not None:
        chosen["python"] = _interpreter(rollout.engine_python)
    device = (
        (device_kind(config.trainer.device) if config.trainer.device else CUDA) if places.layout.on_devices else HOST
    )
    custom = rollout.agent.custom_async_server
    return RayReplica(
        rollout.name if custom.path is None else f"{custom.path}:{custom.name}",
        str(config.actor_rollout_ref.model.path),
        settings={**_settings(config, device), **chosen},
        required=list(chosen),
        placement=places.replicas[index],
        start_timeout_s=config.ray_kwargs.start_timeout_s,
    )


def engine_problems(config: Config) -> list[str]:
    """Sentences about an engine that is not there and about keys that it would not read; empty where it can be started."""
    rollout = config.actor_rollout_ref.rollout
    problems = _process_problems(rollout) if config.trainer.executor == "local" else _actor_problems(rollout)
    if rollout.agent.custom_async_server.path is not None:
        return problems  # what its class takes is asked when it is made
    may_be_elsewhere = config.trainer.executor == "ray" and bool(config.ray_kwargs.ray_init.runtime_env)
    if rollout.engine_python is None and not may_be_elsewhere and importlib.util.find_spec(rollout.name) is None:
        problems.append(
            f"{_ROLLOUT}.name must be an engine that is installed, got {rollout.name}, which is not in this environment; "
            f"write {_ROLLOUT}.engine_python=PATH of the interpreter of an environment that has it"
        )
    wanted = _chosen(rollout)
    if rollout.full_determinism:
        wanted.append(("full_determinism", "full_determinism", True))
    not_taken = names_not_taken(engine_class(rollout.name), [parameter for _, parameter, _ in wanted])
    problems += [
        f"{_ROLLOUT}.{key} must be left out, since {rollout.name} does not read it, got {value}; "
        f"write {_ROLLOUT}.{key}={_unset(key)}"
        for key, parameter, value in wanted
        if parameter in not_taken
    ]
    return problems


def _process_problems(rollout: RolloutConfig) -> list[str]:
    if rollout.engine_python is None:
        return []
    problems = []
    if shutil.which(_interpreter(rollout.engine_python)) is None:
        problems.append(
            f"{_ROLLOUT}.engine_python must be an interpreter that runs here, got {rollout.engine_python}; "
            "write the path of an environment's bin/python"
        )
    if rollout.full_determinism:
        problems.append(
            f"{_ROLLOUT}.full_determinism must be false with engine_python, got true: when a request reaches another process "
            f"is left to the clock; write {_ROLLOUT}.full_determinism=false or {_ROLLOUT}.engine_python=null"
        )
    return problems


def _actor_problems(rollout: RolloutConfig) -> list[str]:
    """Of engines in actors."""
    problems, custom = [], rollout.agent.custom_async_server
    if rollout.full_determinism:
        problems.append(
            f"{_ROLLOUT}.full_determinism must be false with trainer.executor=ray, got true: when a request reaches another process is left "
            f"to the clock; write {_ROLLOUT}.full_determinism=false or trainer.executor=local"
        )
    takes_python = custom.path is None and not names_not_taken(engine_class(rollout.name), ["python"])
    if rollout.engine_python is not None and not takes_python:
        problems.append(
            f"{_ROLLOUT}.engine_python must be null with trainer.executor=ray, got {rollout.engine_python}: the engine is in the environment of "
            f"its actor; write {_ROLLOUT}.engine_python=null, and ray_kwargs.ray_init.runtime_env for an environment of another kind"
        )
    return problems


def _settings(config: Config, device: str) -> dict[str, Any]:
    """What every engine is offered."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    return {
        "device": device,
        "dtype": config.actor_rollout_ref.actor.dtype,
        "max_model_len": rollout.max_model_len or data.max_prompt_length + data.max_response_length,
        "max_num_seqs": rollout.max_num_seqs,
        "full_determinism": rollout.full_determinism,
        # The trainer's weights are float32 whatever both compute in.
        "cast_weights": True,
        "seed": config.rollout_seed,
    }


def _chosen(rollout: RolloutConfig) -> list[tuple[str, str, Any]]:
    """What is set of the keys that not every engine reads: key below the rollout, parameter of the engine's class, value."""
    engine_args = getattr(rollout.engine_kwargs, rollout.name, {})
    keys = (
        ("tensor_model_parallel_size", "tensor_parallel_size", rollout.tensor_model_parallel_size),
        ("gpu_memory_utilization", "gpu_memory_utilization", rollout.gpu_memory_utilization),
        ("enforce_eager", "enforce_eager", rollout.enforce_eager),
        ("max_num_batched_tokens", "max_num_batched_tokens", rollout.max_num_batched_tokens),
        (f"engine_kwargs.{rollout.name}", "engine_args", engine_args),
    )
    return [(key, parameter, value) for key, parameter, value in keys if value != _default(key)]


def _default(key: str) -> Any:
    """The value of a key that nobody has set."""
    node: Any = RolloutConfig()
    for name in key.split("."):
        node = getattr(node, name, {})
    return node


def _unset(key: str) -> str:
    """How an override writes the value of a key that nobody has set."""
    value = _default(key)
    return "null" if value is None else str(value).lower()


def _interpreter(python: str) -> str:
    return str(home_path(python, "actor_rollout_ref.rollout.engine_python"))
