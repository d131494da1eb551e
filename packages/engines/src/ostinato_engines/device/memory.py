"""How much of a device's memory is taken, by whom, and whether it ran out. Knows no tensor."""

from typing import TYPE_CHECKING

import msgspec

from ostinato_engines.device.kinds import backend_of, device_kind

if TYPE_CHECKING:
    import torch


def empty_cache(device: "str | torch.device") -> None:
    """Gives memory that torch holds but does not use back to the system."""
    backend = backend_of(device_kind(device))
    if backend is not None:
        backend.empty_cache()


def memory_allocated(device: "str | torch.device") -> int:
    """Bytes that tensors hold on the device; 0 on the CPU, where torch does not count."""
    kind = device_kind(device)
    backend = backend_of(kind)
    if backend is None:
        return 0
    return int(backend.current_allocated_memory() if kind == "mps" else backend.memory_allocated(device))


def max_memory_allocated(device: "str | torch.device") -> int:
    """The most bytes that tensors held on the device; 0 where torch does not count."""
    peak = getattr(backend_of(device_kind(device)), "max_memory_allocated", None)
    return int(peak(device)) if peak is not None else 0


def max_memory_reserved(device: "str | torch.device") -> int:
    """The most bytes that torch held on the device, unused ones included; 0 where torch does not count."""
    peak = getattr(backend_of(device_kind(device)), "max_memory_reserved", None)
    return int(peak(device)) if peak is not None else 0


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds a device's memory, in bytes."""

    total: int
    free: int
    """That nobody holds."""
    allocated: int
    """That tensors of this process hold."""
    reserved: int
    """That torch holds for this process, used or not."""

    @property
    def available(self) -> int:
        """That this process can still use: what nobody holds, and what torch holds for it without use."""
        return self.free + self.reserved - self.allocated

    @property
    def others(self) -> int:
        """That other processes hold, the driver's part for this one included."""
        return max(0, self.total - self.free - self.reserved)


def device_memory(device: "str | torch.device") -> DeviceMemory | None:
    """Who holds the memory of a device now; None where torch cannot tell, as on the CPU."""
    backend = backend_of(device_kind(device))
    if not hasattr(backend, "mem_get_info"):
        return None
    free, total = backend.mem_get_info(device)
    return DeviceMemory(
        total=int(total),
        free=int(free),
        allocated=int(backend.memory_allocated(device)),
        reserved=int(backend.memory_reserved(device)),
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory, of the device or the host, ran out."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and (
        type(error).__name__ == "OutOfMemoryError"
        or "out of memory" in str(error)
        or "can't allocate memory" in str(error)
    )
