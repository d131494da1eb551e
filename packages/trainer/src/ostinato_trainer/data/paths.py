"""What `data.train_files` and `data.val_files` name, as single files: patterns are replaced by the files that they match, sorted."""

from __future__ import annotations

import glob
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ostinato_trainer.data.hub_files import HUB_SCHEME, hub_file_names
from ostinato_trainer.errors import DatasetError
from ostinato_trainer.home_paths import home_path

__all__ = ["data_file_names", "expanded_path"]

logger = logging.getLogger(__name__)

_PATTERN_CHARACTERS: Final = frozenset("*?[")


def data_file_names(names: Sequence[str]) -> list[str]:
    """The files in the order of `names`; those of a pattern sorted by name.

    Raises:
        DatasetError: A name is empty, a pattern matches no file, or the hub does not list its repository.
    """
    if not all(names):
        raise DatasetError(f"a data file must have a name, got an empty one in {list(names)}; remove it")
    found = [file for name in names for file in (_matches(name) if _is_pattern(name) else [name])]
    repeated = sorted(name for name, number in Counter(found).items() if number > 1)
    if repeated:
        logger.warning("named more than once, so their rows are there more than once: %s", ", ".join(repeated))
    return found


def expanded_path(name: str) -> Path:
    """`name` as a path, with the home that `~` or `~USER` stands for.

    Raises:
        DatasetError: There is no such home.
    """
    return home_path(name, "a path", DatasetError)


def _is_pattern(name: str) -> bool:
    if _PATTERN_CHARACTERS.isdisjoint(name):
        return False
    return name.startswith(HUB_SCHEME) or not expanded_path(name).exists()


def _matches(pattern: str) -> list[str]:
    if pattern.startswith(HUB_SCHEME):
        return hub_file_names(pattern)
    expanded = str(expanded_path(pattern))
    files = sorted(name for name in glob.glob(expanded, recursive=True) if Path(name).is_file())
    if not files:
        raise DatasetError(f"a pattern of data files must match at least one, got {pattern}; check the path")
    return files
