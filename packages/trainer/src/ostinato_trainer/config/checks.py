"""What a well-formed configuration may still get wrong: keys that contradict each other, and what cannot run here.

`consistency_problems` holds for every version and is asked when a configuration is loaded; `check_runnable` speaks of
this version only, so that a file written for another cluster still loads. Every message names the keys to change.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Final

from ostinato_trainer.config import Config
from ostinato_trainer.config.algorithm_checks import algorithm_problems, missing_algorithms, uses_groups
from ostinato_trainer.config.data import DataConfig
from ostinato_trainer.config.reward_checks import reward_problems
from ostinato_trainer.config.sampling_checks import sampling_problems, uncorrected_staleness
from ostinato_trainer.config.strategy_checks import strategy_problems
from ostinato_trainer.errors import ConfigError
from ostinato_trainer.placement.checks import executor_problems

__all__ = ["check_runnable", "consistency_problems", "problems_text", "runnable_problems", "template_problems"]

logger = logging.getLogger(__name__)

_ACTOR: Final = "actor_rollout_ref.actor"
_ROLLOUT: Final = "actor_rollout_ref.rollout"
_RENDERED: Final = frozenset({"messages", "tools", "add_generation_prompt"})


def problems_text(problems: Collection[str]) -> str:
    """One message out of several, a line each."""
    if len(problems) == 1:
        return next(iter(problems))
    return f"{len(problems)} problems in the configuration:\n" + "\n".join(f"  - {problem}" for problem in problems)


def consistency_problems(config: Config) -> list[str]:
    """Sentences about keys that contradict each other; empty where none do."""
    return [
        *algorithm_problems(config),
        *_batch_problems(config),
        *_length_problems(config),
        *_data_problems(config.data),
        *reward_problems(config.reward, max_response_length=config.data.max_response_length),
        *_run_problems(config),
        *config.trainer.resume_problems,
        *sampling_problems(config),
    ]


def _batch_problems(config: Config) -> list[str]:
    """How many prompts there are in a batch and in its mini-batches."""
    batch_size = config.data.train_batch_size
    mini_batches = (
        (
            f"{_ACTOR}.ppo_mini_batch_size",
            config.actor_rollout_ref.actor.ppo_mini_batch_size,
            "for one optimizer step a batch",
        ),
        ("critic.ppo_mini_batch_size", config.critic.ppo_mini_batch_size, "or null"),
    )
    return [
        f"data.train_batch_size must be a multiple of {key} (both count prompts), got {batch_size} and {size}; "
        f"write {key}={batch_size} {rest}"
        for key, size, rest in mini_batches
        if size is not None and batch_size % size
    ]


def _length_problems(config: Config) -> list[str]:
    """Whether a whole sequence fits into the engine, and into a pass of the policy and of the critic."""
    data, actor, critic = config.data, config.actor_rollout_ref.actor, config.critic
    max_model_len = config.actor_rollout_ref.rollout.max_model_len
    longest = data.max_prompt_length + data.max_response_length
    problems = []
    if max_model_len is not None and longest > max_model_len:
        problems.append(
            f"data.max_prompt_length + data.max_response_length must be at most {_ROLLOUT}.max_model_len, got "
            f"{data.max_prompt_length} + {data.max_response_length} = {longest} > {max_model_len}; "
            f"write {_ROLLOUT}.max_model_len={longest} or shorten one of the two"
        )
    of_critic = critic.use_dynamic_bsz, critic.ppo_max_token_len_per_gpu
    budgets = [(_ACTOR, actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu)]
    if of_critic != (None, None):  # else it is the actor's, which is named already
        by_tokens = actor.use_dynamic_bsz if critic.use_dynamic_bsz is None else critic.use_dynamic_bsz
        budgets.append(("critic", by_tokens, critic.ppo_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu))
    shared = actor.ranks_per_pass
    times = f" x {_ACTOR}.fsdp_config.ulysses_sequence_parallel_size={shared}" if shared > 1 else ""
    problems += [
        f"{section}.ppo_max_token_len_per_gpu{times} must hold one whole sequence, data.max_prompt_length + "
        f"data.max_response_length = {longest} tokens, got {budget}; "
        f"write {section}.ppo_max_token_len_per_gpu={-(-longest // shared)} or more"
        for section, by_tokens, budget in budgets
        if by_tokens and shared * budget < longest
    ]
    return problems


def _data_problems(data: DataConfig) -> list[str]:
    problems = [
        f"data.{name} must be at least 1, or -1 for all rows, got 0; write data.{name}=-1"
        for name in ("train_max_samples", "val_max_samples")
        if getattr(data, name) == 0
    ]
    problems += template_problems(data.apply_chat_template_kwargs)
    custom = data.custom_cls
    if (custom.path is None) != (custom.name is None):
        problems.append(
            f"data.custom_cls.path and .name must be given together, got {custom.path} and {custom.name}; write both"
        )
    return problems


def _run_problems(config: Config) -> list[str]:
    """What belongs to none of the sections alone."""
    rollout, timeout_s, names = config.actor_rollout_ref.rollout, config.reward.timeout_s, config.trainer.logger
    problems = []
    if rollout.temperature == 0:
        problems.append(
            f"{_ROLLOUT}.temperature must be greater than 0 to train: else all of a group are alike, got 0; "
            f"write {_ROLLOUT}.temperature=1.0"
        )
    if timeout_s > rollout.agent.reward_timeout_s:
        problems.append(
            f"reward.timeout_s must be at most {_ROLLOUT}.agent.reward_timeout_s, which also covers waiting for a free "
            f"worker, got {timeout_s:g} and {rollout.agent.reward_timeout_s:g}; "
            f"write {_ROLLOUT}.agent.reward_timeout_s={10 * timeout_s:g}"
        )
    if len(set(names)) < len(names):
        problems.append(
            f"trainer.logger must name each logger once, got [{', '.join(names)}]; remove the repeated name"
        )
    return problems


def template_problems(apply_chat_template_kwargs: Collection[str]) -> list[str]:
    """Sentences about variables of a chat template that no configuration may replace."""
    taken = sorted(_RENDERED.intersection(apply_chat_template_kwargs))
    if not taken:
        return []
    return [
        f"data.apply_chat_template_kwargs must not hold what every prompt is rendered with, got {', '.join(taken)}; remove it"
    ]


def runnable_problems(config: Config) -> list[str]:
    """Sentences about what this version cannot run, each with the key that must be given or changed; empty where it can."""
    # The engine's class is loaded to be asked; a configuration that is only read needs none.
    from ostinato_trainer.rollout_engine import engine_problems

    trainer = config.trainer
    problems = consistency_problems(config)
    if config.actor_rollout_ref.model.path is None:
        problems.append(
            "actor_rollout_ref.model.path must be given, got null; write the path of a model folder, config, "
            "weights and tokenizer"
        )
    if not config.data.train_paths:
        problems.append("data.train_files must name a file, got none; write data.train_files=PATH")
    if trainer.test_freq > 0 and not config.data.val_paths:
        problems.append(
            f"data.val_files must name a file while trainer.test_freq is {trainer.test_freq}, got none; "
            "write data.val_files=PATH or trainer.test_freq=-1"
        )
    if trainer.val_only and not config.data.val_paths:
        problems.append(
            "data.val_files must name a file while trainer.val_only is true, got none; "
            "write data.val_files=PATH or trainer.val_only=false"
        )
    if (trainer.best_metric or "").startswith("val-") and (trainer.test_freq <= 0 or not config.data.val_paths):
        problems.append(
            f"trainer.best_metric must be measured in the run, got {trainer.best_metric} without validation; "
            "write data.val_files=PATH and trainer.test_freq, a divisor of trainer.save_freq"
        )
    return [
        *problems,
        *engine_problems(config),
        *executor_problems(config),
        *strategy_problems(config),
        *missing_algorithms(config),
    ]


def check_runnable(config: Config) -> None:
    """Refuse what this version cannot run, all of it in one message.

    Raises:
        ConfigError: naming every key that must be given or changed, the reason and the cure.
    """
    if problems := runnable_problems(config):
        raise ConfigError(problems_text(problems))
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    if (stale := uncorrected_staleness(config)) is not None:
        logger.warning("%s", stale)
    if trainer.min_group_size == 1 < rollout.n and uses_groups(config):
        logger.warning(
            "trainer.min_group_size is 1: where all others of a group fail, the one that is left has no baseline, so its advantage is its plain "
            "reward; write trainer.min_group_size=2 or more to draw another prompt instead"
        )
    if rollout.n == 1 and uses_groups(config):
        logger.warning(
            "%s.n is 1: a group of one has no baseline, so its advantage is its plain reward; write %s.n=4 or more",
            _ROLLOUT,
            _ROLLOUT,
        )
