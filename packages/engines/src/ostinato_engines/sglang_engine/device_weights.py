"""New weights from device to device, without the host: SGLang opens the trainer's memory and copies out of it.

What we send is pickled, as SGLang wants it, and read there by an unpickler that knows torch's tensors only; nothing pickled
comes back. Memory is bounded by one bucket of copies, since a tensor of the stream may change once the next one is taken.
"""

import asyncio
import base64
import io
from collections.abc import Iterable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

from ostinato_engines import device as devices
from ostinato_engines.errors import WeightUpdateError
from ostinato_engines.types import WeightManifest

if TYPE_CHECKING:
    from torch import Tensor

BUCKET_BYTES = 512 << 20
_DEVICE_ARGUMENT = 6
"""Of torch's `rebuild_cuda_tensor`; SGLang finds a device by its UUID, whatever number it has there."""

Bucket = list[tuple[str, "Tensor"]]


class DeviceWeights:
    """One update, in buckets. Raises `WeightUpdateError` where the stream fails, or a tensor lies on no such device."""

    def __init__(self, manifest: WeightManifest, weights: "Iterable[tuple[str, Tensor]]") -> None:
        self._buckets = _buckets(manifest, weights)

    async def next_bucket(self) -> Bucket | None:
        """Some tensors, read in a thread; None at the end."""
        reading = asyncio.ensure_future(asyncio.to_thread(next, self._buckets, None))
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            await asyncio.wait([reading])
            if not reading.cancelled():
                reading.exception()
            raise


def payload(bucket: Bucket) -> str:
    """Handles of the bucket's memory for one of SGLang's ranks, in base64; the bucket must live until SGLang has answered."""
    from torch import Tensor

    buffer = io.BytesIO()
    pickler: Any = ForkingPickler(buffer)
    pickler.dispatch_table[Tensor] = _handle_of
    pickler.dump(bucket)
    return base64.b64encode(buffer.getvalue()).decode()


def _handle_of(tensor: "Tensor") -> tuple[Any, tuple[Any, ...]]:
    """As torch pickles a tensor of a device for another process, the device named so that every process understands it."""
    from torch.multiprocessing import reductions

    rebuild, arguments = reductions.reduce_tensor(tensor)
    place = devices.unique_name(tensor.device)
    return rebuild, (*arguments[:_DEVICE_ARGUMENT], place, *arguments[_DEVICE_ARGUMENT + 1 :])


def _buckets(manifest: WeightManifest, weights: "Iterable[tuple[str, Tensor]]") -> Iterator[Bucket]:
    from ostinato_engines.weight_transfer.layout import num_bytes_of
    from ostinato_engines.weight_transfer.progress import StreamProgress

    progress = StreamProgress(manifest)
    bucket: Bucket = []
    num_bytes = 0
    stream = iter(weights)
    while True:
        try:
            item = next(stream, None)
        except Exception as error:
            raise progress.broken_off(error) from error
        if item is None:
            break
        name, tensor = item
        if not devices.shares_memory(tensor.device.type):
            raise WeightUpdateError(
                f"{name} must lie on a device that shares memory between processes, got {tensor.device}; "
                "leave share_device out"
            )
        spec = progress.check(name, tensor)
        if bucket and num_bytes + num_bytes_of(spec) > BUCKET_BYTES:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append((name, tensor.detach().clone()))
        num_bytes += num_bytes_of(spec)
        del item, tensor
    progress.finish()
    if bucket:
        yield bucket
