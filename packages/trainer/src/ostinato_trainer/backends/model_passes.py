"""Passes of batches through a model on one device, with gradients and without: what the policy and the critic have in common.

Invariant: an error leaves no gradient behind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ostinato_trainer.backends.adamw import AdamW
from ostinato_trainer.backends.base import LossOutput
from ostinato_trainer.backends.compiling import compiler_failures_named
from ostinato_trainer.backends.memory import MemoryOwner, out_of_memory_named
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import BackendError, BatchError


def tokens_to_score(batch: Batch, *, loss_tokens_only: bool) -> Tensor:
    """bool [T]: all tokens, or the trained ones, but never the first of a sequence, which nothing predicts."""
    wanted = batch.loss_mask.clone() if loss_tokens_only else torch.ones_like(batch.loss_mask)
    wanted[batch.cu_seqlens[:-1]] = False
    return wanted


def accumulate_gradients(
    micro_batches: Sequence[Batch],
    loss_of: Callable[[Batch], LossOutput],
    optimizer: AdamW,
    *,
    cures: str,
    owner: MemoryOwner | None = None,
    passes_for_all: bool = False,
) -> dict[str, float]:
    """The gradients of the micro-batches' summed losses, in the parameters; returns the merged metrics.

    Args:
        micro_batches: One without a trained token costs nothing, or a pass, see `passes_for_all`.
        loss_of: Runs the model on a micro-batch and makes its loss and metrics.
        optimizer: Whose gradients are cleared where something fails.
        cures: What to change where memory runs out.
        owner: Whose memory it is.
        passes_for_all: `loss_of` is asked for micro-batches without a trained token too, since other ranks wait for this one's pass.

    Raises:
        OutOfMemoryError: memory ran out.
        BackendError: the loss has no gradient.
    """
    totals: dict[str, Any] = {}
    try:
        for micro_batch in micro_batches:
            if micro_batch.num_loss_tokens == 0 and not passes_for_all:
                continue
            with (
                compiler_failures_named(),
                out_of_memory_named("an update", cures, owner=owner, batches=[micro_batch]),
            ):
                loss, metrics = loss_of(micro_batch)
                if not loss.requires_grad:
                    raise BackendError(
                        "loss must depend on the log-probabilities or values, got a constant; do not detach them in the loss"
                    )
                loss.backward()
                merge_metrics(totals, metrics)
    except BaseException:
        optimizer.clear_gradients()
        raise
    return {name: float(value) for name, value in totals.items()}


def check_ids(batch: Batch, vocab_size: int) -> None:
    """Raises BatchError where a token id lies outside the model's vocabulary."""
    highest = int(batch.token_ids.max())
    if highest >= vocab_size:
        raise BatchError(
            f"token ids must be below the model's vocabulary of {vocab_size}, got {highest}; "
            "use the tokenizer that belongs to the model"
        )


def check_temperature(temperature: float) -> None:
    """Raises BackendError where log-probabilities cannot be taken at a temperature."""
    if not 0 < temperature < math.inf:
        raise BackendError(
            f"temperature must be above 0, got {temperature}; "
            "greedy samples cannot be trained on, set rollout.temperature=1"
        )


def merge_metrics(totals: dict[str, Any], metrics: Mapping[str, Any]) -> None:
    """Adds metrics, numbers or tensors, to `totals`, or keeps the extreme of names that end in _max or _min. Tensors stay on their device, so
    that nothing waits for it."""
    for name, value in metrics.items():
        if isinstance(value, Tensor):
            value = value.detach()
        if name not in totals:
            totals[name] = value
        elif name.endswith(("_max", "_min")):
            totals[name] = _extreme(totals[name], value, largest=name.endswith("_max"))
        else:
            totals[name] = totals[name] + value


def _extreme(one: Any, other: Any, *, largest: bool) -> Any:
    """The larger or smaller of two; not a number where one of them is none."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return (torch.maximum if largest else torch.minimum)(torch.as_tensor(one), torch.as_tensor(other))
    if math.isnan(one) or math.isnan(other):
        return math.nan
    return max(one, other) if largest else min(one, other)
