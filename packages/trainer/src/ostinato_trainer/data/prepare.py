"""Data sets that `ostinato prepare NAME` knows how to turn into rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from ostinato_trainer.data.prepare_gsm8k import prepare_gsm8k
from ostinato_trainer.errors import DatasetError

__all__ = ["PREPARERS", "prepare"]

PREPARERS: Final[dict[str, Callable[..., dict[Path, int]]]] = {"gsm8k": prepare_gsm8k}
"""Name -> function(input, output, *, agent, checks) that returns the files it wrote with their numbers of rows."""


def prepare(
    name: str, input: str | Path, output: str | Path, *, agent: str = "tool_agent", checks: bool = True
) -> dict[Path, int]:
    """Write the rows of the data set `name` to `output`; returns the files with their numbers of rows.

    Raises:
        DatasetError: an unknown name, or see the function in `PREPARERS`.
    """
    if name not in PREPARERS:
        raise DatasetError(f"the data set must be one of {', '.join(PREPARERS)}, got {name!r}; write one of these")
    return PREPARERS[name](input, output, agent=agent, checks=checks)
