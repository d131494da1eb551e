"""`CriticUpdate`: one step's optimizer steps of the critic, and how well its values had explained the returns.

It knows neither rewards nor advantages: values and returns are columns of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import msgspec
import torch

from ostinato_trainer.algorithms.value_loss import value_loss
from ostinato_trainer.batch import Batch
from ostinato_trainer.config import Config
from ostinato_trainer.loop.parts import Critic
from ostinato_trainer.loop.policy_update import policy_update_settings
from ostinato_trainer.loop.update_loop import UpdateSettings, run_updates


class CriticUpdate:
    """The critic's side of a step's update.

    Args:
        config: The whole tree.
    """

    def __init__(self, config: Config) -> None:
        self._settings = critic_update_settings(config)
        self._loss = partial(value_loss, cliprange_value=config.critic.cliprange_value)  # it travels to ranks

    def run(self, batch: Batch, critic: Critic) -> dict[str, float]:
        """`critic.ppo_epochs` passes over the batch in mini-batches; returns the mean of their metrics.

        Args:
            batch: With `values` and `returns`.
            critic: Trained in place.
        """

        def forward_backward(micro_batches: Sequence[Batch]) -> Mapping[str, float]:
            return critic.forward_backward(micro_batches, self._loss)

        metrics = run_updates(
            batch,
            self._settings,
            forward_backward,
            critic.optimizer_step,
            prefix="critic",
            padded=critic.pads_sequences,
        )
        return metrics | explained_variance(batch)


def critic_update_settings(config: Config) -> UpdateSettings:
    """How the critic goes through a batch: as the policy does, where `critic` says nothing else."""
    critic, settings = config.critic, policy_update_settings(config)
    given = {
        "epochs": critic.ppo_epochs,
        "mini_batch_trajectories": critic.ppo_mini_batch_size
        and critic.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n,
        "loss_agg_mode": critic.loss_agg_mode,
        "use_dynamic_bsz": critic.use_dynamic_bsz,
        "max_tokens": critic.ppo_max_token_len_per_gpu
        and critic.ppo_max_token_len_per_gpu * config.actor_rollout_ref.actor.ranks_per_pass,
        "max_sequences": critic.ppo_micro_batch_size_per_gpu,
    }
    return msgspec.structs.replace(settings, **{name: value for name, value in given.items() if value is not None})


def explained_variance(batch: Batch) -> dict[str, float]:
    """`critic/vf_explained_var`: `1 - Var(returns - values) / Var(returns)` over the trained tokens, with the values at the start of the step.

    1 is a perfect critic, 0 one that knows no more than the mean; left out where returns do not vary.
    """
    if batch.values is None or batch.returns is None:
        return {}
    returns = batch.returns[batch.loss_mask].to(torch.float64)
    values = batch.values[batch.loss_mask].to(returns)
    if len(returns) < 2 or not (variance := float(returns.var())) > 0:
        return {}
    return {"critic/vf_explained_var": 1.0 - float((returns - values).var()) / variance}
