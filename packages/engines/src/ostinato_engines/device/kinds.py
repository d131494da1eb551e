"""Which kinds of devices there are, which of them this process can use, and what a kind can do. Knows no memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ostinato_engines.errors import EngineInputError, MissingDependencyError

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


def torch_module() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError(
            "torch must be installed to use a device; run `pip install 'ostinato-engines[transformers]'`"
        ) from error
    return torch


def backend_of(kind: str) -> Any:
    """torch.cuda, torch.npu or torch.mps; None for the CPU or where torch lacks it."""
    return None if kind == "cpu" else getattr(torch_module(), kind, None)


def device_kind(device: "str | torch.device") -> str:
    """The kind without the index: "cuda:1" is "cuda"."""
    return str(device).partition(":")[0]


def is_available(kind: str) -> bool:
    """Whether this process can use a device of the kind."""
    if kind == "cpu":
        return True
    if kind == "mps":
        return bool(torch_module().backends.mps.is_available())
    backend = backend_of(kind)
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
    count = getattr(backend_of(kind), "device_count", None)
    return int(count()) if count is not None else 1


def set_device(device: "str | torch.device") -> None:
    """Makes the device the current one of its kind; nothing to do where there is only one."""
    setter = getattr(backend_of(device_kind(device)), "set_device", None)
    if setter is not None and ":" in str(device):
        setter(int(str(device).partition(":")[2]))


def current_device(kind: str) -> object:
    """What torch calls the current device of a kind, an index; errors as torch's own where there is none."""
    return backend_of(kind).current_device()


def synchronize(device: "str | torch.device") -> None:
    """Waits until everything queued on the device has run."""
    backend = backend_of(device_kind(device))
    if backend is None:
        return
    if device_kind(device) == "mps":
        backend.synchronize()
    else:
        backend.synchronize(device)


def device_generation(device: "str | torch.device") -> int | None:
    """The first number of a GPU's compute capability, by which kernels are chosen: 9 is Hopper; None where the kind has none."""
    ask = getattr(backend_of(device_kind(device)), "get_device_capability", None)
    return None if ask is None else int(ask(device)[0])


def supports_float64(device: "str | torch.device") -> bool:
    """Whether the device computes in double precision."""
    return device_kind(device) not in ("mps", "npu")


def distributed_backend(device: "str | torch.device") -> str:
    """The name of the collective library for the device."""
    return {"cuda": "nccl", "npu": "hccl"}.get(device_kind(device), "gloo")


def collective_versions(device: "str | torch.device") -> str:
    """What carries bytes between processes for the device, and what it was told that all must be told: others may wait for each other in vain."""
    release = ".".join(torch_module().__version__.partition("+")[0].split(".")[:2])
    library = distributed_backend(device)
    if library == "nccl":
        told = os.environ.get(_NCCL_MEMORY, "unset")
        library += f" {'.'.join(map(str, torch_module().cuda.nccl.version()))}, {_NCCL_MEMORY} {told}"
    return f"torch {release} with {library}"


@contextmanager
def host_threads(count: int) -> Iterator[None]:
    """Lets torch use `count` threads of the host within the block; more do not help a tiny model, and hinder neighbours."""
    torch = torch_module()
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
