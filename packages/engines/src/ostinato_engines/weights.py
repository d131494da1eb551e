"""Replaces a model's weights in place by a stream of named tensors, checked against a manifest first.

A tied tensor may come under any or all of its names. Holds no copy: at most one streamed tensor lives at a time.
Knows no requests; the server decides what a failure means.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ostinato_engines.errors import ManifestError, WeightUpdateError
from ostinato_engines.types import TensorSpec, WeightManifest
from ostinato_engines.weight_transfer.progress import StreamProgress, check_names


class WeightWriter:
    """The tensors of one model by all their names."""

    def __init__(self, model: nn.Module, *, cast: bool = False) -> None:
        self._cast = cast
        self._tensors: dict[str, Tensor] = {
            name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)
        }
        parameters = {id(parameter) for parameter in model.parameters()}
        self._required: dict[int, str] = {}
        for name, tensor in self._tensors.items():
            if id(tensor) in parameters:
                self._required.setdefault(id(tensor), name)
        self._shapes = {id(tensor): tensor.shape for tensor in self._tensors.values()}

    @property
    def parameters(self) -> dict[str, Tensor]:
        """What the model computes with, each tensor once, by the first of its names; not copies."""
        return {name: self._tensors[name] for name in self._required.values()}

    def check(self, manifest: WeightManifest) -> None:
        """Raises `ManifestError` unless the manifest describes every parameter once and nothing else, or some of them where it is partial."""
        check_names(manifest)
        names = [spec.name for spec in manifest.tensors]
        for spec in manifest.tensors:
            self._check_spec(spec)
        if manifest.is_partial:
            return
        covered = {id(self._tensors[name]) for name in names}
        missing = [name for key, name in self._required.items() if key not in covered]
        if missing:
            raise ManifestError(
                f"manifest must hold every parameter, got {len(names)} tensors without {', '.join(missing[:3])}"
                f"{' and more' if len(missing) > 3 else ''} ({len(missing)} missing); send the whole model"
            )

    def _check_spec(self, spec: TensorSpec) -> None:
        tensor = self._tensors.get(spec.name)
        if tensor is None:
            raise ManifestError(
                f"manifest must name tensors of the model, got {spec.name!r}; it has {self._some_names()}"
            )
        if tuple(spec.shape) != tuple(self._shapes[id(tensor)]):
            raise ManifestError(
                f"{spec.name} must have shape {tuple(self._shapes[id(tensor)])}, got {tuple(spec.shape)}; send the same model"
            )
        expected = str(tensor.dtype).removeprefix("torch.")
        if spec.dtype == expected:
            return
        given = getattr(torch, spec.dtype, None)
        castable = isinstance(given, torch.dtype) and given.is_floating_point and tensor.dtype.is_floating_point
        if not (self._cast and castable):
            raise ManifestError(
                f"{spec.name} must have dtype {expected}, got {spec.dtype}; convert it, or start the server with "
                "cast_weights=True to round floating-point weights"
            )

    def _some_names(self) -> str:
        names = list(self._tensors)
        return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")

    @torch.no_grad()
    def write(
        self, manifest: WeightManifest, weights: Iterable[tuple[str, Tensor]], *, cancelled: Callable[[], bool]
    ) -> None:
        """Copies the stream into the model, each tensor as it comes, in any order.

        Raises:
            WeightUpdateError: The stream broke off, or did not keep to its manifest. What came before is written.
        """
        progress = StreamProgress(manifest)
        written: dict[int, str] = {}
        try:
            for name, tensor in weights:
                if cancelled():
                    raise WeightUpdateError("weight update must run to its end, got cancelled; send a complete update")
                progress.check(name, tensor)
                self._write_one(name, tensor, written)
                del tensor
        except WeightUpdateError:
            raise
        except Exception as error:
            raise progress.broken_off(error) from error
        progress.finish()

    def _write_one(self, name: str, tensor: Tensor, written: dict[int, str]) -> None:
        target = self._tensors[name]
        if (first := written.get(id(target))) is not None:
            other = tensor.to(device=target.device, dtype=target.dtype)
            if not torch.allclose(target, other, rtol=0, atol=0, equal_nan=True):
                raise WeightUpdateError(
                    f"{name} must equal {first}, to which the model ties it, got other values; send one of them"
                )
            return
        target.copy_(tensor)
        written[id(target)] = name

    @torch.no_grad()
    def discard(self) -> None:
        """Frees the memory of all parameters; their shapes are remembered."""
        for name in self._required.values():
            tensor = self._tensors[name]
            tensor.data = tensor.data.new_empty(0)

    @torch.no_grad()
    def allocate(self) -> None:
        """Gives the weights memory again; the values are undefined until a complete update."""
        for name in self._required.values():
            tensor = self._tensors[name]
            if tensor.numel() == 0:
                tensor.data = tensor.data.new_zeros(self._shapes[id(tensor)])
