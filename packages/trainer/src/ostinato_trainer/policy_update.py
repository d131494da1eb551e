"""`PolicyUpdate`: one step's optimizer steps of the policy: epochs, mini-batches, micro-batches.

A mini-batch gets its loss weights as a whole before it is split, so how it is split cannot matter.
"""

from __future__ import annotations

from ostinato_trainer.aggregation import with_loss_weights
from ostinato_trainer.backend import EntropyMode, OptimizerStats, TrainingBackend
from ostinato_trainer.batch import Batch
from ostinato_trainer.config import Config
from ostinato_trainer.policy_losses import PolicyLossOptions, policy_loss_fn


class PolicyUpdate:
    """The policy's side of a step's update.

    Args:
        config: The whole tree.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        actor = config.actor_rollout_ref.actor
        self._loss_fn = policy_loss_fn(
            PolicyLossOptions(
                clip_ratio=actor.clip_ratio,
                clip_ratio_low=actor.clip_ratio_low,
                clip_ratio_high=actor.clip_ratio_high,
                clip_ratio_c=actor.clip_ratio_c,
                kl_loss_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
                kl_loss_type=actor.kl_loss_type,
                entropy_coeff=actor.entropy_coeff,
            )
        )

    def run(self, batch: Batch, backend: TrainingBackend) -> dict[str, float]:
        """`ppo_epochs` passes over the batch in mini-batches; returns the mean of their metrics."""
        actor, rollout_config = self._config.actor_rollout_ref.actor, self._config.actor_rollout_ref.rollout
        entropy = EntropyMode.GRADIENT if actor.entropy_coeff else EntropyMode.OFF
        updates: list[dict[str, float]] = []
        num_skipped = 0
        for _ in range(actor.ppo_epochs):
            for mini_batch in batch.mini_batches(actor.ppo_mini_batch_size * rollout_config.n):
                weighted = with_loss_weights(
                    mini_batch, actor.loss_agg_mode, loss_scale_factor=float(self._config.data.max_response_length)
                )
                metrics = backend.forward_backward(
                    self._micro_batches(weighted),
                    self._loss_fn,
                    temperature=rollout_config.temperature,
                    entropy=entropy,
                )
                stats: OptimizerStats = backend.optimizer_step()
                num_skipped += stats.skipped
                updates.append({**metrics, "actor/grad_norm": stats.grad_norm, "actor/lr": stats.lr})
        means = {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}
        return {**means, "actor/num_skipped_steps": float(num_skipped)}

    def _micro_batches(self, mini_batch: Batch) -> list[Batch]:
        """The parts of a mini-batch that go through the model at once."""
        actor = self._config.actor_rollout_ref.actor
        if actor.use_dynamic_bsz:
            return mini_batch.split_by_tokens(actor.ppo_max_token_len_per_gpu)
        return mini_batch.split_by_count(actor.ppo_micro_batch_size_per_gpu or mini_batch.num_sequences)
