"""As much of an HTTP server as the protocol needs: JSON in, JSON out. Knows no engine."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec


class Request(msgspec.Struct, frozen=True):
    """One call."""

    body: dict[str, Any]
    query: Mapping[str, str]


class Response(msgspec.Struct, frozen=True):
    """One answer: `content` as JSON, a text as it is."""

    content: Any = ""
    status: int = 200


Handler = Callable[[Request], Awaitable[Response]]


class WebServer:
    """Answers one call per connection; a caller that goes away cancels its call.

    Args:
        routes: By method and path.
        key: That callers bear; an empty one lets everybody in.
    """

    def __init__(self, routes: Mapping[tuple[str, str], Handler], key: str) -> None:
        self._routes = routes
        self._key = key

    async def serve(self, host: str, port: int) -> None:
        """Serves until it is cancelled."""
        server = await asyncio.start_server(self._connection, host, port, backlog=4096)
        async with server:
            await server.serve_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, target, _ = head[0].split(" ")
            fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
            raw = await reader.readexactly(int(fields.get("content-length", 0)))
            answering = asyncio.ensure_future(self._answer(method, target, fields, raw))
            leaving = asyncio.ensure_future(reader.read())
            await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
            if not answering.done():
                answering.cancel()
                await asyncio.wait([answering])
                return
            response = answering.result()
            text = response.content if isinstance(response.content, str) else json.dumps(response.content)
            body = text.encode()
            writer.write(
                f"HTTP/1.1 {response.status} X\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
                + body
            )
            await writer.drain()
        writer.close()

    async def _answer(self, method: str, target: str, fields: Mapping[str, str], raw: bytes) -> Response:
        url = urlsplit(target)
        if self._key and fields.get("authorization") != f"Bearer {self._key}":
            return Response({"error": "Unauthorized"}, 401)
        handler = self._routes.get((method, url.path))
        if handler is None:
            known = any(path == url.path for _, path in self._routes)
            return Response({"detail": "Method Not Allowed" if known else "Not Found"}, 405 if known else 404)
        try:
            body = json.loads(raw) if raw else {}
        except ValueError as error:
            return Response({"object": "error", "message": str(error), "type": "Bad Request", "code": 400}, 400)
        return await handler(Request(body, {name: values[-1] for name, values in parse_qs(url.query).items()}))
