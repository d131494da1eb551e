"""Finding and reading configuration files strictly: a key written twice is an error, and no message quotes a line, which may hold a secret."""

import json
from pathlib import Path
from typing import Any

import yaml

from ostinato_tools.errors import ToolConfigError, ToolFileNotFoundError


def home_path(path: str | Path, key: str) -> Path:
    """Return the path with the home that `~` or `~USER` at its beginning stands for.

    Args:
        path: As it was written.
        key: Where, for the message.

    Raises:
        ToolFileNotFoundError: nobody of that name has a home here.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ToolFileNotFoundError(
            f"{key} must begin with the home of a known user where it begins with ~, got {path}: {error}; write the whole path"
        ) from error


def read_config_file(path: Path) -> Any:
    """Return the content of a YAML file, or of a JSON file where the name ends with `.json`.

    Raises:
        ToolConfigError: it is neither; the message says where.
    """
    try:
        source = path.read_bytes()
        if path.suffix == ".json":
            return json.loads(source, object_pairs_hook=_unique)
        return yaml.load(source, Loader=_StrictLoader)
    except (yaml.YAMLError, RecursionError, ValueError, OSError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise ToolConfigError(f"{path} must be {kind}, got: {_problem(error)}; correct the file") from None


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML in which a key written twice is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if isinstance(key, str) and key != "<<" and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is written twice", key_node.start_mark
                )
            if isinstance(key, str):
                seen.add(key)
        return super().construct_mapping(node, deep)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise ValueError(f"the key {key!r} is written twice")
        mapping[key] = value
    return mapping


def _problem(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} in line {error.problem_mark.line + 1}"
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} in line {error.lineno}"
    if isinstance(error, UnicodeDecodeError):
        return f"{error.reason} at byte {error.start}"
    return f"{type(error).__name__}: {error}"
