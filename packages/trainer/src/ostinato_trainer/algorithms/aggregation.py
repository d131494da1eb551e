"""How token losses become one number: a weight for every token, fixed by the whole mini-batch before it is split.

Every aggregation of the field is linear in the token losses. So the weights are computed once over the mini-batch and
travel with the tokens; the loss of a micro-batch is the weighted sum of its tokens, and the losses and gradients of
micro-batches simply add up. Which split is used, in which order and with how much padding, cannot matter. *Sequences*
are trajectories, however many segments they have; a trajectory without a trained token is not counted.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum

import torch
from torch import Tensor

from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import AlgorithmError, BatchError


class LossAggMode(StrEnum):
    """`loss_agg_mode`; T trained tokens in all, R trajectories with at least one, T_r tokens in trajectory r."""

    TOKEN_MEAN = "token-mean"
    """sum / T."""
    TOKEN_SUM = "token-sum"
    """sum."""
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
    """sum / R."""
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"
    """sum over r of (sum within r / T_r), / R."""
    SEQ_MEAN_TOKEN_SUM_NORM = "seq-mean-token-sum-norm"
    """sum / R / loss_scale_factor, a constant such as the longest response allowed (Dr. GRPO, arXiv:2503.20783)."""


def loss_weights(batch: Batch, mode: LossAggMode | str, *, loss_scale_factor: float | None = None) -> Tensor:
    """Weight of each token's loss, float64 [T], 0 outside the loss mask. `batch` is the whole mini-batch.

    Args:
        batch: The mini-batch.
        mode: A `LossAggMode` or its value.
        loss_scale_factor: The constant of `seq-mean-token-sum-norm`; required there, unused elsewhere.

    Raises:
        AlgorithmError: the mode does not exist.
        BatchError: `loss_scale_factor` is missing or not positive.
    """
    try:
        mode = LossAggMode(mode)
    except ValueError as error:
        raise AlgorithmError(
            f"loss_agg_mode must be one of {', '.join(LossAggMode)}, got {mode!r}; choose one of them"
        ) from error
    mask = batch.loss_mask.to(torch.float64)
    tokens_of = batch.trajectory_loss_tokens
    num_trajectories = max(1, int((tokens_of > 0).sum()))
    if mode is LossAggMode.TOKEN_SUM:
        return mask
    if mode is LossAggMode.TOKEN_MEAN:
        return mask / max(1, batch.num_loss_tokens)
    if mode is LossAggMode.SEQ_MEAN_TOKEN_SUM:
        return mask / num_trajectories
    if mode is LossAggMode.SEQ_MEAN_TOKEN_MEAN:
        return mask / tokens_of.clamp(min=1)[batch.token_trajectory] / num_trajectories
    if loss_scale_factor is None or not 0 < loss_scale_factor < float("inf"):
        raise BatchError(
            f"loss_scale_factor must be positive for {mode}, got {loss_scale_factor}; use data.max_response_length"
        )
    return mask / num_trajectories / loss_scale_factor


def with_loss_weights(batch: Batch, mode: LossAggMode | str, *, loss_scale_factor: float | None = None) -> Batch:
    """The mini-batch with its `loss_weights`, ready to be split. Arguments and errors as `loss_weights`."""
    weights = loss_weights(batch, mode, loss_scale_factor=loss_scale_factor)
    return dataclasses.replace(batch, loss_weights=weights, num_mini_batch_tokens=batch.num_loss_tokens)


def aggregate(token_losses: Tensor, batch: Batch) -> Tensor:
    """This micro-batch's part of the mini-batch's loss, a scalar: the weighted sum over trained tokens.

    What stands outside the mask, NaN and infinity included, changes neither the value nor a gradient; inside the mask
    it shows.

    Args:
        token_losses: float [T].
        batch: A mini-batch with loss weights or a part of one.

    Raises:
        BatchError: the loss weights are missing.
    """
    weights = batch.loss_weights
    if weights is None:
        raise BatchError(
            "loss_weights must be set before the loss, got None; "
            "call with_loss_weights on the mini-batch before splitting it"
        )
    kept = torch.where(batch.loss_mask, token_losses, 0.0)
    return (kept * weights.to(kept.dtype)).sum()


def token_average(values: Tensor, batch: Batch) -> Tensor:
    """This micro-batch's part of the mean of `values` (float or bool [T]) over the mini-batch's trained tokens;
    detached, for metrics."""
    if batch.num_mini_batch_tokens is None:
        raise BatchError(
            "num_mini_batch_tokens must be set, got None; call with_loss_weights on the mini-batch before splitting it"
        )
    values = values.detach()
    floating = values if values.is_floating_point() else values.to(torch.float32)
    return torch.where(batch.loss_mask, floating, 0.0).sum() / max(1, batch.num_mini_batch_tokens)
