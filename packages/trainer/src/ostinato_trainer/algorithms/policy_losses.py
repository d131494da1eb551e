"""Policy losses token by token, the entropy bonus and the KL term, and the `LossFn` made of them that a backend calls.

Token losses are pure functions of log-probabilities and advantages. Aggregation is not decided here: the weights of
the mini-batch do that (`ostinato_trainer.algorithms.aggregation`), for the policy, KL and entropy terms alike. A loss that looks at
whole trajectories says so when it is registered; its micro-batches then hold trajectories with all their segments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
import torch
from torch import Tensor

from ostinato_trainer.algorithms.aggregation import aggregate, token_average
from ostinato_trainer.algorithms.kl import kl_estimate, kl_kind
from ostinato_trainer.backends.base import LossFn, LossOutput, MicroBatch, MicroBatchOutput
from ostinato_trainer.custom_code import load_function
from ostinato_trainer.errors import AlgorithmError, BatchError

_MAX_LOG_RATIO = 20.0
_MAX_SEQUENCE_LOG_RATIO = 10.0


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
    tau_pos: float = 1.0
    """Steepness of SAPO's gate where the advantage is positive; above 0."""
    tau_neg: float = 1.05
    """Steepness of SAPO's gate elsewhere; above 0."""
    kl_loss_coef: float = 0.0
    """Weight of the KL term; 0 leaves it out."""
    kl_loss_type: str = "low_var_kl"
    """See `ostinato_trainer.algorithms.kl`."""
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
        for name, value in (("tau_pos", self.tau_pos), ("tau_neg", self.tau_neg)):
            if not value > 0:
                raise BatchError(f"{name} must be above 0, got {value}; 1.0 is usual")
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


def vanilla(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, options: PolicyLossOptions) -> TokenLosses:
    """PPO's clipped surrogate (arXiv:1707.06347) with separate bounds (DAPO, arXiv:2503.14476) and dual clip
    (arXiv:1912.09729).

    `max(-A r, -A clip(r, 1 - low, 1 + high))`, for A < 0 at most `-A c`, with r = exp(new - old), the exponent held
    within 20.
    """
    log_ratio = _log_ratio(log_probs, old_log_probs)
    plain, bounded = _surrogates(log_ratio.exp(), advantages, options)
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


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    options: PolicyLossOptions,
    *,
    loss_mask: Tensor,
    trajectory: Tensor,
) -> TokenLosses:
    """Group sequence policy optimization in its token form (arXiv:2507.18071, GSPO-token): the clipped surrogate with the ratio
    `s = sg(exp(mean of new - old over the trajectory's trained tokens)) p / sg(p)`.

    A sequence is a trajectory with all its segments. The exponent is held below 10.

    Args:
        log_probs: [T]; gradients flow.
        old_log_probs: [T].
        advantages: [T].
        options: `clip_ratio*`.
        loss_mask: bool [T].
        trajectory: int64 [T]; the trajectory of each token.
    """
    log_ratio = log_probs - old_log_probs
    counted = torch.where(loss_mask, log_ratio.detach(), 0.0)
    blank = counted.new_zeros(int(trajectory.max()) + 1 if len(trajectory) else 0)
    lengths = blank.index_add(0, trajectory, loss_mask.to(counted.dtype)).clamp(min=1)
    means = (blank.index_add(0, trajectory, counted) / lengths)[trajectory]
    ratio = (log_probs - log_probs.detach() + means).clamp(max=_MAX_SEQUENCE_LOG_RATIO).exp()
    plain, bounded = _surrogates(ratio, advantages, options)
    return TokenLosses(
        losses=torch.maximum(plain, bounded),
        kl=-log_ratio.detach(),
        clipped=(bounded > plain).detach(),
        clipped_lower=torch.zeros_like(loss_mask),
    )


def cispo(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, options: PolicyLossOptions) -> TokenLosses:
    """Clipped importance weights on a policy gradient (MiniMax-M1, arXiv:2506.13585):
    `-sg(clip(r, 1 - low, 1 + high)) A log p`, so that a clipped token still pulls."""
    log_ratio = _log_ratio(log_probs, old_log_probs).detach()
    ratio = log_ratio.exp()
    weight = ratio.clamp(1.0 - options.low, 1.0 + options.high)
    return TokenLosses(
        losses=-weight * advantages * log_probs,
        kl=-log_ratio,
        clipped=weight != ratio,
        clipped_lower=torch.zeros_like(weight, dtype=torch.bool),
    )


def gpg(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, options: PolicyLossOptions) -> TokenLosses:
    """The plain policy gradient (GPG, arXiv:2504.02546): `-A log p`; no ratio, no clip."""
    return _unclipped(-advantages * log_probs, log_probs - old_log_probs)


def sapo(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, options: PolicyLossOptions) -> TokenLosses:
    """Soft adaptive policy optimization (arXiv:2511.20347): `-A sigmoid(tau (r - 1)) 4 / tau` with `tau_pos` for A > 0, else
    `tau_neg`; a gate instead of a clip, of slope 1 at r = 1."""
    log_ratio = _log_ratio(log_probs, old_log_probs)
    tau = torch.full_like(log_ratio, options.tau_neg).masked_fill(advantages > 0, options.tau_pos)
    return _unclipped(-advantages * torch.sigmoid(tau * (log_ratio.exp() - 1.0)) * 4.0 / tau, log_ratio)


PolicyLoss = Callable[[Tensor, Tensor, MicroBatch, PolicyLossOptions], TokenLosses]
"""From log_probs and old_log_probs, each [T] and 0 outside the loss mask, the micro-batch with its advantages, and the options to token
losses."""


@dataclass(frozen=True)
class _Entry:
    loss: PolicyLoss
    whole_trajectories: bool


_losses: dict[str, _Entry] = {}


def register_policy_loss(name: str, *, whole_trajectories: bool = False) -> Callable[[PolicyLoss], PolicyLoss]:
    """Makes a loss known as `actor_rollout_ref.actor.policy_loss.loss_mode=name`.

    Args:
        name: As it is written in the configuration.
        whole_trajectories: A token's loss depends on other tokens of its trajectory, so all of them must be in one micro-batch.

    Raises:
        AlgorithmError: another loss has this name.
    """

    def register(loss: PolicyLoss) -> PolicyLoss:
        entry = _Entry(loss, whole_trajectories)
        if _losses.setdefault(name, entry) != entry:
            raise AlgorithmError(f"policy loss name must be unique, got {name!r} twice; register it under another name")
        return loss

    return register


def policy_loss(name: str) -> PolicyLoss:
    """The loss of that name, or the function that `module:function` or `file.py:function` names.

    Raises:
        AlgorithmError: it does not exist, the message lists those that exist; or its file cannot be imported.
    """
    return _entry(name).loss


def needs_whole_trajectories(name: str) -> bool:
    """Whether all segments of a trajectory must be in one micro-batch for this loss. Errors as `policy_loss`."""
    return _entry(name).whole_trajectories


def _of_tokens(loss: Callable[[Tensor, Tensor, Tensor, PolicyLossOptions], TokenLosses]) -> PolicyLoss:
    """A loss that looks at nothing but the token itself, as one of a micro-batch."""

    def of_batch(
        log_probs: Tensor, old_log_probs: Tensor, batch: MicroBatch, options: PolicyLossOptions
    ) -> TokenLosses:
        return loss(log_probs, old_log_probs, _advantages(batch, log_probs.dtype), options)

    return of_batch


register_policy_loss("vanilla")(_of_tokens(vanilla))
register_policy_loss("cispo")(_of_tokens(cispo))
register_policy_loss("gpg")(_of_tokens(gpg))
register_policy_loss("sapo")(_of_tokens(sapo))


@register_policy_loss("gspo", whole_trajectories=True)
def _gspo_of_batch(
    log_probs: Tensor, old_log_probs: Tensor, batch: MicroBatch, options: PolicyLossOptions
) -> TokenLosses:
    return gspo(
        log_probs,
        old_log_probs,
        _advantages(batch, log_probs.dtype),
        options,
        loss_mask=batch.loss_mask,
        trajectory=batch.token_trajectory,
    )


BUILT_IN_LOSSES: Final = frozenset(_losses)
"""Names that every process knows once it has imported this module."""


def policy_loss_fn(options: PolicyLossOptions, name: str = "vanilla") -> LossFn:
    """The loss of a micro-batch: policy term, minus the entropy bonus, plus the KL term, all under the mini-batch's
    weights.

    A batch without `old_log_probs` is on-policy: the ratio is 1 and its gradient that of the log-probability. Its
    `rollout_is_weights`, where it has them, multiply the policy term.
    The metrics are additive: those of the micro-batches sum to the mini-batch's.

    Raises:
        AlgorithmError: the policy loss does not exist; or, when it is called, returns something else than `TokenLosses` of [T].
    """
    policy_loss(name)
    return PolicyLossFn(options, name)


@dataclass(frozen=True)
class PolicyLossFn:
    """What `policy_loss_fn` makes. It travels to other processes, where the loss is looked up by its name."""

    options: PolicyLossOptions
    name: str

    def __call__(self, output: MicroBatchOutput, batch: MicroBatch) -> LossOutput:
        """The loss of a micro-batch and its metrics."""
        options = self.options
        new = _kept(output.log_probs, batch)
        old = new.detach() if batch.old_log_probs is None else _kept(batch.old_log_probs, batch).to(new.dtype)
        tokens = _checked(policy_loss(self.name)(new, old, batch, options), new, self.name)
        weights = batch.rollout_is_weights
        loss = aggregate(tokens.losses if weights is None else tokens.losses * weights.to(new.dtype), batch)
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


def _checked(tokens: object, log_probs: Tensor, name: str) -> TokenLosses:
    """What a loss returned, one entry a token: a sum or a mean would be spread over the tokens without a word."""
    if not isinstance(tokens, TokenLosses):
        raise AlgorithmError(f"policy loss {name!r} must return TokenLosses, got {type(tokens).__name__}; fix the loss")
    for column in ("losses", "kl", "clipped", "clipped_lower"):
        shape = getattr(getattr(tokens, column), "shape", None)
        if shape != log_probs.shape:
            got = "no tensor" if shape is None else f"shape {list(shape)}"
            raise AlgorithmError(
                f"{column} of policy loss {name!r} must have shape {list(log_probs.shape)}, one entry a token, got {got}; "
                "leave the mean to loss_agg_mode"
            )
    return tokens


def _kept(values: Tensor, batch: MicroBatch) -> Tensor:
    """Values inside the mask, 0 elsewhere, so that what stands there cannot reach an exponential or a gradient."""
    return torch.where(batch.loss_mask, values, 0.0)


def _entry(name: str) -> _Entry:
    if ":" in name and name not in _losses:
        loss = load_function(name, key="actor_rollout_ref.actor.policy_loss.loss_mode", error=AlgorithmError)
        registered = (entry for entry in _losses.values() if entry.loss is loss)
        _losses[name] = next(registered, _Entry(loss, whole_trajectories=False))
    if name not in _losses:
        known = ", ".join(sorted(known for known in _losses if ":" not in known))
        raise AlgorithmError(
            f"policy loss must be one of {known}, got {name!r}; choose one of them, or name your own as file.py:function"
        )
    return _losses[name]


def _log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """new - old, held within 20, beyond which it has no gradient."""
    return (log_probs - old_log_probs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def _surrogates(ratio: Tensor, advantages: Tensor, options: PolicyLossOptions) -> tuple[Tensor, Tensor]:
    """`-A r` and `-A clip(r, 1 - low, 1 + high)`."""
    return -advantages * ratio, -advantages * ratio.clamp(1.0 - options.low, 1.0 + options.high)


def _unclipped(losses: Tensor, log_ratio: Tensor) -> TokenLosses:
    nowhere = torch.zeros_like(losses, dtype=torch.bool)
    return TokenLosses(losses=losses, kl=-log_ratio.detach(), clipped=nowhere, clipped_lower=nowhere)


def _advantages(batch: MicroBatch, dtype: torch.dtype) -> Tensor:
    if batch.advantages is None:
        raise BatchError("advantages must be set before the policy loss, got None; call with_advantages first")
    return batch.advantages.to(dtype)
