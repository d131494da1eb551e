"""The memory through which buckets go: a few slots of equal size that both processes see.

Invariants: it has no name, so that nothing is left behind however a process ends, and nobody else can open it; it lives
as long as a process maps it; and it holds no more than `num_slots * slot_bytes`.
"""

import mmap
import os
import select
import tempfile
import weakref
from enum import StrEnum
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from ostinato_engines import device as devices
from ostinato_engines.errors import EngineInputError, WeightUpdateError
from ostinato_engines.types import TensorSpec
from ostinato_engines.weight_transfer.channel import MemoryOpened
from ostinato_engines.weight_transfer.layout import close_window, window

_EXIT_S = 1.0


class MemoryKind(StrEnum):
    """Where the buckets of a transfer lie."""

    SHARED = "shared"
    """Memory of the host that two processes map."""
    DEVICE = "device"
    """Memory of an accelerator that two processes of one host open; for weights that lie on it."""


class SlotMemory(Protocol):
    """Slots that one end fills and the other reads."""

    is_kept: bool
    """Whether it stays between updates: new pages of the host are slow, and a device's memory is wanted elsewhere."""
    num_slots: int
    slot_bytes: int
    handle: bytes
    descriptors: tuple[int, ...]
    """What goes to the other end, which opens the memory by it."""

    def slot(self, index: int) -> Tensor:
        """uint8 [slot_bytes], to write into."""
        ...

    def settle(self) -> None:
        """Returns once what was written, or read, on the device is done."""
        ...

    def open_window(self, slot: int, offset: int, spec: TensorSpec) -> Tensor:
        """The tensor that lies there."""
        ...

    def close_window(self, name: str, tensor: Tensor) -> None:
        """Ends the tensor's use.

        Raises:
            WeightUpdateError: Somebody still holds a part of it, which would change under their hands.
        """
        ...

    def close(self) -> None:
        """Frees this end's hold on the memory."""
        ...

    def release_if_dead(self, process_id: int) -> None:
        """After `close` in the sender: frees what the other process held, if it died without letting go."""
        ...


def create_memory(kind: MemoryKind, device: str, *, num_slots: int, slot_bytes: int) -> SlotMemory:
    """New memory of a sender.

    Raises:
        WeightUpdateError: There is not enough.
    """
    try:
        if kind is MemoryKind.DEVICE:
            return DeviceMemory.create(device, num_slots=num_slots, slot_bytes=slot_bytes)
        return SharedMemory.create(num_slots=num_slots, slot_bytes=slot_bytes)
    except (OSError, RuntimeError) as error:
        raise WeightUpdateError(
            f"{kind} memory must have {num_slots * slot_bytes} bytes free, got {error}; lower bucket_bytes, or make room"
        ) from error


def memory_on(device: str) -> tuple[MemoryKind, str]:
    """Where buckets of weights on a device go, and the device to give: its own memory, if processes can share it."""
    if not devices.shares_memory(device):
        return MemoryKind.SHARED, devices.HOST
    try:
        # Not every allocator of device memory can share: torch's expandable segments cannot.
        create_memory(MemoryKind.DEVICE, device, num_slots=1, slot_bytes=1).close()
    except WeightUpdateError:
        return MemoryKind.SHARED, devices.HOST
    return MemoryKind.DEVICE, device


def open_memory(message: MemoryOpened, descriptors: list[int]) -> SlotMemory:
    """The sender's memory in the receiver, which takes over the descriptors.

    Raises:
        WeightUpdateError: It is not what the message says.
    """
    try:
        if message.num_slots < 1 or message.slot_bytes < 1:
            raise ValueError(f"{message.num_slots} slots of {message.slot_bytes} bytes")
        if message.kind == MemoryKind.DEVICE:
            return DeviceMemory.open(message)
        if message.kind == MemoryKind.SHARED:
            return SharedMemory.open(message, descriptors)
        raise ValueError(f"the kind {message.kind!r}, and there are {', '.join(MemoryKind)}")
    except (OSError, RuntimeError, ValueError, msgspec.MsgspecError) as error:
        raise WeightUpdateError(
            f"memory must be what the sender says, got {error}; use the same version of this package at both ends"
        ) from error


class SharedMemory:
    """Anonymous memory of the host: a file without a name, handed over as a descriptor, mapped by both ends.

    On Linux its size is sealed, so that a mapping never faults, and it does not count against /dev/shm, which containers
    keep small. Only who is given the descriptor can open it.
    """

    is_kept = True

    def __init__(self, descriptor: int, *, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.handle = b""
        self.descriptors = (descriptor,)
        self._map: mmap.mmap | None = mmap.mmap(descriptor, num_slots * slot_bytes)
        self._open: dict[int, tuple[Tensor, weakref.ref]] = {}

    @classmethod
    def create(cls, *, num_slots: int, slot_bytes: int) -> "SharedMemory":
        """Memory that is all there: a page that is missing is an error here and not a fault later."""
        descriptor = _anonymous_file(num_slots * slot_bytes)
        try:
            return cls(descriptor, num_slots=num_slots, slot_bytes=slot_bytes)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def open(cls, message: MemoryOpened, descriptors: list[int]) -> "SharedMemory":
        """Maps what the descriptor opens, if it has the size that the message says."""
        if len(descriptors) != 1:
            raise ValueError("no descriptor with it")
        size, wanted = os.fstat(descriptors[0]).st_size, message.num_slots * message.slot_bytes
        if size != wanted:
            raise ValueError(f"{size} bytes for {message.num_slots} slots of {message.slot_bytes}")
        memory = cls(descriptors[0], num_slots=message.num_slots, slot_bytes=message.slot_bytes)
        descriptors.clear()
        return memory

    def slot(self, index: int) -> Tensor:
        return torch.from_numpy(self._bytes(index * self.slot_bytes, self.slot_bytes))

    def settle(self) -> None:
        pass

    def open_window(self, slot: int, offset: int, spec: TensorSpec) -> Tensor:
        array = self._bytes(slot * self.slot_bytes, self.slot_bytes)
        tensor = window(torch.from_numpy(array), offset, spec)
        # torch keeps the array as long as anything uses its bytes.
        self._open[id(tensor)] = (tensor, weakref.ref(array))
        return tensor

    def close_window(self, name: str, tensor: Tensor) -> None:
        _, array = self._open.pop(id(tensor))
        close_window(tensor)
        if array() is not None:
            raise WeightUpdateError(
                f"{name} must be let go before the next tensor is taken, got a part of it still in use; copy what you keep"
            )

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()
        for tensor, _ in self._open.values():
            close_window(tensor)
        self._open.clear()
        mapped, self._map = self._map, None
        if mapped is None:
            return
        try:
            mapped.close()
        except BufferError:
            # A consumer kept a tensor: the mapping ends with it.
            return

    def release_if_dead(self, process_id: int) -> None:
        pass  # The kernel has done so.

    def _bytes(self, start: int, size: int) -> np.ndarray:
        assert self._map is not None
        return np.frombuffer(self._map, np.uint8, size, start)


def _anonymous_file(num_bytes: int) -> int:
    """A descriptor of a new file in memory that has no name."""
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryFile() as file:
            os.truncate(file.fileno(), num_bytes)
            return os.dup(file.fileno())
    import fcntl

    descriptor = os.memfd_create("ostinato-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(descriptor, 0o600)
        os.posix_fallocate(descriptor, 0, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class DeviceMemory:
    """Memory of an accelerator, opened by a handle in another process of the host."""

    is_kept = False

    def __init__(self, memory: Tensor, handle: bytes, *, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.handle = handle
        self.descriptors: tuple[int, ...] = ()
        self._memory: Tensor | None = memory
        self._device = str(memory.device)
        self._exported: devices.ExportedMemory | None = None

    @classmethod
    def create(cls, device: str, *, num_slots: int, slot_bytes: int) -> "DeviceMemory":
        """Memory on a device whose driver can share it."""
        if not devices.shares_memory(device):
            raise EngineInputError(
                f"device must share memory between processes for {MemoryKind.DEVICE}, got {device!r}; use {MemoryKind.SHARED}"
            )
        memory = devices.empty_to_share(num_slots * slot_bytes, device)
        exported = devices.export_memory(memory)
        created = cls(memory, msgspec.msgpack.encode(exported), num_slots=num_slots, slot_bytes=slot_bytes)
        created._exported = exported
        return created

    @classmethod
    def open(cls, message: MemoryOpened) -> "DeviceMemory":
        """Opens the sender's memory; the device must be visible in this process."""
        exported = msgspec.msgpack.decode(message.handle, type=devices.ExportedMemory)
        memory = devices.import_memory(exported)
        if memory.numel() != message.num_slots * message.slot_bytes:
            raise ValueError(f"{memory.numel()} bytes for {message.num_slots} slots of {message.slot_bytes}")
        return cls(memory, b"", num_slots=message.num_slots, slot_bytes=message.slot_bytes)

    def slot(self, index: int) -> Tensor:
        assert self._memory is not None
        return self._memory[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def settle(self) -> None:
        devices.synchronize(self._device)

    def open_window(self, slot: int, offset: int, spec: TensorSpec) -> Tensor:
        return window(self.slot(slot), offset, spec)

    def close_window(self, name: str, tensor: Tensor) -> None:
        close_window(tensor)

    def close(self) -> None:
        self._memory = None
        devices.collect_shared_memory(self._device)

    def release_if_dead(self, process_id: int) -> None:
        if self._exported is not None and _has_ended(process_id):
            devices.release_for_importer(self._exported, self._device)
            devices.collect_shared_memory(self._device)


def _has_ended(process_id: int) -> bool:
    """Whether a process is gone, or goes within a second: its files are closed a little before it has ended."""
    try:
        descriptor = os.pidfd_open(process_id)
    except ProcessLookupError:
        return True
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(1e3 * _EXIT_S))
    finally:
        os.close(descriptor)
