"""`prepare_batch`: from sampled tokens to a batch that can be learned from: log-probabilities, then advantages.

Everything here happens once a step, over the whole batch and before it is cut into mini-batches, under the policy as it was
when the step began.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ostinato_agent_loop import Trajectory
from ostinato_trainer.advantages import AdvantageOptions, with_advantages
from ostinato_trainer.batch import Batch
from ostinato_trainer.config import Config
from ostinato_trainer.errors import TrainingInterrupted
from ostinato_trainer.segments import segments_of
from ostinato_trainer.trainer_parts import Stopwatch, TrainerParts


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
    rewards = [reward.score for group_id in batch.group_ids if (reward := greedy[group_id].reward) is not None]
    return batch.with_columns(baselines=torch.tensor(rewards, dtype=torch.float64)[batch.trajectory_group])


def prepare_batch(
    batch: Batch, config: Config, parts: TrainerParts, clock: Stopwatch
) -> tuple[Batch, dict[str, float]]:
    """The batch with what the update needs, and metrics of how that came about.

    Args:
        batch: Of `batch_of`.
        config: The whole tree.
        parts: Whose backend is asked.
        clock: Gets the phases `old_log_prob`, `ref`, `values` and `adv`.
    """
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    temperature = config.actor_rollout_ref.rollout.temperature
    metrics: dict[str, float] = {}
    with clock("old_log_prob"):
        batch = batch.with_columns(old_log_probs=parts.backend.log_probs(batch, temperature=temperature))
    if actor.use_kl_loss and actor.kl_loss_coef:
        with clock("ref"):
            reference = parts.backend.log_probs(batch, temperature=temperature, reference=True)
            batch = batch.with_columns(ref_log_probs=reference)
    if parts.critic is not None:
        with clock("values"):
            batch = batch.with_columns(values=parts.critic.values(batch))
    with clock("adv"):
        options = AdvantageOptions(norm_by_std=algorithm.norm_adv_by_std_in_grpo)
        batch = with_advantages(batch, algorithm.adv_estimator, options)
    return batch, metrics
