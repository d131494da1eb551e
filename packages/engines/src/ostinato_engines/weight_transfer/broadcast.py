"""One update for many workers at once: rank 0 of a `WeightGroup` packs tensors into buckets, and broadcasts these.

Invariants: what a bucket holds follows from the manifest, which all have and compare before the first one: nothing is said of it on the way but
its number, which comes last, so that a broadcast which broke off is not taken for one that came; memory is bounded by one bucket, or the largest
tensor; and an end that fails ends the group for all.
"""

import hashlib
from collections.abc import Generator, Iterable, Iterator

import msgspec
import torch
from torch import Tensor

from ostinato_engines.errors import EngineError, WeightUpdateError
from ostinato_engines.types import TensorSpec, WeightManifest
from ostinato_engines.weight_routes import CollectiveRoute
from ostinato_engines.weight_transfer.group import WeightGroup
from ostinato_engines.weight_transfer.layout import ALIGNMENT, aligned, close_window, num_bytes_of, window
from ostinato_engines.weight_transfer.progress import StreamProgress


class KeptGroup:
    """The group that this process is in, from update to update.

    Args:
        device: Of this process.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._group: WeightGroup | None = None

    def of(self, route: CollectiveRoute, rank: int) -> WeightGroup:
        """The group of a route: the kept one, or another that is joined now. Errors as `WeightGroup`."""
        if self._group is not None and self._group.route.name != route.name:
            self.close()
        if self._group is None:
            self._group = WeightGroup(route, rank, self.device)
        return self._group

    def close(self) -> None:
        """Lets go of it."""
        group, self._group = self._group, None
        if group is not None:
            group.close()


class BroadcastSender:
    """Rank 0.

    Args:
        route: Of the group.
        kept: Where this process has its group.
    """

    def __init__(self, route: CollectiveRoute, kept: KeptGroup) -> None:
        self._route, self._kept = route, kept

    def send(self, manifest: WeightManifest, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Sends one complete update, whose tensors come in the manifest's order; returns once all have the last bucket.

        Raises:
            WeightUpdateError: A member has gone or given up, or the stream failed; the workers wait for a complete update.
            WeightUpdateTimeoutError: A member did not come, or stood still.
        """
        progress = StreamProgress(manifest)
        group = self._kept.of(self._route, 0)
        try:
            memory = _memory_for(manifest, self._route.bucket_bytes, self._kept.device)
            group.broadcast(_digest(manifest).to(self._kept.device))
            stream = iter(weights)
            for number, (bucket, num_bytes) in enumerate(_buckets(manifest, self._route.bucket_bytes)):
                for spec, offset in bucket:
                    _pack(window(memory, offset, spec), spec, stream, progress)
                memory[num_bytes : num_bytes + ALIGNMENT] = _stamp(number)
                group.broadcast(memory[: num_bytes + ALIGNMENT])
            for name, tensor in stream:
                progress.check(name, tensor)  # which raises: all have come
        except BaseException as error:
            group.abort(f"rank 0: {error}")
            self._kept.close()
            if isinstance(error, EngineError) or not isinstance(error, Exception):
                raise
            raise progress.broken_off(error) from error

    def close(self) -> None:
        """The group stays."""


class IncomingBroadcast:
    """One update at a worker: iterate it once for the tensors, then call `finish` or `fail`. Joins when the first tensor is taken.

    Args:
        route: Of the group.
        manifest: What comes.
        worker: Rank of this worker in its engine.
        kept: Where this process has its group.

    Raises:
        ManifestError: The manifest names a tensor twice.
    """

    def __init__(self, route: CollectiveRoute, manifest: WeightManifest, worker: int, kept: KeptGroup) -> None:
        self.manifest = manifest
        self._route, self._rank, self._kept = route, route.first_rank + worker, kept
        self._progress = StreamProgress(manifest)
        self._group: WeightGroup | None = None
        self._stream: Generator[tuple[str, Tensor], None, None] | None = None
        self._is_complete = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self._stream is not None:
            raise WeightUpdateError("weights must be read once, got a second reading; send the update again")
        self._stream = self._read()
        return self._stream

    def _read(self) -> Generator[tuple[str, Tensor], None, None]:
        group = self._group = self._kept.of(self._route, self._rank)
        expected = _digest(self.manifest)
        announced = torch.empty_like(expected, device=self._kept.device)
        group.broadcast(announced)
        if not torch.equal(announced.cpu(), expected):
            raise WeightUpdateError("manifest must be the one that is sent, got another; send the update again")
        memory = _memory_for(self.manifest, self._route.bucket_bytes, self._kept.device)
        for number, (bucket, num_bytes) in enumerate(_buckets(self.manifest, self._route.bucket_bytes)):
            stamp = memory[num_bytes : num_bytes + ALIGNMENT].zero_()
            group.broadcast(memory[: num_bytes + ALIGNMENT])
            if not bool((stamp == _stamp(number)).all()):
                raise WeightUpdateError(
                    f"bucket {number} must come whole, got it without its end; send the update again"
                )
            for spec, offset in bucket:
                self._progress.take(spec.name)
                tensor = window(memory, offset, spec)
                yield spec.name, tensor
                close_window(tensor)
        self._is_complete = True

    def finish(self) -> None:
        """Says that the new weights serve.

        Raises:
            WeightUpdateError: The stream was not read to its end.
        """
        if not self._is_complete:
            error = WeightUpdateError(
                f"engine must read all weights before it serves them, got {self._progress}; it ignored the rest"
            )
            self.fail(error)
            raise error

    def fail(self, error: BaseException) -> None:
        """Ends the group: the others learn why."""
        self.abort(f"rank {self._rank}: {type(error).__name__}: {error}")

    def abort(self, why: str = "the update was cancelled") -> None:
        """Ends the group at once, from any thread."""
        if self._group is not None:
            self._group.abort(why)
            self._kept.close()

    def close(self) -> None:
        """The group stays, unless it has failed."""


def _buckets(manifest: WeightManifest, bucket_bytes: int) -> Iterator[tuple[list[tuple[TensorSpec, int]], int]]:
    """Tensors with their places, and the bytes of all, bucket by bucket."""
    bucket: list[tuple[TensorSpec, int]] = []
    used = 0
    for spec in manifest.tensors:
        size = aligned(num_bytes_of(spec))
        if bucket and used + size > bucket_bytes:
            yield bucket, used
            bucket, used = [], 0
        bucket.append((spec, used))
        used += size
    if bucket:
        yield bucket, used


def _memory_for(manifest: WeightManifest, bucket_bytes: int, device: str) -> Tensor:
    num_bytes = max((size for _, size in _buckets(manifest, bucket_bytes)), default=0)
    return torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8, device=device)


def _stamp(number: int) -> int:
    """What ends a bucket: a byte that is not 0, and not that of its neighbours."""
    return 1 + number % 255


def _pack(place: Tensor, spec: TensorSpec, stream: Iterator[tuple[str, Tensor]], progress: StreamProgress) -> None:
    """The next tensor of the stream, which must be the one of the manifest."""
    name, tensor = next(stream, (None, None))
    if name is None or tensor is None:
        progress.finish()  # which raises
        return
    progress.check(name, tensor)
    if name != spec.name:
        raise WeightUpdateError(
            f"weights must come in the order of the manifest to be broadcast, got {name} in the place of {spec.name}"
        )
    place.copy_(tensor.detach())


def _digest(manifest: WeightManifest) -> Tensor:
    """uint8 [16]."""
    digest = hashlib.blake2b(msgspec.msgpack.encode(manifest), digest_size=16).digest()
    return torch.tensor(list(digest), dtype=torch.uint8)
