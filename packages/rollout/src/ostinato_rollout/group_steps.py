"""The work on one group: its runs with their reruns, and the question whether to keep it. Knows no other group."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from operator import index
from typing import Any, Generic

import msgspec

from ostinato_rollout.errors import SessionInputError
from ostinato_rollout.failure import Failure, FailureKind
from ostinato_rollout.item_attempts import Progress, attempt
from ostinato_rollout.open_group import OpenGroup
from ostinato_rollout.overtime import Overtime
from ostinato_rollout.stream_types import Group, Prompt, Result, Run, StreamOptions


class StreamCallbacks(msgspec.Struct, Generic[Prompt, Result], frozen=True, kw_only=True):
    """What a stream asks others; `RolloutScheduler.stream` says what each is."""

    run_one: Callable[[Run[Prompt]], Awaitable[Result]]
    keep_group: Callable[[Group[Prompt, Result]], Any] | None = None
    failure_of: Callable[[Result], Failure | None] | None = None
    current_version: Callable[[], int] | None = None
    oldest_version: Callable[[Result], int | None] | None = None


class Ended(msgspec.Struct, frozen=True):
    """What a step has brought."""

    value: Any = None
    """What the run returned, or the verdict; None if that was raised instead."""
    failure: Failure | None = None
    """Raised, or found in the value."""
    version: int | None = None
    """The oldest that took part in the value, where versions count."""

    @property
    def is_raised(self) -> bool:
        """Whether there is nothing but the failure."""
        return self.failure is not None and self.value is None


class GroupSteps(Generic[Prompt, Result]):
    """Does what is to be done for groups, one step at a time.

    Args:
        callbacks: Who does it.
        n: Runs of a group.
        timeout_s: Longest time that a run, or a verdict, may take; None: they have deadlines of their own.
        options: How often a run that failed is done again, and how long one that is cancelled may tidy up.
        look: Returns the policy version that serves, where versions count.
        progress: Of all steps.
    """

    def __init__(
        self,
        callbacks: StreamCallbacks[Prompt, Result],
        *,
        n: int,
        timeout_s: float | None,
        options: StreamOptions,
        look: Callable[[], int | None],
        progress: Progress,
    ) -> None:
        self._callbacks, self._n, self._timeout_s, self._max_reruns = callbacks, n, timeout_s, options.max_reruns
        self._look, self._progress = look, progress
        self._overtime = Overtime(options.cancel_grace_s)
        self.num_reruns = 0

    def name(self, group: OpenGroup[Prompt, Result], number: int | None) -> str:
        """Return a step's name for people."""
        if number is None:
            return f"keep_group of item {group.index}"
        return f"item {group.index}" if self._n == 1 else f"item {group.index}, run {number}"

    async def do(self, group: OpenGroup[Prompt, Result], number: int | None) -> Ended:
        """Do the run of that number, or for None ask `keep_group`. Raises nothing but CancelledError from outside."""
        return await (self._judge(group) if number is None else self._run(group, number))

    def outcome(self, task: asyncio.Task[Ended], group: OpenGroup[Prompt, Result], number: int | None) -> Ended:
        """Return what a task that did a step has brought; nobody has interrupted it on our behalf."""
        name = self.name(group, number)
        if task.cancelled():
            return Ended(failure=Failure(name, FailureKind.CANCELLED, "its task was cancelled"))
        error = task.exception()
        return task.result() if error is None else Ended(failure=Failure.from_error(error, name))

    async def _run(self, group: OpenGroup[Prompt, Result], number: int) -> Ended:
        """Run until it succeeds, or has failed as often as it may."""
        while True:
            ended = await self._run_once(group, number)
            num_failed = group.attempts.get(number, 0)
            if ended.failure is None or num_failed >= self._max_reruns:
                return ended
            group.attempts[number] = num_failed + 1
            self.num_reruns += 1

    async def _run_once(self, group: OpenGroup[Prompt, Result], number: int) -> Ended:
        run = Run(group.prompt, group.index, number, group.attempts.get(number, 0))
        version, callbacks = self._look(), self._callbacks

        async def call() -> Ended:
            result = await callbacks.run_one(run)
            failure = None if callbacks.failure_of is None else callbacks.failure_of(result)
            if failure is not None:
                return Ended(result, _checked(failure))
            oldest = None if callbacks.oldest_version is None else callbacks.oldest_version(result)
            return Ended(result, version=version if oldest is None else index(oldest))

        return await self._attempt(call, self.name(group, number))

    async def _judge(self, group: OpenGroup[Prompt, Result]) -> Ended:
        keep_group = self._callbacks.keep_group
        assert keep_group is not None

        async def call() -> Ended:
            verdict = keep_group(group.finished())
            if inspect.isawaitable(verdict):
                verdict = await verdict
            if not isinstance(verdict, str) and verdict not in (True, False):
                raise SessionInputError(
                    f"keep_group must return True, False or the reason for dropping, got {verdict!r:.80}; return one of them"
                )
            return Ended(verdict if isinstance(verdict, str) else bool(verdict))

        return await self._attempt(call, self.name(group, None))

    async def _attempt(self, call: Callable[[], Awaitable[Ended]], what: str) -> Ended:
        ended = await attempt(call, what, timeout_s=self._timeout_s, progress=self._progress, overtime=self._overtime)
        return Ended(failure=ended) if isinstance(ended, Failure) else ended


def _checked(failure: Any) -> Failure:
    if not isinstance(failure, Failure):
        raise SessionInputError(f"failure_of must return a Failure or None, got {failure!r:.80}; return one of them")
    return failure
