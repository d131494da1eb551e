"""Paths in settings of tracing, as every process understands them."""

from __future__ import annotations

from pathlib import Path

from ostinato_rollout.errors import TraceStoreError

__all__ = ["absolute_path"]


def absolute_path(path: Path, name: str) -> Path:
    """Return `path` from the root, with the home that it begins with.

    Args:
        path: As it was written.
        name: The setting's.

    Raises:
        TraceStoreError: Nobody of that name has a home here.
    """
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        raise TraceStoreError(
            f"{name} must begin with the home of a known user where it begins with ~, got {path}: {error}; write the whole path"
        ) from error
