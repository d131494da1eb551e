"""Removal of a folder that untrusted code has filled: links are not followed, and neither depth nor modes stop it."""

import errno
import os
import time
from collections.abc import Callable

_PASSING = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.EBUSY, None})
"""What somebody causes who still writes there; None is our own."""
_PAUSE_S = 0.005
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_from_under(path: str, seconds: float, meanwhile: Callable[[], None]) -> OSError | None:
    """Remove a folder as `remove` does, again while a process that is about to end still writes there.

    Args:
        path: The folder.
        seconds: For which it is tried; once in any case.
        meanwhile: Called between attempts: sees to it that the process ends.

    Returns:
        Why the folder is left, where it is.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            remove(path)
        except OSError as error:
            if error.errno not in _PASSING or time.monotonic() > deadline:
                return error
        else:
            return None
        meanwhile()
        time.sleep(_PAUSE_S)


def remove(path: str) -> None:
    """Remove a folder and everything in it, once nothing runs any more that writes there.

    One descriptor walks down and, by `..`, up again: so neither the depth of a tree nor the length of its paths matters.

    Args:
        path: The folder; nothing happens where there is none.

    Raises:
        OSError: something cannot be removed, or something still moves folders about.
    """
    try:
        here = _opened(path)
    except FileNotFoundError:
        return
    try:
        levels = [(_identity(here), _cleared(here))]
        while True:
            while folders := levels[-1][1]:
                here = _replaced(here, _opened(folders[-1], here))
                levels.append((_identity(here), _cleared(here)))
            levels.pop()
            if not levels:
                break
            here = _replaced(here, os.open("..", _FLAGS, dir_fd=here))
            identity, folders = levels[-1]
            if _identity(here) != identity:
                raise OSError(f"a folder was moved while {path} was being removed")
            os.rmdir(folders.pop(), dir_fd=here)
    finally:
        os.close(here)
    os.rmdir(path)


def _cleared(folder: int) -> list[str]:
    """Unlink what is no folder; returns the names of the folders in it."""
    os.fchmod(folder, 0o700)
    return [name for name in os.listdir(folder) if not _is_unlinked(name, folder)]


def _is_unlinked(name: str, parent: int) -> bool:
    try:
        os.unlink(name, dir_fd=parent)
    except (IsADirectoryError, PermissionError):  # the second: what unlinking a folder gives on macOS
        return False
    return True


def _opened(name: str, parent: int | None = None) -> int:
    try:
        return os.open(name, _FLAGS, dir_fd=parent)
    except PermissionError:  # a folder that is closed; a link would have been refused for another reason
        os.chmod(name, 0o700, dir_fd=parent)
        return os.open(name, _FLAGS, dir_fd=parent)


def _replaced(old: int, new: int) -> int:
    os.close(old)
    return new


def _identity(folder: int) -> tuple[int, int]:
    status = os.fstat(folder)
    return status.st_dev, status.st_ino
