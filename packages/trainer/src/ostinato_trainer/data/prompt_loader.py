"""Batches of rows in a seeded order that can be left and taken up again exactly: `PromptLoader`.

The order of an epoch is a function of (seed, epoch) alone. The state is a place, epoch and batch, and a place at the end
of an epoch is written as the start of the next: taken up there, a run goes on. With it stands what the rows were, so that
it is taken up with the same rows only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
import numpy as np

from ostinato_trainer.data.dataset import PromptDataset
from ostinato_trainer.data.fingerprint import DataFingerprint, TellsFingerprint
from ostinato_trainer.errors import DatasetError

__all__ = ["PromptLoader"]

logger = logging.getLogger(__name__)

_STATE_KEYS: Final = ("epoch", "batch", "seed", "shuffle", "batch_size", "num_rows", "data")
_KEYS: Final = {"seed": "data.seed", "shuffle": "data.shuffle", "batch_size": "data.train_batch_size"}
"""Entries of the state that must be as they were, and the keys of the configuration that set them."""


class PromptLoader:
    """Endless batches over a dataset, epoch after epoch.

    An epoch has `len(loader)` full batches; the rows that do not fill another one are left out of that epoch, and with
    shuffling they are others each time.

    Args:
        dataset: the rows.
        batch_size: rows in a batch, `data.train_batch_size`.
        shuffle: a new order for every epoch; false keeps the order of the rows.
        seed: seed of the orders.

    Raises:
        DatasetError: fewer rows than one batch.
    """

    def __init__(self, dataset: PromptDataset, *, batch_size: int, shuffle: bool, seed: int) -> None:
        if batch_size < 1:
            raise DatasetError(f"batch_size must be at least 1, got {batch_size}; set data.train_batch_size")
        if len(dataset) < batch_size:
            raise DatasetError(
                f"data.train_batch_size must be at most the number of rows, got {batch_size} for {len(dataset)} rows; "
                f"write data.train_batch_size={len(dataset)} or less"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._batch = 0
        self._order: tuple[int, np.ndarray] | None = None
        if left_over := len(dataset) % batch_size:
            logger.info("%d of %d rows do not fill a batch and are left out of an epoch", left_over, len(dataset))

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self.dataset) // self.batch_size

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        return self._epoch

    @property
    def batch_in_epoch(self) -> int:
        """Place of the next batch in its epoch, from 0."""
        return self._batch

    @property
    def num_batches_done(self) -> int:
        """Batches given out over all epochs."""
        return self._epoch * len(self) + self._batch

    def next_indices(self) -> list[int]:
        """Row indices of the next batch; moves on."""
        order = self._order_of_epoch()
        start = self._batch * self.batch_size
        indices = order[start : start + self.batch_size].tolist()
        self._batch += 1
        if self._batch == len(self):
            self._epoch, self._batch = self._epoch + 1, 0
        return indices

    def next_batch(self) -> list[dict[str, Any]]:
        """Rows of the next batch; moves on."""
        return [self.dataset[index] for index in self.next_indices()]

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        """The batches left in this epoch; the next iteration goes on with the next one."""
        epoch = self._epoch
        while self._epoch == epoch:
            yield self.next_batch()

    def state_dict(self) -> dict[str, Any]:
        """The place of the next batch and what it depends on; plain values."""
        fingerprint = self.dataset.fingerprint if isinstance(self.dataset, TellsFingerprint) else None
        return {
            "epoch": self._epoch,
            "batch": self._batch,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "batch_size": self.batch_size,
            "num_rows": len(self.dataset),
            "data": msgspec.to_builtins(fingerprint),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the place that `state_dict` gave.

        Raises:
            DatasetError: the state belongs to other rows, another batch size, seed or order, or is none.
        """
        if missing := [key for key in _STATE_KEYS if key not in state]:
            raise DatasetError(
                f"a loader's state must have {', '.join(_STATE_KEYS)}, got none of {', '.join(missing)}; "
                "take it from state_dict()"
            )
        own = self.state_dict()
        for key, written in _KEYS.items():
            if state[key] != own[key]:
                raise DatasetError(
                    f"{written} must be what it was when the state was saved, got {own[key]} instead of {state[key]}; "
                    f"write {written}={msgspec.json.encode(state[key]).decode()}"
                )
        self._check_rows(state["num_rows"], state["data"])
        epoch, batch = state["epoch"], state["batch"]
        if not (_is_place(epoch) and _is_place(batch) and batch <= len(self)):
            raise DatasetError(
                f"a loader's place must be inside an epoch of {len(self)} batches, got epoch {epoch!r}, batch {batch!r}; "
                "take it from state_dict()"
            )
        self._epoch, self._batch = (epoch + 1, 0) if batch == len(self) else (epoch, batch)

    def _check_rows(self, num_rows: Any, data: Any) -> None:
        """Refuse the state of other rows; those of a dataset that does not say what its rows are are only counted."""
        if data is not None and isinstance(self.dataset, TellsFingerprint):
            try:
                saved = msgspec.convert(data, DataFingerprint)
            except msgspec.ValidationError as error:
                raise DatasetError(
                    f"data of a loader's state must be a fingerprint, got {error}; take it from state_dict()"
                ) from None
            problem = self.dataset.fingerprint.difference(saved)
            if problem is not None:
                raise DatasetError(problem)
        if num_rows != len(self.dataset):
            raise DatasetError(
                f"data.train_files must hold the {num_rows} rows that they held when the state was saved, got "
                f"{len(self.dataset)}; take up the run with the data that it had"
            )

    def _order_of_epoch(self) -> np.ndarray:
        if self._order is None or self._order[0] != self._epoch:
            num_rows = len(self.dataset)
            rng = np.random.default_rng([abs(self._seed), int(self._seed < 0), self._epoch])
            order = rng.permutation(num_rows) if self._shuffle else np.arange(num_rows)
            self._order = (self._epoch, order)
        return self._order[1]


def _is_place(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
