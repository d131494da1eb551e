"""Runs trajectories: each with its own agent, deadline and failure, its reward as soon as it ends.

Invariant: a trajectory that fails, hangs, ignores its cancellation or answers nonsense is a recorded Failure and touches no other
one; only a cancellation from outside propagates.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from ostinato_agent_loop.base import AgentLoopContext
from ostinato_agent_loop.clock import TrajectoryClock
from ostinato_agent_loop.config import AgentConfig
from ostinato_agent_loop.errors import AgentConfigError, AgentLoopError, AgentLoopOutputError, RewardResultError
from ostinato_agent_loop.output import AgentLoopOutput
from ostinato_agent_loop.registry import agent_loop_class
from ostinato_agent_loop.reward import RewardFn, RewardResult
from ostinato_agent_loop.tracing import traced_reward, traced_trajectory
from ostinato_agent_loop.trajectory import Trajectory
from ostinato_engines import SamplingParams
from ostinato_rollout import NUM_CANCELLATIONS, Failure, FailureKind, Overtime, RolloutScheduler
from ostinato_rollout.tracing import TrajectoryLabels, TrajectoryTrace

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_CLOSING_TIMEOUT_S = 300.0  # for what an agent has left open, beyond its own deadline


class TrajectoryTask(msgspec.Struct, frozen=True):
    """One trajectory to run; plain data, so that it can be run in another process."""

    row: Mapping[str, Any]
    """The dataset row; its fields are the agent's keyword arguments."""
    agent: str
    """The agent, by the name under which it is registered."""
    group_id: str
    """The row's group."""
    trajectory_id: str
    """Unique among the trajectories under way."""
    seed: int | None = None
    """Makes the trajectory reproducible."""
    step: int = 0
    """The training step that it was started for."""
    sample_index: int = 0
    """Its row's place in the batch or stream, or among the rows of its step."""
    rollout_n: int = 0
    """Its number among the trajectories of its row."""
    validate: bool = False
    """Whether it is of a validation."""

    def failed(self, failure: Failure) -> Trajectory:
        """Return the trajectory that came to nothing."""
        return Trajectory(group_id=self.group_id, trajectory_id=self.trajectory_id, row=self.row, failure=failure)


class TrajectoryWorker(Protocol):
    """Who runs trajectories, in this process (`AgentLoopWorker`) or elsewhere."""

    async def run_trajectory(self, task: TrajectoryTask, sampling_params: SamplingParams) -> Trajectory:
        """Run one trajectory and its reward. Failures are in what is returned; raises CancelledError if it is cancelled."""
        ...


def longest_run_s(config: AgentConfig, admission_timeout_s: float) -> float:
    """Return the seconds after which a trajectory has outlived all its own deadlines, the wait for a place included."""
    grace_s = 2 * NUM_CANCELLATIONS * config.cancel_grace_s
    return admission_timeout_s + config.trajectory_timeout_s + config.reward_timeout_s + grace_s + _CLOSING_TIMEOUT_S


class AgentLoopWorker:
    """Runs trajectories as asyncio tasks, at most `config.max_concurrency` at a time.

    Args:
        context: What all its trajectories share.
        config: Deadlines and concurrency.
        reward_fn: Scores trajectories whose agent gave no `reward_score`; None: they have no reward.
    """

    def __init__(self, context: AgentLoopContext, config: AgentConfig, *, reward_fn: RewardFn | None = None) -> None:
        self._context, self._config, self._reward_fn = context, config, reward_fn
        self._overtime = Overtime(config.cancel_grace_s)

    async def generate_sequences(
        self, tasks: Sequence[TrajectoryTask], sampling_params: SamplingParams
    ) -> list[Trajectory]:
        """Run all tasks; return their trajectories in the order of the tasks."""

        async def run(task: TrajectoryTask) -> Trajectory:
            return await self.run_trajectory(task, sampling_params)

        results = await RolloutScheduler().run(
            tasks,
            run,
            concurrency=self._config.max_concurrency,
            item_timeout_s=longest_run_s(self._config, self._context.client.admission_timeout_s),
        )
        return [
            task.failed(result) if isinstance(result, Failure) else result
            for task, result in zip(tasks, results, strict=True)
        ]

    async def run_trajectory(self, task: TrajectoryTask, sampling_params: SamplingParams) -> Trajectory:
        """Run one trajectory and its reward. Raises nothing but CancelledError from outside."""
        tracer = self._context.tracer
        trace = None if tracer is None else tracer.trajectory(_labels(task))
        if trace is None:
            return await self._run(task, sampling_params, None)
        running = self._run(task, sampling_params, trace)
        return await traced_trajectory(
            trace, running, row=task.row, trajectory_id=task.trajectory_id, tools=self._context.tools
        )

    async def _run(
        self, task: TrajectoryTask, sampling_params: SamplingParams, trace: TrajectoryTrace | None
    ) -> Trajectory:
        clock = TrajectoryClock(self._config.trajectory_timeout_s)
        context = self._context.for_trajectory(task.group_id, task.trajectory_id, clock.stopped, trace)
        where = f"trajectory {task.trajectory_id}, agent {task.agent}"
        if task.seed is not None:
            sampling_params = msgspec.structs.replace(sampling_params, seed=task.seed)
        try:
            outputs = await self._overtime.within(
                clock.deadline,
                lambda: _run_agent(task, context, sampling_params),
                where,
                lambda: _overdue(where, self._config.trajectory_timeout_s),
            )
        except Exception as error:
            return task.failed(_recorded(error, where))
        except asyncio.CancelledError as error:
            if _is_cancelled_from_outside():
                raise
            return task.failed(_recorded(error, where))
        finally:
            await context.close()
        trajectory = Trajectory(
            group_id=task.group_id, trajectory_id=task.trajectory_id, row=task.row, segments=outputs
        )
        trajectory.failure = next((output.failure for output in outputs if output.failure is not None), None)
        if trajectory.failure is None:
            scoring = self._score(trajectory, f"reward of trajectory {task.trajectory_id}")
            await (scoring if trace is None else traced_reward(trace, trajectory, scoring))
        return trajectory

    async def _score(self, trajectory: Trajectory, where: str) -> None:
        """Give the trajectory its reward, or record why there is none."""
        outputs, reward_fn = trajectory.segments, self._reward_fn
        scored = next((output for output in outputs if output.reward_score is not None), None)
        began = time.perf_counter()
        try:
            if scored is not None and scored.reward_score is not None:
                trajectory.reward = RewardResult(scored.reward_score, scored.extra_fields.get("reward_extra", {}))
            elif reward_fn is not None:
                timeout_s = self._config.reward_timeout_s
                result = await self._overtime.within(
                    asyncio.timeout(timeout_s),
                    lambda: _staying(reward_fn(trajectory.row, outputs), "a reward function"),
                    where,
                    lambda: _overdue(where, timeout_s),
                )
                if not isinstance(result, RewardResult):
                    raise RewardResultError(
                        f"the reward function must return a RewardResult, got {result!r:.80}; wrap the score"
                    )
                trajectory.reward = result
        except Exception as error:
            kind = FailureKind.TIMEOUT if isinstance(error, TimeoutError) else FailureKind.REWARD
            trajectory.failure = _recorded(error, where, kind)
        except asyncio.CancelledError as error:
            if _is_cancelled_from_outside():
                raise
            trajectory.failure = _recorded(error, where, FailureKind.REWARD)
        outputs[0].metrics.compute_score += time.perf_counter() - began
        if trajectory.reward is not None:
            for output in outputs:
                output.reward_score = float(trajectory.reward.score)


async def _run_agent(
    task: TrajectoryTask, context: AgentLoopContext, sampling_params: SamplingParams
) -> list[AgentLoopOutput]:
    """Run the agent and check what it returns; fill in whose segments they are."""
    agent = agent_loop_class(task.agent)(context)
    try:
        running = agent.run(sampling_params, **task.row)
    except TypeError:
        _check_takes(agent.run, sampling_params, task.row)
        raise
    if not inspect.isawaitable(running):
        raise AgentLoopOutputError(
            f"run must be a coroutine function, got {running!r:.80} of it; write `async def run`"
        )
    result = await _staying(running, "an agent")
    outputs = result if isinstance(result, list) else [result]
    if not outputs or not all(isinstance(output, AgentLoopOutput) for output in outputs):
        raise AgentLoopOutputError(
            f"run must return an AgentLoopOutput or a list of at least one, got {result!r:.80}; return the segments"
        )
    for index, output in enumerate(outputs):
        output.check()
        output.group_id, output.trajectory_id, output.segment_index = task.group_id, task.trajectory_id, index
    return outputs


def _check_takes(run: Callable[..., Any], sampling_params: SamplingParams, row: Mapping[str, Any]) -> None:
    """Raises AgentConfigError where the signature of `run` does not take a row."""
    try:
        inspect.signature(run).bind(sampling_params, **row)
    except TypeError as mismatch:
        raise AgentConfigError(
            f"run must take sampling_params and each field of a row by name, got: {mismatch};"
            " write `async def run(self, sampling_params, **row)`"
        ) from mismatch


async def _staying(running: Awaitable[_T], who: str) -> _T:
    """What a user's coroutine returns. Its exit would end the event loop, and with it every other trajectory."""
    try:
        return await running
    except SystemExit as error:
        raise AgentLoopError(f"{who} must return or raise, got exit({error.code!r}); raise an error") from error


def _overdue(where: str, timeout_s: float) -> str:
    return f"{where} must end within {timeout_s:g} s, got no result; raise the limit or find what hangs"


def _labels(task: TrajectoryTask) -> TrajectoryLabels:
    return TrajectoryLabels(
        sample_index=task.sample_index,
        step=task.step,
        rollout_n=task.rollout_n,
        validate=task.validate,
        group_id=task.group_id,
        trajectory_id=task.trajectory_id,
        agent=task.agent,
    )


def _is_cancelled_from_outside() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _recorded(error: BaseException, where: str, kind: FailureKind | None = None) -> Failure:
    """Log the traceback, once, and return the failure as data."""
    logger.error("%s failed", where, exc_info=error)
    return Failure.from_error(error, where, kind=kind)
