"""What a well-formed configuration may still get wrong: keys that contradict each other, and what cannot run here.

`consistency_problems` holds for every version and is asked when a configuration is loaded; `check_runnable` speaks of
this version only, so that a file written for another cluster still loads. Every message names the keys to change.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Final

from ostinato_trainer.config import Config
from ostinato_trainer.config.algorithm_checks import (
    algorithm_problems,
    algorithm_rules,
    missing_algorithms,
    uses_groups,
)
from ostinato_trainer.config.reward_checks import reward_problems, unread_reward_keys
from ostinato_trainer.config.sampling_checks import sampling_problems, sampling_rules, uncorrected_staleness
from ostinato_trainer.config.strategy_checks import strategy_problems, unread_strategy_keys
from ostinato_trainer.errors import ConfigError
from ostinato_trainer.placement.checks import executor_problems, unread_executor_keys

__all__ = ["check_runnable", "consistency_problems", "problems_text", "template_problems", "unread_keys"]

logger = logging.getLogger(__name__)

_ACTOR: Final = "actor_rollout_ref.actor"
_MODEL: Final = "actor_rollout_ref.model"
_ROLLOUT: Final = "actor_rollout_ref.rollout"
_RENDERED: Final = frozenset({"messages", "tools", "add_generation_prompt"})


_WITHOUT_CRITIC: Final = (
    *("grpo", "grpo_passk", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
    *("remax", "opo", "gpg"),
)
"""Estimators of ours that read no values; one of the user's own may."""


def problems_text(problems: Collection[str]) -> str:
    """One message out of several, a line each."""
    if len(problems) == 1:
        return next(iter(problems))
    return f"{len(problems)} problems in the configuration:\n" + "\n".join(f"  - {problem}" for problem in problems)


def consistency_problems(config: Config) -> list[str]:
    """Sentences about keys that contradict each other; empty where none do."""
    data, actor, rollout = config.data, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    problems = algorithm_problems(config)
    if data.train_batch_size % actor.ppo_mini_batch_size:
        problems.append(
            f"data.train_batch_size must be a multiple of {_ACTOR}.ppo_mini_batch_size (both count prompts), got "
            f"{data.train_batch_size} and {actor.ppo_mini_batch_size}; write "
            f"{_ACTOR}.ppo_mini_batch_size={data.train_batch_size} for one optimizer step a batch"
        )
    if rollout.temperature == 0:
        problems.append(
            f"{_ROLLOUT}.temperature must be greater than 0 to train: else all of a group are alike, got 0; "
            f"write {_ROLLOUT}.temperature=1.0"
        )
    longest = data.max_prompt_length + data.max_response_length
    if rollout.max_model_len is not None and longest > rollout.max_model_len:
        problems.append(
            f"data.max_prompt_length + data.max_response_length must be at most {_ROLLOUT}.max_model_len, got "
            f"{data.max_prompt_length} + {data.max_response_length} = {longest} > {rollout.max_model_len}; "
            f"write {_ROLLOUT}.max_model_len={longest} or shorten one of the two"
        )
    shared = actor.ranks_per_pass
    if actor.use_dynamic_bsz and shared * actor.ppo_max_token_len_per_gpu < longest:
        problems.append(
            f"{_ACTOR}.ppo_max_token_len_per_gpu{_times(shared)} must hold one whole sequence, data.max_prompt_length + "
            f"data.max_response_length = {longest} tokens, got {actor.ppo_max_token_len_per_gpu}; "
            f"write {_ACTOR}.ppo_max_token_len_per_gpu={-(-longest // shared)} or more"
        )
    critic = config.critic
    mini_batch = critic.ppo_mini_batch_size
    if mini_batch is not None and data.train_batch_size % mini_batch:
        problems.append(
            f"data.train_batch_size must be a multiple of critic.ppo_mini_batch_size (both count prompts), got "
            f"{data.train_batch_size} and {mini_batch}; write critic.ppo_mini_batch_size={data.train_batch_size} or null"
        )
    by_tokens = actor.use_dynamic_bsz if critic.use_dynamic_bsz is None else critic.use_dynamic_bsz
    budget = critic.ppo_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu
    if (
        by_tokens
        and shared * budget < longest
        and (critic.use_dynamic_bsz, critic.ppo_max_token_len_per_gpu) != (None, None)
    ):
        problems.append(
            f"critic.ppo_max_token_len_per_gpu{_times(shared)} must hold one whole sequence, data.max_prompt_length + "
            f"data.max_response_length = {longest} tokens, got {budget}; "
            f"write critic.ppo_max_token_len_per_gpu={-(-longest // shared)} or more"
        )
    for name in ("train_max_samples", "val_max_samples"):
        if getattr(data, name) == 0:
            problems.append(f"data.{name} must be at least 1, or -1 for all rows, got 0; write data.{name}=-1")
    problems += template_problems(data.apply_chat_template_kwargs)
    custom = data.custom_cls
    if (custom.path is None) != (custom.name is None):
        problems.append(
            f"data.custom_cls.path and .name must be given together, got {custom.path} and {custom.name}; write both"
        )
    problems += reward_problems(config.reward, max_response_length=data.max_response_length)
    if config.reward.timeout_s > rollout.agent.reward_timeout_s:
        problems.append(
            f"reward.timeout_s must be at most {_ROLLOUT}.agent.reward_timeout_s, which also covers waiting for a free "
            f"worker, got {config.reward.timeout_s:g} and {rollout.agent.reward_timeout_s:g}; "
            f"write {_ROLLOUT}.agent.reward_timeout_s={10 * config.reward.timeout_s:g}"
        )
    problems += config.trainer.resume_problems
    problems += sampling_problems(config)
    if len(set(config.trainer.logger)) < len(config.trainer.logger):
        names = ", ".join(config.trainer.logger)
        problems.append(f"trainer.logger must name each logger once, got [{names}]; remove the repeated name")
    return problems


def _times(ranks: int) -> str:
    return f" x {_ACTOR}.fsdp_config.ulysses_sequence_parallel_size={ranks}" if ranks > 1 else ""


def template_problems(apply_chat_template_kwargs: Collection[str]) -> list[str]:
    """Sentences about variables of a chat template that no configuration may replace."""
    taken = sorted(_RENDERED.intersection(apply_chat_template_kwargs))
    if not taken:
        return []
    return [
        f"data.apply_chat_template_kwargs must not hold what every prompt is rendered with, got {', '.join(taken)}; remove it"
    ]


def unread_keys(config: Config, written: Collection[str]) -> list[str]:
    """Sentences about keys that were written and that other keys keep from having any effect.

    Args:
        config: the loaded configuration.
        written: dotted paths that files or overrides gave.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    model = config.actor_rollout_ref.model
    rules = (
        (not actor.use_kl_loss, f"{_ACTOR}.use_kl_loss is false", (f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type")),
        (actor.use_dynamic_bsz, f"{_ACTOR}.use_dynamic_bsz is true", (f"{_ACTOR}.ppo_micro_batch_size_per_gpu",)),
        (
            not rollout.val_kwargs.do_sample,
            f"{_ROLLOUT}.val_kwargs.do_sample is false",
            tuple(f"{_ROLLOUT}.val_kwargs.{name}" for name in ("temperature", "top_p", "top_k")),
        ),
        (
            actor.clip_ratio_low is not None and actor.clip_ratio_high is not None,
            "clip_ratio_low and clip_ratio_high are both given",
            (f"{_ACTOR}.clip_ratio",),
        ),
        (
            config.algorithm.rollout_correction.bypass_mode,
            "algorithm.rollout_correction.bypass_mode is true, which leaves nothing to compare",
            (f"{_ROLLOUT}.log_prob_check.max_mean_diff", f"{_ROLLOUT}.log_prob_check.action"),
        ),
        *algorithm_rules(config),
        *sampling_rules(config),
        (not config.data.shuffle, "data.shuffle is false", ("data.seed",)),
        (
            not config.data.val_paths,
            "data.val_files is empty",
            ("data.val_max_samples", "trainer.log_val_generations", "trainer.validation_data_dir"),
        ),
        (
            config.data.filter_overlong_prompts and config.data.truncation != "error",
            "data.filter_overlong_prompts is true",
            ("data.truncation",),
        ),
        *unread_reward_keys(config.reward),
        *unread_executor_keys(config),
        *unread_strategy_keys(config),
        (
            config.trainer.resume_mode != "resume_path",
            f"trainer.resume_mode is {config.trainer.resume_mode}",
            ("trainer.resume_from_path",),
        ),
        (
            config.trainer.save_freq == 0,
            "trainer.save_freq is 0",
            ("trainer.async_save", "trainer.best_metric", "trainer.max_ckpt_to_keep"),
        ),
        (
            config.algorithm.adv_estimator in _WITHOUT_CRITIC,
            f"algorithm.adv_estimator is {config.algorithm.adv_estimator}, which needs no critic",
            ("trainer.critic_warmup", *(key for key in written if key.startswith("critic."))),
        ),
        (
            not model.lora_rank or model.lora_adapter_path is not None,
            f"{_MODEL}.lora_rank is 0" if model.lora_adapter_path is None else f"{_MODEL}.lora_adapter_path decides it",
            tuple(f"{_MODEL}.{name}" for name in ("lora_alpha", "target_modules", "exclude_modules")),
        ),
        (
            bool(config.critic.use_dynamic_bsz),
            "critic.use_dynamic_bsz is true",
            ("critic.ppo_micro_batch_size_per_gpu",),
        ),
        (
            True,
            f"{_ROLLOUT}.trace.backend is {rollout.trace.backend or 'null'}",
            tuple(f"{_ROLLOUT}.trace.{name}" for name in rollout.trace.unread),
        ),
        (
            True,
            f"{_ROLLOUT}.name is {rollout.name}",
            tuple(
                f"{_ROLLOUT}.engine_kwargs.{name}"
                for name in rollout.engine_kwargs.__struct_fields__
                if name != rollout.name
            ),
        ),
    )
    return [
        f"{key} has no effect while {why}" for applies, why, keys in rules if applies for key in keys if key in written
    ]


def check_runnable(config: Config) -> None:
    """Refuse what this version cannot run, all of it in one message.

    Raises:
        ConfigError: naming every key that must be given or changed, the reason and the cure.
    """
    # The engine's class is loaded to be asked; a configuration that is only read needs none.
    from ostinato_trainer.rollout_engine import engine_problems

    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
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
    problems += engine_problems(config)
    problems += executor_problems(config)
    problems += strategy_problems(config)
    problems += missing_algorithms(config)
    if problems:
        raise ConfigError(problems_text(problems))
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
