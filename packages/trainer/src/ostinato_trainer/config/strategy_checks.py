"""What the keys of `actor_rollout_ref.actor.strategy` contradict, and which of them have no effect."""

from __future__ import annotations

from typing import Final

from ostinato_trainer.config import Config

__all__ = ["strategy_problems", "unread_strategy_keys"]

_ACTOR: Final = "actor_rollout_ref.actor"
_MODEL: Final = "actor_rollout_ref.model"
_SEQUENCE: Final = f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size"


def strategy_problems(config: Config) -> list[str]:
    """Sentences about what the strategy does not do."""
    # Asked of a run that is about to start; a configuration that is only read needs no torch.
    from ostinato_trainer.backends.megatron.setup import megatron_problems

    actor, trainer = config.actor_rollout_ref.actor, config.trainer
    problems = _device_problems(config)
    if actor.strategy == "local":
        for path, value in (("trainer.nnodes", trainer.nnodes), ("trainer.n_gpus_per_node", trainer.n_gpus_per_node)):
            if value > 1 and trainer.executor == "local":
                problems.append(
                    f"{path} must be 1 with {_ACTOR}.strategy=local, which trains on one device, got {value}; "
                    f"write {path}=1 or {_ACTOR}.strategy=fsdp2"
                )
        return problems
    if trainer.nnodes > 1 and trainer.executor == "local":
        problems.append(
            f"trainer.nnodes must be 1 with trainer.executor=local, which starts ranks on this machine, got {trainer.nnodes}; "
            "write trainer.nnodes=1 or trainer.executor=ray"
        )
    mode = actor.policy_loss.loss_mode
    if ":" not in mode and mode not in _losses_of_ours():
        problems.append(
            f"{_ACTOR}.policy_loss.loss_mode must be one that every rank can find with {_ACTOR}.strategy={actor.strategy}, got {mode!r}, which is "
            f"registered in this process only; write {_ACTOR}.policy_loss.loss_mode=file.py:name"
        )
    return problems + (_fsdp2_problems(config) if actor.strategy == "fsdp2" else megatron_problems(config))


def _device_problems(config: Config) -> list[str]:
    """Of the device by name; one of another host than this is known to that host alone."""
    from ostinato_engines import EngineInputError
    from ostinato_engines.device import device_kind, pick_device

    strategy, trainer = config.actor_rollout_ref.actor.strategy, config.trainer
    if trainer.device is None:
        return []
    if strategy != "local" and ":" in trainer.device:
        return [
            f"trainer.device must be a kind of device with {_ACTOR}.strategy={strategy}, whose ranks have one each, got {trainer.device}; "
            f"write trainer.device={device_kind(trainer.device)}"
        ]
    if trainer.executor == "local":
        try:
            pick_device(trainer.device)
        except EngineInputError as error:
            return [f"trainer.device: {error}"]
    return []


def _fsdp2_problems(config: Config) -> list[str]:
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    problems = []
    size, num_ranks = actor.ranks_per_pass, config.trainer.nnodes * config.trainer.n_gpus_per_node
    if num_ranks % size:
        problems.append(
            f"{_SEQUENCE} must divide trainer.nnodes x trainer.n_gpus_per_node = {num_ranks} ranks, got {size}; write {_SEQUENCE}=1, "
            f"or a multiple of {size} ranks"
        )
    if size > 1 and not model.use_remove_padding:
        problems.append(
            f"{_MODEL}.use_remove_padding must be true with {_SEQUENCE}={size}, which shares packed rows, got false; "
            f"write {_MODEL}.use_remove_padding=true or {_SEQUENCE}=1"
        )
    return problems


def unread_strategy_keys(config: Config) -> tuple[tuple[bool, str, tuple[str, ...]], ...]:
    """Whether a rule applies, why, and the keys that have no effect then."""
    actor = config.actor_rollout_ref.actor
    why = f"{_ACTOR}.strategy is {actor.strategy}"
    fsdp = tuple(f"{_ACTOR}.fsdp_config.{name}" for name in actor.fsdp_config.__struct_fields__)
    megatron = tuple(f"{_ACTOR}.megatron.{name}" for name in actor.megatron.__struct_fields__)
    return (
        (actor.strategy == "local", why, ("actor_rollout_ref.nccl_timeout", f"{_MODEL}.enable_gradient_checkpointing")),
        (actor.strategy != "fsdp2", why, fsdp),
        (actor.strategy != "megatron", why, megatron),
        (
            actor.strategy == "megatron" and actor.megatron.tensor_model_parallel_size == 1,
            f"{_ACTOR}.megatron.tensor_model_parallel_size is 1",
            (f"{_ACTOR}.megatron.sequence_parallel",),
        ),
        (
            actor.strategy == "fsdp2" and actor.fsdp_config.param_offload,
            f"{_ACTOR}.fsdp_config.param_offload keeps the moments in the host's memory already",
            (f"{_ACTOR}.fsdp_config.optimizer_offload",),
        ),
    )


def _losses_of_ours() -> frozenset[str]:
    from ostinato_trainer.algorithms.policy_losses import BUILT_IN_LOSSES

    return BUILT_IN_LOSSES
