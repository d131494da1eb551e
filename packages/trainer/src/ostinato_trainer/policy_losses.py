"""Policy losses token by token, the entropy bonus and the KL term, and the `LossFn` made of them that a backend calls.

Token losses are pure functions of log-probabilities and advantages. Aggregation is not decided here: the weights of
the mini-batch do that (`ostinato_trainer.aggregation`), for the policy, KL and entropy terms alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from ostinato_trainer.aggregation import aggregate, token_average
from ostinato_trainer.backend import LossFn, LossOutput, MicroBatch, MicroBatchOutput
from ostinato_trainer.errors import AlgorithmError, BatchError
from ostinato_trainer.kl import kl_estimate, kl_kind

_MAX_LOG_RATIO = 20.0


class PolicyLossOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the losses read of `actor_rollout_ref.actor.*`; the names are the configuration's."""

    clip_ratio: float = 0.2
    """PPO's epsilon where the two below are None."""
    clip_ratio_low: float | None = None
    """Ratios below 1 - this are clipped."""
    clip_ratio_high: float | None = None
    """Ratios above 1 + this are clipped."""
    clip_ratio_c: float = 3.0
    """Dual clip: bound of the loss of a token with negative advantage, in multiples of it; above 1."""
    kl_loss_coef: float = 0.0
    """Weight of the KL term; 0 leaves it out."""
    kl_loss_type: str = "low_var_kl"
    """See `ostinato_trainer.kl`."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus; 0 leaves it out."""

    def __post_init__(self) -> None:
        for name, value in (
            ("clip_ratio", self.clip_ratio),
            ("clip_ratio_low", self.low),
            ("clip_ratio_high", self.high),
        ):
            if not value >= 0:
                raise BatchError(f"{name} must be at least 0, got {value}; 0.2 is usual")
        if not self.clip_ratio_c > 1:
            raise BatchError(f"clip_ratio_c must be above 1, got {self.clip_ratio_c}; 3.0 is usual")
        kl_kind(self.kl_loss_type)

    @property
    def low(self) -> float:
        """The lower clip in force."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def high(self) -> float:
        """The upper clip in force."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


@dataclass(frozen=True)
class TokenLosses:
    """Loss of each token and what is worth knowing of it; values outside the mask are without meaning."""

    losses: Tensor
    """float [T]; gradients flow."""
    kl: Tensor
    """float [T], detached: log-ratio old - new, whose mean estimates KL(old || new)."""
    clipped: Tensor
    """bool [T]: the upper or lower clip holds."""
    clipped_lower: Tensor
    """bool [T]: the dual clip holds."""


PolicyLoss = Callable[[Tensor, Tensor, Tensor, PolicyLossOptions], TokenLosses]
"""From log_probs, old_log_probs and advantages, each [T], to token losses."""


def vanilla(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, options: PolicyLossOptions) -> TokenLosses:
    """PPO's clipped surrogate (arXiv:1707.06347) with separate bounds (DAPO, arXiv:2503.14476) and dual clip
    (arXiv:1912.09729).

    `max(-A r, -A clip(r, 1 - low, 1 + high))`, for A < 0 at most `-A c`, with r = exp(new - old), the exponent held
    within 20.
    """
    log_ratio = (log_probs - old_log_probs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - options.low, 1.0 + options.high)
    clipped_once = torch.maximum(plain, bounded)
    ceiling = -advantages * options.clip_ratio_c
    negative = advantages < 0
    losses = torch.where(negative, torch.minimum(ceiling, clipped_once), clipped_once)
    return TokenLosses(
        losses=losses,
        kl=-log_ratio.detach(),
        clipped=(bounded > plain).detach(),
        clipped_lower=(negative & (clipped_once > ceiling)).detach(),
    )


_losses: dict[str, PolicyLoss] = {"vanilla": vanilla}


def policy_loss(name: str) -> PolicyLoss:
    """The token loss of that name.

    Raises:
        AlgorithmError: it does not exist; the message lists those that exist.
    """
    if name not in _losses:
        raise AlgorithmError(
            f"policy loss must be one of {', '.join(sorted(_losses))}, got {name!r}; choose one of them"
        )
    return _losses[name]


def policy_loss_fn(options: PolicyLossOptions, name: str = "vanilla") -> LossFn:
    """The loss of a micro-batch: policy term, minus the entropy bonus, plus the KL term, all under the mini-batch's
    weights.

    A batch without `old_log_probs` is on-policy: the ratio is 1 and its gradient that of the log-probability.
    The metrics are additive: those of the micro-batches sum to the mini-batch's.

    Raises:
        AlgorithmError: the policy loss does not exist.
    """
    token_loss = policy_loss(name)

    def loss_fn(output: MicroBatchOutput, batch: MicroBatch) -> LossOutput:
        if batch.advantages is None:
            raise BatchError("advantages must be set before the policy loss, got None; call with_advantages first")
        new = _kept(output.log_probs, batch)
        old = new.detach() if batch.old_log_probs is None else _kept(batch.old_log_probs, batch).to(new.dtype)
        tokens = token_loss(new, old, batch.advantages.to(new.dtype), options)
        loss = aggregate(tokens.losses, batch)
        metrics: dict[str, float | Tensor] = {
            "actor/pg_loss": loss.detach(),
            "actor/pg_clipfrac": token_average(tokens.clipped, batch),
            "actor/pg_clipfrac_lower": token_average(tokens.clipped_lower, batch),
            "actor/ppo_kl": token_average(tokens.kl, batch),
        }
        if output.entropy is not None:
            metrics["actor/entropy"] = token_average(output.entropy, batch)
        if options.entropy_coeff:
            if output.entropy is None:
                raise BatchError(
                    "entropy must be computed where entropy_coeff is not 0, got None; ask the backend for it"
                )
            loss = loss - options.entropy_coeff * aggregate(output.entropy, batch)
        if options.kl_loss_coef:
            if batch.ref_log_probs is None:
                raise BatchError(
                    "ref_log_probs must be set where kl_loss_coef is not 0, got None; compute them with the reference"
                )
            kl = aggregate(kl_estimate(new, _kept(batch.ref_log_probs, batch), options.kl_loss_type), batch)
            metrics["actor/kl_loss"] = kl.detach()
            loss = loss + options.kl_loss_coef * kl
        return loss, metrics

    return loss_fn


def _kept(values: Tensor, batch: MicroBatch) -> Tensor:
    """Values inside the mask, 0 elsewhere, so that what stands there cannot reach an exponential or a gradient."""
    return torch.where(batch.loss_mask, values, 0.0)
