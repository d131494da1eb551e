"""What a pool asks of its replicas, each under a deadline, and what they have not answered yet. Knows no states."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable

from ostinato_rollout.activity import OperationActivity
from ostinato_rollout.conversation import num_cancellations
from ostinato_rollout.diagnostics import ago, log_dump
from ostinato_rollout.errors import ReplicaError, RequestTimeoutError
from ostinato_rollout.patience import DeadlinePassedError, result_within
from ostinato_rollout.replica_state import Replica

Operation = Callable[[Replica], Awaitable[None]]


class PoolOperations:
    """The operations of one pool."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[int, str], float] = {}  # since when, by replica and purpose
        self.last_answer = ""
        """Who answered last, and to what."""

    def activity(self) -> list[OperationActivity]:
        """Return what has not been answered yet."""
        now = time.monotonic()
        return [
            OperationActivity(replica=replica, what=purpose, since_s=now - since)
            for (replica, purpose), since in list(self._under_way.items())
        ]

    async def on_each(
        self, purpose: str, replicas: Iterable[Replica], operation: Operation, limit_s: float
    ) -> dict[int, Exception]:
        """Run `operation` on all at once, each under the deadline; return the errors by replica."""
        failures: dict[int, Exception] = {}

        async def one(replica: Replica) -> None:
            try:
                await self.on_one(purpose, replica, operation, limit_s)
            # What one replica does says nothing about the others.
            except Exception as error:
                failures[replica.index] = error

        async with asyncio.TaskGroup() as group:
            for replica in replicas:
                group.create_task(one(replica))
        return dict(sorted(failures.items()))

    async def on_one(self, purpose: str, replica: Replica, operation: Operation, limit_s: float) -> None:
        """Run `operation` on one replica.

        Args:
            purpose: Completes `replica 0 must ...`.
            replica: Which.
            operation: What is asked of it.
            limit_s: Longest time.

        Raises:
            RequestTimeoutError: The deadline passed; whatever the replica still does is not waited for.
            Exception: What the operation raised.
        """
        key = (replica.index, purpose)
        since = self._under_way[key] = time.monotonic()
        try:
            await result_within(operation(replica), limit_s)
            self.last_answer = f"replica {replica.index} had to {purpose}"
        except DeadlinePassedError as error:
            raise self._overdue(replica.index, purpose, limit_s, since) from error
        except asyncio.CancelledError as error:
            if num_cancellations():
                raise
            raise ReplicaError(
                f"replica {replica.index} must {purpose}, got cancelled by itself; see its log"
            ) from error
        finally:
            self._under_way.pop(key, None)

    def _overdue(self, replica: int, purpose: str, limit_s: float, since: float) -> RequestTimeoutError:
        """Build the error of an operation that has passed its deadline, and log what everybody is doing."""
        message = (
            f"replica {replica} must {purpose} within {limit_s:g} s, got no answer since {ago(since)},"
            f" last progress: {self.last_answer or 'no operation has ended yet'}; look at that replica's log"
        )
        log_dump(message)
        return RequestTimeoutError(message)
