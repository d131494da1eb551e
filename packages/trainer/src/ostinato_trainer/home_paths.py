"""`home_path`: what `~` and `~USER` stand for at the beginning of a path, or one message that there is no such home."""

from __future__ import annotations

from pathlib import Path

from ostinato_trainer.errors import ConfigError, TrainerError

__all__ = ["home_path"]


def home_path(path: str | Path, name: str, error: type[TrainerError] = ConfigError) -> Path:
    """`path` with the home that it begins with; as it is where it begins with none.

    Args:
        path: What a user has written.
        name: The key, option or argument that it was written for.
        error: What is raised.

    Raises:
        TrainerError: Of the kind `error`: nobody of that name has a home here.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as cause:
        raise error(
            f"{name} must begin with the home of a known user where it begins with ~, got {path}: {cause}; write the whole path"
        ) from cause
