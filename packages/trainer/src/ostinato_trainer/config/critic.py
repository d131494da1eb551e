"""The node `critic`: the value model of PPO, its optimizer and its update.

Read only where the advantage estimator needs values (`algorithm.adv_estimator=gae`). What is null follows the actor. Pure data: knows no
torch. The docstring below a field is what `ostinato config` prints as its meaning.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from ostinato_trainer.config.actor import LossAggMode, OptimConfig

__all__ = ["CriticConfig", "CriticModelConfig", "CriticOptimConfig"]


class CriticModelConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The critic's files (`critic.model`)."""

    path: str | None = None
    """Folder in the Hugging Face format to start the critic from; null takes the policy's. A folder with a scalar head keeps its head."""


class CriticOptimConfig(OptimConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """AdamW and its schedule (`critic.optim`)."""

    lr: Annotated[float, Meta(ge=0)] = 1e-5
    """Learning rate after warm-up."""


class CriticConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The value model and its update (`critic`)."""

    model: CriticModelConfig = CriticModelConfig()
    """The critic's files."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """What the critic computes in; null takes the actor's. Weights, moments and values are kept in float32."""
    optim: CriticOptimConfig = CriticOptimConfig()
    """The critic's optimizer."""
    grad_clip: Annotated[float, Meta(gt=0)] = 1.0
    """Largest global norm of the critic's gradient; a larger one is scaled down to it."""
    ppo_mini_batch_size: Annotated[int, Meta(ge=1)] | None = None
    """Prompts in one optimizer step of the critic; null takes the actor's."""
    ppo_micro_batch_size_per_gpu: Annotated[int, Meta(ge=1)] | None = None
    """Sequences in one forward-backward pass of the critic; null takes the actor's. Unread if use_dynamic_bsz."""
    use_dynamic_bsz: bool | None = None
    """Fill the critic's passes by tokens instead of by sequences; null takes the actor's."""
    ppo_max_token_len_per_gpu: Annotated[int, Meta(ge=1)] | None = None
    """Most tokens in one pass that computes values, and of the update while use_dynamic_bsz is true; null takes the actor's."""
    ppo_epochs: Annotated[int, Meta(ge=1)] | None = None
    """Passes of the critic over the batch of one step; null takes the actor's."""
    cliprange_value: Annotated[float, Meta(gt=0)] = 0.5
    """How far a prediction may move from the value at the start of the step before its loss is that of the bound."""
    loss_agg_mode: LossAggMode | None = None
    """How token losses become one number; null takes the actor's."""
