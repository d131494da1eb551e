"""Which backend trains the policy, and the critic beside it: the one place that reads `actor_rollout_ref.actor.strategy`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from ostinato_engines.device import CUDA, HOST, device_count, pick_device
from ostinato_trainer.backends.base import TrainingBackend
from ostinato_trainer.backends.critic import LocalCritic
from ostinato_trainer.backends.local import LocalBackend, LocalBackendOptions
from ostinato_trainer.config import Config
from ostinato_trainer.errors import BackendError

if TYPE_CHECKING:
    from ostinato_trainer.backends.ranks.base import RankFactory
    from ostinato_trainer.backends.ranks.workers import RankWorkers
    from ostinato_trainer.loop.parts import Critic
    from ostinato_trainer.placement.places import Places

_CALL_TIMEOUTS: Final = 6
"""A whole call may take so many times as long as one exchange between ranks."""
_LOG_FOLDER: Final = "ranks"


def build_backend(
    config: Config,
    options: LocalBackendOptions,
    places: Places | None = None,
    *,
    critic: LocalBackendOptions | None = None,
) -> TrainingBackend:
    """The backend of the policy, with its ranks started where the strategy has any; `close` frees it.

    Args:
        config: The whole tree.
        options: What any strategy needs to know.
        places: Where actors go; None runs ranks as processes of this machine.
        critic: The same of the critic, which ranks hold beside the policy; see `build_critic`.

    Raises:
        BackendError: the model cannot be loaded, a rank does not start, or the machine has too few devices.
    """
    path = str(config.actor_rollout_ref.model.path)
    if config.actor_rollout_ref.actor.strategy == "local":
        return LocalBackend.from_pretrained(path, options)
    from ostinato_trainer.backends.ranks.group import RankGroup

    workers = _actors(config, places) if places is not None else _processes(config, options)
    factory = _factory(config, path, options, critic)
    return RankGroup(workers, factory, max_tokens_per_forward=options.max_tokens_per_forward)


def build_critic(config: Config, options: LocalBackendOptions, backend: TrainingBackend) -> Critic:
    """The critic, on the ranks of the backend where it has any, which were given the same options.

    Raises:
        BackendError: the model cannot be loaded, or the backend's ranks have no critic.
    """
    from ostinato_trainer.backends.ranks.group import RankGroup

    if isinstance(backend, RankGroup):
        return backend.critic(max_tokens_per_forward=options.max_tokens_per_forward)
    return LocalCritic.from_pretrained(critic_path(config), options)


def critic_path(config: Config) -> str:
    """Of the model that the critic starts from: the policy's if it has none of its own."""
    return config.critic.model.path or str(config.actor_rollout_ref.model.path)


def _factory(
    config: Config, path: str, options: LocalBackendOptions, critic: LocalBackendOptions | None
) -> RankFactory:
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    if actor.strategy == "megatron":
        from ostinato_trainer.backends.megatron.setup import megatron_factory

        return megatron_factory(
            config,
            options,
            enable_gradient_checkpointing=model.enable_gradient_checkpointing,
            critic=None if critic is None else (critic_path(config), critic),
        )
    from ostinato_trainer.backends.fsdp2 import Fsdp2Factory, Fsdp2Options

    def sharded(options: LocalBackendOptions) -> Fsdp2Options:
        return Fsdp2Options(
            **msgspec.structs.asdict(options),
            **msgspec.structs.asdict(actor.fsdp_config),
            gradient_checkpointing=model.enable_gradient_checkpointing,
        )

    return Fsdp2Factory(
        path, sharded(options), critic=None if critic is None else (critic_path(config), sharded(critic))
    )


def _processes(config: Config, options: LocalBackendOptions) -> RankWorkers:
    from ostinato_trainer.backends.ranks.processes import RankProcesses, RankProcessOptions

    timeout_s, num_ranks = config.actor_rollout_ref.nccl_timeout, config.trainer.n_gpus_per_node
    device = _kind(options)
    if device == CUDA and num_ranks > (found := device_count(CUDA)):
        raise BackendError(
            f"trainer.n_gpus_per_node must be at most the machine's {found} devices, got {num_ranks}; "
            f"write trainer.n_gpus_per_node={found}"
        )
    return RankProcesses(
        RankProcessOptions(
            num_ranks=num_ranks,
            device=device,
            collective_timeout_s=timeout_s,
            call_timeout_s=_CALL_TIMEOUTS * timeout_s,
            log_folder=str(Path(config.trainer.local_dir) / _LOG_FOLDER),
        )
    )


def _actors(config: Config, places: Places) -> RankWorkers:
    from ostinato_trainer.backends.ranks.ray_workers import RankActors

    timeout_s = config.actor_rollout_ref.nccl_timeout
    return RankActors(
        places.ranks,
        device=CUDA if places.layout.on_devices else HOST,  # of the actors' hosts, which need not be this one
        start_timeout_s=config.ray_kwargs.start_timeout_s,
        collective_timeout_s=timeout_s,
        call_timeout_s=_CALL_TIMEOUTS * timeout_s,
    )


def _kind(options: LocalBackendOptions) -> str:
    """The kind of device that ranks compute on.

    Raises:
        BackendError: ranks cannot meet on it.
    """
    kind = pick_device(options.device).partition(":")[0]
    if kind not in (HOST, CUDA):
        raise BackendError(
            f"trainer.device must be {HOST} or {CUDA} for a strategy with ranks, got {kind}; write trainer.device={HOST} or strategy=local"
        )
    return kind
