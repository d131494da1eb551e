"""`checkpoint.json`: what a complete checkpoint says of itself, by which a damaged or foreign one is told.

Invariant: a directory passes `check_complete` only if every file that it was sealed with is there, byte for byte.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from ostinato_trainer.checkpoints.whole_folder import share_files
from ostinato_trainer.errors import CheckpointError

__all__ = ["FileRecord", "Inventory", "check_complete", "check_files", "flush", "read_inventory", "seal"]

_INVENTORY: Final = "checkpoint.json"
_FORMAT: Final = "ostinato-checkpoint-2"
_FORMATS: Final = "ostinato-checkpoint-"


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a checkpoint."""

    num_bytes: int
    sha256: str
    """Hexadecimal, as `sha256sum` prints it."""


class Inventory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a complete checkpoint says of itself."""

    step: int
    files: dict[str, FileRecord]
    """By path below the checkpoint; the inventory itself is not in it."""
    metrics: dict[str, float | None] = {}
    """Of the step; null where one was not finite."""
    own_sha256: str = ""
    """Of the file's bytes, as they are with nothing here."""
    format: str = _FORMAT


def seal(directory: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Write the inventory of a directory and flush every file and directory to the disk.

    Raises:
        OSError: A file cannot be read or written.
    """
    files = {
        path.relative_to(directory).as_posix(): FileRecord(path.stat().st_size, _sha256(path))
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    finite = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
    raw = msgspec.json.encode(Inventory(step, files, finite))
    (directory / _INVENTORY).write_bytes(raw.replace(_own(""), _own(hashlib.sha256(raw).hexdigest()), 1))
    share_files(directory)
    for path in [*directory.rglob("*"), directory]:
        flush(path)


def read_inventory(directory: Path) -> Inventory:
    """The inventory of a checkpoint.

    Raises:
        CheckpointError: There is none, or it is of another format; the message names the directory.
    """
    cure = "give a directory global_step_N that a run wrote"
    try:
        raw = (directory / _INVENTORY).read_bytes()
        found = msgspec.json.decode(raw, type=dict).get("format")
        if isinstance(found, str) and found.startswith(_FORMATS) and found != _FORMAT:
            raise CheckpointError(
                f"{directory} must be a checkpoint of the format {_FORMAT}, got {found}, of another version; "
                f"use that version, or begin anew from {directory / 'huggingface'}"
            )
        inventory = msgspec.json.decode(raw, type=Inventory)
        if outside := [name for name in inventory.files if Path(name).is_absolute() or ".." in Path(name).parts]:
            raise CheckpointError(f"{directory} must hold its files, got {outside[0]} in its {_INVENTORY}; {cure}")
        without = raw.replace(_own(inventory.own_sha256), _own(""), 1)
        if inventory.own_sha256 not in ("", hashlib.sha256(without).hexdigest()):  # earlier versions wrote none
            raise CheckpointError(
                f"{directory / _INVENTORY} must be as it was written, got another checksum; the checkpoint is damaged, resume from another step"
            )
        return inventory
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{directory} must be a checkpoint, got {error}; {cure}") from error
    except msgspec.DecodeError as error:
        raise CheckpointError(
            f"{directory} must be a checkpoint, got a {_INVENTORY} that is damaged or of another program: {error}; {cure}"
        ) from error


def check_complete(directory: str | Path) -> Inventory:
    """Check that a checkpoint holds every file that it was sealed with, in its size and with its checksum.

    Raises:
        CheckpointError: It does not exist, is no checkpoint, or a file is missing, of another size or changed; the
            message names it.
    """
    directory = Path(directory)
    inventory = read_inventory(directory)
    check_files(directory, inventory, inventory.files)
    return inventory


def check_files(directory: Path, inventory: Inventory, names: Iterable[str]) -> None:
    """Check some files of a checkpoint.

    Raises:
        CheckpointError: One is missing, of another size or changed; the message names it.
    """
    for name in names:
        _check_file(directory / name, inventory.files[name])


def flush(path: Path) -> None:
    """Flush a file or directory to the disk; a directory where its file system can do that.

    Raises:
        OSError: It could not be flushed.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def _own(checksum: str) -> bytes:
    """The field `own_sha256` in the file."""
    return f'"own_sha256":"{checksum}"'.encode()


def _check_file(path: Path, record: FileRecord) -> None:
    damaged = "the checkpoint is damaged, resume from another step"
    try:
        found = path.stat().st_size if path.is_file() else None
        if found != record.num_bytes:
            got = "no such file" if found is None else f"{found} bytes"
            raise CheckpointError(f"{path} must have {record.num_bytes} bytes, got {got}; {damaged}")
        if _sha256(path) != record.sha256:
            raise CheckpointError(f"{path} must be as it was written, got another checksum; {damaged}")
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} must be readable, got {error}; fix that, or resume from another step") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
