"""How tensors lie in bytes: sizes, alignment, and tensors that are windows on memory.

Invariant: nothing here reads or writes outside the bytes that a `TensorSpec` says.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ostinato_engines.errors import ManifestError, WeightUpdateError
from ostinato_engines.types import TensorSpec, WeightManifest

ALIGNMENT = 64
"""Of tensors in a bucket, in bytes: a cache line, and enough for every dtype."""

SAFETENSORS_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "int64": "I64",
    "uint64": "U64",
    "float64": "F64",
}
"""What can be carried, and what safetensors calls it."""


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """The torch dtype of a spec.

    Raises:
        ManifestError: A dtype that no transport carries.
    """
    if spec.dtype not in SAFETENSORS_DTYPES:
        raise ManifestError(
            f"{spec.name} must have a dtype among {', '.join(SAFETENSORS_DTYPES)}, got {spec.dtype}; convert it"
        )
    return getattr(torch, spec.dtype)


def num_bytes_of(spec: TensorSpec) -> int:
    """Bytes of a tensor.

    Raises:
        ManifestError: A dtype that no transport carries, or a negative size.
    """
    if any(size < 0 for size in spec.shape):
        raise ManifestError(f"{spec.name} must have sizes of at least 0, got {spec.shape}; send the tensor's own shape")
    return math.prod(spec.shape) * dtype_of(spec).itemsize


def aligned(num_bytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def slot_bytes_for(manifest: WeightManifest, bucket_bytes: int) -> int:
    """Bytes of one bucket: what was asked for, more only for a larger tensor, less only if all tensors need less."""
    sizes = [aligned(num_bytes_of(spec)) for spec in manifest.tensors]
    return max(ALIGNMENT, max(sizes, default=0), min(sum(sizes), aligned(bucket_bytes)))


def window(memory: Tensor, offset: int, spec: TensorSpec) -> Tensor:
    """The tensor of a spec that lies in `memory` (uint8 [bytes]) from `offset` on; shares the memory, and is no view in
    autograd's books, so that `close_window` cuts the tie.

    Raises:
        WeightUpdateError: It would not lie within `memory`.
    """
    dtype = dtype_of(spec)
    first, odd = divmod(int(memory.storage_offset()) + offset, dtype.itemsize)
    if odd or offset < 0 or offset + num_bytes_of(spec) > memory.numel():
        raise WeightUpdateError(
            f"{spec.name} must lie within its bucket, got offset {offset} of {memory.numel()} bytes; "
            "use the same version of this package at both ends"
        )
    empty: Any = torch.empty(0, dtype=dtype, device=memory.device)
    return empty.set_(memory.untyped_storage(), first, spec.shape)


def close_window(tensor: Tensor) -> None:
    """Empties a window: whoever still holds it finds a tensor without elements, never another one's bytes."""
    with torch.no_grad():
        tensor.set_()  # pyright: ignore[reportCallIssue]  as documented


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's bytes in row-major order, uint8 [bytes]; copies only what is not contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
