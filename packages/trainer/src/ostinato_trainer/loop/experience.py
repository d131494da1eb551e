"""`prepare_batch`: from sampled tokens to a batch that can be learned from: log-probabilities, values, advantages,
and what corrects for another sampler.

Everything here happens once a step, over the whole batch and before it is cut into mini-batches, under the policy as it was
when the step began.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ostinato_agent_loop import Trajectory
from ostinato_trainer.algorithms.advantages import AdvantageOptions, with_advantages
from ostinato_trainer.algorithms.kl_control import with_kl_in_reward
from ostinato_trainer.algorithms.rollout_correction import correct_rollout, sampler_log_probs
from ostinato_trainer.batch import Batch
from ostinato_trainer.config import AlgorithmConfig, Config
from ostinato_trainer.errors import BatchError, TrainingInterrupted
from ostinato_trainer.loop.parts import Stopwatch, TrainerParts
from ostinato_trainer.segments import segments_of


def batch_of(trajectories: Sequence[Trajectory], *, step: int) -> Batch:
    """The trajectories that did not fail, as a batch.

    Raises:
        TrainingInterrupted: there is none.
    """
    segments = segments_of(trajectories)
    if not segments:
        failures = [trajectory.failure for trajectory in trajectories if trajectory.failure is not None]
        first = f"; the first failed in {failures[0].where}: {failures[0].message}" if failures else ""
        raise TrainingInterrupted(
            f"step {step} must have at least one trajectory to learn from, but all {len(trajectories)} failed{first}"
        )
    return Batch.from_segments(segments)


def with_baselines(batch: Batch, greedy: Mapping[str, Trajectory]) -> Batch:
    """The batch with the column `baselines`: for each trajectory the reward of the greedy one of its group; as it is where there are none."""
    if not greedy:
        return batch
    rewards = []
    for group_id in batch.group_ids:
        trajectory = greedy.get(group_id)
        if trajectory is None or trajectory.reward is None:
            raise BatchError(
                f"group {group_id!r} must have a greedy trajectory with a reward, got none; leave the group out of the batch"
            )
        rewards.append(trajectory.reward.score)
    return batch.with_columns(baselines=torch.tensor(rewards, dtype=torch.float64)[batch.trajectory_group])


def prepare_batch(
    batch: Batch, config: Config, parts: TrainerParts, clock: Stopwatch
) -> tuple[Batch, dict[str, float]]:
    """The batch with what the update needs, and metrics of how that came about.

    Args:
        batch: Of `batch_of`.
        config: The whole tree.
        parts: Whose backend and critic are asked, and whose controller of the divergence learns from the batch.
        clock: Gets the phases `old_log_prob`, `ref`, `values` and `adv`.
    """
    algorithm = config.algorithm
    temperature = config.actor_rollout_ref.rollout.temperature
    with clock("old_log_prob"):
        old_log_probs, metrics = _old_log_probs(batch, config, parts)
        batch = batch.with_columns(old_log_probs=old_log_probs)
    if needs_reference(config):
        with clock("ref"):
            reference = parts.backend.log_probs(batch, temperature=temperature, reference=True)
            batch = batch.with_columns(ref_log_probs=reference)
    if parts.critic is not None:
        with clock("values"):
            batch = batch.with_columns(values=parts.critic.values(batch))
    with clock("adv"):
        if parts.kl_controller is not None:
            coef = parts.kl_controller.coef
            batch, kl = with_kl_in_reward(batch, algorithm.kl_penalty, coef)
            parts.kl_controller.update(kl, batch.num_trajectories)
            metrics |= {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": coef}
        batch = with_advantages(batch, algorithm.adv_estimator, advantage_options(algorithm))
        if not algorithm.rollout_correction.bypass_mode:
            batch, of_correction = correct_rollout(batch, algorithm.rollout_correction)
            metrics |= of_correction
    return batch, metrics


def advantage_options(algorithm: AlgorithmConfig) -> AdvantageOptions:
    """What the estimators read of `algorithm`."""
    return AdvantageOptions(
        norm_by_std=algorithm.norm_adv_by_std_in_grpo,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        whiten=algorithm.whiten_advantages,
    )


def _old_log_probs(batch: Batch, config: Config, parts: TrainerParts) -> tuple[Tensor, dict[str, float]]:
    """Log-probabilities at the start of the step: the policy's, or the sampler's own where that pass is bypassed.

    Where the sampler's are not known of every trained token, the policy's stand in for the unknown ones, which are counted.
    """

    def of_policy() -> Tensor:
        return parts.backend.log_probs(batch, temperature=config.actor_rollout_ref.rollout.temperature)

    if not config.algorithm.rollout_correction.bypass_mode:
        return of_policy(), {}
    log_probs, num_unknown = sampler_log_probs(batch)
    if num_unknown:
        log_probs = torch.where(torch.isnan(log_probs), of_policy(), log_probs)
    return log_probs, {"rollout_corr/num_unknown_tokens": float(num_unknown)}


def needs_reference(config: Config) -> bool:
    """Whether the reference policy is asked for anything."""
    actor = config.actor_rollout_ref.actor
    return config.algorithm.use_kl_in_reward or (actor.use_kl_loss and actor.kl_loss_coef > 0)
