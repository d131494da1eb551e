"""The only module of the project that says cuda, npu, mps or cpu. torch is imported when a function needs it."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from ostinato_engines.errors import EngineInputError, MissingDependencyError
from ostinato_engines.weight_routes import WeightPlace, host_name

if TYPE_CHECKING:
    import torch

KINDS = ("cuda", "npu", "mps", "cpu")
"""Known kinds, the preferred first."""

HOST = "cpu"
"""The device that every machine has."""

CUDA = "cuda"
"""The kind that some of torch's kernels are for."""

_NCCL_MEMORY = "NCCL_CUMEM_ENABLE"
"""By which means NCCL shares memory: some engines set it in their processes."""

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""How torch takes memory of a device; the first that is set counts."""


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError(
            "torch must be installed to use a device; run `pip install 'ostinato-engines[transformers]'`"
        ) from error
    return torch


def _backend(kind: str) -> Any:
    """torch.cuda, torch.npu or torch.mps; None for the CPU or where torch lacks it."""
    return None if kind == "cpu" else getattr(_torch(), kind, None)


def device_kind(device: "str | torch.device") -> str:
    """The kind without the index: "cuda:1" is "cuda"."""
    return str(device).partition(":")[0]


def is_available(kind: str) -> bool:
    """Whether this process can use a device of the kind."""
    if kind == "cpu":
        return True
    if kind == "mps":
        return bool(_torch().backends.mps.is_available())
    backend = _backend(kind)
    return backend is not None and bool(backend.is_available())


def pick_device(name: str = "auto") -> str:
    """Resolves "auto" to the best device there is, and checks any other name.

    Raises:
        EngineInputError: An unknown kind, or one that this machine lacks.
    """
    if name == "auto":
        return next(kind for kind in KINDS if is_available(kind))
    kind = device_kind(name)
    if kind not in KINDS:
        raise EngineInputError(f"device must be auto or one of {', '.join(KINDS)}, got {name!r}; use auto")
    index = name.partition(":")[2]
    if index and not index.isdigit():
        raise EngineInputError(f"device must be a kind or kind:index, got {name!r}; use {kind}:0")
    if not is_available(kind):
        raise EngineInputError(f"device must be available here, got {name!r}; use auto or cpu")
    if int(index or 0) >= device_count(kind):
        raise EngineInputError(
            f"device must be one of the {device_count(kind)} {kind} device(s), got {name!r}; use {kind}:0"
        )
    return name


def device_count(kind: str) -> int:
    """How many devices of the kind there are; the CPU counts as one."""
    if not is_available(kind):
        return 0
    count = getattr(_backend(kind), "device_count", None)
    return int(count()) if count is not None else 1


def set_device(device: "str | torch.device") -> None:
    """Makes the device the current one of its kind; nothing to do where there is only one."""
    setter = getattr(_backend(device_kind(device)), "set_device", None)
    if setter is not None and ":" in str(device):
        setter(int(str(device).partition(":")[2]))


def current_device(kind: str) -> object:
    """What torch calls the current device of a kind, an index; errors as torch's own where there is none."""
    return _backend(kind).current_device()


def synchronize(device: "str | torch.device") -> None:
    """Waits until everything queued on the device has run."""
    backend = _backend(device_kind(device))
    if backend is None:
        return
    if device_kind(device) == "mps":
        backend.synchronize()
    else:
        backend.synchronize(device)


def empty_cache(device: "str | torch.device") -> None:
    """Gives memory that torch holds but does not use back to the system."""
    backend = _backend(device_kind(device))
    if backend is not None:
        backend.empty_cache()


def memory_allocated(device: "str | torch.device") -> int:
    """Bytes that tensors hold on the device; 0 on the CPU, where torch does not count."""
    kind = device_kind(device)
    backend = _backend(kind)
    if backend is None:
        return 0
    return int(backend.current_allocated_memory() if kind == "mps" else backend.memory_allocated(device))


def max_memory_allocated(device: "str | torch.device") -> int:
    """The most bytes that tensors held on the device; 0 where torch does not count."""
    peak = getattr(_backend(device_kind(device)), "max_memory_allocated", None)
    return int(peak(device)) if peak is not None else 0


def max_memory_reserved(device: "str | torch.device") -> int:
    """The most bytes that torch held on the device, unused ones included; 0 where torch does not count."""
    peak = getattr(_backend(device_kind(device)), "max_memory_reserved", None)
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
    backend = _backend(device_kind(device))
    if not hasattr(backend, "mem_get_info"):
        return None
    free, total = backend.mem_get_info(device)
    return DeviceMemory(
        total=int(total),
        free=int(free),
        allocated=int(backend.memory_allocated(device)),
        reserved=int(backend.memory_reserved(device)),
    )


def device_generation(device: "str | torch.device") -> int | None:
    """The first number of a GPU's compute capability, by which kernels are chosen: 9 is Hopper; None where the kind has none."""
    ask = getattr(_backend(device_kind(device)), "get_device_capability", None)
    return None if ask is None else int(ask(device)[0])


def supports_float64(device: "str | torch.device") -> bool:
    """Whether the device computes in double precision."""
    return device_kind(device) not in ("mps", "npu")


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
    return str(_torch().cuda.get_device_properties(device).uuid)


def place_of(device: "str | torch.device") -> WeightPlace:
    """Where a process of this host is that has its weights on the device."""
    return WeightPlace(host_name(), unique_name(device) if shares_memory(device) else "")


def collective_versions(device: "str | torch.device") -> str:
    """What carries bytes between processes for the device, and what it was told that all must be told: others may wait for each other in vain."""
    release = ".".join(_torch().__version__.partition("+")[0].split(".")[:2])
    library = distributed_backend(device)
    if library == "nccl":
        told = os.environ.get(_NCCL_MEMORY, "unset")
        library += f" {'.'.join(map(str, _torch().cuda.nccl.version()))}, {_NCCL_MEMORY} {told}"
    return f"torch {release} with {library}"


def empty_to_share(num_bytes: int, device: "str | torch.device") -> "torch.Tensor":
    """Undefined bytes, uint8 [num_bytes], that another process can open: on a device whose memory processes share, or on the host.

    torch's expandable segments need the right to look into the other process, which only parents of it have everywhere: memory
    that is shared is never of them.
    """
    torch = _torch()
    if not shares_memory(device):
        storage = torch.UntypedStorage._new_shared(num_bytes, device=HOST)
        return torch.empty(0, dtype=torch.uint8).set_(storage)
    with _ordinary_segments():
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)


@contextmanager
def _ordinary_segments() -> Iterator[None]:
    """Within the block torch takes memory of devices as it does by default, whatever its variables say."""
    settings = next((os.environ[name] for name in _ALLOCATOR_VARIABLES if os.environ.get(name)), "")
    setter = getattr(_torch()._C, "_accelerator_setAllocatorSettings", None)
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
    torch = _torch()
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
    storage: Any = _torch().UntypedStorage
    storage._release_ipc_counter(exported.counter_handle, exported.counter_offset, device=_torch().device(device))


def collect_shared_memory(device: "str | torch.device") -> None:
    """Frees shared memory that no other process holds any more."""
    collect = getattr(_backend(device_kind(device)), "ipc_collect", None)
    if collect is not None:
        collect()


def distributed_backend(device: "str | torch.device") -> str:
    """The name of the collective library for the device."""
    return {"cuda": "nccl", "npu": "hccl"}.get(device_kind(device), "gloo")


def seed_all(seed: int) -> None:
    """Seeds Python's, numpy's and torch's generators, on every device."""
    import random

    import numpy

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    _torch().manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Where Python's, numpy's and torch's generators stand, on every device that has been used; plain JSON data."""
    import random

    import numpy

    torch = _torch()
    version, words, gauss = random.getstate()
    legacy: dict[str, Any] = numpy.random.get_state(legacy=False)  # pyright: ignore[reportAssignmentType]
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": {**legacy, "state": {**legacy["state"], "key": legacy["state"]["key"].tolist()}},
        "torch": _hexadecimal(torch.get_rng_state()),
    }
    for kind in _kinds_in_use():
        states = [_backend(kind).get_rng_state(*place) for place in _places(kind)]
        state[kind] = [_hexadecimal(each) for each in states]
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Puts the generators where `random_state` found them; devices that this process lacks are passed over.

    Raises:
        EngineInputError: It is no such state; some generators may have been restored then.
    """
    import random

    import numpy

    torch = _torch()
    try:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        legacy = state["numpy"]
        numpy.random.set_state({**legacy, "state": {**legacy["state"], "key": numpy.array(legacy["state"]["key"])}})
        torch.set_rng_state(_from_hexadecimal(state["torch"]))
        for kind in KINDS:
            if kind in state and is_available(kind):
                for place, text in zip(_places(kind), state[kind], strict=False):
                    _backend(kind).set_rng_state(_from_hexadecimal(text), *place)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise EngineInputError(
            f"the state of random generators must be what random_state() gave, got {type(error).__name__}: {error}; "
            "begin anew with a seed"
        ) from error


def _kinds_in_use() -> list[str]:
    """Kinds of devices beside the host that this process has used; asking one that it has not would take memory there."""
    used = []
    for kind in KINDS:
        backend = _backend(kind) if is_available(kind) else None
        if backend is not None and getattr(backend, "is_initialized", lambda: True)():
            used.append(kind)
    return used


def _places(kind: str) -> list[tuple[str, ...]]:
    """The arguments that name each generator of a kind; mps has one, without a name."""
    return [()] if kind == "mps" else [(f"{kind}:{index}",) for index in range(device_count(kind))]


def _hexadecimal(state: "torch.Tensor") -> str:
    return bytes(state.tolist()).hex()


def _from_hexadecimal(text: str) -> "torch.Tensor":
    return _torch().tensor(list(bytes.fromhex(text)), dtype=_torch().uint8)


@contextmanager
def host_threads(count: int) -> Iterator[None]:
    """Lets torch use `count` threads of the host within the block; more do not help a tiny model, and hinder neighbours."""
    torch = _torch()
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory, of the device or the host, ran out."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and (
        type(error).__name__ == "OutOfMemoryError"
        or "out of memory" in str(error)
        or "can't allocate memory" in str(error)
    )
