"""The engine's end of an engine process: `python -m ostinato_engines.engine_process SOCKET`.

Serves one server to one caller, and ends with it: whatever way the caller goes, this process shuts its engine down.
"""

import asyncio
import sys
from importlib import metadata
from typing import Any

from ostinato_engines.engine_process import wire
from ostinato_engines.engine_process.wire import Answer, Build, Built, Call, Generate, Hello
from ostinato_engines.errors import EngineNotReadyError
from ostinato_engines.forwarding import AnswerCall, answers_of, error_name
from ostinato_engines.loading import construct_server, server_class_of
from ostinato_engines.server import AsyncServerBase
from ostinato_engines.types import TokenOutput, as_token_output


class Host:
    """One server and the calls to it that are under way."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._server: AsyncServerBase | None = None
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._methods: dict[str, AnswerCall] = {"build": self._build}

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
            method = self._methods.get(call.method)
            if method is None:
                raise EngineNotReadyError(f"server must be built before {call.method} is called")
            answer = Answer(call.number, wire.encode_raw(await method(call.argument)))
        except asyncio.CancelledError:
            answer = Answer(call.number, error="CancelledError", message="cancelled by the caller")
        # The border between two processes: the caller is told, whatever it is.
        except Exception as error:
            answer = Answer(call.number, error=error_name(error), message=str(error) or type(error).__name__)
        wire.write(self._writer, answer)
        await self._writer.drain()

    async def _build(self, raw: Any) -> Built:
        wanted = wire.decode(raw, Build)
        kind = server_class_of(wanted.engine)
        self._server = server = construct_server(kind, wanted.model, wanted.settings, required=wanted.required)
        await server.start()
        self._methods |= answers_of(server) | {"generate": lambda raw: _generate(server, raw)}
        return Built(server.capabilities(), server.max_model_len, server.policy_version, server.versions)


async def _generate(server: AsyncServerBase, raw: Any) -> TokenOutput:
    asked = wire.decode(raw, Generate)
    return as_token_output(await server.generate(asked.prompt_ids, asked.sampling_params, asked.request_id))


async def main(path: str) -> None:
    """Connects to the caller and serves it."""
    await Host(*await asyncio.open_unix_connection(path)).run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
