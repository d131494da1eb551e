"""Holds a stream of named tensors to its manifest; the two ends of a transfer and the writer into a model all use it.

Invariant: a stream that passes `finish` has brought every tensor of the manifest exactly once, with its shape and dtype.
The order is free: names carry the meaning. Knows no bytes and no model, and loads no torch.
"""

from collections import Counter
from typing import TYPE_CHECKING

from ostinato_engines.errors import ManifestError, WeightUpdateError
from ostinato_engines.types import TensorSpec, WeightManifest

if TYPE_CHECKING:
    from torch import Tensor


def check_names(manifest: WeightManifest) -> None:
    """Raises `ManifestError` where a manifest names a tensor twice."""
    counts = Counter(spec.name for spec in manifest.tensors)
    if len(counts) != len(manifest.tensors):
        double = counts.most_common(1)[0][0]
        raise ManifestError(f"manifest must name each tensor once, got {double!r} twice; remove one")


class StreamProgress:
    """What has come of a stream, and what is still to come.

    Raises:
        ManifestError: The manifest names a tensor twice.
    """

    def __init__(self, manifest: WeightManifest) -> None:
        check_names(manifest)
        self._specs = {spec.name: spec for spec in manifest.tensors}
        self._missing = dict.fromkeys(self._specs)

    @property
    def num_done(self) -> int:
        """Tensors that have come."""
        return len(self._specs) - len(self._missing)

    def __str__(self) -> str:
        return f"{self.num_done} of {len(self._specs)} tensors"

    def take(self, name: str) -> TensorSpec:
        """Notes that a tensor has come, and returns what the manifest says of it.

        Raises:
            WeightUpdateError: The manifest has no such tensor, or it has come before.
        """
        spec = self._specs.get(name)
        if spec is None:
            raise WeightUpdateError(f"weights must follow the manifest, got {name!r} beyond it; send what it names")
        if name not in self._missing:
            raise WeightUpdateError(f"weights must hold each tensor once, got {name!r} twice; send it once")
        del self._missing[name]
        return spec

    def check(self, name: str, tensor: "Tensor") -> TensorSpec:
        """Like `take`, for a tensor that is at hand: its shape and dtype are checked as well."""
        spec = self.take(name)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != tuple(spec.shape) or dtype != spec.dtype:
            raise WeightUpdateError(
                f"{name} must be {spec.dtype} {tuple(spec.shape)} as in the manifest, got {dtype} {tuple(tensor.shape)}; "
                "build the manifest from what is sent"
            )
        return spec

    def broken_off(self, error: Exception) -> WeightUpdateError:
        """What to raise where the stream's source, or what it is written to, failed."""
        return WeightUpdateError(
            f"weights must stream to their end, got {type(error).__name__}: {error} after {self}; send a complete update"
        )

    def finish(self) -> None:
        """Raises `WeightUpdateError` unless every tensor has come."""
        if self._missing:
            raise WeightUpdateError(
                f"weights must hold every tensor of the manifest, got none for {', '.join(list(self._missing)[:3])} "
                f"({len(self._missing)} missing); send a complete update"
            )
