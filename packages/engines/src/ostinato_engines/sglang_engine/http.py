"""JSON over HTTP to a server on this machine: one connection per call, which ends with the call. Knows no endpoint."""

import asyncio
from typing import Any

import msgspec

LOOPBACK = "127.0.0.1"
_HEAD_BYTES = 64 << 10


class Reply(msgspec.Struct, frozen=True):
    """What came back."""

    status: int
    body: bytes

    @property
    def is_success(self) -> bool:
        """Whether the server did what was asked."""
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        """The body for people, shortened; of an error the message in it."""
        try:
            error = msgspec.json.decode(self.body, type=_Error)
            text = error.message or error.detail or error.error.get("message") or self.body.decode(errors="replace")
        except (msgspec.DecodeError, UnicodeDecodeError):
            text = self.body.decode(errors="replace")
        return f"{text:.1000}".strip() or f"status {self.status}"


class _Error(msgspec.Struct, frozen=True):
    """The forms in which SGLang tells what is wrong."""

    message: str = ""
    detail: str = ""
    error: dict[str, Any] = {}


class LocalClient:
    """Asks one server.

    Args:
        port: Of the loopback interface.
        key: Sent as the bearer of every request.
    """

    def __init__(self, port: int, key: str) -> None:
        self._port = port
        self._key = key

    async def get(self, path: str, *, timeout_s: float | None) -> Reply:
        """`GET path`; see `post`."""
        return await self._exchange("GET", path, b"", timeout_s)

    async def post(self, path: str, body: Any = None, *, timeout_s: float | None) -> Reply:
        """`POST path`; cancelling it closes the connection.

        Args:
            path: With its query.
            body: Encoded as JSON; None sends nothing.
            timeout_s: For the whole call; None waits as long as the connection lives.

        Raises:
            ConnectionError: Nobody listens, the connection broke off, or what came is not HTTP.
            TimeoutError: No answer in time.
            OSError: No connection could be made.
        """
        return await self._exchange("POST", path, b"" if body is None else msgspec.json.encode(body), timeout_s)

    async def _exchange(self, method: str, path: str, body: bytes, timeout_s: float | None) -> Reply:
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {LOOPBACK}:{self._port}\r\nAuthorization: Bearer {self._key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(LOOPBACK, self._port, limit=_HEAD_BYTES)
            try:
                writer.write(head.encode() + body)
                await writer.drain()
                return await _read_reply(reader)
            except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, IndexError) as error:
                raise ConnectionError(f"{method} {path} broke off: {error}") from error
            finally:
                writer.close()


async def _read_reply(reader: asyncio.StreamReader) -> Reply:
    status_line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    fields = dict(line.lower().split(":", 1) for line in lines if ":" in line)
    status = int(status_line.split()[1])
    if "chunked" in fields.get("transfer-encoding", ""):
        return Reply(status, await _read_chunks(reader))
    return Reply(status, await reader.readexactly(int(fields.get("content-length", 0))))


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    return bytes(body)
