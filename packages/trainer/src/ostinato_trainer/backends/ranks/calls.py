"""`RankCalls`: what all ranks of a group are asked together, for the policy and for the critic beside it.

Invariants: one call at a time reaches the ranks, whatever threads ask; every sequence goes to exactly one share of the data; all shares have equally
many micro-batches; and optimizer steps are the same on all ranks, or the ranks are ended.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from ostinato_trainer.backends.base import OptimizerStats
from ostinato_trainer.backends.ranks.base import RankPlace
from ostinato_trainer.backends.ranks.workers import RankWorkers
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import BackendError
from ostinato_trainer.partitions import cost_of, deal_to_ranks

Shares = list[list[tuple[Batch, Tensor | None]]]
"""For each share of the data its micro-batches, each with the positions of its sequences in what was dealt; None where it only fills up."""


class RankCalls:
    """Calls to ranks that have been started.

    Args:
        workers: Where the ranks run.

    Raises:
        BackendError: the ranks disagree about their layout.
    """

    def __init__(self, workers: RankWorkers) -> None:
        self._workers, self._lock = workers, threading.Lock()
        self.places: list[RankPlace] = self.ask("place")
        self.num_shares = _checked_layout(self.places)

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """The same question to all ranks; an answer of each, in order."""
        return self._call(method, [arguments] * self._workers.num_ranks)

    def ask_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """A question to each rank, with arguments of its own; an answer of each, in order."""
        return self._call(method, arguments)

    def with_data(self, method: str, shares: Shares, *others: Any) -> dict[int, Any]:
        """Gives each rank the micro-batches of its share, and other arguments; what the reporting ranks answered, by their share."""
        parts = [[batch for batch, _ in share] for share in shares]
        answers = self._call(method, [(parts[place.data_index], *others) for place in self.places])
        reported = [
            (place.data_index, answer) for place, answer in zip(self.places, answers, strict=True) if place.reports
        ]
        return dict(sorted(reported, key=lambda pair: pair[0]))

    def by_token(self, method: str, batch: Batch, *others: Any, max_tokens: int, padded: bool) -> Tensor:
        """One number for each token of a batch, which is given out some tokens at a time: float [T]."""
        chunks = batch.token_chunks(max_tokens, padded=padded)
        shares = self.dealt([batch.select(chunk) for chunk in chunks], padded=padded)
        order, result = torch.cat(chunks), torch.zeros(batch.num_tokens)
        for index, parts in self.with_data(method, shares, *others).items():
            for (_, sequences), values in zip(shares[index], parts, strict=True):
                if sequences is not None:
                    result = result.to(torch.promote_types(result.dtype, values.dtype))
                    result[batch.token_positions(order[sequences])] = values.to(result)
        return result

    def step(self, method: str) -> OptimizerStats:
        """An optimizer step.

        Raises:
            BackendError: a rank failed or died, or the ranks did not do the same.
        """
        stats: list[OptimizerStats] = self.ask(method)
        if len({repr(msgspec.structs.replace(each, reason=None)) for each in stats}) > 1:
            self._workers.close()
            raise BackendError(
                f"optimizer steps must be the same on all ranks, got {stats}; their weights differ now: resume from a checkpoint"
            )
        return stats[0]

    def dealt(self, parts: Sequence[Batch], *, padded: bool) -> Shares:
        """The parts dealt out to the shares; positions count the sequences of all parts in order.

        Args:
            parts: Micro-batches; they are cut smaller, between trajectories, where ranks would have nothing to do.
            padded: Whether a micro-batch costs its sequences times its longest.
        """
        lengths: list[int] = []
        owners: list[int] = []
        sources: list[tuple[Batch, int]] = []
        positions: list[list[int]] = []
        first_owner = 0
        for part in parts:
            start = len(lengths)
            lengths += part.sequence_lengths.tolist()
            owners += (part.trajectory_index + first_owner).tolist()
            first_owner += part.num_trajectories
            sources += [(part, start)] * part.num_sequences
            positions.append(list(range(start, len(lengths))))

        def cost(chosen: Sequence[int]) -> float:
            if padded:
                return len(chosen) * cost_of(max(lengths[place] for place in chosen))
            return sum(cost_of(lengths[place]) for place in chosen)

        def batch_of(chosen: list[int]) -> tuple[Batch, Tensor | None]:
            if not chosen:
                return filler, None
            part, start = sources[chosen[0]]
            whole = len(chosen) == part.num_sequences
            return part if whole else part.select([place - start for place in chosen]), torch.tensor(chosen)

        filler = _filler(parts[0])
        return [
            [batch_of(chosen) for chosen in share] for share in deal_to_ranks(positions, owners, self.num_shares, cost)
        ]

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        with self._lock:  # a checkpoint is written by another thread than the one that trains
            return self._workers.call(method, arguments)


def _filler(batch: Batch) -> Batch:
    """The shortest sequence of a batch, with nothing to train on: for a rank that has nothing to do while others compute."""
    shortest = batch.select([int(batch.sequence_lengths.argmin())])
    return dataclasses.replace(shortest, loss_mask=torch.zeros_like(shortest.loss_mask))


def _checked_layout(places: Sequence[RankPlace]) -> int:
    """How many shares the data have.

    Raises:
        BackendError: the ranks do not agree, or a share has not exactly one rank that reports.
    """
    num_shares = places[0].data_size
    reporting = sorted(place.data_index for place in places if place.reports)
    if any(place.data_size != num_shares for place in places) or reporting != list(range(num_shares)):
        raise BackendError(
            f"each of the {num_shares} shares of the data must have exactly one rank that reports, got {reporting}; "
            "mend the layout of the backend"
        )
    return num_shares
