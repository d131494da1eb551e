"""`function_tool`: a plain function as a tool, for what needs no state.

Decorating imports nothing heavy: the schema is made by `transformers.utils.get_json_schema` when it is first asked for,
or is the author's own. A synchronous function runs off the event loop, an asynchronous one on it.
"""

import functools
import inspect
from collections.abc import Callable, Coroutine
from types import FunctionType
from typing import TYPE_CHECKING, Any, overload

from ostinato_tools.errors import ToolDefinitionError
from ostinato_tools.inference import infer_schema
from ostinato_tools.policies import ToolPolicy
from ostinato_tools.schema import check_tool_schema
from ostinato_tools.threads import run_in_thread

if TYPE_CHECKING:
    from ostinato_tools.processes import FunctionReference

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class FunctionTool:
    """A function that a model may call. Calling it from Python calls the function itself."""

    def __init__(
        self,
        function: Callable,
        *,
        name: str | None = None,
        schema: dict | None = None,
        process: bool = False,
        policy: ToolPolicy | None = None,
    ) -> None:
        """Make a tool of `function`.

        Args:
            function: Its parameters must all be reachable by name.
            name: The tool's name; the function's own, or the schema's, if None.
            schema: OpenAI-style schema to be used as it is; made from type hints and docstring when needed if None.
            process: Run it in a process of its own; for synchronous, CPU-bound functions at the top level of a module.
            policy: How it may be called.

        Raises:
            ToolDefinitionError: the function cannot be a tool.
            ToolSchemaError: `schema` has the wrong form.
        """
        place = place_of(function)
        self._parameters, self._required = _named_parameters(function, place)
        own_name = getattr(function, "__name__", type(function).__name__)
        if schema is not None:
            schema_name = check_tool_schema(schema, place)
            if name is not None and name != schema_name:
                raise ToolDefinitionError(
                    f"name of {place} must equal the name in its schema, got {name!r} and {schema_name!r}; give one of them"
                )
            name = schema_name
        if name is None and own_name == "<lambda>":
            raise ToolDefinitionError(
                f'name of {place} must be given for a lambda, got none; use function_tool("name") or a def'
            )
        self.name: str = name or own_name
        self.function = function
        self.place = place
        self.policy = policy
        self._schema = schema
        self._converters: dict[str, Callable[[Any], Any]] = {}
        self._asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object whose __call__ is a coroutine function
        )
        self._is_plain = isinstance(function, FunctionType) and bool(function.__code__.co_flags & inspect.CO_COROUTINE)
        self._reference: FunctionReference | None = None
        if process:
            if self._asynchronous:
                raise ToolDefinitionError(
                    f"function of {place} must be synchronous to run in a process, got an asynchronous one; "
                    "write `def`, or leave process out"
                )
            from ostinato_tools.processes import reference_to

            self._reference = reference_to(function, place)
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"FunctionTool({self.name!r}, {self.place})"

    def get_openai_tool_schema(self) -> dict:
        """Return the schema that the model sees; the first call may make it.

        Raises:
            ToolImportError: the schema must be made and the extra `transformers` is missing.
            ToolSchemaError: type hints or docstring do not give one.
        """
        if self._schema is None:
            self._schema, self._converters = infer_schema(self.function, self.name, self.place)
        return self._schema

    @property
    def runs_in_process(self) -> bool:
        """Whether calls run in a process of their own."""
        return self._reference is not None

    def argument_problems(self, arguments: dict) -> list[str]:
        """Return what keeps the function from being called with `arguments`, whatever its schema allows."""
        if arguments.keys() <= self._parameters and self._required <= arguments.keys():
            return []
        problems = [f"{name!r} is not a parameter" for name in arguments if name not in self._parameters]
        problems += [f"{name!r} is a required property" for name in sorted(self._required - arguments.keys())]
        return problems

    def invoke(self, arguments: dict) -> Coroutine[Any, Any, Any]:
        """Begin to call the function by name.

        Args:
            arguments: By parameter; the caller's no longer.

        Returns:
            To be awaited; gives what the function returns, not normalised.
        """
        if self._is_plain and not self._converters:
            return self.function(**arguments)
        return self._invoke(arguments)

    async def _invoke(self, arguments: dict) -> Any:
        for name, convert in self._converters.items():
            if name in arguments:
                arguments[name] = convert(arguments[name])
        if self._asynchronous:
            return await self.function(**arguments)
        if self._reference is not None:
            from ostinato_tools.processes import run_in_process

            return await run_in_process(self._reference, arguments)
        result = await run_in_thread(functools.partial(self.function, **arguments))
        return await result if inspect.isawaitable(result) else result


@overload
def function_tool(function: Callable, /) -> FunctionTool: ...
@overload
def function_tool(
    name: str | None = None,
    /,
    *,
    schema: dict | None = None,
    process: bool = False,
    policy: ToolPolicy | None = None,
) -> Callable[[Callable], FunctionTool]: ...


def function_tool(
    function_or_name: Callable | str | None = None,
    /,
    *,
    schema: dict | None = None,
    process: bool = False,
    policy: ToolPolicy | None = None,
) -> FunctionTool | Callable[[Callable], FunctionTool]:
    """Make a tool of a function: `@function_tool`, `@function_tool("name")` or `@function_tool(schema=...)`.

    The function may return `str`, `dict`, `ToolResponse`, or `(response, reward)` or `(response, reward, metrics)`.

    Args:
        function_or_name: The function, or the tool's name where it is not the function's.
        schema: OpenAI-style schema; made from type hints and docstring when first needed if None.
        process: Run a synchronous, CPU-bound function in a process of its own, killed when the call is cancelled or late.
        policy: How it may be called: retries, limits, a cache and more.

    Raises:
        ToolDefinitionError: the function takes `*args`, `**kwargs` or positional-only parameters, is a generator, or cannot
            run in a process.
        ToolSchemaError: `schema` has the wrong form.
    """
    if callable(function_or_name):
        return FunctionTool(function_or_name, schema=schema, process=process, policy=policy)
    if function_or_name is not None and not isinstance(function_or_name, str):
        raise ToolDefinitionError(
            f"function_tool must be given a function or a name, got {type(function_or_name).__name__}; "
            'write @function_tool, @function_tool("name") or @function_tool(schema=...)'
        )
    if function_or_name is not None and not function_or_name.strip():
        raise ToolDefinitionError("name must not be empty, got ''; leave it out to use the function's own")
    return functools.partial(FunctionTool, name=function_or_name, schema=schema, process=process, policy=policy)


def place_of(function: Callable) -> str:
    """Return where `function` was written, for messages: `name (file:line)`."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else f"{name} ({function.__class__.__module__})"


def _named_parameters(function: Callable, place: str) -> tuple[frozenset[str], frozenset[str]]:
    if isinstance(function, FunctionTool | type):
        raise ToolDefinitionError(
            f"function of {place} must be a plain function, got {type(function).__name__}; "
            "decorate once, and derive classes from BaseTool"
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ToolDefinitionError(
            f"function of {place} must return its result, got a generator; return instead of yield"
        )
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ToolDefinitionError(
            f"function of {place} must have a signature, got {error}; wrap it in a def"
        ) from error
    for parameter in parameters.values():
        if parameter.kind not in _BY_NAME:
            stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
            kind = "a variable one" if stars else "a positional-only one"
            raise ToolDefinitionError(
                f"parameters of {place} must each have a name that the model can fill, got {kind}: "
                f"{stars}{parameter.name}; name every parameter, or take one list or dict"
            )
    required = frozenset(name for name, value in parameters.items() if value.default is inspect.Parameter.empty)
    return frozenset(parameters), required
