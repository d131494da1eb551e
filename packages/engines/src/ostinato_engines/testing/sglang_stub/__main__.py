"""Starts the stub: `python -m ostinato_engines.testing.sglang_stub`, with SGLang's arguments."""

import asyncio
import sys

from ostinato_engines.testing.sglang_stub.arguments import load_plugins, read_arguments
from ostinato_engines.testing.sglang_stub.endpoints import Endpoints
from ostinato_engines.testing.sglang_stub.model import Model
from ostinato_engines.testing.sglang_stub.web import WebServer


async def main() -> None:
    """Serves until it is ended."""
    arguments = read_arguments(sys.argv[1:], load_plugins())
    model = Model(
        arguments.model_path,
        dtype=arguments.dtype,
        context_length=arguments.context_length,
        max_running_requests=arguments.max_running_requests,
    )
    await model.engine.start()
    endpoints = Endpoints(model, arguments)
    await WebServer(endpoints.routes, arguments.api_key).serve(arguments.host, arguments.port)


if __name__ == "__main__":
    asyncio.run(main())
