"""Names that rows choose, agents and tools, checked against what is loaded before the first step.

A dataset of the user's own may not know its rows beforehand; what it does not tell is found when such a row is sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from ostinato_agent_loop import AgentLoopError, agent_loop_class
from ostinato_tools import ToolRegistry
from ostinato_trainer.errors import DatasetError

__all__ = ["TellsRowNames", "check_row_names"]


@runtime_checkable
class TellsRowNames(Protocol):
    """A dataset that has looked at all its rows."""

    @property
    def agent_places(self) -> Mapping[str | None, str]:
        """Each agent_name, None for rows without it, and the first row that has it."""
        ...

    @property
    def tool_places(self) -> Mapping[tuple[str | None, str], str]:
        """Each pair of agent_name and a tool that a row names, and the first row that has it."""
        ...


def check_row_names(dataset: object, *, default_agent: str, registry: ToolRegistry) -> None:
    """Refuse rows that ask for an agent or a tool that is not there. Tools count only where the agent uses tools.

    Raises:
        DatasetError: Naming file, row, name, and what there is.
    """
    if not isinstance(dataset, TellsRowNames):
        return
    for name, place in dataset.agent_places.items():
        try:
            agent_loop_class(name or default_agent)
        except AgentLoopError as error:
            raise DatasetError(f"{place}: {error}") from error
    for (agent, tool), place in dataset.tool_places.items():
        if tool not in registry and agent_loop_class(agent or default_agent).needs_tools:
            known = ", ".join(registry.names) or "none"
            raise DatasetError(
                f"{place}: a tool must be one of those loaded ({known}), got {tool!r} in extra_info; load it by "
                "actor_rollout_ref.rollout.multi_turn.function_tool_path or tool_config_path, or mend the row"
            )
