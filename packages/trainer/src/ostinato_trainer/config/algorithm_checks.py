"""What the algorithm's keys may get wrong together, and which of them the chosen estimator and loss do not read.

Part of `config.checks`; knows no torch, except where it is asked which estimators and losses are registered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from ostinato_trainer.config import Config
from ostinato_trainer.errors import ConfigError

__all__ = ["algorithm_problems", "algorithm_rules", "missing_algorithms", "uses_groups"]

_ACTOR: Final = "actor_rollout_ref.actor"
_CORRECTION: Final = "algorithm.rollout_correction"

_ESTIMATOR_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "grpo": ("norm_adv_by_std_in_grpo",),
    "grpo_passk": ("norm_adv_by_std_in_grpo",),
    "rloo": (),
    "opo": (),
    "gpg": (),
    "remax": (),
    "reinforce_plus_plus": ("gamma", "whiten_advantages"),
    "reinforce_plus_plus_baseline": ("whiten_advantages",),
    "gae": ("gamma", "lam", "whiten_advantages"),
}
"""Our estimators and what they read of `algorithm`; one of the user's own may read anything."""

_CLIP: Final = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
_LOSS_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "vanilla": (*_CLIP, "clip_ratio_c"),
    "gspo": _CLIP,
    "cispo": _CLIP,
    "gpg": (),
    "sapo": ("tau_pos", "tau_neg"),
}
"""Our policy losses and what they read of the actor."""

_OF_GROUPS: Final = ("grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline")


def uses_groups(config: Config) -> bool:
    """Whether the estimator compares a trajectory with its siblings."""
    return config.algorithm.adv_estimator in _OF_GROUPS


def algorithm_problems(config: Config) -> list[str]:
    """Sentences about keys of the algorithm that contradict each other or hold no threshold where one belongs."""
    algorithm = config.algorithm
    correction, estimator = algorithm.rollout_correction, algorithm.adv_estimator
    problems = []
    for read in ("weight_bounds", "rejections"):
        try:
            getattr(correction, read)
        except ConfigError as problem:
            problems.append(str(problem))
    if correction.bypass_mode:
        for name, value in (("rollout_is", correction.rollout_is), ("rollout_rs", correction.rollout_rs)):
            if value is not None:
                problems.append(
                    f"{_CORRECTION}.{name} must be null while bypass_mode is true, which leaves the correction to the clipped ratio, got "
                    f"{value}; write {_CORRECTION}.{name}=null or {_CORRECTION}.bypass_mode=false"
                )
    kl_ctrl = algorithm.kl_ctrl
    if algorithm.use_kl_in_reward and kl_ctrl.type == "adaptive" and kl_ctrl.kl_coef == 0:
        problems.append(
            "algorithm.kl_ctrl.kl_coef must be above 0 while algorithm.kl_ctrl.type is adaptive, as each step multiplies it, got 0; write "
            "algorithm.kl_ctrl.kl_coef=0.001 to start from"
        )
    if estimator == "grpo_passk" and config.actor_rollout_ref.rollout.n < 2:
        problems.append(
            "actor_rollout_ref.rollout.n must be at least 2 for grpo_passk, as the best of a group is compared with the second best, got "
            f"{config.actor_rollout_ref.rollout.n}; write actor_rollout_ref.rollout.n=4 or more"
        )
    return problems


def missing_algorithms(config: Config) -> list[str]:
    """Sentences about an estimator or a policy loss that does not exist."""
    from ostinato_trainer.algorithms.advantages import advantage_estimator
    from ostinato_trainer.algorithms.policy_losses import policy_loss

    estimator, problems = config.algorithm.adv_estimator, []
    for key, look_up, name in (
        ("algorithm.adv_estimator", advantage_estimator, estimator),
        (f"{_ACTOR}.policy_loss.loss_mode", policy_loss, config.actor_rollout_ref.actor.policy_loss.loss_mode),
    ):
        try:
            look_up(name)
        except LookupError as problem:
            problems.append(f"{key}: {problem}")
    return problems


def algorithm_rules(config: Config) -> Iterator[tuple[bool, str, tuple[str, ...]]]:
    """Whether a rule applies, why, and the keys that have no effect then."""
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    correction, loss = algorithm.rollout_correction, actor.policy_loss.loss_mode
    yield _others(_ESTIMATOR_KEYS, algorithm.adv_estimator, "algorithm", "algorithm.adv_estimator")
    yield _others(_LOSS_KEYS, loss, _ACTOR, f"{_ACTOR}.policy_loss.loss_mode")
    kl_ctrl = tuple(f"algorithm.kl_ctrl.{name}" for name in algorithm.kl_ctrl.__struct_fields__)
    yield not algorithm.use_kl_in_reward, "algorithm.use_kl_in_reward is false", ("algorithm.kl_penalty", *kl_ctrl)
    fixed = algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "fixed"
    yield fixed, "algorithm.kl_ctrl.type is fixed", ("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl")
    yield (
        correction.rollout_is is None,
        f"{_CORRECTION}.rollout_is is null",
        (f"{_CORRECTION}.rollout_is_threshold", f"{_CORRECTION}.rollout_is_batch_normalize"),
    )
    yield correction.rollout_rs is None, f"{_CORRECTION}.rollout_rs is null", (f"{_CORRECTION}.rollout_rs_threshold",)
    without_weight = actor.use_kl_loss and actor.kl_loss_coef == 0
    yield without_weight, f"{_ACTOR}.kl_loss_coef is 0", (f"{_ACTOR}.use_kl_loss", f"{_ACTOR}.kl_loss_type")
    yield bool(actor.entropy_coeff), f"{_ACTOR}.entropy_coeff is not 0", (f"{_ACTOR}.calculate_entropy",)


def _others(
    table: Mapping[str, tuple[str, ...]], chosen: str, node: str, key: str
) -> tuple[bool, str, tuple[str, ...]]:
    """The keys that others of a table read and the chosen one does not."""
    read = table.get(chosen, ())
    unread = dict.fromkeys(name for names in table.values() for name in names if name not in read)
    return chosen in table, f"{key} is {chosen}", tuple(f"{node}.{name}" for name in unread)
