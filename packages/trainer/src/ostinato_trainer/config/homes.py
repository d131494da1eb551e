"""`~` in values that name files or folders: replaced when a configuration is read, so that all who use one mean the same place.

A shell replaces `~` at the beginning of a word only, not in `trainer.default_local_dir=~/runs`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from ostinato_trainer.home_paths import home_path

__all__ = ["with_homes"]

_NAMES_FILES: Final = re.compile(r"(.*_)?(path|dir|files|python)|cwd|function|callbacks")
"""Last parts of keys whose values are paths, or begin with one."""


def with_homes(nested: Mapping[str, Any], origins: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
    """The values of a tree, paths with the home that they begin with.

    Args:
        nested: Values by name, in mappings.
        origins: For messages, the file or override that each dotted key was written in.
        prefix: Of the dotted keys of `nested`.

    Raises:
        ConfigError: Nobody of that name has a home here.
    """
    return {name: _with_home(value, name, f"{prefix}{name}", origins) for name, value in nested.items()}


def _with_home(value: Any, name: str, path: str, origins: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return with_homes(value, origins, f"{path}.")
    if isinstance(value, list):
        return [_with_home(item, name, path, origins) for item in value]
    if not isinstance(value, str) or not value.startswith("~") or not _NAMES_FILES.fullmatch(name):
        return value
    return str(home_path(value, f"{origins.get(path, 'the configuration')}: {path}"))
