"""`BaseTool`: a tool with a life. One instance serves one trajectory, so its state lives across that trajectory's turns."""

from abc import ABC, abstractmethod
from typing import Any

from ostinato_tools.policies import ToolPolicy
from ostinato_tools.responses import ToolResponse
from ostinato_tools.schema import check_tool_schema


class BaseTool(ABC):
    """A stateful tool.

    The executor makes one instance per trajectory when the model first calls the tool, awaits `create` once, then
    `execute` for every call (one at a time), `calc_reward` when the trajectory is scored, and `release` exactly once for
    every `create` that was begun, also when it failed. A further instance is made when the tools are loaded, only to ask
    for its schema: so `__init__` should acquire nothing.
    """

    policy: ToolPolicy | None = None
    """How the tool may be called; None sets nothing. A class attribute, or set by `__init__`."""
    trajectory_scope: dict | None = None
    """Shared by all tool instances of one trajectory and by nobody else, for what they hold together; set by the executor
    before `create`, None without an executor. A tool keeps its entries under keys of its own."""

    def __init__(self, config: dict, tool_schema: dict) -> None:
        """Keep the configuration and the schema.

        Args:
            config: The tool's `config` mapping.
            tool_schema: OpenAI-style function schema, shown to the model whole.

        Raises:
            ToolSchemaError: the schema has the wrong form.
        """
        self.config = config
        self.tool_schema = tool_schema
        self.name: str = check_tool_schema(tool_schema, type(self).__name__)

    def get_openai_tool_schema(self) -> dict:
        """Return the schema that the model sees."""
        return self.tool_schema

    async def create(  # noqa: B027 - optional: a tool without state to prepare need not override it
        self, instance_id: str | None = None, **create_kwargs: Any
    ) -> None:
        """Prepare the state of one trajectory.

        Args:
            instance_id: Unique to trajectory and tool.
            **create_kwargs: The row's `tools_kwargs[name]["create_kwargs"]`.
        """

    @abstractmethod
    async def execute(
        self, instance_id: str, parameters: dict, **execute_kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        """Run one call.

        Args:
            instance_id: As given to `create`.
            parameters: The model's arguments, valid under the schema; the tool may keep or change them.
            **execute_kwargs: The row's `tools_kwargs[name]["execute_kwargs"]`.

        Returns:
            Response, reward of this call, metrics; the metric `terminate: True` ends the trajectory.
        """

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the reward of the state that the trajectory left behind; 0.0 unless overridden."""
        return 0.0

    async def release(  # noqa: B027 - optional: a tool that acquires nothing need not override it
        self, instance_id: str, **release_kwargs: Any
    ) -> None:
        """Let go of what `create` acquired, or began to acquire.

        Args:
            instance_id: As given to `create`.
            **release_kwargs: The row's `tools_kwargs[name]["release_kwargs"]`.
        """
