"""A server whose engine is elsewhere, and the table by which the other end answers for it.

Both ends of a process border use it: `ForwardingServer` turns each method of the contract into one named call with plain
arguments, `answers_of` turns such a call into the method again, and errors cross by class name and message. How a call
travels, and how `generate` does, is not known here.
"""

import asyncio
import importlib
import socket
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ostinato_engines import errors
from ostinato_engines.chat import decoded_body
from ostinato_engines.errors import EngineCrashedError, EngineError, UnsupportedError
from ostinato_engines.server import AsyncServerBase
from ostinato_engines.types import PauseMode, WeightManifest
from ostinato_engines.weight_routes import WeightRoute

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
AnswerCall = Callable[[msgspec.Raw], Awaitable[Any]]

_CONNECT_S = 120.0


class ForwardingServer(AsyncServerBase):
    """Every method but `generate` and those of its life is asked of the other end."""

    @abstractmethod
    async def _ask(self, method: str, argument: Any, kind: type[T]) -> T:
        """Has the other end call a method of its server.

        Args:
            method: A key of `answers_of`.
            argument: A plain value.
            kind: Of the answer.

        Raises:
            EngineError: As the method at the other end, or because the other end cannot be asked.
        """

    async def chat_completion(self, raw_request: Any) -> Any:
        """What the engine's own `chat_completion` says to the decoded body; its answer must be plain values."""
        return await self._ask("chat_completion", await decoded_body(raw_request), object)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        await self._ask("wake_up", None if tags is None else list(tags), object)

    async def sleep(self, level: int = 1) -> None:
        await self._ask("sleep", level, object)

    async def pause(self, mode: PauseMode = PauseMode.ABORT) -> None:
        await self._ask("pause", PauseMode(mode), object)

    async def resume(self) -> None:
        await self._ask("resume", None, object)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        return await self._ask("abort", None if request_ids is None else list(request_ids), int)

    async def reset_prefix_cache(self) -> None:
        await self._ask("reset_prefix_cache", None, object)

    async def update_weights(self, manifest: WeightManifest, weights: "Iterable[tuple[str, Tensor]]") -> None:
        """Streams through memory that both processes of this host share; see `AsyncServerBase.update_weights`."""
        if not self.capabilities().weight_update:
            engine = self.capabilities().engine
            raise UnsupportedError(f"{engine} cannot update its weights; start a new one from a checkpoint")
        from ostinato_engines.weight_transfer import LOADING_S, WeightListener, WeightSender, send_weights

        with WeightListener() as listener:
            receiving = asyncio.ensure_future(self._ask("receive_weights", str(listener.path), object))
            connecting = asyncio.ensure_future(asyncio.to_thread(listener.accept, timeout_s=_CONNECT_S))
            try:
                await asyncio.wait([receiving, connecting], return_when=asyncio.FIRST_COMPLETED)
                if receiving.done():
                    await receiving
                sender = WeightSender(await asyncio.shield(connecting), timeout_s=LOADING_S)
                try:
                    await send_weights(sender, manifest, weights)
                finally:
                    sender.close()
            finally:
                await _end_wait(connecting, listener.path)
                with suppress(EngineError):
                    await receiving

    async def receive_weights(self, manifest: WeightManifest, route: WeightRoute) -> None:
        await self._ask("receive_along_route", _AlongRoute(manifest, route), object)


class _AlongRoute(msgspec.Struct, frozen=True):
    """What `receive_weights` is asked with."""

    manifest: WeightManifest
    route: WeightRoute


async def _end_wait(connecting: "asyncio.Future[socket.socket]", path: Path) -> None:
    """Lets a thread go that waits for an end which will not come: its own caller comes instead. What came is closed."""
    with suppress(EngineError):
        if not connecting.done():
            from ostinato_engines.weight_transfer import connect

            await asyncio.to_thread(lambda: connect(path).close())
    with suppress(EngineError):
        (await connecting).close()


def answers_of(server: AsyncServerBase) -> dict[str, AnswerCall]:
    """The calls that a `ForwardingServer` makes, by name; each takes an encoded argument.

    A call raises `msgspec.ValidationError` where its argument is not what the method takes.
    """

    async def receive_weights(raw: msgspec.Raw) -> None:
        # It imports torch, which takes seconds where nobody has yet: too long for a loop that gives signs of life.
        transfer = await asyncio.to_thread(importlib.import_module, "ostinato_engines.weight_transfer")
        connection = await asyncio.to_thread(transfer.connect, _decoded(raw, str))
        receiver = transfer.WeightReceiver(connection, timeout_s=transfer.LOADING_S)
        await transfer.serve_weight_updates(server, receiver)

    async def receive_along_route(raw: msgspec.Raw) -> None:
        asked = _decoded(raw, _AlongRoute)
        transfer = await asyncio.to_thread(importlib.import_module, "ostinato_engines.weight_transfer")
        try:
            await server.receive_weights(asked.manifest, asked.route)
        except BaseException as error:
            await asyncio.to_thread(transfer.decline, asked.route, f"{type(error).__name__}: {error}")
            raise

    return {
        "chat_completion": lambda raw: server.chat_completion(_decoded(raw, object)),
        "wake_up": lambda raw: server.wake_up(_decoded_names(raw)),
        "sleep": lambda raw: server.sleep(_decoded(raw, int)),
        "pause": lambda raw: server.pause(_decoded(raw, PauseMode)),
        "resume": lambda raw: server.resume(),
        "abort": lambda raw: server.abort(_decoded_names(raw)),
        "receive_weights": receive_weights,
        "receive_along_route": receive_along_route,
        "reset_prefix_cache": lambda raw: server.reset_prefix_cache(),
        "health": lambda raw: server.health(),
        "release": lambda raw: server.release(_decoded(raw, str)),
        "shutdown": lambda raw: server.shutdown(),
    }


def error_name(error: BaseException) -> str:
    """The name under which an error crosses: of the nearest class that the other end knows."""
    kinds = type(error).__mro__
    return next((kind.__name__ for kind in kinds if kind.__module__ == errors.__name__), kinds[0].__name__)


def error_named(name: str, message: str) -> EngineError:
    """The error that crossed, as one of this process; what is not of the engines' tree is an `EngineCrashedError`."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, EngineError):
        return kind(message)
    return EngineCrashedError(f"engine must serve the call, got {name}: {message}; see its log")


def _decoded(raw: msgspec.Raw, kind: type[T]) -> T:
    return msgspec.msgpack.decode(raw, type=kind)


def _decoded_names(raw: msgspec.Raw) -> list[str] | None:
    return msgspec.msgpack.decode(raw, type=list[str] | None)
