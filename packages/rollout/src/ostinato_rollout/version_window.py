"""How far ahead of its consumer a stream may work, counted in policy versions."""

from __future__ import annotations

from collections.abc import Callable
from operator import index

from ostinato_rollout.errors import SessionInputError
from ostinato_rollout.stream_types import StreamOptions


class VersionWindow:
    """Bounds staleness: how many versions a group is behind the policy when the consumer gets it.

    Whatever the consumer takes counts for the version at which it takes it. If it takes `groups_per_version` at each, the
    group that is k-th in the queue is taken (num_taken + k) // groups_per_version versions from now.

    Args:
        current_version: Returns the version that serves now.
        max_staleness: Versions that a group may be behind.
        groups_per_version: Groups that the consumer takes before the version moves.
    """

    def __init__(self, current_version: Callable[[], int], *, max_staleness: int, groups_per_version: int) -> None:
        self._current_version, self._max_staleness = current_version, max_staleness
        self.num_groups = (max_staleness + 1) * groups_per_version
        """Groups that there may be at one version: those taken at it, and those on their way."""
        self.version = index(current_version())
        """The version as of the last look."""
        self._num_taken = 0

    @classmethod
    def of(cls, current_version: Callable[[], int] | None, options: StreamOptions) -> VersionWindow | None:
        """Return what the options ask for; None where staleness has no bound.

        Raises:
            SessionInputError: There is a bound, and nobody who knows the version.
        """
        if options.max_staleness is None or options.groups_per_version is None:
            return None
        if current_version is None:
            raise SessionInputError(
                f"current_version must be given with max_staleness, got None with {options.max_staleness}; pass a function"
            )
        return cls(current_version, max_staleness=options.max_staleness, groups_per_version=options.groups_per_version)

    def look(self) -> bool:
        """Ask for the version; return whether it is another one than before."""
        version = index(self._current_version())
        if version == self.version:
            return False
        self.version, self._num_taken = version, 0
        return True

    def take(self, num_groups: int) -> None:
        """Note that the consumer got groups."""
        self._num_taken += num_groups

    def has_room(self, num_ahead: int) -> bool:
        """Whether one group more than the `num_ahead` that are under way or wait can be taken in time."""
        return self._num_taken + num_ahead < self.num_groups

    def is_stale(self, version: int | None) -> bool:
        """Whether a group whose oldest part is of `version` is too far behind now."""
        return version is not None and self.version - version > self._max_staleness
