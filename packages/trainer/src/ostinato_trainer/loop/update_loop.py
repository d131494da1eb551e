"""What the updates of policy and critic have in common: passes over a batch, its mini-batches, their micro-batches, and the mean of metrics.

A mini-batch gets its loss weights as a whole before it is split, so how it is split cannot matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from ostinato_trainer.algorithms.aggregation import with_loss_weights
from ostinato_trainer.backends.base import OptimizerStats
from ostinato_trainer.batch import Batch


class UpdateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a batch is gone through."""

    epochs: int
    """Passes over the batch."""
    mini_batch_trajectories: int
    """Trajectories in one optimizer step, at most."""
    loss_agg_mode: str
    loss_scale_factor: float
    """The constant of `seq-mean-token-sum-norm`."""
    use_dynamic_bsz: bool
    """Fill micro-batches by tokens instead of by sequences."""
    max_tokens: int
    """Of a micro-batch, where it is filled by tokens; see `padded`."""
    max_sequences: int | None
    """Of a micro-batch, where it is not; None takes the whole mini-batch."""
    whole_trajectories: bool = False
    """Whether the loss needs all segments of a trajectory in one micro-batch."""


def run_updates(
    batch: Batch,
    settings: UpdateSettings,
    forward_backward: Callable[[Sequence[Batch]], Mapping[str, float]],
    optimizer_step: Callable[[], OptimizerStats],
    *,
    prefix: str,
    padded: bool = True,
    has_loss: Callable[[Batch], bool] = lambda mini_batch: mini_batch.num_loss_tokens > 0,
) -> dict[str, float]:
    """One optimizer step for every mini-batch of every pass that has something to learn from; the others are counted: with a gradient of zero
    momentum and decay would still move the weights.

    Args:
        batch: Of one step.
        settings: How it is gone through.
        forward_backward: Accumulates the gradients of micro-batches and gives their metrics.
        optimizer_step: Uses the gradients up.
        prefix: Of the optimizer's metrics.
        padded: Whether the model pads sequences to the longest of the micro-batch, which then count as that long.
        has_loss: Whether there is something to learn from in a mini-batch; by default where a token is trained on.

    Returns:
        The mean of each metric over the updates that have it, with those of the optimizer under `prefix`.
    """
    updates: list[dict[str, float]] = []
    num_skipped = num_empty = 0
    for _ in range(settings.epochs):
        for mini_batch in batch.mini_batches(settings.mini_batch_trajectories):
            if not has_loss(mini_batch):
                num_empty += 1
                continue
            weighted = with_loss_weights(
                mini_batch, settings.loss_agg_mode, loss_scale_factor=settings.loss_scale_factor
            )
            metrics = forward_backward(_micro_batches(weighted, settings, padded=padded))
            stats = optimizer_step()
            num_skipped += stats.skipped
            updates.append({**metrics, f"{prefix}/grad_norm": stats.grad_norm, f"{prefix}/lr": stats.lr})
    values: dict[str, list[float]] = {}
    for update in updates:
        for name, value in update.items():
            values.setdefault(name, []).append(value)
    means = {name: sum(each) / len(each) for name, each in values.items()}
    counts = {"num_skipped_steps": num_skipped, "num_empty_mini_batches": num_empty}
    return {**means, **{f"{prefix}/{name}": float(count) for name, count in counts.items()}}


def _micro_batches(mini_batch: Batch, settings: UpdateSettings, *, padded: bool) -> list[Batch]:
    """The parts of a mini-batch that go through the model at once."""
    if settings.use_dynamic_bsz:
        return mini_batch.split_by_tokens(
            settings.max_tokens, padded=padded, whole_trajectories=settings.whole_trajectories
        )
    return mini_batch.split_by_count(
        settings.max_sequences or mini_batch.num_sequences, whole_trajectories=settings.whole_trajectories
    )
