"""The sending end: offers a manifest and, once it is accepted, streams the tensors through a few reused slots.

Invariant: memory is bounded by `NUM_SLOTS` slots and one tensor of the source at a time, whatever the model's size. On a device,
where memory is scarce, a tensor that is larger than a bucket goes through memory for it alone, and nothing else is there then.
"""

import itertools
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from torch import Tensor

from ostinato_engines import device as devices
from ostinato_engines import errors as engine_errors
from ostinato_engines.errors import (
    EngineError,
    EngineInputError,
    WeightPeerLostError,
    WeightUpdateError,
    WeightUpdateTimeoutError,
)
from ostinato_engines.second_errors import second_to
from ostinato_engines.types import TensorSpec, WeightManifest
from ostinato_engines.weight_transfer.channel import (
    Accepted,
    Bucket,
    Channel,
    Done,
    Ended,
    Entry,
    Failed,
    MemoryOpened,
    Offer,
    Taken,
    close_all,
)
from ostinato_engines.weight_transfer.layout import aligned, num_bytes_of, slot_bytes_for, window
from ostinato_engines.weight_transfer.memory import MemoryKind, SlotMemory, create_memory
from ostinato_engines.weight_transfer.progress import StreamProgress

NUM_SLOTS = 2
"""One is filled while the other is read."""
DEFAULT_BUCKET_BYTES = {MemoryKind.SHARED: 4 << 20, MemoryKind.DEVICE: 64 << 20}
"""Of the host's memory so little that it stays in the processor's cache between writing and reading; a device copies so
fast that what counts is how often it is waited for."""

Answer = TypeVar("Answer", Accepted, Taken, Done)


class WeightSender:
    """Sends weight updates to one `WeightReceiver`, one at a time; `abort` may come from another thread.

    Args:
        connection: A connected Unix stream socket; the sender owns it from then on.
        memory: Where buckets lie.
        device: For `MemoryKind.DEVICE`, the device.
        bucket_bytes: Of one bucket; two exist at a time. A larger tensor makes them as large as it needs. By default what
            is fast in that memory: 4 MiB of the host's, 64 MiB of a device's.
        timeout_s: Longest wait for an answer: to accept, to empty a bucket, to serve the new weights.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        memory: MemoryKind = MemoryKind.SHARED,
        device: str = "auto",
        bucket_bytes: int | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._kind = MemoryKind(memory)
        if bucket_bytes is None:
            bucket_bytes = DEFAULT_BUCKET_BYTES[self._kind]
        if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            raise EngineInputError(f"bucket_bytes must be an integer of at least 1, got {bucket_bytes!r}; leave it out")
        self._device = devices.pick_device(device)
        if self._kind is MemoryKind.DEVICE and not devices.shares_memory(self._device):
            raise EngineInputError(
                f"device must share memory between processes, got {self._device!r}; use MemoryKind.{MemoryKind.SHARED.name}"
            )
        self._bucket_bytes = bucket_bytes
        self._channel = Channel(connection, timeout_s=timeout_s, peer="receiver of weights")
        self._updates = itertools.count(1)
        self._memory: SlotMemory | None = None
        self._reader_pid = 0
        self._sending = threading.Lock()

    def send(self, manifest: WeightManifest, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Sends one complete update; returns once the new weights serve.

        Another update may follow any error but the last two.

        Raises:
            EngineInputError: Another update is being sent.
            ManifestError: Refused; no tensor was read, the old policy serves on.
            EngineError: The engine cannot take weights now, as it says; no tensor was read.
            WeightUpdateError: The stream failed at either end; the engine waits for a complete update.
            WeightUpdateTimeoutError: The receiver stood still.
            WeightPeerLostError: The receiver is gone.
        """
        progress = StreamProgress(manifest)
        slot_bytes = slot_bytes_for(manifest, self._bucket_bytes)
        if self._kind is MemoryKind.DEVICE:
            slot_bytes = min(slot_bytes, aligned(self._bucket_bytes))
        if not self._sending.acquire(blocking=False):
            raise EngineInputError("send must end before the next one begins, got two at a time; await the first")
        try:
            update = next(self._updates)
            with self._telling_failures(update, progress):
                self._send(update, manifest, weights, progress, slot_bytes)
        finally:
            self._sending.release()

    def _send(
        self,
        update: int,
        manifest: WeightManifest,
        weights: Iterable[tuple[str, Tensor]],
        progress: StreamProgress,
        slot_bytes: int,
    ) -> None:
        self._channel.send(Offer(update, manifest))
        self._reader_pid = self._expect(update, Accepted).process_id
        buckets = _BucketWriter(
            lambda num_slots, num_bytes: self._memory_of(update, num_slots, num_bytes),
            slot_bytes,
            self._bucket_bytes,
            lambda index, slot, entries: self._channel.send(Bucket(update, index, slot, entries)),
            lambda: self._expect(update, Taken).slot,
        )
        for name, tensor in weights:
            buckets.add(progress.check(name, tensor), tensor)
            del tensor
        progress.finish()
        self._channel.send(Ended(update, buckets.finish()))
        self._expect(update, Done)
        if self._memory is not None and not self._memory.is_kept:
            self._drop_memory()

    def abort(self) -> None:
        """Ends the conversation at once, from any thread; a `send` that waits raises `WeightPeerLostError`."""
        self._channel.abort()

    def close(self) -> None:
        """Says goodbye: the receiver's `next_update` returns None."""
        self._channel.close()
        self._drop_memory()

    def _memory_of(self, update: int, num_slots: int, slot_bytes: int) -> SlotMemory:
        """The memory that there is, where it has these slots; else new, and the receiver is told."""
        memory = self._memory
        if memory is None or memory.num_slots != num_slots or memory.slot_bytes < slot_bytes:
            self._drop_memory()
            memory = create_memory(self._kind, self._device, num_slots=num_slots, slot_bytes=slot_bytes)
            self._memory = memory
            opened = MemoryOpened(update, self._kind, num_slots, slot_bytes, memory.handle)
            self._channel.send(opened, descriptors=memory.descriptors)
        return memory

    def _drop_memory(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _expect(self, update: int, kind: type[Answer]) -> Answer:
        """The next answer of a kind to this update; what belongs to an earlier one is late, and dropped."""
        while True:
            received = self._channel.receive()
            if received is None:
                raise WeightPeerLostError(
                    "receiver of weights must stay until the update is done, got a closed channel; connect anew"
                )
            message, descriptors = received
            close_all(descriptors)
            if message.update != update:
                continue
            if isinstance(message, Failed):
                raise _TheirFailure(_error_of(message, refused=kind is Accepted))
            if isinstance(message, kind):
                return message
            # At the end, slots that nobody waits for still come back.
            if not (kind is Done and isinstance(message, Taken)):
                self._channel.abort()
                raise WeightPeerLostError(
                    f"receiver of weights must answer {kind.__name__}, got {type(message).__name__}; "
                    "use the same version of this package at both ends"
                )

    @contextmanager
    def _telling_failures(self, update: int, progress: StreamProgress) -> Iterator[None]:
        """Tells the receiver what went wrong here, so that it need not wait; after a failure both ends open new memory."""
        try:
            yield
        except BaseException as error:
            memory = self._memory
            with second_to(error, "freeing the memory of the update"):
                self._drop_memory()
            if isinstance(error, _TheirFailure):
                raise error.error from None
            if isinstance(error, WeightPeerLostError | WeightUpdateTimeoutError):
                self._channel.abort()
                if memory is not None:
                    with second_to(error, "freeing what the receiver held"):
                        memory.release_if_dead(self._reader_pid)
                raise
            with suppress(WeightUpdateError):
                self._channel.send(Failed(update, type(error).__name__, str(error)))
            if isinstance(error, EngineError) or not isinstance(error, Exception):
                raise
            raise progress.broken_off(error) from error


class _BucketWriter:
    """Fills one slot after the other, and hands each over when the next tensor does not fit any more.

    Args:
        open_memory: Memory of so many slots with so many bytes each; the one before is gone then.
        slot_bytes: Of `NUM_SLOTS` slots; a larger tensor gets memory of one slot.
        bucket_bytes: Most bytes of several tensors together.
        hand_over: Tells the reader what is in a slot: number of the bucket, slot, tensors.
        wait_for_slot: Waits until the reader gives one back.
    """

    def __init__(
        self,
        open_memory: Callable[[int, int], SlotMemory],
        slot_bytes: int,
        bucket_bytes: int,
        hand_over: Callable[[int, int, tuple[Entry, ...]], None],
        wait_for_slot: Callable[[], int],
    ) -> None:
        self._open_memory = open_memory
        self._slot_bytes = slot_bytes
        self._bucket_bytes = bucket_bytes
        self._hand_over = hand_over
        self._wait_for_slot = wait_for_slot
        self._memory: SlotMemory | None = None
        self._free: list[int] = []
        self._slot = 0
        self._entries: list[Entry] = []
        self._used = 0
        self._num_buckets = 0

    def add(self, spec: TensorSpec, tensor: Tensor) -> None:
        """Copies a tensor into the bucket; waits for a free slot where one is needed."""
        num_bytes = num_bytes_of(spec)
        if self._entries and self._used + num_bytes > self._bucket_bytes:
            self.finish()
        if not self._entries:
            self._memory = self._memory_for(num_bytes)
            self._slot = self._free.pop() if self._free else self._wait_for_slot()
            self._used = 0
        assert self._memory is not None
        window(self._memory.slot(self._slot), self._used, spec).copy_(tensor.detach())
        self._entries.append(Entry(spec.name, self._used))
        self._used += aligned(num_bytes)

    def _memory_for(self, num_bytes: int) -> SlotMemory:
        """The memory for a bucket that begins with so many bytes; another one only once nobody reads the one before."""
        is_large = num_bytes > self._slot_bytes
        memory = self._memory
        if memory is not None and num_bytes <= memory.slot_bytes and is_large == (memory.num_slots == 1):
            return memory
        while memory is not None and len(self._free) < memory.num_slots:
            self._free.append(self._wait_for_slot())
        memory = self._open_memory(*((1, aligned(num_bytes)) if is_large else (NUM_SLOTS, self._slot_bytes)))
        self._free = list(range(memory.num_slots))
        return memory

    def finish(self) -> int:
        """Hands the bucket over if there is anything in it; returns how many there were."""
        if self._entries and self._memory is not None:
            self._memory.settle()
            self._hand_over(self._num_buckets, self._slot, tuple(self._entries))
            self._entries.clear()
            self._num_buckets += 1
        return self._num_buckets


class _TheirFailure(Exception):
    """The receiver reported a failure: it need not be told."""

    def __init__(self, error: EngineError) -> None:
        super().__init__(str(error))
        self.error = error


def _error_of(failed: Failed, *, refused: bool) -> EngineError:
    """What the receiver reported, as an error of this process."""
    kind = getattr(engine_errors, failed.error, None)
    if isinstance(kind, type) and issubclass(kind, EngineError if refused else WeightUpdateError):
        return kind(failed.message)
    return WeightUpdateError(
        f"receiver of weights must apply every tensor, got {failed.error}: {failed.message}; send a complete update"
    )
