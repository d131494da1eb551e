"""A replica in a process of its own: `python -m ostinato_rollout.transport ENGINE MODEL`.

Prints the address that it serves at, and serves until it is shut down by a `RemoteServer`, or interrupted; a second
interrupt does not wait for the engine's end.
"""

import argparse
import asyncio
import os
import signal
import sys

import msgspec

from ostinato_engines.loading import construct_server, server_class_of
from ostinato_rollout.transport.service import LOOPBACK, ReplicaService
from ostinato_rollout.transport.wire import SILENCE_S

KEY_VARIABLE = "OSTINATO_REPLICA_KEY"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHUTDOWN_S = 60.0


async def serve(options: argparse.Namespace) -> None:
    """Serves one replica to its end."""
    settings = msgspec.json.decode(options.settings, type=dict[str, object])
    server = construct_server(server_class_of(options.engine), options.model, settings, required=settings)
    service = ReplicaService(
        server, options.address, key=os.environ.get(KEY_VARIABLE) or None, silence_s=options.silence_s
    )
    loop = asyncio.get_running_loop()
    serving = asyncio.ensure_future(service.wait_closed())
    for number in _SIGNALS:
        loop.add_signal_handler(number, serving.cancel)
    try:
        async with service:
            sys.stdout.write(f"{service.address}\n")
            sys.stdout.flush()
            await asyncio.wait([serving])
    finally:
        # A second signal ends the process at once.
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
        async with asyncio.timeout(_SHUTDOWN_S):
            await server.shutdown()


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m ostinato_rollout.transport",
        description="Serve one replica to other processes.",
        epilog=f"A key that others must have too is taken from the variable {KEY_VARIABLE}.",
    )
    parser.add_argument("engine", help="transformers, vllm, ...; or module:Class, file.py:Class")
    parser.add_argument("model", help="path of a checkpoint")
    parser.add_argument("--address", default=LOOPBACK, help="tcp://HOST:PORT or ipc:///PATH (default: %(default)s)")
    parser.add_argument("--settings", default="{}", help="what the engine takes by name, as a JSON object")
    parser.add_argument("--silence-s", type=float, default=SILENCE_S, help="a caller silent for so long has gone")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
