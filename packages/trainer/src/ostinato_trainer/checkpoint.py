"""`CheckpointManager`: directories of checkpoints that are there whole or not at all.

Invariant: at every moment, a kill included, each `global_step_N` below the root is complete, and
`latest_checkpointed_iteration.txt` names one of them if there is any. A checkpoint is written to a hidden sibling,
flushed to the disk, and renamed; what a crash leaves behind is hidden, and removed when the root is opened again.
One run owns a root. The manager does not know what is in a checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from safetensors import SafetensorError

from ostinato_trainer.errors import CheckpointError

_logger = logging.getLogger(__name__)

LATEST = "latest_checkpointed_iteration.txt"
"""Name of the file that holds the number of the newest step, as elsewhere in the field."""

_STEP = re.compile(r"global_step_(0|[1-9][0-9]*)")
_HIDDEN = re.compile(r"\.(writing|replaced|removing)-(global_step_\d+|latest)-[0-9a-f]{8}")
_INVENTORY = "checkpoint.json"


class Inventory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a complete checkpoint says of itself, in `checkpoint.json`."""

    step: int
    files: dict[str, int]
    """Size in bytes by path below the checkpoint; the inventory itself is not in it."""
    format: str = "ostinato-checkpoint-1"


class CheckpointManager:
    """Checkpoints of one run below one root."""

    def __init__(self, root: str | Path, *, max_to_keep: int | None = None) -> None:
        """Opens the root and removes what an earlier crash left behind. The root is made with the first checkpoint.

        Args:
            root: `trainer.default_local_dir`.
            max_to_keep: `trainer.max_ckpt_to_keep`: older checkpoints are removed after a newer one is complete; None
                keeps all.

        Raises:
            CheckpointError: `max_to_keep` is below 1, or the root is no directory or cannot be read.
        """
        if max_to_keep is not None and max_to_keep < 1:
            raise CheckpointError(f"max_ckpt_to_keep must be at least 1 or null, got {max_to_keep}; null keeps all")
        self.root = Path(root).expanduser()
        self._max_to_keep = max_to_keep
        if self.root.exists() and not self.root.is_dir():
            raise CheckpointError(
                f"default_local_dir must be a directory, got {self.root}, which is a file; choose another"
            )
        self._recover()

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Makes the checkpoint of a step; one of the same step is replaced.

        Args:
            step: At least 0.
            write: Fills the empty directory that it is given.

        Returns:
            The directory of the complete checkpoint.

        Raises:
            CheckpointError: it could not be written; the hidden directory is gone and earlier checkpoints are as they
                were.
        """
        if step < 0:
            raise CheckpointError(f"step must be at least 0, got {step}; number steps from 1")
        target = self.root / f"global_step_{step}"
        hidden = self._hidden("writing", target.name)
        try:
            hidden.mkdir(parents=True)
            write(hidden)
            _seal(hidden, step)
            self._put(hidden, target)
            self._write_latest(step)
        except Exception as error:  # the boundary to whatever `write` does; every cause becomes one message
            _remove(hidden)
            raise self._failure(step, error) from error
        except BaseException:
            _remove(hidden)
            raise
        self._forget_old(step)
        return target

    def steps(self) -> list[int]:
        """Steps that have a complete checkpoint, in rising order.

        Raises:
            CheckpointError: the root cannot be read.
        """
        if not self.root.is_dir():
            return []
        try:
            names = [_STEP.fullmatch(path.name) for path in self.root.iterdir() if path.is_dir()]
        except OSError as error:
            raise CheckpointError(f"{self.root} must be readable, got {error}; fix its permissions") from error
        return sorted(int(match[1]) for match in names if match)

    def latest(self) -> Path | None:
        """The checkpoint that was completed last, or None where there is none.

        Raises:
            CheckpointError: see `steps`.
        """
        steps = self.steps()
        if not steps:
            return None
        try:
            named = int((self.root / LATEST).read_text(encoding="ascii"))
        except (OSError, ValueError):
            named = -1
        return self.root / f"global_step_{named if named in steps else steps[-1]}"

    def _hidden(self, purpose: str, name: str) -> Path:
        return self.root / f".{purpose}-{name}-{uuid.uuid4().hex[:8]}"

    def _put(self, hidden: Path, target: Path) -> None:
        """Renames into place; an older checkpoint of that name steps aside first and comes back if the rename fails."""
        aside = None
        if target.exists():
            aside = self._hidden("replaced", target.name)
            target.rename(aside)
        try:
            hidden.rename(target)
        except BaseException:
            if aside is not None:
                aside.rename(target)
            raise
        _flush(self.root)
        if aside is not None:
            _remove(aside)

    def _write_latest(self, step: int) -> None:
        hidden = self._hidden("writing", "latest")
        try:
            with hidden.open("w", encoding="ascii") as file:
                file.write(f"{step}\n")
                file.flush()
                os.fsync(file.fileno())
            hidden.replace(self.root / LATEST)
        finally:
            hidden.unlink(missing_ok=True)
        _flush(self.root)

    def _forget_old(self, newest: int) -> None:
        """Removes the oldest checkpoints beyond the limit; a failure to do so is logged, for nothing is lost by it."""
        if self._max_to_keep is None:
            return
        try:
            older = [step for step in self.steps() if step != newest]
            for step in older[: max(0, len(older) - (self._max_to_keep - 1))]:
                path = self.root / f"global_step_{step}"
                doomed = self._hidden("removing", path.name)
                path.rename(doomed)
                shutil.rmtree(doomed)
        except OSError as error:
            _logger.warning("An old checkpoint below %s could not be removed: %s", self.root, error)

    def _recover(self) -> None:
        """Removes hidden leftovers; a checkpoint that had stepped aside for one that never came is put back."""
        if not self.root.is_dir():
            return
        try:
            leftovers = [(path, match) for path in self.root.iterdir() if (match := _HIDDEN.fullmatch(path.name))]
            for path, match in leftovers:
                target = self.root / match[2]
                if match[1] == "replaced" and not target.exists():
                    path.rename(target)
                    continue
                _logger.info("Removing %s, left behind by a run that was stopped", path)
                _remove(path)
        except OSError as error:
            raise CheckpointError(
                f"{self.root} must be readable and writable, got {error}; fix its permissions"
            ) from error

    def _failure(self, step: int, error: Exception) -> CheckpointError:
        reason = str(error).strip() or type(error).__name__
        cure = "earlier checkpoints are unharmed"
        if self.root.is_dir():
            free = shutil.disk_usage(self.root).free
            cure = (
                f"{free / 2**20:.0f} MiB are free there; make room, fix permissions or choose another "
                f"trainer.default_local_dir; {cure}"
            )
        return CheckpointError(f"checkpoint of step {step} must be written below {self.root}, but: {reason}; {cure}")


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
            f"{folder} must be a folder that can be written, got: {reason} "
            f"({shutil.disk_usage(folder).free / 2**20:.0f} MiB are free); make room or choose another"
        ) from error


def check_root(root: Path) -> None:
    """Find out, before a run has computed anything, that checkpoints could not be written; makes nothing.

    Raises:
        CheckpointError: `root`, or what it would be made in, is no folder or must not be written to.
    """
    folder = root.expanduser().absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    found = "is no folder" if not folder.is_dir() else None if os.access(folder, os.W_OK | os.X_OK) else "is protected"
    if found is not None:
        raise CheckpointError(
            f"trainer.default_local_dir must be a folder that can be written, got {root}, but {folder} {found}; "
            "choose another"
        )


def check_complete(directory: str | Path) -> int:
    """Checks that a checkpoint holds every file that it was sealed with, in its size; returns its step.

    Raises:
        CheckpointError: it does not exist, is no checkpoint, or a file is missing or has another size; the message
            names it.
    """
    directory = Path(directory)
    try:
        inventory = msgspec.json.decode((directory / _INVENTORY).read_bytes(), type=Inventory)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(
            f"{directory} must be a checkpoint, got {error}; give a directory global_step_N that a run wrote"
        ) from error
    for name, size in inventory.files.items():
        path = directory / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            got = "no such file" if found is None else f"{found} bytes"
            raise CheckpointError(
                f"{path} must have {size} bytes, got {got}; the checkpoint is damaged, resume from another step"
            )
    return inventory.step


def _seal(directory: Path, step: int) -> None:
    """Writes the inventory and flushes every file and directory to the disk."""
    files = {
        path.relative_to(directory).as_posix(): path.stat().st_size
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    (directory / _INVENTORY).write_bytes(msgspec.json.encode(Inventory(step=step, files=files)))
    for path in [*directory.rglob("*"), directory]:
        _flush(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Removes a file or directory that only this module knows of; what resists is removed when the root is opened again."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()
