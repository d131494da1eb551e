"""Removal of a folder that untrusted code has filled: links are not followed, and neither depth nor modes stop it."""

import os

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove(path: str) -> None:
    """Remove a folder and everything in it, once nothing runs any more that writes there.

    A folder found in it is emptied into the top one before it is removed: so two descriptors are enough for any depth.

    Args:
        path: The folder; nothing happens where there is none.

    Raises:
        OSError: something cannot be removed.
    """
    try:
        top = os.open(path, _FLAGS)
    except FileNotFoundError:
        return
    try:
        os.fchmod(top, 0o700)
        number = 0
        while names := os.listdir(top):
            for name in names:
                if not _unlinked(name, top):
                    number = _lift(name, top, number)
                    os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(path)


def _lift(name: str, top: int, number: int) -> int:
    """Empty the folder `name`; folders in it move up, under names that nothing has."""
    folder = _opened(name, top)
    try:
        os.fchmod(folder, 0o700)
        for inner in os.listdir(folder):
            if not _unlinked(inner, folder):
                os.chmod(inner, 0o700, dir_fd=folder)  # moving a folder writes its entry `..`
                while True:
                    number += 1
                    try:
                        os.mkdir(f".{number}", dir_fd=top)
                        break
                    except FileExistsError:
                        continue
                os.rename(inner, f".{number}", src_dir_fd=folder, dst_dir_fd=top)
    finally:
        os.close(folder)
    return number


def _opened(name: str, parent: int) -> int:
    try:
        return os.open(name, _FLAGS, dir_fd=parent)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=parent)
        return os.open(name, _FLAGS, dir_fd=parent)


def _unlinked(name: str, parent: int) -> bool:
    """Whether `name` was no folder and is gone now."""
    try:
        os.unlink(name, dir_fd=parent)
    except (IsADirectoryError, PermissionError):  # the second: what unlinking a folder gives on macOS
        return False
    return True
