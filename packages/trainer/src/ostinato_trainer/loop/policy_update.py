"""`PolicyUpdate`: one step's optimizer steps of the policy, with the loss that the configuration chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ostinato_trainer.algorithms.policy_losses import PolicyLossOptions, needs_whole_trajectories, policy_loss_fn
from ostinato_trainer.backends.base import EntropyMode, TrainingBackend
from ostinato_trainer.batch import Batch
from ostinato_trainer.config import Config
from ostinato_trainer.loop.update_loop import UpdateSettings, run_updates


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
                tau_pos=actor.tau_pos,
                tau_neg=actor.tau_neg,
                kl_loss_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
                kl_loss_type=actor.kl_loss_type,
                entropy_coeff=actor.entropy_coeff,
            ),
            actor.policy_loss.loss_mode,
        )

    def run(self, batch: Batch, backend: TrainingBackend) -> dict[str, float]:
        """`ppo_epochs` passes over the batch in mini-batches; returns the mean of their metrics."""
        rollout_config = self._config.actor_rollout_ref.rollout
        entropy = _entropy_mode(self._config)

        def forward_backward(micro_batches: Sequence[Batch]) -> Mapping[str, float]:
            return backend.forward_backward(
                micro_batches, self._loss_fn, temperature=rollout_config.temperature, entropy=entropy
            )

        settings = policy_update_settings(self._config)
        return run_updates(
            batch,
            settings,
            forward_backward,
            backend.optimizer_step,
            prefix="actor",
            padded=backend.pads_sequences,
            has_loss=_has_weight,
        )


def policy_update_settings(config: Config) -> UpdateSettings:
    """How the policy goes through a batch."""
    actor = config.actor_rollout_ref.actor
    return UpdateSettings(
        epochs=actor.ppo_epochs,
        mini_batch_trajectories=actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n,
        loss_agg_mode=actor.loss_agg_mode,
        loss_scale_factor=float(config.data.max_response_length),
        use_dynamic_bsz=actor.use_dynamic_bsz,
        max_tokens=actor.ppo_max_token_len_per_gpu * actor.ranks_per_pass,
        max_sequences=actor.ppo_micro_batch_size_per_gpu,
        whole_trajectories=needs_whole_trajectories(actor.policy_loss.loss_mode),
    )


def _has_weight(mini_batch: Batch) -> bool:
    """Whether a token is trained on that its importance weight does not take out."""
    weights = mini_batch.rollout_is_weights
    trained = (
        mini_batch.loss_mask if weights is None else mini_batch.loss_mask & (weights != 0)
    )  # NaN shows in the loss
    return bool(trained.any())


def _entropy_mode(config: Config) -> EntropyMode:
    actor = config.actor_rollout_ref.actor
    if actor.entropy_coeff:
        return EntropyMode.GRADIENT
    return EntropyMode.VALUE if actor.calculate_entropy else EntropyMode.OFF
