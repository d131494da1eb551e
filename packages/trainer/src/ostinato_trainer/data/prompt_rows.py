"""`PromptRows`: the rows of a loader one by one, at a place that can be left and taken up again exactly.

Steps need whole batches of groups, but not every group is good: what takes a dropped one's place is the next row, wherever the
loader's batches begin and end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from ostinato_trainer.errors import DatasetError

__all__ = ["PromptRows", "PromptStream"]


class PromptStream(Protocol):
    """An endless, resumable stream of batches of dataset rows; `PromptLoader`, or a class of the user's own."""

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        ...

    def next_batch(self) -> list[dict]:
        """The next `data.train_batch_size` rows."""
        ...

    def state_dict(self) -> dict:
        """Its place; plain values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the place that `state_dict` gave."""
        ...


class PromptRows(Iterator[dict]):
    """Endless rows.

    Args:
        loader: Where they come from, a batch at a time.

    Raises:
        DatasetError: The loader gives an empty batch.
    """

    def __init__(self, loader: PromptStream) -> None:
        self._loader = loader
        self._batch: list[dict] = []
        self._num_given = 0
        self._before_batch = loader.state_dict()
        self._epoch = loader.epoch

    @property
    def epoch(self) -> int:
        """Epoch of the row that was given last, from 0."""
        return self._epoch

    def __next__(self) -> dict:
        if self._num_given == len(self._batch):
            self._before_batch, self._epoch = self._loader.state_dict(), self._loader.epoch
            self._batch, self._num_given = self._loader.next_batch(), 0
            if not self._batch:
                raise DatasetError("next_batch must return at least one row, got none; mend the loader")
        self._num_given += 1
        return self._batch[self._num_given - 1]

    def state_dict(self) -> dict:
        """The place of the next row: the loader's before the batch that is being given, and how many of its rows were given."""
        if self._num_given == len(self._batch):
            return {"loader": self._loader.state_dict(), "num_given": 0}
        return {"loader": self._before_batch, "num_given": self._num_given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the place that `state_dict` gave.

        Raises:
            DatasetError: It is no such place, or the loader's batches have become smaller than it.
        """
        loader, num_given = state.get("loader"), state.get("num_given")
        if not isinstance(loader, Mapping) or not isinstance(num_given, int) or num_given < 0:
            raise DatasetError(
                f"a place in the rows must have loader and num_given, got {state!r:.200}; take it from state_dict()"
            )
        self._loader.load_state_dict(loader)
        self._epoch = self._loader.epoch
        self._batch, self._num_given = [], 0
        if num_given:
            self._before_batch = dict(loader)
            self._batch, self._num_given = self._loader.next_batch(), num_given
            if num_given >= len(self._batch):
                raise DatasetError(
                    f"num_given must be below the {len(self._batch)} rows of a batch, got {num_given}; take up the run with the"
                    " data.train_batch_size that it had"
                )
