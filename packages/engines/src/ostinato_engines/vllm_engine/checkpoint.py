"""Which tensors a checkpoint holds, from the heads of its safetensors files: what a weight manifest must name.

vLLM fuses and splits tensors in ways of its own; updates come under the checkpoint's names, as its loader takes them.
"""

import json
import struct
from pathlib import Path

from ostinato_engines.errors import EngineLoadError, ManifestError, UnsupportedError
from ostinato_engines.types import TensorSpec, WeightManifest
from ostinato_engines.weight_blocks import whole_blocks
from ostinato_engines.weight_transfer.progress import check_names

_DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I8": "int8",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "BOOL": "bool",
}
_FLOATS = ("bfloat16", "float16", "float32", "float64")
_NOT_WEIGHTS = ("rotary_emb.inv_freq",)
"""Ends of names that old checkpoints hold although they are computed."""
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"
_MAX_HEADER_BYTES = 100 << 20


class CheckpointTensors:
    """The tensors of one checkpoint.

    Args:
        folder: With safetensors files.
        dtype: That the engine computes in; floating-point updates come in it, or in the checkpoint's own.
        tied: Whether the output head is the embedding: it may then come too, or not.
        cast: Accepts any floating-point type.

    Raises:
        UnsupportedError: There are no safetensors files.
        EngineLoadError: One of them is damaged.
    """

    def __init__(self, folder: Path, *, dtype: str, tied: bool, cast: bool) -> None:
        self._dtype = dtype
        self._cast = cast
        files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
        if not files:
            raise UnsupportedError(
                f"model must be a folder with safetensors files to take weight updates, got {folder}; save it as one"
            )
        self._specs = {spec.name: spec for file in files for spec in _specs_of(file)}
        self._optional: set[str] = set()
        if tied:
            embedding = next((spec for name, spec in self._specs.items() if name.endswith(_EMBEDDING)), None)
            if embedding is not None:
                self._specs.setdefault(_HEAD, TensorSpec(_HEAD, embedding.shape, embedding.dtype))
                self._optional.add(_HEAD)

    def check(self, manifest: WeightManifest) -> None:
        """Raises `ManifestError` unless the manifest describes every tensor once and nothing else; or, in part, whole blocks of them."""
        check_names(manifest)
        for spec in manifest.tensors:
            self._check_spec(spec)
        given = [spec.name for spec in manifest.tensors]
        wanted = whole_blocks(given, list(self._specs)) if manifest.is_partial else self._specs.keys()
        missing = set(wanted) - self._optional - set(given)
        if missing:
            raise ManifestError(
                f"manifest must hold every tensor of the checkpoint, got {len(manifest.tensors)} without "
                f"{', '.join(sorted(missing)[:3])} ({len(missing)} missing); send the whole model"
            )

    def _check_spec(self, spec: TensorSpec) -> None:
        own = self._specs.get(spec.name)
        if own is None:
            some = ", ".join(list(self._specs)[:3])
            raise ManifestError(f"manifest must name tensors of the checkpoint, got {spec.name!r}; it has {some}, ...")
        if tuple(spec.shape) != own.shape:
            raise ManifestError(
                f"{spec.name} must have shape {own.shape}, got {tuple(spec.shape)}; send the same model"
            )
        floating = own.dtype in _FLOATS
        wanted = self._dtype if floating else own.dtype
        if spec.dtype in (wanted, own.dtype) or (self._cast and floating and spec.dtype in _FLOATS):
            return
        raise ManifestError(
            f"{spec.name} must have dtype {wanted}, got {spec.dtype}; convert it, or start the server with "
            "cast_weights=True to round floating-point weights"
        )


def _specs_of(file: Path) -> list[TensorSpec]:
    """What the head of a safetensors file says."""
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {size} bytes")
            head = json.loads(stream.read(size))
        head.pop("__metadata__", None)
        return [
            TensorSpec(name, tuple(entry["shape"]), _DTYPES.get(entry["dtype"], str(entry["dtype"])))
            for name, entry in head.items()
            if not name.endswith(_NOT_WEIGHTS)
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise EngineLoadError(f"{file} must be a safetensors file, got {error}; save the checkpoint again") from error
