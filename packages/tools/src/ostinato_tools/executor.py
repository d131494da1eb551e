"""`ToolExecutor`: the only way tools run, with one set of policies, shared by all trajectories."""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

from ostinato_tools.calls import CallObserver, OutcomeKind
from ostinato_tools.deadline import Deadlines
from ostinato_tools.errors import ToolClosedError, ToolConfigError
from ostinato_tools.guards import Guard
from ostinato_tools.registry import ToolDefinition, ToolRegistry
from ostinato_tools.stats import ToolStats
from ostinato_tools.trajectory import TrajectoryTools
from ostinato_tools.truncation import (
    TruncateSide,
    TruncateUnit,
    as_truncate_side,
    as_truncate_unit,
    truncate,
    truncate_tokens,
)

KWARGS_KEYS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
UNKNOWN_TOOLS = ""
"""Key of `ToolExecutor.stats` under which calls of tools that do not exist are counted."""

_logger = logging.getLogger(__name__)


class BoundTool:
    """A tool as one executor runs it: its definition, its deadline, and what there is to keep of its policy."""

    __slots__ = ("_deadlines", "definition", "guard", "name", "timeout_s")

    def __init__(self, definition: ToolDefinition, timeout_s: float, guard: Guard | None) -> None:
        self.definition = definition
        self.name = definition.name
        self.timeout_s = timeout_s
        self.guard = guard
        """None where the policy sets nothing but a deadline."""
        self._deadlines: Deadlines | None = None

    def deadlines(self) -> Deadlines:
        """Return the deadlines of this tool in the running loop."""
        loop = asyncio.get_running_loop()
        if self._deadlines is None or self._deadlines.loop is not loop:
            self._deadlines = Deadlines(self.timeout_s, loop)
        return self._deadlines


class ToolExecutor:
    """Runs tool calls of any number of trajectories under a deadline, a length limit and each tool's policy; a failure is a
    value. Use it as an asynchronous context manager, or `close` it, and no trajectory's tools outlive it."""

    def __init__(
        self,
        registry: ToolRegistry,
        *,
        timeout_s: float = 60.0,
        max_response_length: int | None = 256,
        truncate_side: TruncateSide | str = TruncateSide.MIDDLE,
        truncate_unit: TruncateUnit | str = TruncateUnit.CHARACTERS,
        encode: Callable[[str], Sized] | None = None,
    ) -> None:
        """Set the policies.

        Args:
            registry: What there is to call; tools added to it later are seen by trajectories opened later.
            timeout_s: Seconds for each create, execute, calc_reward and release of a tool whose policy sets no other.
            max_response_length: Characters or tokens of a tool's text that are kept, the mark of the cut not counted; None
                keeps all.
            truncate_side: The side of a longer text that is cut off.
            truncate_unit: What `max_response_length` counts.
            encode: For tokens: from a text to its token ids, of which only the number counts.

        Raises:
            ToolConfigError: a value is out of range.
        """
        if not isinstance(registry, ToolRegistry):
            raise ToolConfigError(
                f"registry must be a ToolRegistry, got {type(registry).__name__}; write ToolRegistry([...]) or load_tools"
            )
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
            raise ToolConfigError(f"timeout_s must be a positive finite number, got {timeout_s!r}; give seconds")
        if max_response_length is not None and (
            isinstance(max_response_length, bool) or not isinstance(max_response_length, int) or max_response_length < 1
        ):
            raise ToolConfigError(
                f"max_response_length must be a positive integer or None, got {max_response_length!r}; "
                "give characters or tokens"
            )
        self.registry = registry
        self.timeout_s = timeout_s
        self.max_response_length = max_response_length
        self.truncate_side = as_truncate_side(truncate_side)
        self.truncate_unit = as_truncate_unit(truncate_unit)
        if (encode is not None) != (self.truncate_unit is TruncateUnit.TOKENS) or not (
            encode is None or callable(encode)
        ):
            raise ToolConfigError(
                f"encode must be a callable exactly where truncate_unit is 'tokens', got {encode!r} with "
                f"{self.truncate_unit.value!r}; give tokenizer.encode_text or the like"
            )
        self.stats: dict[str, ToolStats] = {}
        """Counts by tool name, since the executor was made."""
        self.observers: dict[str, CallObserver] = {}
        """Who watches a trajectory's calls, by its id; read when its tools are opened."""
        self._encode = encode
        self._tools: dict[str, BoundTool] = {}
        self._selections: dict[tuple[str, ...], tuple[dict[str, BoundTool], list[dict]]] = {}
        self._open: dict[TrajectoryTools, None] = {}
        self._closed = False

    @property
    def num_open(self) -> int:
        """Trajectories that have tools now."""
        return len(self._open)

    async def __aenter__(self) -> "ToolExecutor":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

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
            ToolConfigError: `tools_kwargs` or `names` has another form.
            ToolClosedError: the executor is closed.
        """
        self._require_open()
        if isinstance(names, str):
            raise ToolConfigError(f"names must be a list of names, got the text {names!r:.80}; write [{names!r:.80}]")
        selection = self.registry.names if names is None else tuple(dict.fromkeys(names))
        known = self._selections.get(selection)
        if known is None:
            bound = {name: self._bind(name) for name in selection}
            known = self._selections[selection] = (bound, [item.definition.schema for item in bound.values()])
        bound, schemas = known
        kwargs = self._checked_kwargs(tools_kwargs) if tools_kwargs else {}
        return TrajectoryTools(self, trajectory_id, bound, schemas, kwargs)

    async def close(self) -> None:
        """Release the tools of every trajectory that is still open; what they are running is stopped. Closing twice is closing.
        Processes of function tools that run nothing end as well.

        To be called on the loop on which the trajectories run. What cannot be released is in their `release_failures`.
        """
        self._closed = True
        while self._open:
            await asyncio.gather(*(tools.close() for tools in tuple(self._open)))
        if any(tool.definition.runs_in_process for tool in self._tools.values()):
            from ostinato_tools.processes import stop_idle_processes

            await asyncio.to_thread(stop_idle_processes)

    def shorten(self, text: str) -> str:
        """Return `text`, cut to the length limit and marked where it was longer."""
        limit = self.max_response_length
        if limit is None:
            return text
        if self._encode is None:
            return text if len(text) <= limit else truncate(text, limit, self.truncate_side)
        try:
            return truncate_tokens(text, limit, self.truncate_side, self._encode)
        except Exception:  # the tokenizer is the user's: the limit holds all the same
            _logger.exception("counting the tokens of a tool's text failed; it is cut by characters")
            return truncate(text, limit, self.truncate_side)

    def count(self, name: str, kind: OutcomeKind, seconds: float) -> None:
        """Count one call of `name`."""
        stats = self.stats.get(name)
        if stats is None:
            stats = self.stats[name] = ToolStats()
        stats.count(kind, seconds)

    def enter(self, tools: TrajectoryTools) -> None:
        """Note that the tools of a trajectory are open.

        Raises:
            ToolClosedError: the executor is closed.
        """
        self._require_open()
        self._open[tools] = None

    def leave(self, tools: TrajectoryTools) -> None:
        """Note that the tools of a trajectory are released."""
        self._open.pop(tools, None)

    def _bind(self, name: str) -> BoundTool:
        known = self._tools.get(name)
        if known is None:
            definition = self.registry.get(name)
            policy = definition.policy
            timeout_s = self.timeout_s if policy.timeout_s is None else policy.timeout_s
            guard = None
            if policy.is_guarded:
                guard = Guard(name, policy, timeout_s, self.stats.setdefault(name, ToolStats()))
            known = self._tools[name] = BoundTool(definition, timeout_s, guard)
        return known

    def _require_open(self) -> None:
        if self._closed:
            raise ToolClosedError("tool executor must be open, got one that is closed; make a new one")

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
