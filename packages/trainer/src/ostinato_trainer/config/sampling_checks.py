"""What the keys about sampling and waiting may get wrong, and which of them nothing reads: see `config.checks`."""

from __future__ import annotations

from ostinato_trainer.config import Config

__all__ = ["sampling_problems", "sampling_rules", "uncorrected_staleness"]

_FILTER = "algorithm.filter_groups"


def sampling_problems(config: Config) -> list[str]:
    """Sentences about keys that contradict each other."""
    trainer, filtering, n = config.trainer, config.algorithm.filter_groups, config.actor_rollout_ref.rollout.n
    problems = []
    if trainer.min_group_size is not None and trainer.min_group_size > n:
        problems.append(
            f"trainer.min_group_size must be at most actor_rollout_ref.rollout.n, the trajectories of a group, got {trainer.min_group_size} and"
            f" {n}; write trainer.min_group_size={n} for groups without a failure"
        )
    if filtering.enable and n == 1:
        problems.append(
            f"{_FILTER}.enable must be false while actor_rollout_ref.rollout.n is 1: one alone never differs; write {_FILTER}.enable=false"
        )
    if filtering.metric == "seq_final_reward":
        problems.append(
            f"{_FILTER}.metric must be known before a step computes, got seq_final_reward, which is not; write {_FILTER}.metric=score"
        )
    warn_after_s, fail_after_s = trainer.watchdog.warn_after_s, trainer.watchdog.fail_after_s
    if warn_after_s is not None and fail_after_s is not None and fail_after_s <= warn_after_s:
        problems.append(
            f"trainer.watchdog.fail_after_s must be above warn_after_s, got {fail_after_s:g} and {warn_after_s:g}; write"
            " trainer.watchdog.warn_after_s=null to have no warning"
        )
    return problems


def sampling_rules(config: Config) -> list[tuple[bool, str, tuple[str, ...]]]:
    """Whether a reason applies, the reason, and the keys that have no effect then."""
    return [
        (
            not config.algorithm.filter_groups.enable,
            f"{_FILTER}.enable is false",
            (f"{_FILTER}.metric", f"{_FILTER}.max_num_gen_batches"),
        )
    ]


def uncorrected_staleness(config: Config) -> str | None:
    """A sentence, where data is sampled ahead and nothing is done about the policy having changed since."""
    correction, max_staleness = config.algorithm.rollout_correction, config.trainer.max_staleness
    if not max_staleness or correction.bypass_mode or correction.rollout_is is not None:
        return None
    return (
        f"trainer.max_staleness is {max_staleness} and nothing corrects for the policy having changed since a token was sampled;"
        " write algorithm.rollout_correction.rollout_is=token to weigh tokens by it"
    )
