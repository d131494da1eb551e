"""The critic's loss: squared error between values and returns, clipped around the values at the start of the step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ostinato_trainer.algorithms.aggregation import aggregate, token_average
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import BatchError


def value_loss(predicted: Tensor, batch: Batch, *, cliprange_value: float) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Half the aggregated maximum of two squared errors (OpenAI baselines' PPO2; as in TRL and verl).

    With `v` the prediction, `v0` the value at the start of the step, `R` the return and `c` the clip range:
    `0.5 * max((v - R)^2, (clip(v, v0 - c, v0 + c) - R)^2)` for every trained token, weighted by the batch's loss weights. Where the
    clipped error is the larger one, the prediction has left the range towards the return, and no gradient flows.

    Args:
        predicted: float [T]; what the critic says now.
        batch: A mini-batch with loss weights, or a part of one; with `values` and `returns`.
        cliprange_value: Above 0; infinity never clips.

    Returns:
        This part's share of the loss, a scalar, and of the metrics `critic/vf_loss`, `critic/vf_clipfrac`, `critic/vpred_mean`.

    Raises:
        BatchError: values, returns or loss weights are missing.
    """
    if batch.values is None or batch.returns is None:
        missing = "values" if batch.values is None else "returns"
        raise BatchError(
            f"{missing} must be set before the critic's loss, got None; use an estimator that computes returns, such as adv_estimator=gae"
        )
    predicted, values, returns = (
        torch.where(batch.loss_mask, column.to(predicted), 0.0) for column in (predicted, batch.values, batch.returns)
    )
    clipped = torch.minimum(torch.maximum(predicted, values - cliprange_value), values + cliprange_value)
    error, clipped_error = (predicted - returns).square(), (clipped - returns).square()
    loss = 0.5 * aggregate(torch.maximum(error, clipped_error), batch)
    return loss, {
        "critic/vf_loss": loss.detach(),
        "critic/vf_clipfrac": token_average(clipped_error > error, batch),
        "critic/vpred_mean": token_average(predicted, batch),
    }
