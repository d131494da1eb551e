"""The engine's end of an engine process: `python -m ostinato_engines.engine_process SOCKET`.

Serves one server to one caller, and ends with it: whatever way the caller goes, this process shuts its engine down.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from importlib import metadata
from typing import Any

from ostinato_engines.engine_process import wire
from ostinato_engines.engine_process.wire import Answer, Build, Built, Call, Generate, Hello
from ostinato_engines.errors import EngineError, EngineNotReadyError
from ostinato_engines.loading import ENGINES, construct_server, engine_class, load_server_class
from ostinato_engines.server import AsyncServerBase
from ostinato_engines.types import PauseMode, TokenOutput, as_token_output


class Host:
    """One server and the calls to it that are under way."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._server: AsyncServerBase | None = None
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._methods: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "build": self._build,
            "generate": self._generate,
            "chat_completion": lambda raw: self._ready.chat_completion(wire.decode(raw, object)),
            "wake_up": lambda raw: self._ready.wake_up(wire.decode_names(raw)),
            "sleep": lambda raw: self._ready.sleep(wire.decode(raw, int)),
            "pause": lambda raw: self._ready.pause(wire.decode(raw, PauseMode)),
            "resume": lambda raw: self._ready.resume(),
            "abort": lambda raw: self._ready.abort(wire.decode_names(raw)),
            "receive_weights": self._receive_weights,
            "reset_prefix_cache": lambda raw: self._ready.reset_prefix_cache(),
            "health": lambda raw: self._ready.health(),
            "release": lambda raw: self._ready.release(wire.decode(raw, str)),
            "shutdown": lambda raw: self._ready.shutdown(),
        }

    @property
    def _ready(self) -> AsyncServerBase:
        if self._server is None:
            raise EngineNotReadyError("server must be built before it is called")
        return self._server

    async def run(self) -> None:
        """Answers calls until the caller is gone; then ends the engine."""
        wire.write(self._writer, Hello(wire.PROTOCOL, metadata.version("ostinato-engines")))
        try:
            while (request := await wire.read_request(self._reader)) is not None:
                if isinstance(request, Call):
                    task = asyncio.ensure_future(self._answer(request))
                    self._calls[request.number] = task
                    task.add_done_callback(lambda _, number=request.number: self._calls.pop(number, None))
                elif (task := self._calls.get(request.number)) is not None:
                    task.cancel()
        finally:
            for task in list(self._calls.values()):
                task.cancel()
            if self._server is not None:
                await self._server.shutdown()

    async def _answer(self, call: Call) -> None:
        try:
            answer = Answer(call.number, wire.encode_raw(await self._methods[call.method](call.argument)))
        except asyncio.CancelledError:
            answer = Answer(call.number, error="CancelledError", message="cancelled by the caller")
        # The border between two processes: the caller is told, whatever it is.
        except Exception as error:
            answer = Answer(call.number, error=_known_kind(error), message=str(error) or type(error).__name__)
        wire.write(self._writer, answer)
        await self._writer.drain()

    async def _build(self, raw: Any) -> Built:
        wanted = wire.decode(raw, Build)
        if wanted.engine in ENGINES:
            kind = engine_class(wanted.engine)
        else:
            place, _, name = wanted.engine.rpartition(":")
            kind = load_server_class(place, name)
        self._server = construct_server(kind, wanted.model, wanted.settings, required=wanted.required)
        await self._server.start()
        server = self._server
        return Built(server.capabilities(), server.max_model_len, server.policy_version, server.versions)

    async def _generate(self, raw: Any) -> TokenOutput:
        asked = wire.decode(raw, Generate)
        return as_token_output(await self._ready.generate(asked.prompt_ids, asked.sampling_params, asked.request_id))

    async def _receive_weights(self, raw: Any) -> None:
        from ostinato_engines.weight_transfer import WeightReceiver, connect, serve_weight_updates

        server = self._ready
        await serve_weight_updates(server, WeightReceiver(await asyncio.to_thread(connect, wire.decode(raw, str))))


def _known_kind(error: Exception) -> str:
    """The nearest class that the other end knows: a subclass of an engine's own crosses as its base."""
    if not isinstance(error, EngineError):
        return type(error).__name__
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == EngineError.__module__)


async def main(path: str) -> None:
    """Connects to the caller and serves it."""
    await Host(*await asyncio.open_unix_connection(path)).run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
