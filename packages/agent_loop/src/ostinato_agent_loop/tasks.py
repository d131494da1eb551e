"""From rows to tasks: the agent that a row chooses, names, and seeds that depend on places only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ostinato_agent_loop.config import RolloutConfig
from ostinato_agent_loop.errors import AgentRowError, UnknownAgentError
from ostinato_agent_loop.registry import agent_loop_class
from ostinato_agent_loop.rows import row_agent_name
from ostinato_agent_loop.worker import TrajectoryTask
from ostinato_rollout import derive_seed


class TaskMaker:
    """Makes the tasks of one batch or stream.

    Args:
        config: `actor_rollout_ref.rollout`.
        seed: Root of the seeds.
        step: The training step.
        validate: Whether they are of a validation; those have seeds and names of their own.
        rows_per_step: After so many rows of a stream the tasks are labelled with the next step, and places in it; names and
            seeds know the first step and the place in the stream. None: all are of the one step.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        seed: int,
        step: int,
        validate: bool = False,
        rows_per_step: int | None = None,
    ) -> None:
        self._config, self._seed, self._step, self._validate = config, seed, step, validate
        self._rows_per_step = rows_per_step

    def check(self, index: int, row: Any) -> None:
        """Raise unless a task can be made of the row.

        Raises:
            AgentRowError, UnknownAgentError, AgentConfigError: It is no row, or chooses an agent that cannot run.
        """
        if not isinstance(row, Mapping):
            raise AgentRowError(f"rows[{index}] must be a mapping of fields, got {type(row).__name__}; pass dicts")
        try:
            name = self._agent(row)
            agent = agent_loop_class(name)
        except (AgentRowError, UnknownAgentError) as error:
            raise type(error)(f"rows[{index}]: {error}") from error
        agent.check_config(self._config, name)

    def make(self, row: Mapping[str, Any], index: int, number: int, attempt: int = 0) -> TrajectoryTask:
        """Return the task of a row that was checked.

        Args:
            row: The row.
            index: Its place.
            number: Of the trajectory, among those of the row.
            attempt: How often it was run before and failed; another attempt has another seed, or it would fail again.
        """
        group_id = self.group_id(index)
        again = f"+{attempt}" if attempt else ""
        num_steps, place = (0, index) if self._rows_per_step is None else divmod(index, self._rows_per_step)
        parts = (self._seed, self._step, index, number, int(self._validate), *([attempt] if attempt else []))
        return TrajectoryTask(
            row,
            self._agent(row),
            group_id,
            f"{group_id}/{number}{again}",
            derive_seed(*parts),
            step=self._step + num_steps,
            sample_index=place,
            rollout_n=number,
            validate=self._validate,
        )

    def group_id(self, index: int) -> str:
        """Return the name of a row's group."""
        return f"{'val' if self._validate else 'train'}-{self._step}-{index}"

    def _agent(self, row: Mapping[str, Any]) -> str:
        return row_agent_name(row, self._config.agent.default_agent_loop)
