"""The receiving end: hands an engine the manifest, and then the tensors one by one as windows on the sender's slots.

Invariant: a stream that ends normally has given every tensor of the manifest exactly once, with its shape and dtype.
A tensor is valid until the next one is taken, and is empty from then on; what is kept must be copied.
"""

import os
import socket
from collections.abc import Generator, Iterator

from torch import Tensor

from ostinato_engines.errors import EngineError, WeightPeerLostError, WeightUpdateError
from ostinato_engines.second_errors import second_to
from ostinato_engines.types import WeightManifest
from ostinato_engines.weight_transfer.channel import (
    PROTOCOL,
    Accepted,
    Bucket,
    Channel,
    Done,
    Ended,
    Failed,
    MemoryOpened,
    Offer,
    Taken,
    close_all,
)
from ostinato_engines.weight_transfer.memory import SlotMemory, open_memory
from ostinato_engines.weight_transfer.progress import StreamProgress

_SAME_VERSION = "use the same version of this package at both ends"


class WeightReceiver:
    """Receives weight updates from one `WeightSender`; from one thread at a time, only `abort` may come from another.

    Args:
        connection: A connected Unix stream socket; the receiver owns it from then on.
        timeout_s: Longest wait for the sender within an update; between updates the wait has no end.
    """

    def __init__(self, connection: socket.socket, *, timeout_s: float = 60.0) -> None:
        self._channel = Channel(connection, timeout_s=timeout_s, peer="sender of weights")
        self._memory = _Kept()

    def next_update(self, *, forever: bool = True) -> "IncomingUpdate | None":
        """Waits for an offer; None once the sender has said goodbye.

        Args:
            forever: Wait as long as it takes; else no longer than within an update.

        Raises:
            WeightPeerLostError: The sender speaks something else.
            WeightUpdateTimeoutError: It is silent.
        """
        while (received := self._channel.receive(forever=forever)) is not None:
            message, descriptors = received
            close_all(descriptors)
            # Anything else belongs to an update that has failed here.
            if not isinstance(message, Offer):
                continue
            if message.protocol == PROTOCOL:
                try:
                    return IncomingUpdate(self._channel, message, self._memory)
                except EngineError as error:
                    self._channel.send(Failed(message.update, type(error).__name__, str(error)))
                    continue
            refusal = f"protocol must be {PROTOCOL}, got {message.protocol}; use the same version of this package"
            self._channel.send(Failed(message.update, WeightUpdateError.__name__, refusal))
        return None

    def abort(self) -> None:
        """Ends the conversation at once, from any thread; whoever waits for the sender learns of it."""
        self._channel.abort()

    def close(self) -> None:
        """Says goodbye; the sender's next `send` raises `WeightPeerLostError`."""
        self._channel.close()
        self._memory.replace(None)


class _Kept:
    """The memory that the sender opened last, which it may use again."""

    def __init__(self) -> None:
        self.memory: SlotMemory | None = None

    def replace(self, memory: SlotMemory | None) -> None:
        before, self.memory = self.memory, memory
        if before is not None:
            before.close()


class IncomingUpdate:
    """One offered update: iterate it once for the tensors, then call `finish` or `fail`.

    Taking the first tensor accepts the manifest; until then nothing is sent.

    Raises:
        ManifestError: The manifest names a tensor twice.
    """

    def __init__(self, channel: Channel, offer: Offer, kept: _Kept) -> None:
        self.manifest: WeightManifest = offer.manifest
        self._channel = channel
        self._kept = kept
        self._update = offer.update
        self._progress = StreamProgress(offer.manifest)
        self._stream: Generator[tuple[str, Tensor], None, None] | None = None
        self._complete = False
        self._is_over = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self._stream is not None or self._is_over:
            raise WeightUpdateError("weights must be read once, got a second reading; send the update again")
        self._stream = self._read()
        return self._stream

    def finish(self) -> None:
        """Tells the sender that the new weights serve.

        Raises:
            WeightUpdateError: The stream was not read to its end.
        """
        if not self._complete:
            error = WeightUpdateError(
                f"engine must read all weights before it serves them, got {self._progress}; it ignored the rest"
            )
            self.fail(error)
            raise error
        self._end()
        self._channel.send(Done(self._update))

    def fail(self, error: BaseException) -> None:
        """Tells the sender why the engine refused the manifest, or could not take the weights; the first word counts."""
        if self._is_over:
            return
        self._end()
        self._channel.send(Failed(self._update, type(error).__name__, str(error)))

    def _end(self) -> None:
        self._is_over = True
        if self._stream is not None:
            self._stream.close()

    def _read(self) -> Generator[tuple[str, Tensor], None, None]:
        self._channel.send(Accepted(self._update, os.getpid()))
        try:
            yield from self._buckets()
        except BaseException as error:
            with second_to(error, "freeing the memory of the update"):
                self._kept.replace(None)
            raise
        if self._kept.memory is not None and not self._kept.memory.is_kept:
            self._kept.replace(None)
        self._progress.finish()
        self._complete = True

    def _buckets(self) -> Generator[tuple[str, Tensor], None, None]:
        num_buckets = 0
        while not isinstance(message := self._next(), Ended):
            if isinstance(message, Bucket):
                self._check_order(message.index, num_buckets)
                yield from self._tensors(message)
                num_buckets += 1
        self._check_order(message.num_buckets, num_buckets)

    def _tensors(self, bucket: Bucket) -> Generator[tuple[str, Tensor], None, None]:
        memory = self._kept.memory
        if memory is None or not 0 <= bucket.slot < memory.num_slots:
            raise WeightUpdateError(
                f"slot must be one of the memory that was opened, got {bucket.slot}; {_SAME_VERSION}"
            )
        for entry in bucket.entries:
            tensor = memory.open_window(bucket.slot, entry.offset, self._progress.take(entry.name))
            yield entry.name, tensor
            memory.close_window(entry.name, tensor)
        memory.settle()
        self._channel.send(Taken(self._update, bucket.slot))

    def _check_order(self, index: int, expected: int) -> None:
        if index != expected:
            raise WeightUpdateError(
                f"buckets must come in order, got number {index} after {expected} of them; send a complete update"
            )

    def _next(self) -> Bucket | Ended | None:
        """The sender's next message of this update; None after new memory, which is opened."""
        received = self._channel.receive()
        if received is None:
            self._channel.abort()
            raise WeightPeerLostError(
                f"sender of weights must stay until the update is done, went away after {self._progress}; connect anew"
            )
        message, descriptors = received
        try:
            if message.update == self._update:
                if isinstance(message, Bucket | Ended):
                    return message
                if isinstance(message, MemoryOpened):
                    self._kept.replace(open_memory(message, descriptors))
                    return None
                if isinstance(message, Failed):
                    raise WeightUpdateError(
                        f"sender of weights must stream to their end, got {message.error}: {message.message} after "
                        f"{self._progress}; send a complete update"
                    )
        finally:
            close_all(descriptors)
        self._channel.abort()
        raise WeightPeerLostError(
            f"sender of weights must send buckets of update {self._update}, got {message!r:.200}; {_SAME_VERSION}"
        )
