"""Tool schemas: carried whole, checked once, and compiled once into a validator of arguments.

A schema is the author's dict and stays it: unknown keywords, nested objects, `anyOf`, `$defs` and defaults reach the
prompt as they were written. Validation never converts a value ("5" is not 5) and never fetches anything.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from ostinato_tools.acceptance import compile_acceptance
from ostinato_tools.errors import ToolSchemaError
from ostinato_tools.pattern_keywords import pattern_keywords
from ostinato_tools.schema_patterns import may_be_slow
from ostinato_tools.threads import run_in_thread

_MAX_ERRORS = 3
_MAX_SENTENCE = 200
_MAX_DEPTH = 64
"""Of a value. The validator's own parts, not all of them Python, must not meet the end of the stack: they would panic."""
_IN_PLACE_KEYWORDS = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")
_LITERAL_KEYWORDS = frozenset({"const", "default", "enum", "examples"})


def check_tool_schema(schema: Any, place: str) -> str:
    """Check the outer form of an OpenAI-style tool schema.

    Args:
        schema: `{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}`.
        place: Where it was written, for the message.

    Returns:
        The tool's name.

    Raises:
        ToolSchemaError: the form is wrong or the schema is not JSON.
    """
    cure = '; write {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}'
    if not isinstance(schema, dict):
        raise ToolSchemaError(f"tool_schema of {place} must be a mapping, got {type(schema).__name__}{cure}")
    if schema.get("type") != "function":
        raise ToolSchemaError(f"tool_schema.type of {place} must be 'function', got {schema.get('type')!r}{cure}")
    function = schema.get("function")
    if not isinstance(function, dict):
        raise ToolSchemaError(f"tool_schema.function of {place} must be a mapping, got {type(function).__name__}{cure}")
    name = function.get("name")
    if not isinstance(name, str) or not name.isprintable() or not name or any(map(str.isspace, name)):
        raise ToolSchemaError(
            f"tool_schema.function.name of {place} must be a name without white space, got {name!r:.100}{cure}"
        )
    if not isinstance(function.get("parameters", {}), dict):
        raise ToolSchemaError(
            f"tool_schema.function.parameters of {place} must be a mapping, "
            f"got {type(function['parameters']).__name__}{cure}"
        )
    try:
        json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolSchemaError(f"tool_schema of {place} must be JSON, got one that is not ({error}){cure}") from error
    return name


def tool_name(schema: Mapping) -> str:
    """Return the name inside an OpenAI-style tool schema."""
    return schema["function"]["name"]


class SchemaCheck:
    """Says what is wrong with a value, in at most three sentences; none means that it is valid.

    Args:
        problems: The check.
        may_wait: It may take long for some value, as patterns can.
    """

    __slots__ = ("_may_wait", "_problems")

    def __init__(self, problems: Callable[[Any], list[str]], *, may_wait: bool) -> None:
        self._problems, self._may_wait = problems, may_wait

    def __call__(self, value: Any) -> list[str]:
        """The sentences; blocks for as long as it takes."""
        return self._problems(value)

    async def problems(self, value: Any) -> list[str]:
        """The same; the event loop goes on meanwhile."""
        if self._may_wait:
            return await run_in_thread(lambda: self._problems(value))
        return self._problems(value)


def compile_validator(schema: Mapping, place: str) -> SchemaCheck:
    """Compile the `parameters` of a tool schema; see `compile_json_schema`.

    Args:
        schema: A tool schema that `check_tool_schema` accepted.
        place: Where it was written, for the message.

    Returns:
        The check of arguments.
    """
    return compile_json_schema(schema["function"].get("parameters", {}), "parameters", place)


def compile_json_schema(schema: Mapping, what: str, place: str) -> SchemaCheck:
    """Compile a JSON schema (draft 2020-12, and `nullable`). What a pattern says of a value counts where it can be found out in time.

    Args:
        schema: The schema.
        what: What it is called where it was written, for the message.
        place: Where it was written, for the message.

    Returns:
        The check.

    Raises:
        ToolSchemaError: it is no valid JSON schema, or a `$ref` leads nowhere or in a circle.
    """
    try:
        validator = _checked_validator(schema, what, place)
        accepts = compile_acceptance(schema, validator.VALIDATORS)
    except RecursionError:
        raise ToolSchemaError(
            f"{what} of {place} must be nested less deeply, got more levels than can be followed; put parts under $defs"
        ) from None

    too_deep = [f"the {'arguments are' if what == 'parameters' else 'value is'} nested too deeply"]

    def problems(value: Any) -> list[str]:
        try:
            if accepts is not None and accepts(value):
                return []
            if _is_deeper(value, _MAX_DEPTH):
                return too_deep
            return [_sentence(error) for error in islice(validator.iter_errors(value), _MAX_ERRORS)]
        except RecursionError:
            return too_deep

    patterns = (
        *_found_under("pattern", schema),
        *(name for each in _found_under("patternProperties", schema) for name in each),
    )
    return SchemaCheck(problems, may_wait=any(isinstance(each, str) and may_be_slow(each) for each in patterns))


def _checked_validator(schema: Mapping, what: str, place: str) -> Any:
    import jsonschema
    from referencing import Registry

    validator_class = _nullable_validator_class()
    try:
        validator_class.check_schema(schema)
    except jsonschema.SchemaError as error:
        where = ".".join(str(part) for part in error.absolute_path) or "its root"
        raise ToolSchemaError(
            f"{what} of {place} must be a valid JSON schema, got a fault at {where}: {error.message}; "
            "see https://json-schema.org/draft/2020-12"
        ) from error
    registry: Any = Registry()  # an empty one: a remote `$ref` is an error, never a download
    validator = validator_class(schema, registry=registry)
    _check_references(validator, schema, what, place)
    _check_unevaluated(schema, what, place)
    _check_circles(validator, schema, what, place)
    return validator


_VALIDATOR_CLASS: Any = None


def _nullable_validator_class() -> Any:
    """JSON schema 2020-12 that also knows OpenAPI's `nullable`, which `get_json_schema` writes for `X | None`."""
    global _VALIDATOR_CLASS
    if _VALIDATOR_CLASS is None:
        from jsonschema import Draft202012Validator, validators

        def unless_null(keyword: Callable) -> Callable:
            def check(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
                if instance is None and schema.get("nullable") is True:
                    return
                yield from keyword(validator, value, instance, schema) or ()

            return check

        known = Draft202012Validator.VALIDATORS
        changed = {name: unless_null(known[name]) for name in ("type", "enum", "const", "anyOf", "oneOf", "allOf")}
        changed |= pattern_keywords(known)
        _VALIDATOR_CLASS = validators.extend(Draft202012Validator, changed)
    return _VALIDATOR_CLASS


def _objects(schema: Mapping) -> Iterator[dict[str, Any]]:
    """The schema and the objects within it, without those that are values of an instance."""
    waiting: list[Any] = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting.extend(node)
        elif isinstance(node, dict):
            yield node
            waiting.extend(value for key, value in node.items() if key not in _LITERAL_KEYWORDS)


def _found_under(keyword: str, schema: Mapping) -> list[Any]:
    """The values of a keyword, wherever it stands in a schema; names of properties may be among the keywords."""
    return [node[keyword] for node in _objects(schema) if keyword in node]


def _check_unevaluated(schema: Mapping, what: str, place: str) -> None:
    """Refuse the one keyword that searches for patterns by itself, beside one that may take for ever."""
    slow = next(
        filter(may_be_slow, (name for each in _found_under("patternProperties", schema) for name in each)), None
    )
    if slow is not None and _found_under("unevaluatedProperties", schema):
        raise ToolSchemaError(
            f"patternProperties of {place} must be quick to search for beside unevaluatedProperties, got {slow!r:.100}; "
            f"write additionalProperties in the {what}, or the pattern without * and +"
        )


def _check_references(validator: Any, schema: Mapping, what: str, place: str) -> None:
    from referencing.exceptions import Unresolvable

    resolver = validator._resolver  # the one that validation itself will use
    for reference in _found_under("$ref", schema):
        if isinstance(reference, str):
            try:
                resolver.lookup(reference)
            except Unresolvable as error:
                raise ToolSchemaError(
                    f"$ref of {place} must point into the {what} themselves, got {reference!r}; "
                    f"put the definition under {what}.$defs"
                ) from error


def _check_circles(validator: Any, schema: Mapping, what: str, place: str) -> None:
    """Refuse a `$ref` that leads back to where it stands without going into the value: nothing would ever fit it."""
    resolver = validator._resolver
    ahead: dict[
        int, list[Any]
    ] = {}  # of a schema on the present path: those that the same value must fit, not seen yet
    done: set[int] = set()
    waiting: list[Any] = [schema]
    while waiting:  # every schema is a start; from there only along what the same value must fit
        node = waiting.pop()
        if isinstance(node, list):
            waiting.extend(node)
        if not isinstance(node, dict):
            continue
        waiting.extend(value for key, value in node.items() if key not in _LITERAL_KEYWORDS)
        path = [node]
        while path:
            here = path[-1]
            if id(here) not in ahead and id(here) not in done:
                ahead[id(here)] = _in_place(here, resolver)
            if ahead.get(id(here)):
                path.append(ahead[id(here)].pop())
                if id(path[-1]) in ahead:
                    raise ToolSchemaError(
                        f"$ref of {place} must lead to a schema, got a circle at {path[-1].get('$ref', here)!r:.100}; "
                        f"correct the definitions under {what}.$defs"
                    )
            else:
                path.pop()
                ahead.pop(id(here), None)
                done.add(id(here))


def _in_place(node: dict, resolver: Any) -> list[Any]:
    """Schemas that a value must fit, or is tried against, where it is to fit `node`."""
    reference = node.get("$ref")
    found = [resolver.lookup(reference).contents] if isinstance(reference, str) else []
    for key in _IN_PLACE_KEYWORDS:
        value = node.get(key)
        found += value if isinstance(value, list) else [value]
    return [item for item in found if isinstance(item, dict)]


def _is_deeper(value: Any, limit: int) -> bool:
    """Whether lists and mappings are nested beyond a number of levels."""
    level = [value]
    for _ in range(limit + 1):
        level = [
            item
            for node in level
            if isinstance(node, list | dict)
            for item in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return False
    return True


def _sentence(error: Any) -> str:
    where = ".".join(str(part) for part in error.absolute_path)
    message = error.message
    if len(message) > _MAX_SENTENCE:  # it repeats the value; what is wrong with it stands at the end
        message = f"{message[: _MAX_SENTENCE // 2]} ... {message[-_MAX_SENTENCE // 2 :]}"
    return f"{where}: {message}" if where else message
