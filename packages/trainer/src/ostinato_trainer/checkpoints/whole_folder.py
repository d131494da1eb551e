"""Folders that a command writes: whether it can, what it says if it cannot, and one that is there whole or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ostinato_trainer.errors import CheckpointError
from ostinato_trainer.home_paths import home_path

__all__ = ["check_root", "folder_made_whole", "free_room", "share_files", "writing_below"]


def share_files(folder: Path) -> None:
    """Let files be read by whom the folder is open to: the library that writes tensors keeps them to their owner.

    Raises:
        OSError: They are somebody else's.
    """
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


@contextmanager
def folder_made_whole(output: Path) -> Iterator[Path]:
    """A hidden folder beside `output`, which becomes `output` if the block succeeds and is removed if it does not.

    Args:
        output: What the command line calls `--output`.

    Raises:
        CheckpointError: There is something in it already, or it cannot be written.
    """
    output = home_path(output, "--output", CheckpointError).absolute()
    hidden = output.parent / f".{output.name}.{uuid.uuid4().hex[:8]}.unfinished"
    try:
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise CheckpointError(
                f"the output must be new or an empty folder, got {output}; choose another or remove it"
            )
        hidden.mkdir(parents=True)
        yield hidden
        share_files(hidden)
        if output.exists():
            output.rmdir()
        hidden.rename(output)
    except (OSError, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(
            f"{output} must be a folder that can be written: {reason}; make room or choose another --output"
        ) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def check_root(root: Path) -> None:
    """Find out, before a run has computed anything, that checkpoints could not be written; makes nothing.

    Raises:
        CheckpointError: `root`, or what it would be made in, is no folder or must not be written to.
    """
    folder = home_path(root, "trainer.default_local_dir", CheckpointError).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    found = "is no folder" if not folder.is_dir() else None if os.access(folder, os.W_OK | os.X_OK) else "is protected"
    if found is not None:
        raise CheckpointError(
            f"trainer.default_local_dir must be a folder that can be written, got {root}, but {folder} {found}; "
            "choose another"
        )


@contextmanager
def writing_below(folder: Path) -> Iterator[None]:
    """Make one message of whatever keeps the block from writing files.

    Raises:
        CheckpointError: Naming folder, cause and free space.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(
            f"{folder} must be a folder that can be written, got: {reason} ({free_room(folder)}); make room or choose another"
        ) from error


def free_room(folder: Path) -> str:
    """How much of the disk is free, in words."""
    try:
        return f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB are free"
    except OSError as error:  # it is gone, or does not answer
        return f"how much is free cannot be told: {error.strerror}"
