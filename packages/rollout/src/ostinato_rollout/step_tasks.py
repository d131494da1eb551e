"""The tasks that do the steps of a stream's groups: begun, interrupted, and what each has brought."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable
from typing import Any, Generic

import msgspec

from ostinato_rollout.group_steps import Ended, GroupSteps
from ostinato_rollout.item_attempts import Progress
from ostinato_rollout.open_group import OpenGroup
from ostinato_rollout.stream_types import Prompt, Result


class Step(msgspec.Struct, frozen=True):
    """Something that is under way."""

    group: OpenGroup[Any, Any]
    number: int | None
    """Of the run; None: `keep_group` is asked."""
    began: float


class StepTasks(Generic[Prompt, Result]):
    """Each step has a task of its own, in a copy of the context in which this was made.

    Args:
        work: Does the steps.
        progress: Counts those that have ended.
        on_end: Is given each step that has ended, and what it has brought; None: it was interrupted and would have to be done again.
    """

    def __init__(
        self,
        work: GroupSteps[Prompt, Result],
        *,
        progress: Progress,
        on_end: Callable[[OpenGroup[Prompt, Result], int | None, Ended | None], None],
    ) -> None:
        self._work, self._progress, self._on_end = work, progress, on_end
        self._context = contextvars.copy_context()
        self._steps: dict[asyncio.Task[Ended], Step] = {}
        self._interrupted: set[asyncio.Task[Ended]] = set()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def ending(self) -> set[asyncio.Task[Ended]]:
        """Those that were interrupted and have not ended."""
        return self._interrupted

    def begin(self, group: OpenGroup[Prompt, Result], number: int | None) -> None:
        """Begin a step."""
        task = asyncio.create_task(self._work.do(group, number), context=self._context.copy())
        self._steps[task] = Step(group, number, time.monotonic())
        group.tasks[task] = None
        task.add_done_callback(self._ended)

    def interrupt(self, group: OpenGroup[Prompt, Result]) -> None:
        """Cancel what is under way for a group."""
        self._interrupted.update(group.tasks)
        for task in group.tasks:
            task.cancel()

    def seconds_by_index(self) -> dict[int, float]:
        """Return how long steps have been under way; of each group the one that has been longest."""
        now = time.monotonic()
        seconds: dict[int, float] = {}
        for step in list(self._steps.values()):
            seconds[step.group.index] = max(seconds.get(step.group.index, 0.0), now - step.began)
        return seconds

    def _ended(self, task: asyncio.Task[Ended]) -> None:
        step = self._steps.pop(task)
        del step.group.tasks[task]
        self._progress.end()
        was_interrupted = task in self._interrupted
        self._interrupted.discard(task)
        is_void = was_interrupted and task.cancelled()
        ended = None if is_void else self._work.outcome(task, step.group, step.number)
        self._on_end(step.group, step.number, ended)
