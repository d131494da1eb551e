"""A group whose runs are not all done, or that nobody has taken: the mutable half of `Group` and `SavedGroup`."""

from __future__ import annotations

import asyncio
from typing import Any, Generic

from ostinato_rollout.errors import SessionInputError
from ostinato_rollout.failure import Failure
from ostinato_rollout.stream_types import Group, Prompt, Result, SavedGroup, StreamState


class OpenGroup(Generic[Prompt, Result]):
    """Results come in by number, in any order.

    Args:
        saved: What it starts from.
        n: Runs that make it complete.
    """

    def __init__(self, saved: SavedGroup[Prompt, Result], n: int) -> None:
        self.index, self.prompt = saved.index, saved.prompt
        self.oldest_version = saved.oldest_version
        self.was_kept = saved.is_kept
        """Whether it was found good before the state was taken."""
        self.tasks: dict[asyncio.Task[Any], None] = {}
        """What is under way for it, in the order in which it was begun."""
        self.attempts = dict(saved.attempts)
        self._results, self._failures = dict(saved.results), dict(saved.failures)
        self._n = n

    @property
    def is_complete(self) -> bool:
        """Whether no run is missing."""
        return len(self._results) + len(self._failures) == self._n

    @property
    def missing(self) -> list[int]:
        """Numbers of the runs that have not ended."""
        return [number for number in range(self._n) if number not in self._results and number not in self._failures]

    def add_result(self, number: int, result: Result, version: int | None) -> None:
        """Take in what a run returned, and the oldest version that took part in it."""
        self._results[number] = result
        self.attempts.pop(number, None)
        if version is not None:
            self.oldest_version = version if self.oldest_version is None else min(self.oldest_version, version)

    def add_failure(self, number: int, failure: Failure) -> None:
        """Take in that a run failed for good."""
        self._failures[number] = failure
        self.attempts.pop(number, None)

    def finished(self) -> Group[Prompt, Result]:
        """Return the complete group."""
        found = {**self._results, **self._failures}
        return Group(self.index, self.prompt, [found[number] for number in range(self._n)], self.oldest_version)

    def saved(self, *, is_kept: bool) -> SavedGroup[Prompt, Result]:
        """Return what it would take to go on with it."""
        return SavedGroup(
            index=self.index,
            prompt=self.prompt,
            results=dict(self._results),
            failures=dict(self._failures),
            attempts=dict(self.attempts),
            oldest_version=self.oldest_version,
            is_kept=is_kept,
        )


def groups_of(state: StreamState[Prompt, Result], n: int) -> list[OpenGroup[Prompt, Result]]:
    """Return the groups of a state, by index.

    Raises:
        SessionInputError: They do not fit together, or are not of n runs.
    """
    indices = sorted(saved.index for saved in state.groups)
    if len(set(indices)) != len(indices) or any(not 0 <= index < state.num_drawn for index in indices):
        raise SessionInputError(
            f"indices of groups must be different and below num_drawn={state.num_drawn}, got {indices!r:.200}; give the state"
            " as it was taken"
        )
    for saved in state.groups:
        numbers = [*saved.results, *saved.failures]
        fits = len(set(numbers)) == len(numbers) and all(0 <= number < n for number in numbers)
        if not fits or (saved.is_kept and len(numbers) != n):
            raise SessionInputError(
                f"n must be what it was when group {saved.index} was saved with the runs {sorted(numbers)}, got {n}; go on with"
                " the same number of runs"
            )
    return [OpenGroup(saved, n) for saved in sorted(state.groups, key=lambda saved: saved.index)]
