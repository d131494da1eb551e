"""Where two processes of one user on one host meet, when neither started the other.

A parent and its child need none of this: `socket.socketpair()` before the start is enough.
"""

import shutil
import socket
from pathlib import Path
from types import TracebackType
from typing import Self

from ostinato_engines.errors import WeightPeerLostError, WeightUpdateTimeoutError
from ostinato_engines.socket_folder import new_socket_folder


class WeightListener:
    """A socket in a folder that only this user can enter; `close` removes both."""

    def __init__(self) -> None:
        self._directory = new_socket_folder("ostinato-weights-")
        self.path = self._directory / "socket"
        """What the other process passes to `connect`."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(str(self.path))
            self._socket.listen(1)
        except BaseException:
            self.close()
            raise

    def accept(self, *, timeout_s: float = 60.0) -> socket.socket:
        """The connection to whoever comes first.

        Raises:
            WeightUpdateTimeoutError: Nobody came.
        """
        self._socket.settimeout(timeout_s)
        try:
            connection, _ = self._socket.accept()
        except TimeoutError as error:
            raise WeightUpdateTimeoutError(
                f"other end must connect to {self.path} within {timeout_s:g} s, got nobody; see its log, or raise timeout_s"
            ) from error
        return connection

    def close(self) -> None:
        """Removes the socket and its folder; connections stay."""
        self._socket.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(path: str | Path, *, timeout_s: float = 60.0) -> socket.socket:
    """A connection to a `WeightListener`.

    Raises:
        WeightPeerLostError: Nobody listens there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
    except OSError as error:
        connection.close()
        raise WeightPeerLostError(
            f"path must be that of a WeightListener, got {path} ({error}); start the other end first"
        ) from error
    return connection
