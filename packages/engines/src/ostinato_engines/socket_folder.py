"""A folder for a socket of one user's processes, where a socket's path may be bound."""

import os
import tempfile
from pathlib import Path

_MAX_PATH_BYTES = 100
"""Systems allow 104 or 108 with the final zero."""
_SHORT = "/tmp"


def new_socket_folder(prefix: str, *, name: str = "socket") -> Path:
    """A new folder that only this user can enter: among temporary files, or where the path of `name` in it is not too long."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    if len(os.fsencode(folder / name)) <= _MAX_PATH_BYTES:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix=prefix, dir=_SHORT))
