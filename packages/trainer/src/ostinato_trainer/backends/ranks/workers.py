"""`RankWorkers`: where the ranks of a group run, whatever starts them.

Invariants: a call reaches all ranks or none; the death of one rank ends the call on all of them within a second or so, names the rank and
leaves none of the others behind; and after an error that broke the ranks' step together, or after `close`, no call is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ostinato_trainer.backends.ranks.base import RankFactory
from ostinato_trainer.errors import BackendError


class RankDiedError(BackendError):
    """A rank ended while it was needed, or could not be started; the message names it, its exit status and the end of its log."""


class RankTimeoutError(BackendError):
    """A call took longer than allowed; the message names the ranks that had not answered."""


class RankExchangeError(BackendError):
    """Ranks waited for others in an exchange until it was given up: one of them is stopped, slower than the deadline, or out of reach."""


class RankWorkers(Protocol):
    """Processes or actors, each with a `RankHost` inside; a call names one of its methods.

    Not made for several threads. A call that is interrupted (by an exception thrown into it) leaves ranks in an unknown state: it closes them.
    """

    @property
    def num_ranks(self) -> int:
        """How many there are; constant."""
        ...

    def address_for(self, beyond_host: bool) -> tuple[str, str | None]:
        """The address of this process for others of its host, and the interface between these; or for other hosts as well, and None."""
        ...

    def start(self, factory: RankFactory) -> None:
        """Starts all ranks and builds their backends.

        Raises:
            BackendError: what the factory raised on the first rank that failed, with the rank named; none is left running.
            RankDiedError, RankTimeoutError: see there.
        """
        ...

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls `RankHost.<method>` on every rank at once and waits for all.

        Args:
            method: Of `RankHost`.
            arguments: One tuple a rank, in order; picklable.

        Returns:
            One result a rank, in order.

        Raises:
            Exception: what a rank raised, with the rank named where it did not raise on all. Where all ranks raised, they are in step and go on
                serving; where only some did, all are closed.
            RankDiedError, RankTimeoutError, RankExchangeError: all are closed.
        """
        ...

    def close(self) -> None:
        """Ends all ranks and frees what they hold; may be called twice, before `start` too."""
        ...
