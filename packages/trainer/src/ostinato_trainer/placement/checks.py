"""What a run as actors cannot be, as far as the configuration alone tells."""

from __future__ import annotations

import importlib.util
from typing import Final

from ostinato_trainer.config import Config

__all__ = ["executor_problems", "unread_executor_keys"]

_ROLLOUT: Final = "actor_rollout_ref.rollout"


def executor_problems(config: Config) -> list[str]:
    """Sentences about keys that do not go with `trainer.executor`."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    problems = []
    if rollout.free_cache_engine and trainer.max_staleness:
        problems.append(
            f"{_ROLLOUT}.free_cache_engine must be null or false with trainer.max_staleness above 0, for engines then sample while training "
            f"computes, got true and {trainer.max_staleness}; write {_ROLLOUT}.free_cache_engine=null or trainer.max_staleness=0"
        )
    if trainer.executor == "local":
        if not rollout.nnodes:
            return problems
        return [
            *problems,
            f"{_ROLLOUT}.nnodes must be 0 with trainer.executor=local, which has its engine in one process, got {rollout.nnodes}; "
            f"write {_ROLLOUT}.nnodes=0 or trainer.executor=ray",
        ]
    if importlib.util.find_spec("ray") is None:
        problems.append(
            "trainer.executor must be local where Ray is not installed, got ray; run `pip install 'ostinato-trainer[ray]'`"
        )
    per_node, key = trainer.n_gpus_per_node, "trainer.n_gpus_per_node"
    if rollout.nnodes and rollout.n_gpus_per_node is not None:
        per_node, key = rollout.n_gpus_per_node, f"{_ROLLOUT}.n_gpus_per_node"
    if per_node % rollout.tensor_model_parallel_size:
        problems.append(
            f"{key} must be a multiple of {_ROLLOUT}.tensor_model_parallel_size, for a replica is on one machine, got {per_node} and "
            f"{rollout.tensor_model_parallel_size}; change one of them"
        )
    return problems


def unread_executor_keys(config: Config) -> tuple[tuple[bool, str, tuple[str, ...]], ...]:
    """As `config.without_effect.unread_keys` takes them: whether a rule applies, why, and the keys without effect."""
    is_local = config.trainer.executor == "local"
    return (
        (
            is_local,
            "trainer.executor is local",
            tuple(
                f"ray_kwargs.{key}"
                for key in ("ray_init.address", "ray_init.num_cpus", "ray_init.runtime_env", "start_timeout_s")
            ),
        ),
        (
            is_local or not config.actor_rollout_ref.rollout.nnodes,
            f"{_ROLLOUT}.nnodes is 0",
            (f"{_ROLLOUT}.n_gpus_per_node",),
        ),
        (
            bool(config.actor_rollout_ref.rollout.nnodes),
            f"{_ROLLOUT}.nnodes gives engines machines of their own",
            (f"{_ROLLOUT}.free_cache_engine",),
        ),
    )
