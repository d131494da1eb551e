"""`ToolExecutor`: the only way tools run, with one set of policies, shared by all trajectories."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ostinato_tools.calls import OutcomeKind
from ostinato_tools.errors import ToolConfigError
from ostinato_tools.registry import ToolDefinition, ToolRegistry
from ostinato_tools.responses import TruncateSide, as_truncate_side
from ostinato_tools.trajectory import TrajectoryTools

KWARGS_KEYS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
UNKNOWN_TOOLS = ""
"""Key of `ToolExecutor.stats` under which calls of tools that do not exist are counted."""


class ToolStats(msgspec.Struct):
    """Counts of one tool over all trajectories."""

    outcomes: dict[OutcomeKind, int] = {}
    """Number of calls by class of outcome."""
    seconds: float = 0.0
    """Wall time of all calls together."""
    max_seconds: float = 0.0
    """Wall time of the longest call."""

    @property
    def num_calls(self) -> int:
        """Number of calls of any class."""
        return sum(self.outcomes.values())


class ToolExecutor:
    """Runs tool calls of any number of trajectories under a deadline and a length limit; a failure is a value."""

    def __init__(
        self,
        registry: ToolRegistry,
        *,
        timeout_s: float = 60.0,
        max_response_length: int | None = 256,
        truncate_side: TruncateSide | str = TruncateSide.MIDDLE,
    ) -> None:
        """Set the policies.

        Args:
            registry: What there is to call; tools added to it later are seen by trajectories opened later.
            timeout_s: Seconds for each create, execute, calc_reward and release.
            max_response_length: Characters of a tool's text that are kept, the mark of the cut not counted; None keeps all.
            truncate_side: The side of a longer text that is cut off.

        Raises:
            ToolConfigError: a value is out of range.
        """
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
            raise ToolConfigError(f"timeout_s must be a positive finite number, got {timeout_s!r}; give seconds")
        if max_response_length is not None and (
            isinstance(max_response_length, bool) or not isinstance(max_response_length, int) or max_response_length < 1
        ):
            raise ToolConfigError(
                f"max_response_length must be a positive integer or None, got {max_response_length!r}; give characters"
            )
        self.registry = registry
        self.timeout_s = timeout_s
        self.max_response_length = max_response_length
        self.truncate_side = as_truncate_side(truncate_side)
        self.stats: dict[str, ToolStats] = {}
        """Counts by tool name, since the executor was made."""
        self._selections: dict[tuple[str, ...], tuple[dict[str, ToolDefinition], list[dict]]] = {}

    def open(
        self,
        trajectory_id: str,
        tools_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        names: Sequence[str] | None = None,
    ) -> TrajectoryTools:
        """Give a trajectory its tools.

        Args:
            trajectory_id: Unique to the trajectory; instance ids are made from it.
            tools_kwargs: Tool name to `create_kwargs`, `execute_kwargs`, `calc_reward_kwargs`, `release_kwargs`. None,
                as parquet fills it in where other rows have a value, counts as absent.
            names: The tools that this trajectory may call; all if None.

        Returns:
            To be used as `async with executor.open(...) as tools:`; leaving it releases every instance.

        Raises:
            UnknownToolError: `names` or `tools_kwargs` names a tool that is not registered.
            ToolConfigError: `tools_kwargs` has another form.
        """
        selection = tuple(self.registry.names if names is None else dict.fromkeys(names))
        known = self._selections.get(selection)
        if known is None:
            definitions = {name: self.registry.get(name) for name in selection}
            known = self._selections[selection] = (definitions, [item.schema for item in definitions.values()])
        definitions, schemas = known
        kwargs = self._checked_kwargs(tools_kwargs) if tools_kwargs else {}
        return TrajectoryTools(self, trajectory_id, definitions, schemas, kwargs)

    def count(self, name: str, kind: OutcomeKind, seconds: float) -> None:
        """Count one call of `name`."""
        stats = self.stats.get(name)
        if stats is None:
            stats = self.stats[name] = ToolStats()
        stats.outcomes[kind] = stats.outcomes.get(kind, 0) + 1
        stats.seconds += seconds
        stats.max_seconds = max(stats.max_seconds, seconds)

    def _checked_kwargs(self, tools_kwargs: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        cure = f"; write tools_kwargs[tool] = {{key: {{...}}}} with key one of {', '.join(KWARGS_KEYS)}"
        if not isinstance(tools_kwargs, Mapping):
            raise ToolConfigError(f"tools_kwargs must be a mapping, got {type(tools_kwargs).__name__}{cure}")
        checked: dict[str, Mapping[str, Any]] = {}
        for name, kwargs in tools_kwargs.items():
            if kwargs is None:
                continue
            self.registry.get(name)
            if not isinstance(kwargs, Mapping):
                raise ToolConfigError(f"tools_kwargs[{name!r}] must be a mapping, got {type(kwargs).__name__}{cure}")
            for key, value in kwargs.items():
                if key not in KWARGS_KEYS:
                    raise ToolConfigError(f"tools_kwargs[{name!r}] must have known keys, got {key!r}{cure}")
                if value is not None and not isinstance(value, Mapping):
                    raise ToolConfigError(
                        f"tools_kwargs[{name!r}][{key!r}] must be a mapping, got {type(value).__name__}{cure}"
                    )
            checked[name] = kwargs
        return checked
