"""Prompts in, groups of n results out, as they finish.

Invariant: each prompt that was drawn is in one place: under way, ready, or counted under its one `GroupFate`. Everything is
decided in plain functions between two steps of the event loop, so that no cancellation finds anything half done. Knows no agent,
no reward and no server.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import AsyncIterable, Iterable, Sequence
from itertools import islice
from typing import Any, Generic

from ostinato_rollout.activity import SchedulerActivity
from ostinato_rollout.diagnostics import discard, register
from ostinato_rollout.errors import SessionInputError
from ostinato_rollout.failure import Failure
from ostinato_rollout.fates import Fates
from ostinato_rollout.group_steps import Ended, GroupSteps, StreamCallbacks
from ostinato_rollout.item_attempts import Progress, all_ended
from ostinato_rollout.open_group import OpenGroup, groups_of
from ostinato_rollout.prompt_source import PromptSource
from ostinato_rollout.step_tasks import StepTasks
from ostinato_rollout.stream_types import (
    DroppedGroup,
    Group,
    GroupFate,
    Leftover,
    OnFailure,
    Prompt,
    Result,
    SavedGroup,
    StreamCounts,
    StreamOptions,
    StreamState,
)
from ostinato_rollout.version_window import VersionWindow

_VERSION_POLL_S = 0.05
_VERSION = "the policy version"


class GroupStream(Generic[Prompt, Result]):
    """An async iterator of groups; `RolloutScheduler.stream` makes it and says what it does.

    Use it as `async with`, or call `aclose`: what is under way does not end by itself when nobody listens any more. A call
    that is cancelled while it waits has taken nothing.
    """

    def __init__(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        callbacks: StreamCallbacks[Prompt, Result],
        *,
        n: int,
        concurrency: int,
        item_timeout_s: float | None,
        options: StreamOptions,
        state: StreamState[Prompt, Result],
    ) -> None:
        self._options, self._n, self._concurrency = options, n, concurrency
        self._is_judged = callbacks.keep_group is not None
        self._window = VersionWindow.of(callbacks.current_version, options)
        self._progress = Progress()
        work = GroupSteps(
            callbacks,
            n=n,
            timeout_s=item_timeout_s,
            options=options,
            look=self._look,
            progress=self._progress,
        )
        self._work, self._tasks = work, StepTasks(work, progress=self._progress, on_end=self._ended)
        self._fates = Fates(options.max_dropped_in_row)
        self._changed = asyncio.Event()
        self._open: dict[int, OpenGroup[Prompt, Result]] = {}
        self._ready: dict[int, OpenGroup[Prompt, Result]] = {}
        self._to_do: deque[tuple[OpenGroup[Prompt, Result], int | None]] = deque()
        self._num_demanded = 0
        self._source_is_over = self._is_closed = False
        self._error: BaseException | None = None
        self._held_by = ""
        self._source = PromptSource(prompts, on_prompt=self._draw, on_end=self._end_source, on_answer=self._go_on)
        self._first_index, self._num_drawn, self._num_resumed = state.num_drawn, 0, len(state.groups)
        for group in groups_of(state, n):
            self._add(group)
        self._drop_stale()
        register(self)

    def __aiter__(self) -> GroupStream[Prompt, Result]:
        return self

    async def __anext__(self) -> Group[Prompt, Result]:
        groups = await self.take(1)
        if not groups:
            raise StopAsyncIteration
        return groups[0]

    async def __aenter__(self) -> GroupStream[Prompt, Result]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def dropped(self) -> Sequence[DroppedGroup]:
        """The groups that were dropped last, and why; at most a thousand."""
        return tuple(self._fates.dropped)

    async def take(self, num_groups: int) -> list[Group[Prompt, Result]]:
        """Wait for so many groups and return them together, by index; fewer where the stream ends, none when it has ended.

        They are taken all at the same moment: until then they may become stale, and a cancelled call has taken none.

        Raises:
            SessionInputError: `num_groups` is not positive, or more than the bound of staleness lets wait at one time.
            Exception: What the source of the prompts raised, or StreamStalledError where too many groups in a row were dropped;
                once all groups have ended and are fewer. They can still be taken.
            RequestTimeoutError: Cancelled runs did not end.
        """
        limit = None if self._window is None else self._window.num_groups
        if num_groups < 1 or (limit is not None and num_groups > limit):
            raise SessionInputError(
                f"num_groups must be at least 1, and at most (max_staleness + 1) * groups_per_version={limit}, got {num_groups};"
                " more are never there at one time"
            )
        self._num_demanded += num_groups
        try:
            groups = await self._await_groups(num_groups)
        finally:
            self._num_demanded -= num_groups
        if len(groups) < num_groups and self._error is not None and not self._is_closed:
            raise self._error
        if not groups:
            await self.aclose()
        for group in groups:
            del self._ready[group.index]
        self._fates.took(len(groups))
        if self._window is not None:
            self._window.take(len(groups))
        self._advance()
        return [group.finished() for group in groups]

    async def aclose(self) -> None:
        """End now: cancel what is under way and wait until it has ended. May be called at any time, and again.

        Raises:
            RequestTimeoutError: Cancelled runs did not end.
        """
        if not self._is_closed:
            self._is_closed = True
            self._stop_rest()
            if self._options.leftover is Leftover.CANCEL:
                for group in list(self._ready.values()):
                    self._drop(group, GroupFate.CANCELLED, "the stream was closed before it was taken")
            self._changed.set()
            discard(self)
        await all_ended(self._ending, timeout_s=self._options.close_timeout_s)

    def state(self) -> StreamState[Prompt, Result]:
        """Return what a later stream needs to go on from here; nothing changes. After `aclose`: what was handed back."""
        groups = [group.saved(is_kept=True) for group in self._ready.values()]
        groups += [group.saved(is_kept=False) for group in self._open.values()]
        groups.sort(key=lambda group: group.index)
        return StreamState(num_drawn=self._first_index + self._num_drawn, groups=groups)

    def counts(self) -> StreamCounts:
        """Return what has been done so far."""
        fates = {fate.value: self._fates.counts[fate] for fate in GroupFate}
        if self._is_closed:
            fates[GroupFate.HANDED_BACK.value] = len(self._open) + len(self._ready)
        return StreamCounts(
            num_drawn=self._num_drawn,
            num_resumed=self._num_resumed,
            num_open=0 if self._is_closed else len(self._open),
            num_ready=0 if self._is_closed else len(self._ready),
            num_reruns=self._work.num_reruns,
            fates=fates,
            filtered=dict(self._fates.filtered),
        )

    def activity(self) -> SchedulerActivity:
        """Return what it is doing now."""
        return SchedulerActivity(
            num_done=self._progress.num_done,
            under_way=self._tasks.seconds_by_index(),
            idle_s=time.monotonic() - self._progress.last_end,
            num_ready=len(self._ready),
            fates={fate.value: count for fate, count in self._fates.counts.items()},
            held_by=self._held_by,
        )

    async def _await_groups(self, num_groups: int) -> list[OpenGroup[Prompt, Result]]:
        """Wait until there are so many groups, or the stream is over and nothing of it runs any more."""
        while not self._is_closed:
            self._advance()
            groups = self._deliverable(num_groups)
            if len(groups) == num_groups:
                return groups
            if not self._is_over():
                await self._wait()
            elif self._ending():
                await all_ended(self._ending, timeout_s=self._options.close_timeout_s)
            else:
                return groups
        return []

    async def _wait(self) -> None:
        """Wait until something has changed. Nobody tells when the version moves, so that is looked for."""
        self._changed.clear()
        try:
            async with asyncio.timeout(_VERSION_POLL_S if self._held_by == _VERSION else None):
                await self._changed.wait()
        except TimeoutError:
            return

    def _ending(self) -> set[asyncio.Task[Any]]:
        return self._tasks.ending | self._source.ending

    def _advance(self) -> None:
        """Begin everything that can be begun now."""
        self._held_by = ""
        self._look()
        while not self._is_closed and not self._has_enough() and len(self._tasks) < self._concurrency:
            step = self._next_step()
            if step is None:
                return
            group, number = step
            if number is None and not self._is_judged:
                self._keep(group)
            else:
                self._tasks.begin(group, number)

    def _go_on(self) -> None:
        self._advance()
        self._changed.set()

    def _next_step(self) -> tuple[OpenGroup[Prompt, Result], int | None] | None:
        """Return what to begin next: for the groups there are, else for a new one; None if nothing can be."""
        while True:
            while self._to_do:
                group, number = self._to_do.popleft()
                if self._is_open(group):
                    return group, number
            self._held_by = self._what_holds()
            if self._held_by:
                return None
            self._source.ask()

    def _what_holds(self) -> str:
        """Return what no prompt is drawn for; empty: one can be."""
        num_ahead = len(self._open) + len(self._ready)
        num_groups, queue_size = self._options.num_groups, self._options.queue_size
        if self._source_is_over:
            return "the end of the prompts"
        if self._source.is_asking:
            return "the source of the prompts"
        if queue_size is not None and len(self._ready) >= max(queue_size, self._num_demanded):
            return "the consumer"
        if num_groups is not None and self._num_taken() + num_ahead >= num_groups + self._options.oversample:
            return "the groups under way"
        if self._window is not None and not self._window.has_room(num_ahead):
            return _VERSION
        return ""

    def _ended(self, group: OpenGroup[Prompt, Result], number: int | None, ended: Ended | None) -> None:
        """Take in what a step has brought, if its group is still wanted."""
        if self._is_open(group):
            if ended is None:
                self._to_do.append((group, number))
            elif number is None:
                self._decide(group, ended)
            else:
                self._record(group, number, ended)
        self._go_on()

    def _record(self, group: OpenGroup[Prompt, Result], number: int, ended: Ended) -> None:
        """Take in the end of a run."""
        failure = ended.failure
        if failure is not None and self._options.on_failure is OnFailure.DROP:
            self._drop(group, GroupFate.FAILED, failure.where, failure)
            return
        if failure is not None and ended.is_raised:
            group.add_failure(number, failure)
        else:
            group.add_result(number, ended.value, ended.version)
        if not self._drop_if_stale(group) and group.is_complete:
            self._to_do.appendleft((group, None))

    def _decide(self, group: OpenGroup[Prompt, Result], ended: Ended) -> None:
        """Take in what `keep_group` has answered."""
        if ended.failure is not None:
            self._drop(group, GroupFate.FAILED, ended.failure.where, ended.failure)
        elif ended.value is True:
            self._keep(group)
        else:
            self._drop(group, GroupFate.FILTERED, ended.value or "keep_group said no")

    def _draw(self, prompt: Prompt) -> None:
        """Take in a prompt; one that comes when nothing more is begun is left over like those under way."""
        index = self._first_index + self._num_drawn
        self._num_drawn += 1
        self._add(OpenGroup(SavedGroup(index=index, prompt=prompt), self._n))
        if (self._is_closed or self._has_enough()) and self._options.leftover is Leftover.CANCEL:
            self._drop(self._open[index], GroupFate.CANCELLED, "the stream ended before it began")

    def _add(self, group: OpenGroup[Prompt, Result]) -> None:
        if group.was_kept:
            self._ready[group.index] = group
        else:
            self._open[group.index] = group
            self._to_do.extend((group, number) for number in group.missing or [None])

    def _keep(self, group: OpenGroup[Prompt, Result]) -> None:
        self._ready[group.index] = self._open.pop(group.index)
        self._fates.wanted()
        if self._has_enough():
            self._stop_rest()

    def _drop(
        self, group: OpenGroup[Prompt, Result], fate: GroupFate, reason: str, failure: Failure | None = None
    ) -> None:
        self._open.pop(group.index, None)
        self._ready.pop(group.index, None)
        self._tasks.interrupt(group)
        self._fates.drop(group.index, fate, reason, failure)
        self._changed.set()
        stalled = self._fates.stalled()
        if stalled is not None:
            self._end_source(stalled)

    def _drop_if_stale(self, group: OpenGroup[Prompt, Result]) -> bool:
        if self._window is None or not self._window.is_stale(group.oldest_version):
            return False
        self._drop(
            group, GroupFate.STALE, f"version {group.oldest_version} took part and {self._window.version} serves"
        )
        return True

    def _drop_stale(self) -> None:
        for group in [*self._ready.values(), *self._open.values()]:
            self._drop_if_stale(group)

    def _look(self) -> int | None:
        """Return the version that serves; if it has moved, drop what has become stale."""
        if self._window is None:
            return None
        try:
            if self._window.look():
                self._drop_stale()
        except Exception as error:
            self._end_source(error)
        return self._window.version

    def _stop_rest(self) -> None:
        """Interrupt all that is under way; what becomes of the groups is in the options."""
        self._source.cancel()
        for group in list(self._open.values()):
            if self._options.leftover is Leftover.CANCEL:
                self._drop(group, GroupFate.CANCELLED, "the stream ended before it was finished")
            else:
                self._tasks.interrupt(group)

    def _end_source(self, error: BaseException | None = None) -> None:
        """Draw no more prompts; what is under way goes on. The first error is the one that is raised."""
        self._source_is_over = True
        if self._error is None:
            self._error = error
        self._changed.set()

    def _num_taken(self) -> int:
        return self._fates.counts[GroupFate.KEPT]

    def _has_enough(self) -> bool:
        num_groups = self._options.num_groups
        return num_groups is not None and self._num_taken() + len(self._ready) >= num_groups

    def _is_over(self) -> bool:
        """Whether no group will become ready any more."""
        return self._is_closed or self._has_enough() or (self._source_is_over and not self._open)

    def _is_open(self, group: OpenGroup[Prompt, Result]) -> bool:
        return self._open.get(group.index) is group

    def _deliverable(self, num_groups: int) -> list[OpenGroup[Prompt, Result]]:
        """Return ready groups, at most so many: the first to finish, or with `in_order` those that none comes before."""
        if len(self._ready) < num_groups and not self._is_over():
            return []
        if self._options.num_groups is not None:
            num_groups = min(num_groups, self._options.num_groups - self._num_taken())
        groups: Iterable[OpenGroup[Prompt, Result]] = self._ready.values()
        if self._options.in_order:
            first_open = sys.maxsize if self._is_over() else min(self._open, default=sys.maxsize)
            groups = (self._ready[index] for index in sorted(self._ready) if index < first_open)
        return sorted(islice(groups, num_groups), key=lambda group: group.index)
