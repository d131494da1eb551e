"""`WeightOutlets`: a rank's end of the routes by which weights go to the workers of engines.

Invariants: a layer is gathered once, whoever gets it, and none before every outlet is done with the one before; all ranks gather alike, whatever
becomes of their outlets; and what one worker does ends its own outlet and no other. While one rank waits for a worker, the ranks go on exchanging
that they wait: how long a worker takes has nothing to do with how long an exchange may.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from ostinato_engines import CollectiveRoute, WeightManifest, WeightUpdateError
from ostinato_engines.device import HOST, set_device
from ostinato_engines.weight_transfer import (
    LOADING_S,
    SENDING_S,
    BroadcastSender,
    KeptGroup,
    MemoryKind,
    WeightListener,
    WeightSender,
)
from ostinato_engines.weight_transfer.memory import memory_on
from ostinato_trainer.heartbeat import beat

logger = logging.getLogger(__name__)

COLLECTIVE: Final = "broadcast"
"""The outlet to all that take part in a broadcast."""
_CONNECT_S: Final = 60.0
"""Longest wait for a worker to come."""
_SOURCE_S: Final = SENDING_S - 60.0
"""Longest wait of an outlet for the next tensors, for which another outlet waits for its worker: its own worker waits for longer, and hears why."""
_EXCHANGE_S: Final = 1.0
"""How often ranks exchange that they wait."""

Tensors = Sequence[tuple[str, Tensor]]


class SendOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank is to send, and where; all ranks get an order at once."""

    manifest: WeightManifest
    sockets: Mapping[str, bool]
    """Those of the sockets that `listen` has opened, by name, and whether whoever is behind them shares this rank's device."""
    route: CollectiveRoute | None
    """Of rank 0: where to broadcast."""
    everywhere: bool
    """Whether a rank beyond the first has something to send: the same in all orders."""


class _Sender(Protocol):
    def send(self, manifest: WeightManifest, weights: Iterator[tuple[str, Tensor]]) -> None: ...

    def close(self) -> None: ...


class WeightOutlets:
    """Those of one rank.

    Args:
        device: Of the rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._kept = device, KeptGroup(str(device))
        self._listeners: dict[str, WeightListener] = {}

    def listen(self, names: Sequence[str]) -> dict[str, str]:
        """Opens a socket for each worker, in the place of those that were there before; paths by name."""
        self._stop_listening()
        self._listeners = {name: WeightListener() for name in names}
        return {name: str(listener.path) for name, listener in self._listeners.items()}

    def send(
        self, order: SendOrder, weights_of: Callable[[bool], Iterator[Sequence[tuple[str, Tensor]]]]
    ) -> dict[str, str]:
        """Sends what the manifest names to all who come. Collective.

        Args:
            order: Of this rank.
            weights_of: The whole tensors of the model in order, some at a time; whether all ranks need them.

        Returns:
            What went wrong, by outlet; empty where the new weights serve.
        """
        outlets = [
            _Outlet(name, self._over_socket(self._listeners[name], shares), self._device, order.manifest)
            for name, shares in order.sockets.items()
        ]
        if order.route is not None:
            kept, route = self._kept, order.route
            outlets.append(_Outlet(COLLECTIVE, lambda: BroadcastSender(route, kept), self._device, order.manifest))
        try:
            wanted = {spec.name for spec in order.manifest.tensors}
            self._wait_for(outlets)
            ready = [outlet for outlet in outlets if not outlet.is_over]
            if self._any_rank(bool(ready)):
                for tensors in weights_of(order.everywhere):
                    chosen = [(name, tensor) for name, tensor in tensors if name in wanted]
                    del tensors
                    for outlet in ready if chosen else ():
                        outlet.give(chosen)
                    self._wait_for(ready)
                    del chosen
                    beat()
            return {outlet.name: outlet.ended() for outlet in outlets}
        finally:
            for outlet in outlets:
                outlet.break_off()
            self._stop_listening()

    def _over_socket(self, listener: WeightListener, shares_device: bool) -> Callable[[], _Sender]:
        def connected() -> WeightSender:
            connection = listener.accept(timeout_s=_CONNECT_S)
            kind, device = memory_on(str(self._device)) if shares_device else (MemoryKind.SHARED, HOST)
            return WeightSender(connection, memory=kind, device=device, timeout_s=LOADING_S)

        return connected

    def _wait_for(self, outlets: Sequence[_Outlet]) -> None:
        """Returns once no outlet of any rank has anything that is still read. Collective."""
        is_waiting = True
        while is_waiting:
            deadline = time.monotonic() + _EXCHANGE_S
            is_waiting = self._any_rank(not all(outlet.has_taken(deadline) for outlet in outlets))

    def _any_rank(self, is_so: bool) -> bool:
        """Whether it is so on any of the ranks; by way of the host, since the device may be in a broadcast. Collective."""
        found = torch.tensor([int(is_so)])
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found.item())

    def _stop_listening(self) -> None:
        for listener in self._listeners.values():
            listener.close()
        self._listeners = {}


class _Outlet:
    """A thread that sends what it is given to one reader, or to a group."""

    def __init__(
        self, name: str, connect: Callable[[], _Sender], device: torch.device, manifest: WeightManifest
    ) -> None:
        self.name = name
        self._connect, self._device, self._manifest = connect, device, manifest
        self._changed = threading.Condition()
        self._given: Tensors | None = None
        self._asks = self._is_over = self._is_complete = False
        self._error = ""
        self._thread = threading.Thread(target=self._run, name=f"weights {name}", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether its reader wants nothing more."""
        with self._changed:
            return self._is_over

    def give(self, tensors: Tensors) -> None:
        """The next tensors, which must stay until they are taken."""
        with self._changed:
            if not self._is_over:
                self._given, self._asks = tensors, False
                self._changed.notify_all()

    def has_taken(self, deadline: float) -> bool:
        """Waits until the reader wants the next tensors, or never will; False where it still reads, or has not come, at the deadline."""
        with self._changed:
            limit_s = max(0.0, deadline - time.monotonic())
            return self._changed.wait_for(lambda: self._asks or self._is_over, limit_s)

    def ended(self) -> str:
        """Says that nothing more comes, and waits for what became of it; empty where all is well."""
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_over)
        return self._error

    def break_off(self) -> None:
        """Nothing more comes, if it has not ended."""
        with self._changed:
            if not self._is_over and not self._is_complete:
                self._error = self._error or "the ranks failed"
                self._is_complete = True
                self._changed.notify_all()

    def _run(self) -> None:
        try:
            set_device(self._device)
            sender = self._connect()
            try:
                sender.send(self._manifest, self._read())
            finally:
                sender.close()
        except Exception as error:  # the boundary of this reader: it is reported, and the others go on
            self._error = f"{type(error).__name__}: {error}"
        finally:
            with self._changed:
                self._is_over, self._given = True, None
                self._changed.notify_all()

    def _read(self) -> Iterator[tuple[str, Tensor]]:
        while True:
            tensors = self._next()
            if tensors is None:
                return
            yield from tensors
            del tensors

    def _next(self) -> Tensors | None:
        """What is given next, now that the last is taken; None after all."""
        with self._changed:
            self._given, self._asks = None, True
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._given is not None or self._is_complete, _SOURCE_S):
                raise WeightUpdateError(f"ranks must gather within {_SOURCE_S:g} s, got nothing; see their logs")
            return self._given
