"""Workers as one: each trajectory goes to the worker with the least under way, whatever kind of worker that is."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato_agent_loop.trajectory import Trajectory
from ostinato_agent_loop.worker import TrajectoryTask, TrajectoryWorker
from ostinato_engines import SamplingParams


class WorkerTeam:
    """Spreads trajectories; those of a group may go to different workers.

    Args:
        workers: At least one.
        max_concurrency: Most trajectories that one has under way.
        run_timeout_s: Seconds after which a trajectory is given up, whatever its worker does.
    """

    def __init__(self, workers: Sequence[TrajectoryWorker], *, max_concurrency: int, run_timeout_s: float) -> None:
        self._workers = workers
        self._num_under_way = [0] * len(workers)
        self.concurrency = max_concurrency * len(workers)
        """Most trajectories that one batch or stream has under way."""
        self.run_timeout_s = run_timeout_s

    async def run(self, task: TrajectoryTask, sampling_params: SamplingParams) -> Trajectory:
        """Run one trajectory on some worker."""
        number = min(range(len(self._workers)), key=self._num_under_way.__getitem__)
        self._num_under_way[number] += 1
        try:
            return await self._workers[number].run_trajectory(task, sampling_params)
        finally:
            self._num_under_way[number] -= 1
