"""A manager of somebody else's in the place of `AgentLoopManager`: what it must have, and what it must return.

Invariant: a class that lacks something is refused before a run, and a batch that is not what was asked for before it is trained
on. It need not derive from ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from ostinato_agent_loop.config import AgentConfig, RolloutConfig
from ostinato_agent_loop.errors import AgentConfigError, AgentLoopOutputError
from ostinato_agent_loop.manager import AgentLoopManager
from ostinato_agent_loop.registry import import_class
from ostinato_agent_loop.reward import RewardFn
from ostinato_agent_loop.trajectory import RolloutBatch, Trajectory
from ostinato_engines import SamplingParams
from ostinato_rollout import ServerPool, SessionBudget
from ostinato_tokenization import ContinuousTokens
from ostinato_tools import ToolExecutor

_KEY = "agent.agent_loop_manager_class"


class RolloutManager(Protocol):
    """Turns rows into scored trajectories: `AgentLoopManager`, or a class that `agent.agent_loop_manager_class` names.

    One with `stream`, as `AgentLoopManager` has it, can also sample ahead, run failed trajectories again and filter groups.
    """

    def check_agents(self, names: Iterable[str]) -> None:
        """Raise before a run unless rows may choose these agents; nothing to do for a manager that knows none."""
        ...

    async def generate_sequences(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        n: int,
        sampling_params: SamplingParams,
        step: int,
        validate: bool = False,
    ) -> RolloutBatch:
        """Return `n` trajectories for each row, side by side and in the order of the rows, those that failed in their places.

        A row's trajectories share a `group_id` that no other row has, and each has a reward or a failure.
        """
        ...

    async def close(self) -> None:
        """Free what it holds; called once, when the run ends in whatever way."""
        ...


class RolloutManagerClass(Protocol):
    """How a manager is made. The pool is started, updated and shut down by the run."""

    def __call__(
        self,
        config: RolloutConfig,
        *,
        tokens: ContinuousTokens,
        budget: SessionBudget,
        pool: ServerPool,
        tools: ToolExecutor,
        reward_fn: RewardFn,
        seed: int,
    ) -> RolloutManager:
        """Return a manager; what the arguments are is in `AgentLoopManager`."""
        ...


def load_manager_class(config: AgentConfig) -> RolloutManagerClass:
    """Return the manager class that the configuration names, or AgentLoopManager.

    Raises:
        AgentConfigError: The class cannot be imported, or is no RolloutManager; the message says all that it lacks.
    """
    target = config.agent_loop_manager_class
    if target is None:
        return AgentLoopManager
    cls = import_class(target, object, _KEY)
    if problems := _problems(cls):
        raise AgentConfigError(
            f"{_KEY}: {target!r} must be a manager, got a class {' and '.join(problems)};"
            " give it what ostinato_agent_loop.RolloutManager has"
        )
    return cls


def check_rollout(batch: object, *, num_rows: int, n: int) -> None:
    """Raise unless a manager returned what it was asked for: `n` good or failed trajectories for each of `num_rows` rows, in order.

    Raises:
        AgentLoopOutputError: It did not; the message names what is wrong, and where.
    """
    if not isinstance(batch, RolloutBatch):
        raise AgentLoopOutputError(
            f"generate_sequences must return a RolloutBatch, got {type(batch).__name__}; put trajectories and metrics in one"
        )
    trajectories = batch.trajectories
    if len(trajectories) != num_rows * n:
        raise AgentLoopOutputError(
            f"generate_sequences must return {n} trajectories for each of {num_rows} rows, got {len(trajectories)} in all;"
            " return those that failed, too"
        )
    seen: set[str] = set()
    for start in range(0, len(trajectories), n):
        group = trajectories[start : start + n]
        for index, trajectory in enumerate(group, start):
            _check_trajectory(trajectory, f"trajectories[{index}]")
        names = {trajectory.group_id for trajectory in group}
        if len(names) > 1 or names & seen:
            raise AgentLoopOutputError(
                f"group_id must be one for the {n} trajectories of a row and another for each row, got"
                f" {sorted(names)} for trajectories {start} to {start + n - 1}; name groups by their rows"
            )
        seen |= names


def _check_trajectory(trajectory: object, where: str) -> None:
    if not isinstance(trajectory, Trajectory):
        raise AgentLoopOutputError(f"{where} must be a Trajectory, got {type(trajectory).__name__}; make one")
    if trajectory.failure is None and (trajectory.reward is None or not trajectory.segments):
        lacking = "reward" if trajectory.segments else "segment"
        raise AgentLoopOutputError(
            f"{where} must have a reward and a segment, or a failure, got no {lacking}; record a Failure where it has none"
        )


def _problems(cls: type) -> list[str]:
    """Say in what a class differs from a RolloutManager; nothing where it is one."""
    asked = ("tokens", "budget", "pool", "tools", "reward_fn", "seed")
    problems = _call_problems(cls, "it", ("config",), asked)
    for name, positional, by_name in (
        ("check_agents", ("self", "names"), ()),
        ("generate_sequences", ("self", "rows"), ("n", "sampling_params", "step", "validate")),
        ("close", ("self",), ()),
    ):
        member = getattr(cls, name, None)
        if not callable(member):
            problems.append(f"without {name}")
        else:
            problems += _call_problems(member, name, positional, by_name)
    return problems


def _call_problems(member: Any, name: str, positional: Sequence[str], by_name: Sequence[str]) -> list[str]:
    try:
        inspect.signature(member).bind(*positional, **dict.fromkeys(by_name))
    except TypeError as error:
        return [f"of which {name} cannot be called with {', '.join((*positional, *by_name))} ({error})"]
    except ValueError:  # written in C: its first call will tell
        return []
    return []
