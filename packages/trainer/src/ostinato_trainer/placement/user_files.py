"""Files that a configuration names and that actors read."""

from __future__ import annotations

from collections.abc import Mapping

from ostinato_trainer.algorithms.advantages import needs_critic
from ostinato_trainer.config import Config
from ostinato_trainer.custom_code import is_file, without_prefix

__all__ = ["files_of_ranks", "named_files"]

_ROLLOUT = "actor_rollout_ref.rollout"


def named_files(config: Config) -> dict[str, str]:
    """Key -> path, of files and folders that engines and agent workers open; the policy's model among them."""
    rollout, reward = config.actor_rollout_ref.rollout, config.reward
    agent = rollout.agent
    paths = {
        "actor_rollout_ref.model.path": config.actor_rollout_ref.model.path,
        f"{_ROLLOUT}.agent.agent_loop_config_path": agent.agent_loop_config_path,
        f"{_ROLLOUT}.agent.gateway.cwd": agent.gateway.cwd,
    }
    if rollout.multi_turn.enable:
        paths[f"{_ROLLOUT}.multi_turn.tool_config_path"] = rollout.multi_turn.tool_config_path
        paths[f"{_ROLLOUT}.multi_turn.function_tool_path"] = rollout.multi_turn.function_tool_path
    of_code = {
        f"{_ROLLOUT}.agent.custom_async_server.path": agent.custom_async_server.path,
        f"{_ROLLOUT}.agent.gateway.function": (agent.gateway.function or "").rpartition(":")[0],
        "reward.custom_reward_function.path": reward.custom_reward_function.path,
    }
    return _without_none(paths) | _files(of_code)


def files_of_ranks(config: Config) -> dict[str, str]:
    """Key -> path, of files and folders that training ranks open; the policy's model among them."""
    model, loss = config.actor_rollout_ref.model, config.actor_rollout_ref.actor.policy_loss.loss_mode
    paths = {
        "actor_rollout_ref.model.path": model.path,
        "actor_rollout_ref.model.lora_adapter_path": model.lora_adapter_path,
        "critic.model.path": config.critic.model.path if needs_critic(config.algorithm.adv_estimator) else None,
    }
    of_code = {"actor_rollout_ref.actor.policy_loss.loss_mode": loss.rpartition(":")[0]}
    return _without_none(paths) | _files(of_code)


def _files(of_code: Mapping[str, str | None]) -> dict[str, str]:
    """Those of places of code that are files, and not modules by name."""
    return {key: without_prefix(path) for key, path in of_code.items() if path and is_file(path)}


def _without_none(paths: Mapping[str, str | None]) -> dict[str, str]:
    return {key: path for key, path in paths.items() if path is not None}
