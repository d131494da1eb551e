"""The workers of a pool of replicas, each in a process of its own, replaced when it is lost.

Invariant: each trajectory has one outcome. One whose worker is lost begins anew on another, once its process is gone for
certain; what the first run had recorded has gone with the process, so that nothing of it is in any ledger.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

import msgspec

from ostinato_agent_loop.errors import AgentConfigError
from ostinato_agent_loop.ray_workers.following import Reachable, ReplicaFollower, unreachable
from ostinato_agent_loop.ray_workers.process import WorkerBody, WorkerReport, WorkerShare, WorkerSpec
from ostinato_agent_loop.trajectory import Trajectory
from ostinato_agent_loop.worker import TrajectoryTask
from ostinato_engines import AsyncServerBase, SamplingParams
from ostinato_rollout import Failure, FailureKind, RolloutScheduler, ServerPool, SessionInputError
from ostinato_rollout.ray_cluster import ActorLostError, ActorPlacement, ActorProcess, ClusterError
from ostinato_rollout.restarts import RestartBudget, RestartPolicy

logger = logging.getLogger(__name__)

_BEATS = 4
_LONGEST_BEAT_S = 5.0
"""Between two questions for a sign of life, which also bring back replicas that a worker has lost from sight."""
_CLOSE_S = 30.0
_LETTING_GO_S = 5.0
"""Longest wait for a cancelled trajectory to have freed what it held; it is freed later all the same."""


class RayWorkers:
    """`config.agent.num_workers` workers in actors; `workers` are those, as a manager takes them.

    Together they admit no more conversations than the replicas hold: each admits to its part.

    Args:
        spec: What they are made from.
        pool: The replicas, `RayReplica`s: started before the workers, shut down after them.
        placements: Where they go, one for each; None: one CPU each, wherever there is room.
        max_reruns: How often a trajectory begins anew because its worker was lost, before that is its failure.
        silence_s: A worker that answers nothing for so long is lost; one whose event loop an agent blocks answers nothing.
        start_timeout_s: Longest wait for a worker to be there.
        restarts: How often lost ones are replaced.

    Raises:
        AgentConfigError: An argument cannot be used.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        pool: ServerPool,
        *,
        placements: Sequence[ActorPlacement] | None = None,
        max_reruns: int = 1,
        silence_s: float = 60.0,
        start_timeout_s: float = 300.0,
        restarts: RestartPolicy | None = None,
    ) -> None:
        num_workers = spec.config.agent.num_workers
        placements = [ActorPlacement()] * num_workers if placements is None else placements
        if len(placements) != num_workers:
            raise AgentConfigError(f"placements must be one for each of {num_workers} workers, got {len(placements)}")
        if max_reruns < 0:
            raise AgentConfigError(f"max_reruns must be at least 0, got {max_reruns}; 0 never begins anew")
        for name, value in (
            ("silence_s", silence_s),
            ("start_timeout_s", start_timeout_s),
        ):
            if not 0 < value < float("inf"):
                raise AgentConfigError(f"{name} must be positive, got {value}; give seconds")
        self._agents = spec.pickled_agents()
        self._spec, self._pool = dataclasses.replace(spec, agents={}), pool
        self._max_reruns, self._silence_s, self._start_timeout_s = max_reruns, silence_s, start_timeout_s
        self._budget = RestartBudget(RestartPolicy() if restarts is None else restarts, spec.seed)
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._follower = ReplicaFollower(self._note_change, self._note_failed, self._tell_all)
        self._letting_go: set[asyncio.Task[None]] = set()
        self._closed = False
        self._stopping: asyncio.Task[None] | None = None
        self.workers = tuple(RayWorker(self, number, place) for number, place in enumerate(placements))
        """One for each; they stay the same while their processes are replaced."""
        self.num_reruns = 0
        """Trajectories that began anew so far."""
        self.num_replaced = 0
        """Workers that were replaced so far."""

    # Life

    async def start(self) -> None:
        """Starts all workers, once a replica is in service; if one fails, all are ended and its error is raised.

        Raises:
            ClusterError: No cluster, or no room in it.
            AgentConfigError: The pool's replicas cannot be reached from other processes.
            Exception: As a worker's tools, agents or reward could not be made.
        """
        if self._closed or any(worker.keeping is not None for worker in self.workers):
            raise ClusterError("workers must be started once, got a second start; create new ones")
        for server in self._pool.servers:
            if not isinstance(server, Reachable):
                raise unreachable(server)
        self._pool.follow(self._follower)
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self.workers:
                    group.create_task(self._launch(worker))
        except BaseException as error:
            await self.shutdown()
            if isinstance(error, ExceptionGroup):
                raise error.exceptions[0] from error
            raise
        for worker in self.workers:
            worker.keeping = asyncio.ensure_future(self._keep(worker))

    async def shutdown(self) -> None:
        """Ends all trajectories and workers; whoever waits for a trajectory gets a failure.

        It goes on to its end, whoever is cancelled; a second call waits for the same.
        """
        if self._stopping is None:
            self._closed = True
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        self._note_change()
        await asyncio.gather(*(self._close(worker) for worker in self.workers))
        if self._letting_go:
            await asyncio.wait(self._letting_go, timeout=_CLOSE_S)

    async def _close(self, worker: RayWorker) -> None:
        process = worker.process
        if process is not None:
            with suppress(ClusterError, TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await process.ask("close")
        if worker.keeping is not None:
            worker.keeping.cancel()
            await asyncio.wait([worker.keeping])
        if worker.process is not None:
            await worker.process.end()
            worker.process = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.shutdown()

    async def report(self) -> list[WorkerReport]:
        """What those that are there have under way; one that is lost meanwhile is left out."""
        processes = [worker.process for worker in self.workers if worker.process is not None]
        async with asyncio.timeout(self._silence_s):
            answers = await asyncio.gather(*(process.ask("report") for process in processes), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, ActorLostError):
                raise answer
        return [answer for answer in answers if isinstance(answer, WorkerReport)]

    # Workers

    async def _launch(self, worker: RayWorker) -> None:
        """A process for a worker, with what it needs."""
        process = ActorProcess(WorkerBody, worker.placement, on_lost=lambda why: worker.note_lost(process, why))
        deadline = asyncio.timeout(self._start_timeout_s)
        try:
            async with deadline:
                await process.start()
                while not self._follower.view.endpoints:
                    await self._changed.wait()
                share = WorkerShare(worker.number, len(self.workers))
                await process.ask("build", self._spec, self._agents, share, self._follower.view)
        except BaseException as error:
            told = process.unplaced() if process.place is None else "no answer, or no replica was in service"
            await process.end()
            if isinstance(error, TimeoutError) and deadline.expired():
                raise ClusterError(
                    f"worker {worker.number} must start within {self._start_timeout_s:g} s, got {told}; see Ray's log of it"
                ) from error
            raise
        worker.process, worker.lost, worker.failure = process, asyncio.get_running_loop().create_future(), ""
        self._note_change()

    async def _keep(self, worker: RayWorker) -> None:
        """Watches over a worker, and replaces it as often as the budget allows."""
        while True:
            worker.failure = await self._follow(worker)
            logger.warning("worker %d is lost: %s", worker.number, worker.failure)
            while worker.process is None:
                wait_s = self._budget.take(worker.number, time.monotonic())
                if isinstance(wait_s, str):
                    worker.is_given_up = True
                    logger.error("worker %d is given up: it %s; %s", worker.number, wait_s, worker.failure)
                    self._note_change()
                    return
                await asyncio.sleep(wait_s)
                try:
                    await self._launch(worker)
                    self.num_replaced += 1
                # Whatever keeps a worker from coming back is told, and tried again within the budget.
                except Exception as error:
                    worker.failure = f"{type(error).__name__}: {error}"
                    logger.warning("worker %d could not be replaced: %s", worker.number, worker.failure)

    async def _follow(self, worker: RayWorker) -> str:
        """Tells a worker of its replicas until it is lost; in words, how. Its process is gone then."""
        process, lost = worker.process, worker.lost
        if process is None or lost is None:
            return worker.failure
        beat_s = min(self._silence_s / _BEATS, _LONGEST_BEAT_S)
        try:
            while not lost.done():
                changed, view = self._changed, self._follower.view
                async with asyncio.timeout(self._silence_s):
                    await process.ask("follow", view)
                await _first_of(lost, changed, beat_s)
            return lost.result()
        except TimeoutError:
            place, stack = await process.standing()
            if stack:
                logger.warning("worker %d does not answer; its event loop is in\n%s", worker.number, stack)
            where = f"its event loop stands still in {place}" if place else "see whether an agent blocks its event loop"
            return f"it must answer within {self._silence_s:g} s, got silence; {where}"
        # Whatever it answers instead, it does not know its replicas.
        except Exception as error:
            return str(error)
        finally:
            worker.process = None
            await process.end()

    async def _tell_all(self, *call: Any) -> None:
        """Tells those that are there of the replicas, and has them do something; who is lost meanwhile has nothing left there.

        Args:
            call: The name of a method and what it takes; none: they are told only.
        """

        async def tell(process: ActorProcess) -> None:
            with suppress(ActorLostError):
                await process.ask("follow", self._follower.view)
                if call:
                    await process.ask(*call)

        await asyncio.gather(*(tell(worker.process) for worker in self.workers if worker.process is not None))

    def _note_failed(self, server: AsyncServerBase, error: Exception) -> None:
        """A replica says that it has failed, which the pool would find out when it next asks for its health."""
        with suppress(SessionInputError):  # the pool has replaced it
            self._pool.take_out(server, Failure.from_error(error, "a replica had to go on", kind=FailureKind.ENGINE))

    def _note_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # Trajectories

    async def run(self, preferred: RayWorker, task: TrajectoryTask, sampling_params: SamplingParams) -> Trajectory:
        """Runs a trajectory on a worker, or, while that is not there, on the one with the least under way."""
        where = f"trajectory {task.trajectory_id}, agent {task.agent}"
        for attempt in itertools.count():
            try:
                worker = await self._there(preferred)
                trajectory = await self._run_on(worker, task, sampling_params, attempt)
            except ActorLostError as error:
                if attempt < self._max_reruns and not self._closed:
                    self.num_reruns += 1
                    logger.warning("%s begins anew, because its worker is lost: %s", where, error)
                    continue
                return task.failed(Failure.from_error(error, where, kind=FailureKind.AGENT))
            # What cannot cross to a worker or back belongs to this trajectory alone.
            except Exception as error:
                logger.error("%s failed", where, exc_info=error)
                return task.failed(Failure.from_error(error, where))
            trajectory.row, trajectory.trajectory_id = task.row, task.trajectory_id
            for segment in trajectory.segments:
                segment.trajectory_id = task.trajectory_id
            return trajectory
        raise AssertionError("attempts never end by themselves")

    async def _run_on(
        self, worker: RayWorker, task: TrajectoryTask, params: SamplingParams, attempt: int
    ) -> Trajectory:
        process, number = worker.process, next(self._numbers)
        assert process is not None
        # Replicas may not have noticed yet that the first run is over: its conversations have names of their own.
        if attempt:
            task = msgspec.structs.replace(task, trajectory_id=f"{task.trajectory_id}~{attempt}")
        worker.num_under_way += 1
        try:
            return await process.ask("run", number, task, params)
        except ActorLostError as error:
            worker.note_lost(process, str(error))
            await process.end()
            raise
        except asyncio.CancelledError:
            letting_go = asyncio.ensure_future(_let_go(process, number))
            self._letting_go.add(letting_go)
            letting_go.add_done_callback(self._letting_go.discard)
            # Engines may be put to sleep once this returns, and a trajectory that still asks them would fail in vain.
            await asyncio.wait([letting_go], timeout=_LETTING_GO_S)
            raise
        finally:
            worker.num_under_way -= 1

    async def _there(self, preferred: RayWorker) -> RayWorker:
        """A worker that is there, waiting for one that is being replaced if there is no other."""
        deadline = asyncio.timeout(self._start_timeout_s)
        try:
            async with deadline:
                while True:
                    if self._closed:
                        raise ClusterError("workers must be running, are shut down; create new ones")
                    there = [worker for worker in self.workers if worker.process is not None]
                    if there:
                        return preferred if preferred in there else min(there, key=lambda worker: worker.num_under_way)
                    if all(worker.is_given_up for worker in self.workers):
                        raise ClusterError(
                            f"at least one worker must be there, got none: {self._causes()}; restart them"
                        )
                    await self._changed.wait()
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise ClusterError(
                f"a worker must be there within {self._start_timeout_s:g} s, got none: {self._causes()}; see their logs"
            ) from error

    def _causes(self) -> str:
        return "; ".join(f"worker {worker.number}: {worker.failure or 'not started'}" for worker in self.workers)


class RayWorker:
    """One of the workers: runs trajectories as an `AgentLoopWorker` does, in a process that may change."""

    def __init__(self, workers: RayWorkers, number: int, placement: ActorPlacement) -> None:
        self._workers = workers
        self.number, self.placement = number, placement
        self.process: ActorProcess | None = None
        """While it is there."""
        self.lost: asyncio.Future[str] | None = None
        self.keeping: asyncio.Task[None] | None = None
        self.failure = ""
        """Why it is not there."""
        self.is_given_up = False
        """Whether it has been replaced too often."""
        self.num_under_way = 0
        """Trajectories."""

    def note_lost(self, process: ActorProcess, why: str) -> None:
        """A process that was this worker's is gone; nothing is sent to it any more."""
        if self.process is process and self.lost is not None:
            self.process, self.failure = None, why
            self.lost.set_result(why)

    async def run_trajectory(self, task: TrajectoryTask, sampling_params: SamplingParams) -> Trajectory:
        """Run one trajectory and its reward. Failures are in what is returned; raises CancelledError if it is cancelled."""
        return await self._workers.run(self, task, sampling_params)

    async def generate_sequences(
        self, tasks: Sequence[TrajectoryTask], sampling_params: SamplingParams, *, concurrency: int = 256
    ) -> list[Trajectory]:
        """Run all tasks, so many at a time; return their trajectories in the order of the tasks."""

        async def run(task: TrajectoryTask) -> Trajectory:
            return await self.run_trajectory(task, sampling_params)

        results: list[Any] = await RolloutScheduler().run(tasks, run, concurrency=concurrency)
        return [
            task.failed(result) if isinstance(result, Failure) else result
            for task, result in zip(tasks, results, strict=True)
        ]


async def _first_of(lost: asyncio.Future[str], changed: asyncio.Event, timeout_s: float) -> None:
    """Waits until one of them is there, or the time is over."""
    changing = asyncio.ensure_future(changed.wait())
    try:
        await asyncio.wait([lost, changing], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        changing.cancel()


async def _let_go(process: ActorProcess, number: int) -> None:
    """Ends a trajectory that nobody waits for."""
    with suppress(ClusterError):
        await process.ask("cancel", number)
