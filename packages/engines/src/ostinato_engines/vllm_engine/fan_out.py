"""One stream of weights to the workers of an engine: each gets every tensor, and takes the part of it that it holds.

Invariant: one tensor of the source lives at a time, and none is replaced before every worker has its copy.
"""

import asyncio
import itertools
import logging
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from ostinato_engines import device as devices
from ostinato_engines.types import WeightManifest
from ostinato_engines.weight_routes import WeightPlace
from ostinato_engines.weight_transfer import LOADING_S, MemoryKind, WeightListener, WeightSender
from ostinato_engines.weight_transfer.memory import memory_on

logger = logging.getLogger(__name__)

_SAID = {MemoryKind.DEVICE: "the device's", MemoryKind.SHARED: "the host's"}
CONNECT_S = 60.0


class _Arrivals:
    """The connections of workers; none is left open once it is closed, whichever thread gets it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self._is_over = False

    def accept(self, listener: WeightListener) -> socket.socket:
        """See `WeightListener.accept`."""
        connection = listener.accept(timeout_s=CONNECT_S)
        with self._lock:
            self._connections.append(connection)
            if self._is_over:
                connection.close()
        return connection

    def close(self) -> None:
        """Workers that still wait for something learn that nothing comes."""
        with self._lock:
            self._is_over = True
            for connection in self._connections:
                connection.close()


class _Shared:
    """An iterable that several threads read in step."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], num_readers: int) -> None:
        self._source = iter(weights)
        self._item: tuple[str, Tensor] | None = None
        self._step = threading.Barrier(num_readers, action=self._fetch)

    def peek(self) -> Tensor | None:
        """The first tensor, which is still read afterwards; None if there is none to be had: reading then says why."""
        try:
            first = next(self._source, None)
        # The border to foreign code: the sender reports its errors, when it comes to them.
        except Exception as error:
            self._source = _raising(error)
            return None
        if first is None:
            return None
        self._source = itertools.chain([first], self._source)
        return first[1]

    def _fetch(self) -> None:
        self._item = None
        self._item = next(self._source, None)

    def read(self) -> Iterator[tuple[str, Tensor]]:
        while True:
            self._step.wait()
            if self._item is None:
                return
            yield self._item

    def send(self, sender: WeightSender, manifest: WeightManifest) -> None:
        """Sends all to one worker; a failure ends the others' sending too."""
        try:
            sender.send(manifest, self.read())
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Ends everybody's reading."""
        self._step.abort()


async def send_to_all(
    listeners: Sequence[WeightListener],
    manifest: WeightManifest,
    weights: Iterable[tuple[str, Tensor]],
    workers: Sequence[WeightPlace] = (),
) -> None:
    """Streams to the workers that connect to these listeners; returns once the new weights serve in all.

    Args:
        listeners: One a worker.
        manifest: What is sent.
        weights: The tensors.
        workers: Where the workers have theirs; not known where empty.

    Raises:
        WeightUpdateError: A worker did not come, or failed, or the source did.
    """
    loop = asyncio.get_running_loop()
    shared = _Shared(weights, len(listeners))
    # A pool of its own: with fewer threads than readers, none would get on.
    pool = ThreadPoolExecutor(len(listeners), thread_name_prefix="weights")
    senders: list[WeightSender] = []
    arrivals = _Arrivals()
    try:
        accepted = [loop.run_in_executor(pool, arrivals.accept, listener) for listener in listeners]
        kind, device = await loop.run_in_executor(pool, lambda: memory_for(shared.peek(), workers))
        logger.info(
            "Weights of version %d go to %d vLLM worker(s) through %s memory",
            manifest.version,
            len(listeners),
            _SAID[kind],
        )
        for outcome in await asyncio.gather(*accepted, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
            senders.append(WeightSender(outcome, memory=kind, device=device, timeout_s=LOADING_S))
        sends = [loop.run_in_executor(pool, shared.send, sender, manifest) for sender in senders]
        try:
            outcomes = await asyncio.shield(asyncio.gather(*sends, return_exceptions=True))
        except asyncio.CancelledError:
            for sender in senders:
                sender.abort()
            shared.abort()
            await asyncio.wait(sends)
            raise
        _raise_first([outcome for outcome in outcomes if outcome is not None])
    finally:
        for sender in senders:
            sender.close()
        arrivals.close()
        pool.shutdown(wait=False)


def memory_for(tensor: Tensor | None, workers: Sequence[WeightPlace] = ()) -> tuple[MemoryKind, str]:
    """Where buckets go, and the device: a device's memory for weights that lie there, if processes can share it and no worker has another."""
    device = devices.HOST if tensor is None else str(tensor.device)
    if any(worker != devices.place_of(device) for worker in workers):
        device = devices.HOST
    return memory_on(device)


def _raising(error: Exception) -> Iterator[tuple[str, Tensor]]:
    raise error
    yield


def _raise_first(errors: Sequence[BaseException]) -> None:
    """Raises the error that began it: those whose reading was ended only followed."""
    followed = threading.BrokenBarrierError
    first = [error for error in errors if not isinstance(error.__cause__, followed)]
    for error in first or errors:
        raise error
