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


class Telling(TransformersServer):
    """Told `dies_at=2`, it is killed in the middle of that version; `absent_at`: it does not follow its route then; `kills_at`: a version, and
    the process that it kills before it follows its route."""

    def __init__(self, model: str, *, dies_at: int = -1, absent_at: int = -1) -> None:
        super().__init__(model, device="cpu")
        self.dies_at, self.absent_at, self.kills_at = dies_at, absent_at, (-1, 0)
        self.routes: list[str] = []

    @staticmethod
    def digest_of(tensor: Any) -> str:
        """Of a tensor's bytes."""
        return hashlib.sha256(as_bytes(tensor).numpy().data).hexdigest()

    def zero(self) -> None:
        """Leaves no weight as it is."""
        for tensor in self._weights.values():
            tensor.data.zero_()

    async def receive_weights(self, manifest: WeightManifest, route: WeightRoute) -> None:
        self.routes.append(type(route).__name__)
        version, victim = self.kills_at
        if manifest.version == version:
            os.kill(victim, signal.SIGKILL)
        if manifest.version == self.absent_at:
            await asyncio.Event().wait()
        await super().receive_weights(manifest, route)

    async def update_weights(self, manifest: WeightManifest, weights: Iterable[tuple[str, Any]]) -> None:
        await super().update_weights(manifest, self._read(manifest.version, weights))

    def _read(self, version: int, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        for place, named in enumerate(weights):
            if version == self.dies_at and place == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            yield named

    async def chat_completion(self, raw_request: Any) -> Any:
        digests = {name: self.digest_of(tensor) for name, tensor in self._weights.items()}
        return {"digests": digests, "routes": self.routes}

    @property
    def _weights(self) -> dict[str, Any]:
        assert self._engine is not None
        return self._engine.writer.parameters
