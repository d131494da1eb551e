"""Messages between the parent and a worker: four bytes of length, big-endian, then that many bytes of JSON."""

import json
import os
import socket
from typing import Any

_HEADER_BYTES = 4


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Write one message.

    Raises:
        OSError: the other side is gone.
    """
    body = json.dumps(message, ensure_ascii=False).encode("utf-8", "backslashreplace")
    connection.sendall(len(body).to_bytes(_HEADER_BYTES, "big") + body)


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Read one message; None where the other side has closed.

    Raises:
        OSError: the connection broke.
    """
    header = _exactly(connection, _HEADER_BYTES)
    body = header and _exactly(connection, int.from_bytes(header, "big"))
    return json.loads(body) if body else None


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 20))
        if not part:
            return b""
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data`.

    Raises:
        OSError: it cannot be written.
    """
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
