"""`ParameterCopies`: a module that computes in another type than its parameters are kept in.

Invariant: gradients come back, and add up, in the parameters' own type. Copies are made, and gradients turned back, a group of parameters at a time:
one by one they would cost a small model on a fast device as much as its layers do. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["ParameterCopies"]

_GROUP: Final = 16
"""Parameters whose gradients wait for each other in the backward pass: about a layer's."""


class ParameterCopies:
    """Floating parameters of a module in another type.

    Args:
        module: Whose parameters stay the same objects.
        dtype: Of the copies.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for each in module.modules():
            for name, parameter in each._parameters.items():
                if parameter is not None and parameter.is_floating_point():
                    self._places.setdefault(parameter, []).append((each, name))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside the block the module has copies of its parameters of now in their stead, through which gradients flow to them."""
        try:
            for parameter, copied in self._copies():
                for module, name in self._places[parameter]:
                    module._parameters[name] = copied  # pyright: ignore[reportArgumentType]  no leaf, so no parameter
            yield
        finally:
            for parameter, places in self._places.items():
                for module, name in places:
                    module._parameters[name] = parameter

    def _copies(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        trained = [parameter for parameter in self._places if parameter.requires_grad]
        frozen = [parameter for parameter in self._places if not parameter.requires_grad]
        for parameters in (trained, frozen):
            for start in range(0, len(parameters), _GROUP):
                group = parameters[start : start + _GROUP]
                yield from zip(group, _Cast.apply(self._dtype, *group), strict=True)


class _Cast(torch.autograd.Function):
    """Tensors in another type, and gradients back in their own."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        return tuple(_cast(tensors, [dtype] * len(tensors)))

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  torch's stub names the first argument, which a static method cannot override
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        there = [place for place, gradient in enumerate(gradients) if gradient is not None]
        found: list[Tensor | None] = [None] * len(gradients)
        known = [gradient for gradient in gradients if gradient is not None]
        for place, gradient in zip(there, _cast(known, [ctx.dtypes[place] for place in there]), strict=True):
            found[place] = gradient
        return None, *found


def _cast(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
    if copies:
        torch._foreach_copy_(copies, list(tensors))  # pyright: ignore[reportPrivateImportUsage]  torch's optimizers are made of these
    return copies
