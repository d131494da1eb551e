"""A folder that a command writes: there whole or not at all."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ostinato_trainer.errors import CheckpointError

__all__ = ["folder_made_whole", "share_files"]


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
    output = output.expanduser().absolute()
    hidden = output.with_name(f".{output.name}.{uuid.uuid4().hex[:8]}.unfinished")
    try:
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise CheckpointError(f"--output must be new or an empty folder, got {output}; choose another or remove it")
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
