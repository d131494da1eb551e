"""Engines that actors make by class path: the embedded one, which tells what it has, and does at some versions what engines do at their worst."""

import asyncio
import hashlib
import os
import signal
from collections.abc import Iterable, Iterator
from typing import Any

from ostinato_engines import WeightManifest, WeightRoute
from ostinato_engines.transformers_server import TransformersServer
from ostinato_engines.weight_transfer.layout import as_bytes


def digest_of(tensor: Any) -> str:
    """Of a tensor's bytes."""
    return hashlib.sha256(as_bytes(tensor).numpy().data).hexdigest()


class Telling(TransformersServer):
    """Told `dies_at=2` it is killed in the middle of that version, which comes along a route; `absent_at`: it never fetches it."""

    def __init__(self, model: str, *, dies_at: int = -1, absent_at: int = -1) -> None:
        super().__init__(model, device="cpu")
        self._dies_at, self._absent_at, self.routes = dies_at, absent_at, []

    async def receive_weights(self, manifest: WeightManifest, route: WeightRoute) -> None:
        self.routes.append(type(route).__name__)
        if manifest.version == self._absent_at:
            await asyncio.Event().wait()
        await super().receive_weights(manifest, route)

    async def update_weights(self, manifest: WeightManifest, weights: Iterable[tuple[str, Any]]) -> None:
        await super().update_weights(manifest, self._read(manifest.version, weights))

    def _read(self, version: int, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        for place, named in enumerate(weights):
            if version == self._dies_at and place == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            yield named

    async def chat_completion(self, raw_request: Any) -> Any:
        assert self._writer is not None
        digests = {name: digest_of(tensor) for name, tensor in self._writer._tensors.items()}
        return {"digests": digests, "routes": self.routes}
