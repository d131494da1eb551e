"""Where new weights wait for SGLang: one safetensors file in a private folder of the host's memory, gone when it is loaded."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato_engines.errors import WeightUpdateError
from ostinato_engines.types import WeightManifest

if TYPE_CHECKING:
    from torch import Tensor

MEMORY = Path("/dev/shm")
FILE = "model.safetensors"


class _Stopped(Exception):
    """Nobody waits for the file any more."""


@asynccontextmanager
async def staged_weights(manifest: WeightManifest, weights: "Iterable[tuple[str, Tensor]]") -> AsyncIterator[Path]:
    """A folder with a complete update, for the block's time. The stream is read in a thread.

    Raises:
        WeightUpdateError: The stream failed, or there is no room for it.
    """
    from ostinato_engines.weight_transfer import write_weights

    stopped = False

    def stream() -> "Iterator[tuple[str, Tensor]]":
        for item in weights:
            if stopped:
                raise _Stopped
            yield item

    folder = _new_folder(manifest)
    try:
        writing = asyncio.ensure_future(asyncio.to_thread(write_weights, folder / FILE, manifest, stream()))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            stopped = True
            await asyncio.wait([writing])
            writing.exception()
            raise
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _new_folder(manifest: WeightManifest) -> Path:
    place = _place_for(manifest)
    try:
        return Path(tempfile.mkdtemp(prefix="ostinato-weights-", dir=place))
    except OSError as error:
        raise WeightUpdateError(f"{place} must take a folder of weights, got {error}; make it writable") from error


def _place_for(manifest: WeightManifest) -> Path:
    """The host's memory if it has room, else the folder for temporary files."""
    from ostinato_engines.weight_transfer.layout import num_bytes_of

    num_bytes = sum(num_bytes_of(spec) for spec in manifest.tensors)
    for place in (MEMORY, Path(tempfile.gettempdir())):
        if place.is_dir() and shutil.disk_usage(place).free > num_bytes + num_bytes // 16:
            return place
    raise WeightUpdateError(
        f"{MEMORY} or {tempfile.gettempdir()} must have room for {num_bytes} bytes of weights, got neither; free some"
    )
