"""`Batch`: the ragged, flat, unpadded form in which trajectories reach the optimizer.

Invariant: every per-token column has one entry a token, entry `t` being about token `t` itself (`log_probs[t]` is the
log-probability of token `t` given what stands before it), so masks, log-probabilities and advantages never need a
shift. A *sequence* is one segment of a trajectory; all segments of a trajectory share its reward and its advantage,
and the trajectory counts once. Failed trajectories are not in a batch. This module knows no model, no loss and no
padding.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ostinato_engines.device import CUDA, HOST
from ostinato_trainer.errors import BatchError
from ostinato_trainer.partitions import (
    check_longest,
    chunks_by_count,
    chunks_by_padded_tokens,
    chunks_by_tokens,
    chunks_of_owners,
    even_chunks,
)
from ostinato_trainer.segments import Segment, columns_of

_TOKEN_COLUMNS = (
    "token_ids",
    "loss_mask",
    "rollout_log_probs",
    "position_ids",
    "old_log_probs",
    "ref_log_probs",
    "rollout_is_weights",
    "token_rewards",
    "values",
    "returns",
    "advantages",
    "loss_weights",
)
_SEQUENCE_COLUMNS = ("group_index", "trajectory_index", "prompt_lengths")
_TRAJECTORY_COLUMNS = ("rewards", "baselines")


@dataclass(frozen=True)
class Batch:
    """T tokens of N sequences (segments) that belong to R trajectories in G groups."""

    token_ids: Tensor
    """int64 [T]."""
    loss_mask: Tensor
    """bool [T]; True where the policy sampled the token and it is trained on. Never True at the start of a sequence."""
    rollout_log_probs: Tensor
    """float32 [T]; what the engine reported for the sampled token; NaN where there is none."""
    cu_seqlens: Tensor
    """int64 [N+1]; sequence n is the tokens `cu_seqlens[n]:cu_seqlens[n+1]`."""
    group_index: Tensor
    """int64 [N]; into `group_ids`."""
    trajectory_index: Tensor
    """int64 [N]; into `trajectory_ids` and `rewards`."""
    prompt_lengths: Tensor
    """int64 [N]; tokens before the first one that was sampled."""
    rewards: Tensor
    """float64 [R]; one finite number a trajectory."""
    group_ids: tuple[str, ...]
    """G names, in order of first appearance."""
    trajectory_ids: tuple[str, ...]
    """R names, in order of first appearance."""
    position_ids: Tensor | None = None
    """int64 [T], or None where positions count from 0 in every sequence."""
    old_log_probs: Tensor | None = None
    """float [T]; under the policy at the start of the step. None means that the batch is on-policy."""
    ref_log_probs: Tensor | None = None
    """float [T]; under the reference policy."""
    rollout_is_weights: Tensor | None = None
    """float [T]; what a token's policy loss is multiplied with because another distribution sampled it
    (`rollout_correction`); 1 outside the loss mask."""
    token_rewards: Tensor | None = None
    """float64 [T]; rewards token by token; what stands on a token that is not trained on counts for the last trained one before it. None where
    all of a trajectory's reward stands in `rewards`."""
    values: Tensor | None = None
    """float [T]; what the critic expected before token t was sampled, 0 outside the loss mask."""
    returns: Tensor | None = None
    """float64 [T]; what the critic learns to expect, 0 outside the loss mask."""
    advantages: Tensor | None = None
    """float64 [T]; 0 outside the loss mask."""
    loss_weights: Tensor | None = None
    """float64 [T]; what a token's loss is multiplied with before everything is summed
    (`aggregation.with_loss_weights`)."""
    baselines: Tensor | None = None
    """float64 [R]; reward of a greedy trajectory for the same prompt."""
    num_mini_batch_tokens: int | None = None
    """Trained tokens of the whole mini-batch that this batch is a part of; set together with `loss_weights`."""

    def __post_init__(self) -> None:
        num_tokens = int(self.token_ids.shape[0])
        for name in _TOKEN_COLUMNS:
            column = getattr(self, name)
            if column is not None and tuple(column.shape) != (num_tokens,):
                raise BatchError(
                    f"{name} must have shape [{num_tokens}], one entry a token, got {list(column.shape)}; recompute it"
                )
        num_sequences = int(self.cu_seqlens.shape[0]) - 1
        for name in _SEQUENCE_COLUMNS:
            shape = tuple(getattr(self, name).shape)
            if shape != (num_sequences,):
                raise BatchError(
                    f"{name} must have shape [{num_sequences}], one entry a sequence, got {list(shape)}; recompute it"
                )
        for name in _TRAJECTORY_COLUMNS:
            column = getattr(self, name)
            if column is not None and tuple(column.shape) != (len(self.trajectory_ids),):
                raise BatchError(
                    f"{name} must have shape [{len(self.trajectory_ids)}], one entry a trajectory, "
                    f"got {list(column.shape)}; recompute them"
                )

    @classmethod
    def from_segments(cls, segments: Sequence[Segment]) -> Batch:
        """Checks and flattens segments; groups and trajectories are numbered in order of first appearance.

        Raises:
            BatchError: there is no segment, or one of them contradicts itself or its siblings; the message names the
                trajectory.
        """
        return cls(**columns_of(segments))

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_sequences(self) -> int:
        return int(self.cu_seqlens.shape[0]) - 1

    @property
    def num_trajectories(self) -> int:
        return len(self.trajectory_ids)

    @property
    def num_groups(self) -> int:
        return len(self.group_ids)

    @cached_property
    def num_loss_tokens(self) -> int:
        """How many tokens of this batch are trained on."""
        return int(self.loss_mask.sum())

    @cached_property
    def sequence_lengths(self) -> Tensor:
        """int64 [N]: tokens of each sequence, prompt included."""
        return self.cu_seqlens.diff()

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """`sequence_lengths`, known to the host wherever the batch lies."""
        return tuple(self.sequence_lengths.tolist())

    @property
    def response_lengths(self) -> Tensor:
        """int64 [N]: tokens from the first sampled one to the end, tool tokens in between included."""
        return self.sequence_lengths - self.prompt_lengths

    @cached_property
    def token_sequence(self) -> Tensor:
        """int64 [T]: the sequence that each token belongs to."""
        index = torch.arange(self.num_sequences, device=self.token_ids.device)
        return torch.repeat_interleave(index, self.sequence_lengths, output_size=self.num_tokens)

    @cached_property
    def token_trajectory(self) -> Tensor:
        """int64 [T]: the trajectory that each token belongs to."""
        return self.trajectory_index[self.token_sequence]

    @cached_property
    def trajectory_group(self) -> Tensor:
        """int64 [R]: the group that each trajectory belongs to."""
        groups = self.group_index.new_zeros(self.num_trajectories)
        return groups.index_copy(0, self.trajectory_index, self.group_index)

    @cached_property
    def trajectory_loss_tokens(self) -> Tensor:
        """int64 [R]: trained tokens of each trajectory, over all its segments in this batch."""
        return torch.zeros_like(self.rewards, dtype=torch.int64).index_add(
            0, self.token_trajectory, self.loss_mask.long()
        )

    def with_columns(self, **columns: Tensor | None) -> Batch:
        """A batch with columns added or replaced; everything else is shared, not copied.

        Raises:
            BatchError: a column is unknown or of the wrong shape.
        """
        known = (*_TOKEN_COLUMNS, *_TRAJECTORY_COLUMNS)
        unknown = sorted(set(columns) - set(known))
        if unknown:
            raise BatchError(f"column must be one of {', '.join(known)}, got {unknown[0]!r}; fix the name")
        return dataclasses.replace(self, **columns)  # pyright: ignore[reportArgumentType]

    def token_positions(self, sequences: Tensor) -> Tensor:
        """int64: where the tokens of `sequences` (int64 [n]) lie in the flat columns, in the order of `sequences`."""
        lengths = self.sequence_lengths[sequences]
        ends = lengths.cumsum(0)
        total = int(ends[-1]) if len(ends) else 0
        shift = self.cu_seqlens[:-1][sequences] - (ends - lengths)
        return torch.arange(total, device=self.token_ids.device) + torch.repeat_interleave(
            shift, lengths, output_size=total
        )

    def select(self, sequences: Sequence[int] | Tensor) -> Batch:
        """The batch of these sequences, in this order; groups and trajectories without a sequence left are dropped.

        Loss weights and `num_mini_batch_tokens` travel along, so a selection is still a part of the mini-batch that
        it came from.

        Raises:
            BatchError: nothing is selected, or a sequence is out of range or selected twice.
        """
        chosen = torch.as_tensor(sequences, dtype=torch.int64)
        self._check_selection(chosen)
        tokens = self.token_positions(chosen)
        trajectories, trajectory_index = torch.unique(self.trajectory_index[chosen], return_inverse=True)
        groups, group_index = torch.unique(self.group_index[chosen], return_inverse=True)
        columns: dict[str, Any] = {}
        for name in _TOKEN_COLUMNS:
            column = getattr(self, name)
            columns[name] = None if column is None else column[tokens]
        cu_seqlens = self.cu_seqlens.new_zeros(len(chosen) + 1)
        torch.cumsum(self.sequence_lengths[chosen], 0, out=cu_seqlens[1:])
        return Batch(
            **columns,
            cu_seqlens=cu_seqlens,
            group_index=group_index,
            trajectory_index=trajectory_index,
            prompt_lengths=self.prompt_lengths[chosen],
            rewards=self.rewards[trajectories],
            baselines=None if self.baselines is None else self.baselines[trajectories],
            group_ids=tuple(self.group_ids[group] for group in groups.tolist()),
            trajectory_ids=tuple(self.trajectory_ids[trajectory] for trajectory in trajectories.tolist()),
            num_mini_batch_tokens=self.num_mini_batch_tokens,
        )

    def mini_batches(self, num_trajectories: int, *, generator: torch.Generator | None = None) -> list[Batch]:
        """Cuts the batch into as few mini-batches of at most `num_trajectories` as possible, sizes differing by one
        at most.

        All segments of a trajectory stay together. With a generator the trajectories are shuffled first, else they
        keep their order.

        Raises:
            BatchError: `num_trajectories` is below 1.
        """
        chunks = even_chunks(self.num_trajectories, num_trajectories)
        if len(chunks) == 1 and generator is None:
            return [self]
        order = (
            torch.arange(self.num_trajectories)
            if generator is None
            else torch.randperm(self.num_trajectories, generator=generator)
        )
        rank = torch.empty_like(order)
        rank[order] = torch.arange(self.num_trajectories)
        sequence_rank = rank[self.trajectory_index]
        by_rank = torch.argsort(sequence_rank, stable=True)
        bounds = torch.searchsorted(
            sequence_rank[by_rank].contiguous(), torch.tensor([c.start for c in chunks] + [self.num_trajectories])
        )
        edges = bounds.tolist()
        return [self.select(by_rank[start:stop]) for start, stop in itertools.pairwise(edges)]

    def split_by_count(self, max_sequences: int, *, whole_trajectories: bool = False) -> list[Batch]:
        """Micro-batches of at most `max_sequences` sequences, alike in length.

        Args:
            max_sequences: Of one micro-batch.
            whole_trajectories: All segments of a trajectory stay together; one of more segments gets a micro-batch of its own.
        """
        if whole_trajectories and self._has_several_segments:
            return self._parts_of_trajectories(lambda lengths: len(lengths) <= max_sequences)
        return self._parts(chunks_by_count(self.sequence_lengths.tolist(), max_sequences))

    def split_by_tokens(
        self, max_tokens: int, *, padded: bool = True, allow_longer: bool = False, whole_trajectories: bool = False
    ) -> list[Batch]:
        """Micro-batches within a token budget, as few and as even as possible.

        Args:
            max_tokens: Budget of one micro-batch.
            padded: Count sequences x longest, which is what a padding backend computes; else the tokens alone.
            allow_longer: A single sequence above the budget gets a micro-batch of its own instead of an error.
            whole_trajectories: All segments of a trajectory stay together; one that is longer with all of them than the budget gets a
                micro-batch of its own.

        Raises:
            BatchError: a sequence is longer than the budget.
        """
        if whole_trajectories and self._has_several_segments:
            if not allow_longer:
                check_longest(int(self.sequence_lengths.max()), max_tokens)
            return self._parts_of_trajectories(
                lambda lengths: (len(lengths) * max(lengths) if padded else sum(lengths)) <= max_tokens
            )
        chunks = chunks_by_padded_tokens if padded else chunks_by_tokens
        return self._parts(chunks(self.sequence_lengths.tolist(), max_tokens, allow_longer=allow_longer))

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Batch:
        """The batch on a device, its floating columns in `dtype` where one is given. What the host knows of it by then need not be asked again."""
        columns = {}
        for field in dataclasses.fields(self):
            column = getattr(self, field.name)
            if isinstance(column, Tensor):
                columns[field.name] = moved(column, device, dtype if column.is_floating_point() else None)
        batch = dataclasses.replace(self, **columns)
        vars(batch).update({name: getattr(self, name) for name in ("lengths", "num_loss_tokens")})
        return batch

    def token_chunks(self, max_tokens: int, *, padded: bool = True) -> list[Tensor]:
        """Which sequences go together where a forward pass has a token budget; a longer sequence goes alone.
        int64 each. `padded` as in `split_by_tokens`."""
        chunks = chunks_by_padded_tokens if padded else chunks_by_tokens
        return [torch.tensor(chunk) for chunk in chunks(self.sequence_lengths.tolist(), max_tokens, allow_longer=True)]

    @property
    def _has_several_segments(self) -> bool:
        return self.num_sequences > self.num_trajectories

    def _parts_of_trajectories(self, fits: Callable[[Sequence[int]], bool]) -> list[Batch]:
        owners = self.trajectory_index.tolist()
        return self._parts(chunks_of_owners(self.sequence_lengths.tolist(), owners, fits))

    def _parts(self, chunks: list[list[int]]) -> list[Batch]:
        return [self] if len(chunks) == 1 else [self.select(chunk) for chunk in chunks]

    def _check_selection(self, chosen: Tensor) -> None:
        if chosen.ndim != 1 or chosen.numel() == 0:
            raise BatchError(
                f"sequences must be a non-empty list of positions, got {chosen.tolist()}; select at least one"
            )
        if int(chosen.min()) < 0 or int(chosen.max()) >= self.num_sequences:
            raise BatchError(
                f"sequences must lie in [0, {self.num_sequences}), got {chosen.tolist()}; fix the positions"
            )
        if len(torch.unique(chosen)) != len(chosen):
            raise BatchError(f"sequences must be distinct, got {chosen.tolist()}; a sequence is trained on once")


def moved(column: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor on a device, in `dtype` where one is given; the host does not wait for what CUDA still has to do."""
    queued = column.device.type == HOST and device.type == CUDA  # the host's memory has been read by then
    return column.to(device, dtype or column.dtype, non_blocking=queued)
