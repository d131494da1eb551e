"""`RankGroup`: a `TrainingBackend` made of ranks.

Invariants: a batch's results do not depend on the number of ranks beyond the order of sums; every sequence goes to exactly one data rank; all ranks
get equally many micro-batches; and what the ranks say of a step is the same, or the run ends.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from ostinato_engines import WeightManifest
from ostinato_trainer.backends.base import EntropyMode, LossFn, OptimizerStats
from ostinato_trainer.backends.model_passes import check_temperature, merge_metrics
from ostinato_trainer.backends.ranks.base import RankFactory, RankPlace
from ostinato_trainer.backends.ranks.workers import RankWorkers
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import BackendError
from ostinato_trainer.partitions import cost_of, deal_to_ranks

_Shares = list[list[tuple[Batch, Tensor | None]]]
"""For each data rank its micro-batches, each with the positions of its sequences in what was dealt; None where it only fills up."""


class RankGroup:
    """The ranks as one backend; see `TrainingBackend` for the methods' contract.

    Args:
        workers: Where the ranks run; they are started here, and the group ends them.
        factory: Builds a rank's backend there.
        max_tokens_per_forward: Tokens of one forward pass of one rank in `log_probs`.

    Raises:
        BackendError: a rank could not be started, or the ranks disagree about their layout. None is left running.
    """

    def __init__(self, workers: RankWorkers, factory: RankFactory, *, max_tokens_per_forward: int = 16384) -> None:
        self._workers, self._max_tokens = workers, max_tokens_per_forward
        self._lock, self._streams = threading.Lock(), itertools.count()
        try:
            workers.start(factory)
            self._places: list[RankPlace] = self._ask("place")
            self._num_shares = _checked_layout(self._places)
            self._pads: bool = self._ask("pads_sequences")[0]
            self.policy_version: int = self._ask("policy_version")[0]
        except BaseException:
            workers.close()
            raise

    @property
    def num_ranks(self) -> int:
        return len(self._places)

    @property
    def pads_sequences(self) -> bool:
        """See `TrainingBackend.pads_sequences`."""
        return self._pads

    def forward_backward(
        self,
        micro_batches: Sequence[Batch],
        loss_fn: LossFn,
        *,
        temperature: float = 1.0,
        entropy: EntropyMode = EntropyMode.OFF,
    ) -> dict[str, float]:
        """See `TrainingBackend.forward_backward`. The loss travels, so it must be something that can be pickled; micro-batches are cut smaller,
        between trajectories, where ranks would have nothing to do.

        Raises:
            BackendError: a rank failed or died, the loss cannot travel, or the temperature is not positive.
            BatchError: a token id lies outside the vocabulary.
        """
        check_temperature(temperature)
        trained = [micro_batch for micro_batch in micro_batches if micro_batch.num_loss_tokens]
        if not trained:
            return {}
        shares = [[batch for batch, _ in share] for share in self._dealt(trained)]
        answers = self._call_with_data("forward_backward", shares, (loss_fn, temperature, entropy))
        totals: dict[str, float] = {}
        for answer in answers.values():
            merge_metrics(totals, answer)
        return totals

    def log_probs(
        self, batch: Batch, *, temperature: float, reference: bool = False, loss_tokens_only: bool = False
    ) -> Tensor:
        """See `TrainingBackend.log_probs`; arguments and errors as `LocalBackend.log_probs`."""
        check_temperature(temperature)
        chunks = batch.token_chunks(self._max_tokens, padded=self._pads)
        shares = self._dealt([batch.select(chunk) for chunk in chunks])
        order = torch.cat(chunks)
        answers = self._call_with_data(
            "log_probs", [[part for part, _ in share] for share in shares], (temperature, reference, loss_tokens_only)
        )
        result = torch.zeros(batch.num_tokens)
        for index, parts in answers.items():
            for (_, sequences), values in zip(shares[index], parts, strict=True):
                if sequences is not None:
                    result = result.to(torch.promote_types(result.dtype, values.dtype))
                    result[batch.token_positions(order[sequences])] = values.to(result)
        return result

    def optimizer_step(self) -> OptimizerStats:
        """See `TrainingBackend.optimizer_step`.

        Raises:
            BackendError: a rank failed or died, or the ranks did not do the same.
        """
        stats = self._ask("optimizer_step")
        if len({repr(msgspec.structs.replace(each, reason=None)) for each in stats}) > 1:
            self.close()
            raise BackendError(
                f"optimizer steps must be the same on all ranks, got {stats}; their weights differ now: resume from a checkpoint"
            )
        if not stats[0].skipped:
            self.policy_version += 1
        return stats[0]

    def weights(
        self, *, version: int | None = None
    ) -> tuple[WeightManifest, Callable[[], Iterable[tuple[str, Tensor]]]]:
        """See `TrainingBackend.weights`. The ranks gather a few tensors at a time, when they are asked for; several streams may be
        read at a time. A tensor is good until the next is taken."""
        manifest: WeightManifest = self._ask("manifest", self.policy_version if version is None else version)[0]

        def stream() -> Iterator[tuple[str, Tensor]]:
            number = next(self._streams)
            self._ask("open_weights", number)
            while (tensors := self._ask("next_weights", number)[0]) is not None:
                yield from tensors
                del tensors  # the rank has their memory again before it makes the next ones

        return manifest, stream

    def save(self, directory: str | Path) -> None:
        """See `TrainingBackend.save`. All ranks write into the directory, which they must share.

        Raises:
            OSError: the directory cannot be written.
        """
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._ask("save", Path(directory).absolute())

    def load(self, directory: str | Path) -> None:
        """See `TrainingBackend.load`; the group that wrote it may have had another number of ranks.

        Raises:
            CheckpointError: a file is missing, damaged, or of another model; nothing has changed then.
        """
        self._ask("load", Path(directory).absolute())
        self.policy_version = self._ask("policy_version")[0]

    def save_hf(self, directory: str | Path) -> None:
        """See `TrainingBackend.save_hf`."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._ask("save_hf", Path(directory).absolute())

    def close(self) -> None:
        """Ends the ranks; may be called twice."""
        self._workers.close()

    def _ask(self, method: str, *arguments: Any) -> list[Any]:
        """The same question to all ranks."""
        return self._call(method, [arguments] * self._workers.num_ranks)

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        with self._lock:  # a checkpoint is written by another thread than the one that trains
            return self._workers.call(method, arguments)

    def _call_with_data(
        self, method: str, shares: Sequence[Sequence[Batch]], others: tuple[Any, ...]
    ) -> dict[int, Any]:
        """What the reporting ranks answered, by their share of the data."""
        arguments = [(shares[place.data_index], *others) for place in self._places]
        answers = self._call(method, arguments)
        reported = [
            (place.data_index, answer) for place, answer in zip(self._places, answers, strict=True) if place.reports
        ]
        return dict(sorted(reported, key=lambda pair: pair[0]))

    def _dealt(self, parts: Sequence[Batch]) -> _Shares:
        """The parts dealt out to the data ranks; positions count the sequences of all parts in order."""
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
            if self._pads:
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
            [batch_of(chosen) for chosen in share] for share in deal_to_ranks(positions, owners, self._num_shares, cost)
        ]


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
