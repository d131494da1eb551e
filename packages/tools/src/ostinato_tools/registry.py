"""The registry: which tools there are, their schemas, and where each was written.

It holds definitions only. Instances belong to trajectories and are made by the executor.
"""

from collections.abc import Iterable, Mapping, Sequence

from ostinato_tools.base import BaseTool
from ostinato_tools.errors import DuplicateToolError, ToolConfigError, ToolDefinitionError, UnknownToolError
from ostinato_tools.function import FunctionTool
from ostinato_tools.policies import ToolPolicy, policy_from_mapping
from ostinato_tools.schema import check_tool_schema, compile_json_schema, compile_validator


class ToolDefinition:
    """One registered tool: a function, or a class with its configuration."""

    __slots__ = ("_validate", "config", "function", "name", "place", "policy", "schema", "tool_class")

    def __init__(
        self,
        *,
        schema: dict,
        place: str,
        policy: ToolPolicy,
        function: FunctionTool | None = None,
        tool_class: type[BaseTool] | None = None,
        config: dict | None = None,
    ) -> None:
        self.name = check_tool_schema(schema, place)
        self.schema = schema
        self.place = place
        self.function = function
        self.tool_class = tool_class
        self.config = {} if config is None else config
        self.policy = policy
        """How it may be called."""
        _check_policy(policy, place, function)
        self._validate = compile_validator(schema, place)

    async def problems(self, arguments: dict) -> list[str]:
        """Return what is wrong with `arguments`, at most a few sentences; none means that the tool can be run with them."""
        found = await self._validate.problems(arguments)
        if not found and self.function is not None:
            return self.function.argument_problems(arguments)
        return found

    @property
    def runs_in_process(self) -> bool:
        """Whether it is a function that runs in a process of its own."""
        return self.function is not None and self.function.runs_in_process

    def make(self) -> BaseTool:
        """Return a new instance of the tool's class."""
        assert self.tool_class is not None
        return self.tool_class(dict(self.config), self.schema)


class ToolRegistry:
    """Tools by name, in the order in which they were added."""

    def __init__(self, tools: Iterable[FunctionTool] = ()) -> None:
        """Register function tools; see `add_function`.

        Raises:
            ToolDefinitionError: `tools` is no list of tools.
        """
        if not isinstance(tools, Iterable):
            raise ToolDefinitionError(
                f"tools must be a list of tools, got {type(tools).__name__}; write [tool], or load_tools for files"
            )
        self._definitions: dict[str, ToolDefinition] = {}
        for tool in tools:
            self.add_function(tool)

    def add_function(
        self, tool: FunctionTool, *, place: str | None = None, policy: ToolPolicy | Mapping | None = None
    ) -> None:
        """Register a function tool; the very same tool twice, under the same policy, is registered once.

        Args:
            tool: A decorated function.
            place: Where it was found, for messages; where it was written if None.
            policy: How it may be called, instead of what it was decorated with; a mapping, as in a configuration file,
                changes single fields of that.

        Raises:
            DuplicateToolError: another tool has this name.
            ToolSchemaError: no schema, or a wrong one.
            ToolImportError: its schema must be made and the extra `transformers` is missing.
        """
        if not isinstance(tool, FunctionTool):
            raise ToolDefinitionError(
                f"tool must be made by @function_tool, got {type(tool).__name__}; decorate it, or use add_class for a BaseTool"
            )
        place = place or tool.place
        policy = _effective_policy(tool.policy, policy, place)
        known = self._definitions.get(tool.name)
        if known is not None and known.function is tool and known.policy == policy:
            return
        self._refuse_duplicate(tool.name, place)
        self._definitions[tool.name] = ToolDefinition(
            schema=tool.get_openai_tool_schema(), place=place, function=tool, policy=policy
        )

    def add_class(
        self,
        tool_class: type[BaseTool],
        *,
        config: dict | None = None,
        tool_schema: dict | None = None,
        place: str | None = None,
        policy: ToolPolicy | Mapping | None = None,
    ) -> None:
        """Register a tool class; one instance is made now to ask for its schema, and one per trajectory later.

        Args:
            tool_class: A concrete subclass of BaseTool.
            config: Its configuration; each instance gets a shallow copy.
            tool_schema: Its schema; None for a class that brings its own.
            place: Where it was found, for messages.
            policy: How it may be called, instead of the `policy` of the class; a mapping, as in a configuration file, changes
                single fields of that.

        Raises:
            DuplicateToolError: another tool has this name.
            ToolDefinitionError: it is no such class.
            ToolConfigError: it cannot be made from this configuration.
            ToolSchemaError: the schema is wrong.
        """
        place = place or f"{tool_class!r}"
        if not (isinstance(tool_class, type) and issubclass(tool_class, BaseTool)):
            raise ToolDefinitionError(f"class of {place} must derive from BaseTool, got {tool_class!r}; derive it")
        config = {} if config is None else config
        if tool_schema is not None:
            check_tool_schema(tool_schema, place)
        try:
            probe = tool_class(dict(config), tool_schema)  # type: ignore[arg-type] - a class that brings its own takes None
            schema = probe.get_openai_tool_schema()
        except Exception as error:  # the author's constructor: whatever it raises, the tool cannot be made
            missing = "" if tool_schema is not None else " and no tool_schema"
            raise ToolConfigError(
                f"{tool_class.__qualname__} of {place} must be constructible from its config{missing}, "
                f"got {type(error).__name__}: {error}; correct config or tool_schema"
            ) from error
        self._refuse_duplicate(check_tool_schema(schema, place), place)
        policy = _effective_policy(probe.policy, policy, place)
        definition = ToolDefinition(schema=schema, place=place, tool_class=tool_class, config=config, policy=policy)
        self._definitions[definition.name] = definition

    def merge(self, other: "ToolRegistry") -> None:
        """Take over the tools of `other`.

        Raises:
            DuplicateToolError: a name is taken.
        """
        for name, definition in other._definitions.items():
            self._refuse_duplicate(name, definition.place)
            self._definitions[name] = definition

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in order."""
        return tuple(self._definitions)

    def schemas(self, names: Sequence[str] | None = None) -> list[dict]:
        """Return the schemas of `names`, or of all tools; the dicts are shared and must not be changed.

        Raises:
            UnknownToolError: a name is not registered.
        """
        if names is None:
            return [definition.schema for definition in self._definitions.values()]
        return [self.get(name).schema for name in names]

    def get(self, name: str) -> ToolDefinition:
        """Return the definition of `name`.

        Raises:
            UnknownToolError: it is not registered.
        """
        definition = self._definitions.get(name)
        if definition is None:
            known = ", ".join(self._definitions) or "none"
            raise UnknownToolError(
                f"tool must be one of those registered ({known}), got {name!r}; correct the name or load it"
            )
        return definition

    def __contains__(self, name: object) -> bool:
        return name in self._definitions

    def __len__(self) -> int:
        return len(self._definitions)

    def _refuse_duplicate(self, name: str, place: str) -> None:
        known = self._definitions.get(name)
        if known is not None:
            raise DuplicateToolError(
                f"tool name must be unique, got {name!r} in {known.place} and in {place}; rename or remove one of them"
            )


def _effective_policy(own: ToolPolicy | None, given: ToolPolicy | Mapping | None, place: str) -> ToolPolicy:
    if isinstance(given, Mapping):
        given = policy_from_mapping(given, place, own)
    policy = given or own or ToolPolicy()
    if not isinstance(policy, ToolPolicy):
        raise ToolConfigError(f"policy of {place} must be a ToolPolicy, got {policy!r:.80}; write ToolPolicy(...)")
    return policy


def _check_policy(policy: ToolPolicy, place: str, function: FunctionTool | None) -> None:
    if policy.pure and function is None:
        raise ToolConfigError(
            f"pure of {place} must be false for a tool with state, got true; make it a function tool, or say idempotent"
        )
    if policy.result_schema is not None:
        compile_json_schema(policy.result_schema, "result_schema", place)
