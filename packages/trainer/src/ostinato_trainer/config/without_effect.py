"""Keys that were written and that other keys keep from having any effect: the table of what switches what off."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from ostinato_trainer.config import Config
from ostinato_trainer.config.algorithm_checks import algorithm_rules
from ostinato_trainer.config.reward_checks import unread_reward_keys
from ostinato_trainer.config.sampling_checks import sampling_rules
from ostinato_trainer.config.strategy_checks import unread_strategy_keys
from ostinato_trainer.placement.checks import unread_executor_keys

__all__ = ["unread_keys"]

_ACTOR: Final = "actor_rollout_ref.actor"
_MODEL: Final = "actor_rollout_ref.model"
_ROLLOUT: Final = "actor_rollout_ref.rollout"

_WITHOUT_CRITIC: Final = (
    *("grpo", "grpo_passk", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
    *("remax", "opo", "gpg"),
)
"""Estimators of ours that read no values; one of the user's own may."""


Rule = tuple[bool, str, Sequence[str]]
"""Whether it applies, why, and the keys that are then without effect."""


def unread_keys(config: Config, written: Collection[str]) -> list[str]:
    """Sentences about keys that were written and that other keys keep from having any effect.

    Args:
        config: the loaded configuration.
        written: dotted paths that files or overrides gave.
    """
    rules: tuple[Rule, ...] = (
        *_actor_rules(config),
        *algorithm_rules(config),
        *sampling_rules(config),
        *_data_rules(config),
        *unread_reward_keys(config.reward),
        *unread_executor_keys(config),
        *unread_strategy_keys(config),
        *_trainer_rules(config),
        *_critic_rules(config, written),
        *_rollout_rules(config),
    )
    return [
        f"{key} has no effect while {why}" for applies, why, keys in rules if applies for key in keys if key in written
    ]


def _actor_rules(config: Config) -> list[Rule]:
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    return [
        (not actor.use_kl_loss, f"{_ACTOR}.use_kl_loss is false", (f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type")),
        (actor.use_dynamic_bsz, f"{_ACTOR}.use_dynamic_bsz is true", (f"{_ACTOR}.ppo_micro_batch_size_per_gpu",)),
        (
            actor.clip_ratio_low is not None and actor.clip_ratio_high is not None,
            "clip_ratio_low and clip_ratio_high are both given",
            (f"{_ACTOR}.clip_ratio",),
        ),
        (
            not model.lora_rank or model.lora_adapter_path is not None,
            f"{_MODEL}.lora_rank is 0" if model.lora_adapter_path is None else f"{_MODEL}.lora_adapter_path decides it",
            [f"{_MODEL}.{name}" for name in ("lora_alpha", "target_modules", "exclude_modules")],
        ),
    ]


def _data_rules(config: Config) -> list[Rule]:
    data = config.data
    return [
        (not data.shuffle, "data.shuffle is false", ("data.seed",)),
        (
            not data.val_paths,
            "data.val_files is empty",
            ("data.val_max_samples", "trainer.log_val_generations", "trainer.validation_data_dir"),
        ),
        (
            data.filter_overlong_prompts and data.truncation != "error",
            "data.filter_overlong_prompts is true",
            ("data.truncation",),
        ),
    ]


def _trainer_rules(config: Config) -> list[Rule]:
    trainer = config.trainer
    return [
        (
            trainer.resume_mode != "resume_path",
            f"trainer.resume_mode is {trainer.resume_mode}",
            ("trainer.resume_from_path",),
        ),
        (
            trainer.save_freq == 0,
            "trainer.save_freq is 0",
            ("trainer.async_save", "trainer.best_metric", "trainer.max_ckpt_to_keep"),
        ),
    ]


def _critic_rules(config: Config, written: Collection[str]) -> list[Rule]:
    estimator = config.algorithm.adv_estimator
    own, actors = config.critic.use_dynamic_bsz, config.actor_rollout_ref.actor.use_dynamic_bsz
    return [
        (
            estimator in _WITHOUT_CRITIC,
            f"algorithm.adv_estimator is {estimator}, which needs no critic",
            ("trainer.critic_warmup", *(key for key in written if key.startswith("critic."))),
        ),
        (
            actors if own is None else own,
            f"{_ACTOR}.use_dynamic_bsz is true" if own is None else "critic.use_dynamic_bsz is true",
            ("critic.ppo_micro_batch_size_per_gpu",),
        ),
    ]


def _rollout_rules(config: Config) -> list[Rule]:
    rollout = config.actor_rollout_ref.rollout
    other_engines = [name for name in rollout.engine_kwargs.__struct_fields__ if name != rollout.name]
    return [
        (
            not rollout.val_kwargs.do_sample,
            f"{_ROLLOUT}.val_kwargs.do_sample is false",
            [f"{_ROLLOUT}.val_kwargs.{name}" for name in ("temperature", "top_p", "top_k")],
        ),
        (
            config.algorithm.rollout_correction.bypass_mode,
            "algorithm.rollout_correction.bypass_mode is true, which leaves nothing to compare",
            (f"{_ROLLOUT}.log_prob_check.max_mean_diff", f"{_ROLLOUT}.log_prob_check.action"),
        ),
        (
            True,
            f"{_ROLLOUT}.trace.backend is {rollout.trace.backend or 'null'}",
            [f"{_ROLLOUT}.trace.{name}" for name in rollout.trace.unread],
        ),
        (True, f"{_ROLLOUT}.name is {rollout.name}", [f"{_ROLLOUT}.engine_kwargs.{name}" for name in other_engines]),
    ]
