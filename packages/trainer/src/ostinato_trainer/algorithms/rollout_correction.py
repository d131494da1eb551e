"""What is done about tokens that another distribution sampled than the one that is trained: importance weights and rejection, and how far
apart the two are.

The sampler is the engine (its precision, its kernels, an older policy), whose log-probabilities were recorded with the tokens; the policy is the
model at the start of the step, `old_log_probs`. Sources: truncated importance sampling (Yao et al., "Your efficient RL framework secretly brings
you off-policy training"), the band (IcePop, Ring-1T, arXiv:2510.18855), rejection by trajectory (Liu et al., "When speed kills stability").
Sequences are trajectories, however many segments they have.

A trained token whose sampler log-probability is unknown (NaN) is never taken for a ratio of 1 in any figure: it is left out of all sums and
means, shares the weight of its trajectory where weights are by trajectory and else has 1, is rejected with its trajectory but not by itself, and is
counted in `rollout_corr/num_unknown_tokens`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato_trainer.batch import Batch
from ostinato_trainer.config.algorithm import Rejection, RolloutCorrectionConfig
from ostinato_trainer.errors import BatchError

__all__ = ["correct_rollout", "sampler_log_probs"]

_MAX_LOG_RATIO = 20.0
_PREFIX = "rollout_corr"


def correct_rollout(batch: Batch, config: RolloutCorrectionConfig) -> tuple[Batch, dict[str, float]]:
    """The batch with `rollout_is_weights` and without the loss of what is rejected, and the metrics `rollout_corr/*`.

    What is rejected keeps its part in what was computed before (advantages, baselines): it happened. It is not trained on, and does not
    count in the denominators of the loss.

    Args:
        batch: With `old_log_probs`; advantages, where they are there already, become 0 on what is rejected.
        config: `algorithm.rollout_correction`.

    Raises:
        BatchError: weights or rejection are asked for, but the sampler's log-probability is not known of any trained token.
    """
    if not batch.num_loss_tokens:
        return batch, {}
    tokens = _known_tokens(batch)
    num_unknown = batch.num_loss_tokens - len(tokens.places)
    metrics = {"num_unknown_tokens": float(num_unknown)}
    rejections = config.rejections
    if not len(tokens.places):
        if config.rollout_is is not None or rejections:
            raise BatchError(
                "rollout_log_probs must be known for some trained token to correct by them, got none; let the engine report them, or write "
                "algorithm.rollout_correction.rollout_is=null and rollout_rs=null"
            )
        return batch, _named(metrics)
    metrics |= _distance(tokens)
    columns: dict[str, Tensor] = {}
    if config.rollout_is is not None:
        weights, of_weights = _importance_weights(tokens, config)
        if config.rollout_is == "sequence":
            of_trajectory = weights.new_ones(batch.num_trajectories).index_copy(0, tokens.names, weights)
            columns["rollout_is_weights"] = torch.where(batch.loss_mask, of_trajectory[batch.token_trajectory], 1.0)
        else:
            columns["rollout_is_weights"] = weights.new_ones(batch.num_tokens).index_copy(0, tokens.places, weights)
        metrics |= of_weights
    if rejections:
        kept, whole, of_rejection = _kept(tokens, rejections)
        rejected = torch.zeros(batch.num_trajectories, dtype=torch.bool).index_copy(0, tokens.names, ~whole)
        columns["loss_mask"] = batch.loss_mask.index_copy(0, tokens.places, kept) & ~rejected[batch.token_trajectory]
        for name in ("advantages", "values", "returns"):
            column = getattr(batch, name)
            if column is not None:
                columns[name] = torch.where(columns["loss_mask"], column, 0.0)
        metrics |= of_rejection
        metrics["rollout_rs_masked_fraction"] = 1.0 - float(columns["loss_mask"].sum()) / batch.num_loss_tokens
    return batch.with_columns(**columns), _named(metrics)


def sampler_log_probs(batch: Batch) -> tuple[Tensor, int]:
    """The sampler's log-probabilities to take for `old_log_probs` ("bypass"), and of how many trained tokens they are unknown.

    Returns:
        float32 [T], 0 outside the loss mask and NaN where unknown; the number of those.
    """
    log_probs = torch.where(batch.loss_mask, batch.rollout_log_probs, 0.0)
    return log_probs, int(torch.isnan(log_probs).sum())


@dataclass(frozen=True)
class _KnownTokens:
    """The K trained tokens whose sampler log-probability is known; their trajectories are numbered densely, Q in all."""

    places: Tensor
    """int64 [K]; in the batch."""
    trajectory: Tensor
    """int64 [K], into [Q]."""
    names: Tensor
    """int64 [Q]; the batch's number of each trajectory."""
    counts: Tensor
    """float64 [Q]; tokens of each trajectory."""
    policy: Tensor
    """float64 [K]; log-probability under the policy."""
    sampler: Tensor
    """float64 [K]; under the sampler."""

    @property
    def log_ratio(self) -> Tensor:
        """float64 [K]: policy - sampler."""
        return self.policy - self.sampler

    def sum(self, values: Tensor) -> Tensor:
        """[K] to [Q]."""
        return torch.zeros_like(self.counts).index_add(0, self.trajectory, values)

    def mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / self.counts

    def max(self, values: Tensor) -> Tensor:
        return torch.zeros_like(self.counts).scatter_reduce(0, self.trajectory, values, "amax", include_self=False)


def _known_tokens(batch: Batch) -> _KnownTokens:
    if batch.old_log_probs is None:
        raise BatchError("old_log_probs must be set to correct the rollout, got None; compute them with the policy")
    places = (batch.loss_mask & ~torch.isnan(batch.rollout_log_probs)).nonzero().squeeze(1)
    names, trajectory = torch.unique(batch.token_trajectory[places], return_inverse=True)
    return _KnownTokens(
        places=places,
        trajectory=trajectory,
        names=names,
        counts=torch.bincount(trajectory, minlength=len(names)).to(torch.float64),
        policy=batch.old_log_probs[places].to(torch.float64),
        sampler=batch.rollout_log_probs[places].to(torch.float64),
    )


def _distance(tokens: _KnownTokens) -> dict[str, float]:
    """How far sampler and policy are apart: divergence, perplexities and chi-squared, by token and by trajectory."""
    policy, sampler = -tokens.mean(tokens.policy), -tokens.mean(tokens.sampler)  # log-perplexity of each trajectory
    difference = policy - sampler
    ratio = _exp(tokens.log_ratio)
    return {
        "kl": float(-tokens.log_ratio.mean()),
        "k3_kl": float(_divergence(tokens.log_ratio, "k3").mean()),
        "training_ppl": float(policy.exp().mean()),
        "training_log_ppl": float(policy.mean()),
        "rollout_ppl": float(sampler.exp().mean()),
        "rollout_log_ppl": float(sampler.mean()),
        "log_ppl_diff": float(difference.mean()),
        "log_ppl_abs_diff": float(difference.abs().mean()),
        "log_ppl_diff_max": float(difference.max()),
        "log_ppl_diff_min": float(difference.min()),
        "ppl_ratio": float(difference.exp().mean()),
        "chi2_token": float(ratio.square().mean() - 1.0),
        "chi2_seq": float(_exp(tokens.sum(tokens.log_ratio)).square().mean() - 1.0),
    }


def _importance_weights(tokens: _KnownTokens, config: RolloutCorrectionConfig) -> tuple[Tensor, dict[str, float]]:
    """`min(policy / sampler, upper)`, or that ratio inside the band and 0 outside; of a token, or of all tokens of its trajectory.

    Returns:
        float64, [K] by token and [Q] by trajectory; and metrics over the K tokens: mean, std and effective sample size (a fraction) of the
        weights, extremes of the ratios before.
    """
    by_trajectory = config.rollout_is == "sequence"
    lower, upper = config.weight_bounds
    ratios = _exp(tokens.sum(tokens.log_ratio) if by_trajectory else tokens.log_ratio)  # [Q] or [K]
    low = 1 / upper if lower is None else lower
    outside = (ratios < low) | (ratios > upper)
    weights = ratios.clamp(max=upper) if lower is None else torch.where(outside, 0.0, ratios)
    on_tokens = weights[tokens.trajectory] if by_trajectory else weights
    mean, square = float(on_tokens.mean()), float(on_tokens.square().mean())
    metrics = {
        "rollout_is_mean": mean,
        "rollout_is_std": math.sqrt(max(0.0, square - mean * mean)),
        "rollout_is_max": float(ratios.max()),
        "rollout_is_min": float(ratios.min()),
        "rollout_is_eff_sample_size": mean * mean / square if square else 0.0,
        "rollout_is_ratio_fraction_high": float((ratios > upper).to(torch.float64).mean()),
        "rollout_is_ratio_fraction_low": float((ratios < low).to(torch.float64).mean()),
    }
    if lower is not None:
        out_of_band = outside[tokens.trajectory] if by_trajectory else outside
        metrics["rollout_is_oob_ratio"] = float(out_of_band.to(torch.float64).mean())
    if config.rollout_is_batch_normalize:
        factor = float(weights.mean()) or 1.0
        weights = weights / factor
        metrics["rollout_is_batch_norm_factor"] = factor
    return weights, metrics


def _kept(tokens: _KnownTokens, rejections: tuple[Rejection, ...]) -> tuple[Tensor, Tensor, dict[str, float]]:
    """bool [K], what every rule lets pass; bool [Q], the trajectories that those by trajectory let pass; what each would mask."""
    kept = torch.ones_like(tokens.places, dtype=torch.bool)
    whole = torch.ones_like(tokens.names, dtype=torch.bool)
    metrics: dict[str, float] = {}
    for rule in rejections:
        value = _divergence(tokens.log_ratio, rule.kind)
        if rule.level != "token":
            value = {"seq_sum": tokens.sum, "seq_mean": tokens.mean, "seq_max": tokens.max}[rule.level](value)
        passes = ~(
            value > (rule.upper if rule.lower is None else math.log(rule.upper))
        )  # what is NaN stays and shows in the loss
        if rule.lower is not None:
            passes &= ~(value < math.log(rule.lower))
        if rule.level != "token":
            whole &= passes
            passes = passes[tokens.trajectory]
        kept &= passes
        metrics |= {
            f"rollout_rs_{rule.name}_mean": float(value.mean()),
            f"rollout_rs_{rule.name}_max": float(value.max()),
            f"rollout_rs_{rule.name}_min": float(value.min()),
            f"rollout_rs_{rule.name}_masked_fraction": float((~passes).to(torch.float64).mean()),
            f"rollout_rs_{rule.name}_seq_masked_fraction": _touched(tokens, ~passes),
        }
    return kept, whole, metrics | {"rollout_rs_seq_masked_fraction": _touched(tokens, ~kept)}


def _touched(tokens: _KnownTokens, masked: Tensor) -> float:
    """The part of the trajectories of which a token is masked."""
    return float((tokens.sum(masked.to(torch.float64)) > 0).to(torch.float64).mean())


def _divergence(log_ratio: Tensor, kind: str) -> Tensor:
    """Estimators of the divergence of the sampler from the policy: k1 = log(sampler / policy), k2 = k1^2 / 2, k3 = exp(-k1) - 1 + k1."""
    held = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    if kind == "k1":
        return -held
    return 0.5 * held.square() if kind == "k2" else held.expm1() - held


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _named(metrics: dict[str, float]) -> dict[str, float]:
    return {f"{_PREFIX}/{name}": value for name, value in metrics.items()}
