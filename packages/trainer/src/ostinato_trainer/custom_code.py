"""Objects of the user's own, named by a Python file (or dotted module) and a name in it.

Importing runs the user's code: whatever it raises comes out as the caller's error with file and line. A file is run once, also where
tools or agents are in it too.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from ostinato_tools import ToolError, ToolImportError
from ostinato_tools.loading import execute_file
from ostinato_trainer.errors import TrainerError
from ostinato_trainer.home_paths import home_path

__all__ = ["is_file", "load_function", "load_object", "place_of", "without_prefix"]

_FILE_PREFIX: Final = "file://"
_MODULE_PREFIX: Final = "pkg://"


def load_object(path: str, name: str, *, key: str, error: type[TrainerError]) -> Any:
    """Import `path` and return its attribute `name`.

    Args:
        path: a `.py` file, or a dotted module name; `file://` or `pkg://` before it says which.
        name: attribute of that module.
        key: the configuration key that named them, without `.path` and `.name`; for messages.
        error: what to raise.

    Raises:
        error: the file or module is missing, raises while it is imported, or has no such attribute.
    """
    bare = without_prefix(path)
    module = _import_file(bare, key, error) if is_file(path) else _import_module(bare, key, error)
    if not hasattr(module, name):
        names = ", ".join(sorted(other for other in vars(module) if not other.startswith("_"))) or "nothing"
        raise error(f"{key}.name must be defined in {path}, got {name!r}; it defines {names}")
    return getattr(module, name)


def load_function(place: str, *, key: str, error: type[TrainerError]) -> Callable[..., Any]:
    """Import the function that `module:name` or `file.py:name` names. Errors as `load_object`, and where it is no function.

    Args:
        place: where it is.
        key: the configuration key that named it; for messages.
        error: what to raise.
    """
    path, _, name = place.rpartition(":")
    if not path or not name:
        raise error(f"{key} must be module:function or file.py:function, got {place!r}; write it so")
    function = load_object(path, name, key=key, error=error)
    if not callable(function):
        raise error(f"{key} must name a function, got {type(function).__name__} at {place}; name another")
    return function


def is_file(path: str) -> bool:
    """Whether `path` names a file and not a module."""
    if path.startswith((_FILE_PREFIX, _MODULE_PREFIX)):
        return path.startswith(_FILE_PREFIX)
    return path.endswith(".py") or "/" in path


def without_prefix(path: str) -> str:
    """`path` without what says whether it is a file or a module."""
    return path.removeprefix(_FILE_PREFIX).removeprefix(_MODULE_PREFIX)


def _import_file(path: str, key: str, error: type[TrainerError]) -> ModuleType:
    file = home_path(path, f"{key}.path", error)
    if not file.is_file():
        raise error(f"{key}.path must be an existing Python file, got {path}; check the path")
    try:
        return execute_file(file)
    except ToolError as raised:
        cause = raised.__cause__ if isinstance(raised, ToolImportError) and raised.__cause__ is not None else raised
        raise error(f"{key}.path must import without errors, got {place_of(cause, path)}; mend the file") from cause


def _import_module(path: str, key: str, error: type[TrainerError]) -> ModuleType:
    try:
        return importlib.import_module(path)
    except (Exception, SystemExit) as cause:
        raise error(
            f"{key}.path must be a Python file or an importable module, got {place_of(cause, path)}; check the path"
        ) from cause


def place_of(cause: BaseException, path: str) -> str:
    """The error with the line of the user's file that raised it."""
    frames = traceback.extract_tb(cause.__traceback__)
    name = Path(path).name
    line = next((frame.lineno for frame in reversed(frames) if Path(frame.filename).name == name), None)
    return f"{path}{'' if line is None else f':{line}'}: {type(cause).__name__}: {cause}"
