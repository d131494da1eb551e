"""Weights as one safetensors file, written beside its place and renamed once it is complete.

Invariants: under its name a file is whole; its header, which is the manifest, is written before the first tensor and
checked before the first tensor is read; every tensor's checksum is verified while it streams. A writer that was killed
leaves a hidden file, which the next writer to the same place removes. Any reader of safetensors reads the file.
"""

import contextlib
import fcntl
import glob
import json
import mmap
import os
import secrets
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import msgspec
import numpy as np
import torch
from torch import Tensor

from ostinato_engines.errors import EngineLoadError, ManifestError, WeightUpdateError
from ostinato_engines.types import TensorSpec, WeightManifest
from ostinato_engines.weight_transfer.layout import (
    ALIGNMENT,
    SAFETENSORS_DTYPES,
    as_bytes,
    dtype_of,
    num_bytes_of,
    window,
)
from ostinato_engines.weight_transfer.progress import StreamProgress

_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
"""What readers of safetensors accept."""
_SUM_DIGITS = 16
_DTYPE_NAMES = {code: name for name, code in SAFETENSORS_DTYPES.items()}


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Metadata(msgspec.Struct, frozen=True, rename={"version": "ostinato.version", "sums": "ostinato.sums"}):
    version: str
    sums: str
    """`_SUM_DIGITS` hexadecimal digits a tensor, in the order of their bytes: the sum of its bytes as 64-bit words."""
    format: str = "pt"


def write_weights(path: str | Path, manifest: WeightManifest, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Writes a complete update, holding one tensor at a time; a file that was there before is replaced at the end.

    Tensors may come in any order. The file is meant for processes that live now: it is not forced to the disk.

    Raises:
        ManifestError: A name twice, or a dtype that cannot be stored.
        WeightUpdateError: The stream, or the disk, failed; the place is as it was.
    """
    path = Path(path)
    progress = StreamProgress(manifest)
    places, num_bytes = _places(manifest)
    sums = dict.fromkeys(places, 0)
    header = _header(manifest.version, places, sums)
    try:
        with _beside(path) as file:
            file.write(header)
            file.truncate(len(header) + num_bytes)
            for name, tensor in weights:
                progress.check(name, tensor)
                data = as_bytes(tensor).cpu().numpy()
                file.seek(len(header) + places[name].data_offsets[0])
                file.write(data.data)
                sums[name] = _sum_of(data)
                del tensor, data
            progress.finish()
            file.seek(0)
            file.write(_header(manifest.version, places, sums))
    except WeightUpdateError:
        raise
    except Exception as error:
        raise progress.broken_off(error) from error


def _places(manifest: WeightManifest) -> tuple[dict[str, _Entry], int]:
    """Where each tensor lies: wide dtypes first, so that each is aligned to its own; and the bytes of all."""
    places: dict[str, _Entry] = {}
    offset = 0
    for spec in sorted(manifest.tensors, key=lambda spec: -dtype_of(spec).itemsize):
        if spec.name == _METADATA:
            raise ManifestError(f"manifest must not name a tensor {_METADATA}, which safetensors keeps; rename it")
        end = offset + num_bytes_of(spec)
        places[spec.name] = _Entry(SAFETENSORS_DTYPES[spec.dtype], tuple(spec.shape), (offset, end))
        offset = end
    return places, offset


def _header(version: int, places: dict[str, _Entry], sums: dict[str, int]) -> bytes:
    """Of the same length whatever the sums are."""
    metadata = _Metadata(str(version), "".join(f"{sums[name]:0{_SUM_DIGITS}x}" for name in places))
    text = json.dumps({_METADATA: msgspec.to_builtins(metadata), **msgspec.to_builtins(places)}).encode()
    padding = -(len(text) + _LENGTH.size) % ALIGNMENT
    return _LENGTH.pack(len(text) + padding) + text + b" " * padding


def _sum_of(data: np.ndarray) -> int:
    """The sum of bytes as 64-bit words modulo 2**64: finds lost pages and flipped bits at the speed of memory."""
    whole = len(data) // 8 * 8
    tail = int.from_bytes(data[whole:].tobytes(), "little")
    return (int(np.add.reduce(data[:whole].view(np.uint64), dtype=np.uint64)) + tail) % 2**64


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[BinaryIO]:
    """A new hidden file that takes the place of `path` at the end of the block, or goes away."""
    prefix, suffix = f".{path.name}.", ".partial"
    for left in path.parent.glob(f"{glob.escape(prefix)}*{suffix}"):
        _remove_if_abandoned(left)
    partial = path.parent / f"{prefix}{secrets.token_hex(8)}{suffix}"
    with open(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600), "wb") as file:
        try:
            # Held while the writer lives, however it ends.
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
            file.flush()
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def _remove_if_abandoned(partial: Path) -> None:
    try:
        with open(partial, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            partial.unlink(missing_ok=True)
    except (BlockingIOError, FileNotFoundError):
        return  # Its writer lives, or another took it away.


class StoredWeights:
    """A file of `write_weights`, opened: its manifest, and any number of streams of its tensors.

    Tensors are windows on the mapped file; the file may be replaced meanwhile, but not written into.

    Raises:
        EngineLoadError: There is no such file, or it is not whole; no engine was touched.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        try:
            with open(self._path, "rb") as file:
                self._start, self._places, metadata = _read_header(file)
                self._map: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            specs = [
                TensorSpec(name, place.shape, _DTYPE_NAMES.get(place.dtype, place.dtype))
                for name, place in self._places.items()
            ]
            _check_places(specs, self._places, len(self._map) - self._start)
            self.manifest = WeightManifest(int(metadata.version), tuple(specs))
            digits = metadata.sums
            if len(digits) != _SUM_DIGITS * len(specs):
                raise ValueError(f"{len(digits)} digits of checksums for {len(specs)} tensors")
            self._sums = [int(digits[at : at + _SUM_DIGITS], 16) for at in range(0, len(digits), _SUM_DIGITS)]
        except (OSError, ValueError) as error:
            raise EngineLoadError(
                f"path must be a whole file of write_weights, got {self._path} ({error}); write it again"
            ) from error

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors in the order of the file.

        Raises:
            WeightUpdateError: A tensor's bytes are not those that were written.
        """
        if self._map is None:
            raise WeightUpdateError(f"{self._path} must be open, got closed; open it again")
        memory = torch.from_numpy(np.frombuffer(self._map, np.uint8))
        for spec, place, wanted in zip(self.manifest.tensors, self._places.values(), self._sums, strict=True):
            start, end = (self._start + offset for offset in place.data_offsets)
            if (found := _sum_of(memory[start:end].numpy())) != wanted:
                raise WeightUpdateError(
                    f"{spec.name} in {self._path} must have checksum {wanted:x}, got {found:x}; the file is damaged, write it again"
                )
            yield spec.name, window(memory, start, spec)

    def close(self) -> None:
        """Lets the file go; tensors that somebody holds stay valid."""
        mapped, self._map = self._map, None
        if mapped is not None:
            with contextlib.suppress(BufferError):
                mapped.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read_header(file: BinaryIO) -> tuple[int, dict[str, _Entry], _Metadata]:
    """Where the bytes start, where each tensor lies (in the order of their bytes), and what we noted."""
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise ValueError(f"{len(head)} bytes")
    (length,) = _LENGTH.unpack(head)
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    fields = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
    if _METADATA not in fields:
        raise ValueError("no metadata")
    metadata = msgspec.json.decode(fields.pop(_METADATA), type=_Metadata)
    places = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in fields.items()}
    return _LENGTH.size + length, dict(sorted(places.items(), key=lambda item: item[1].data_offsets)), metadata


def _check_places(specs: list[TensorSpec], places: dict[str, _Entry], num_bytes: int) -> None:
    """Raises ValueError unless the tensors fill the bytes one after the other."""
    offset = 0
    for spec in specs:
        if places[spec.name].data_offsets != (offset, offset + num_bytes_of(spec)):
            raise ValueError(f"{spec.name} at {places[spec.name].data_offsets}, not from {offset} on")
        offset += num_bytes_of(spec)
    if offset != num_bytes:
        raise ValueError(f"{num_bytes} bytes of tensors, not {offset}")
