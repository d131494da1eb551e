"""Groups of trajectories as they finish, over `ostinato_rollout.GroupStream`: rows in, trajectories out, the pool awake meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ostinato_agent_loop.batch_metrics import add_spread, batch_metrics
from ostinato_agent_loop.tasks import TaskMaker
from ostinato_agent_loop.team import WorkerTeam
from ostinato_agent_loop.trajectory import RolloutBatch, Trajectory
from ostinato_agent_loop.wakefulness import Wakefulness
from ostinato_engines import SamplingParams
from ostinato_rollout import (
    DroppedGroup,
    Failure,
    Group,
    NoReplicaError,
    RolloutScheduler,
    Run,
    ServerPool,
    StreamCounts,
    StreamOptions,
    StreamState,
)

Row = Mapping[str, Any]


class TrajectoryGroup(msgspec.Struct, frozen=True):
    """The trajectories of one row."""

    index: int
    """The row's place among all that were drawn."""
    group_id: str
    row: Row
    trajectories: list[Trajectory]
    """By number; a failure is in its trajectory."""
    oldest_version: int | None
    """Of the policies that sampled a part of them; None where it is not known."""
    baseline: Trajectory | None = None
    """The greedy trajectory, where the stream samples one for each row; it may have failed."""


KeepGroup = Callable[[TrajectoryGroup], bool | str | Awaitable[bool | str]]


class TrajectoryStream:
    """An async iterator of groups; `AgentLoopManager.stream` makes it and says what it does.

    Use it as `async with`, or call `aclose`. The pool wakes when the first group is asked for, and sleeps when it is closed.
    """

    def __init__(
        self,
        rows: Iterable[Row] | AsyncIterable[Row],
        *,
        tasks: TaskMaker,
        team: WorkerTeam,
        wakefulness: Wakefulness,
        sampling_params: SamplingParams,
        n: int,
        options: StreamOptions,
        keep_group: KeepGroup | None,
        current_version: Callable[[], int] | None,
        state: StreamState[Row, Trajectory] | None,
        more_metrics: Callable[[], dict[str, float]],
        greedy_baseline: bool = False,
    ) -> None:
        self._tasks, self._team, self._wakefulness = tasks, team, wakefulness
        self._sampling_params, self._more_metrics = sampling_params, more_metrics
        self._greedy_params = msgspec.structs.replace(sampling_params, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0)
        self._n = n
        self._current_version = current_version
        self._is_awake = self._is_closed = False
        first_index = 0 if state is None else state.num_drawn
        for saved in [] if state is None else state.groups:
            tasks.check(saved.index, saved.prompt)
        self._groups = RolloutScheduler().stream(
            _checked(rows, tasks, first_index),
            self._run_one,
            n=n + greedy_baseline,
            concurrency=team.concurrency,
            item_timeout_s=team.run_timeout_s,
            options=options,
            keep_group=None if keep_group is None else lambda group: keep_group(self._group(group)),
            failure_of=lambda trajectory: trajectory.failure,
            current_version=current_version,
            oldest_version=oldest_version,
            state=state,
        )

    def __aiter__(self) -> TrajectoryStream:
        return self

    async def __anext__(self) -> TrajectoryGroup:
        groups = await self.take(1)
        if not groups:
            raise StopAsyncIteration
        return groups[0]

    async def __aenter__(self) -> TrajectoryStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def dropped(self) -> Sequence[DroppedGroup]:
        """The groups that were dropped last, and why; at most a thousand."""
        return self._groups.dropped

    async def take(self, num_groups: int) -> list[TrajectoryGroup]:
        """Wait for so many groups and return them together, by index; fewer where the stream ends, none when it has ended.

        Raises:
            NoReplicaError: No replica could be woken; it is tried again with the next call.
            AgentRowError, UnknownAgentError, AgentConfigError: A row cannot be run; those before it can still be taken.
            Exception: As `GroupStream.take` has it.
        """
        await self._wake()
        groups = await self._groups.take(num_groups)
        if not groups:
            await self.aclose()
        return [self._group(group) for group in groups]

    async def take_batch(self, num_groups: int) -> RolloutBatch:
        """`take`, as a batch with its metrics: those of `generate_sequences`, what became of groups so far, and staleness."""
        groups = await self.take(num_groups)
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        counts = self.counts()
        metrics = batch_metrics(trajectories) | self._more_metrics()
        metrics |= {f"agent_loop/groups/{fate}": count for fate, count in counts.fates.items()}
        metrics["agent_loop/groups/reruns"] = counts.num_reruns
        add_spread(metrics, "agent_loop/staleness", self._staleness(groups))
        baselines = {group.group_id: group.baseline for group in groups if group.baseline is not None}
        return RolloutBatch(trajectories, metrics, baselines)

    async def aclose(self) -> None:
        """End now, and let the pool sleep; see `GroupStream.aclose`."""
        self._is_closed = True
        try:
            await self._groups.aclose()
        finally:
            if self._is_awake:
                self._is_awake = False
                await self._wakefulness.leave()

    def state(self) -> StreamState[Row, Trajectory]:
        """Return what a later stream needs to go on from here; see `GroupStream.state`."""
        return self._groups.state()

    def counts(self) -> StreamCounts:
        """Return what has been done so far."""
        return self._groups.counts()

    def _staleness(self, groups: Sequence[TrajectoryGroup]) -> list[int]:
        """Return how many versions groups are behind, as far as somebody can tell."""
        if self._current_version is None:
            return []
        try:
            version = self._current_version()
        except NoReplicaError:
            return []
        return [version - group.oldest_version for group in groups if group.oldest_version is not None]

    async def _wake(self) -> None:
        if self._is_awake or self._is_closed:
            return
        await self._wakefulness.enter()
        if self._is_awake or self._is_closed:  # somebody else was sooner
            await self._wakefulness.leave()
        else:
            self._is_awake = True

    async def _run_one(self, run: Run[Row]) -> Trajectory:
        task = self._tasks.make(run.prompt, run.index, run.number, run.attempt)
        return await self._team.run(task, self._sampling_params if run.number < self._n else self._greedy_params)

    def _group(self, group: Group[Row, Trajectory]) -> TrajectoryGroup:
        trajectories = [
            self._tasks.make(group.prompt, group.index, number).failed(result)
            if isinstance(result, Failure)
            else result
            for number, result in enumerate(group.results)
        ]
        return TrajectoryGroup(
            group.index,
            self._tasks.group_id(group.index),
            group.prompt,
            trajectories[: self._n],
            group.oldest_version,
            baseline=trajectories[self._n] if len(trajectories) > self._n else None,
        )


class ServedVersion:
    """Returns the policy version that a pool serves; while no replica is in service, as in a restart, the last one."""

    def __init__(self, pool: ServerPool) -> None:
        self._pool = pool
        self._last: int | None = None

    def __call__(self) -> int:
        try:
            self._last = self._pool.policy_version
        except NoReplicaError:
            if self._last is None:
                raise
        return self._last


def oldest_version(trajectory: Trajectory) -> int | None:
    """Return the oldest policy version that sampled a part of a trajectory; None if it is not known."""
    spans = [span for segment in trajectory.segments for span in segment.policy_versions]
    return min((span.version for span in spans), default=None)


def _checked(
    rows: Iterable[Row] | AsyncIterable[Row], tasks: TaskMaker, first_index: int
) -> Iterable[Row] | AsyncIterable[Row]:
    """Return the rows, each checked when it is drawn."""
    return (
        _CheckedLater(rows, tasks, first_index)
        if isinstance(rows, AsyncIterable)
        else _checked_now(rows, tasks, first_index)
    )


def _checked_now(rows: Iterable[Row], tasks: TaskMaker, first_index: int) -> Iterator[Row]:
    for index, row in enumerate(rows, first_index):
        tasks.check(index, row)
        yield row


class _CheckedLater:
    """No generator, which would be at its end once a wait in it is cancelled."""

    def __init__(self, rows: AsyncIterable[Row], tasks: TaskMaker, first_index: int) -> None:
        self._rows, self._tasks, self._index = aiter(rows), tasks, first_index

    def __aiter__(self) -> AsyncIterator[Row]:
        return self

    async def __anext__(self) -> Row:
        row = await anext(self._rows)
        index, self._index = self._index, self._index + 1
        self._tasks.check(index, row)
        return row
