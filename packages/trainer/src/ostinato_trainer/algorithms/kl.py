"""KL estimators between the policy and a reference from the log-probabilities of sampled tokens (Schulman,
"Approximating KL divergence").

With `d = ref - policy`, one estimate a token. Values and gradients are finite for every finite input: 16-bit inputs
are computed in float32, and the exponential of k3 continues as a straight line beyond a log-ratio of 10, so that a
token the policy has all but abandoned still pulls towards the reference, with a slope that even float16 can hold.
"""

from __future__ import annotations

import math
from enum import StrEnum

import torch
from torch import Tensor

from ostinato_trainer.errors import AlgorithmError

_LINEAR_BEYOND = 10.0


class KLKind(StrEnum):
    """`kl_loss_type` and `kl_penalty`. A name with a "+" behind it keeps the value and takes the gradient of k2, whose expectation is that
    of the divergence."""

    ABS = "abs"
    """|d|."""
    K1 = "k1"
    """-d: unbiased in value, its gradient as a loss has expectation 0; may be negative."""
    K2 = "k2"
    """d^2 / 2: right in gradient, biased in value."""
    K3 = "k3"
    """exp(d) - d - 1: unbiased and never negative."""


_ALIASES = {"kl": KLKind.K1, "mse": KLKind.K2, "low_var_kl": KLKind.K3}


def kl_kind(name: str) -> KLKind:
    """The estimator of that name, with or without "+"; the field's older names kl, mse and low_var_kl are understood.

    Raises:
        AlgorithmError: it does not exist.
    """
    plain = name.removesuffix("+")
    try:
        return _ALIASES.get(plain) or KLKind(plain)
    except ValueError as error:
        known = ", ".join([*KLKind, *_ALIASES])
        raise AlgorithmError(
            f'kl_loss_type or kl_penalty must be one of {known}, got {name!r}; choose one of them, with or without a "+" behind it'
        ) from error


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: KLKind | str) -> Tensor:
    """KL(policy || reference) estimated token by token.

    Args:
        log_probs: float [...], of the sampled tokens under the policy; gradients flow through it.
        ref_log_probs: float [...], the same tokens under the reference.
        kind: A `KLKind` or one of its names; "+" behind it takes the gradient of k2 (straight through).

    Returns:
        [...] in float32, or float64 where an input is.

    Raises:
        AlgorithmError: the estimator does not exist.
    """
    dtype = torch.promote_types(torch.promote_types(log_probs.dtype, ref_log_probs.dtype), torch.float32)
    log_ratio = ref_log_probs.to(dtype) - log_probs.to(dtype)
    value = _value(log_ratio, kl_kind(kind))
    if not kind.endswith("+"):
        return value
    slope = -log_ratio.detach()  # of k2, with respect to the policy's log-probability
    return value.detach() + slope * (log_ratio.detach() - log_ratio)


def _value(log_ratio: Tensor, kind: KLKind) -> Tensor:
    if kind is KLKind.K1:
        return -log_ratio
    if kind is KLKind.ABS:
        return log_ratio.abs()
    if kind is KLKind.K2:
        return 0.5 * log_ratio.square()
    near = log_ratio.clamp(max=_LINEAR_BEYOND)
    slope = math.exp(_LINEAR_BEYOND)
    return near.expm1() - near + (log_ratio - near) * (slope - 1.0)
