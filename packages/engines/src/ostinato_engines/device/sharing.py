"""Memory that several processes of one host have open: taken, exported, imported, freed.

Invariant: what is taken here can be opened elsewhere, whatever torch was told of its segments. Who holds it for how long is its users' business.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from ostinato_engines.device.kinds import HOST, backend_of, device_count, device_kind, torch_module
from ostinato_engines.weight_routes import WeightPlace, host_name

if TYPE_CHECKING:
    import torch

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""How torch takes memory of a device; the first that is set counts."""


class ExportedMemory(msgspec.Struct, frozen=True):
    """Opens the memory of a device in another process of the same host; valid as long as the exporter holds it."""

    device_uuid: str
    memory_handle: bytes
    num_bytes: int
    offset_bytes: int
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    event_needed: bool


def shares_memory(device: "str | torch.device") -> bool:
    """Whether processes can open each other's memory on the device."""
    return device_kind(device) == "cuda"


def unique_name(device: "str | torch.device") -> str:
    """By which every process of this host finds a device that shares memory, whatever its index there."""
    return str(torch_module().cuda.get_device_properties(device).uuid)


def place_of(device: "str | torch.device") -> WeightPlace:
    """Where a process of this host is that has its weights on the device."""
    return WeightPlace(host_name(), unique_name(device) if shares_memory(device) else "")


def empty_to_share(num_bytes: int, device: "str | torch.device") -> "torch.Tensor":
    """Undefined bytes, uint8 [num_bytes], that another process can open: on a device whose memory processes share, or on the host.

    torch's expandable segments need the right to look into the other process, which only parents of it have everywhere: memory
    that is shared is never of them.
    """
    torch = torch_module()
    if not shares_memory(device):
        storage = torch.UntypedStorage._new_shared(num_bytes, device=HOST)
        return torch.empty(0, dtype=torch.uint8).set_(storage)
    with _ordinary_segments():
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)


@contextmanager
def _ordinary_segments() -> Iterator[None]:
    """Within the block torch takes memory of devices as it does by default, whatever its variables say."""
    settings = next((os.environ[name] for name in _ALLOCATOR_VARIABLES if os.environ.get(name)), "")
    setter = getattr(torch_module()._C, "_accelerator_setAllocatorSettings", None)
    if "expandable_segments:true" not in settings.lower().replace(" ", "") or setter is None:
        yield
        return
    setter("expandable_segments:False")
    try:
        yield
    finally:
        setter(settings)


def export_memory(memory: "torch.Tensor") -> ExportedMemory:
    """What opens a tensor's memory elsewhere.

    Raises:
        RuntimeError: The allocator in use cannot share it (expandable segments, for one).
    """
    _, *parts = memory.untyped_storage()._share_cuda_()
    uuid = unique_name(memory.device)
    return ExportedMemory(uuid, *parts)


def import_memory(exported: ExportedMemory) -> "torch.Tensor":
    """Another process's memory as uint8 [num_bytes], on the same physical device.

    Raises:
        ValueError: That device is not visible here.
    """
    torch = torch_module()
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(device_count("cuda"))]
    if exported.device_uuid not in uuids:
        raise ValueError(f"memory on device {exported.device_uuid}, and visible here are {', '.join(uuids) or 'none'}")
    index = uuids.index(exported.device_uuid)
    _, *parts = msgspec.structs.astuple(exported)
    torch.cuda._lazy_init()
    storage = torch.UntypedStorage._new_shared_cuda(index, *parts)
    return torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}").set_(storage)


def release_for_importer(exported: ExportedMemory, device: "str | torch.device") -> None:
    """Gives exported memory back in the place of a process that died without doing so."""
    storage: Any = torch_module().UntypedStorage
    storage._release_ipc_counter(exported.counter_handle, exported.counter_offset, device=torch_module().device(device))


def collect_shared_memory(device: "str | torch.device") -> None:
    """Frees shared memory that no other process holds any more."""
    collect = getattr(backend_of(device_kind(device)), "ipc_collect", None)
    if collect is not None:
        collect()
