"""Tensors on their way from a rank's process to its controller: one piece of memory for a whole list, which both processes see.

Invariants: the memory is the hand-over's own, never the model's, so that nothing that the rank does later changes what was handed over; and it
lives until the controller has let go of the last tensor in it. On a device torch carries the driver's handle, an event that makes the reader's
work wait for the writer's, and the count that keeps the memory. Opening a handle takes about as long as copying a gigabyte: so there is one
for a list, and not one for each tensor.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import torch
import torch.multiprocessing  # teaches the pickler torch's ways to share tensors
from torch import Tensor

from ostinato_engines.device import HOST, empty_to_share, shares_memory

logger = logging.getLogger(__name__)

_ALIGNMENT: Final = 64
"""Of tensors in the memory, in bytes: enough for every type."""


@dataclass(frozen=True)
class HandedOver:
    """Tensors as they travel."""

    memory: Tensor
    """uint8 [bytes]; what is left of it goes when the last tensor of `taken_over` does."""
    names: tuple[str, ...]
    kinds: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    """Type and shape of each."""

    def views(self) -> Iterator[Tensor]:
        """The tensors' places in the memory."""
        start = 0
        for dtype, shape in self.kinds:
            num_bytes = _num_bytes(dtype, shape)
            yield self.memory[start : start + num_bytes].view(dtype).view(shape)
            start += _aligned(num_bytes)


def hand_over(tensors: Sequence[tuple[str, Tensor]], *, on_host: bool = False) -> HandedOver:
    """Copies tensors of one device into memory that another process can open: there, or on the host where devices share none.

    Raises:
        RuntimeError: there is not enough memory.
    """
    names = tuple(name for name, _ in tensors)
    kinds = tuple((tensor.dtype, tuple(tensor.shape)) for _, tensor in tensors)
    num_bytes = sum(_aligned(_num_bytes(dtype, shape)) for dtype, shape in kinds)
    device = tensors[0][1].device if tensors and not on_host else torch.device(HOST)
    handed = HandedOver(empty_to_share(num_bytes, device if shares_memory(device) else HOST), names, kinds)
    for view, (_, tensor) in zip(handed.views(), tensors, strict=True):
        view.copy_(tensor.detach())
    return handed


def taken_over(handed: HandedOver) -> list[tuple[str, Tensor]]:
    """The tensors in the order in which they were given."""
    return list(zip(handed.names, handed.views(), strict=True))


def dumped(answer: Any, tensors: Sequence[tuple[str, Tensor]]) -> Any:
    """Bytes of what `answer` makes of handed over tensors; through the host's memory where the device's cannot be shared."""
    try:
        return ForkingPickler.dumps(answer(hand_over(tensors)))
    except RuntimeError as error:
        if not tensors or not shares_memory(tensors[0][1].device):
            raise
        logger.warning(
            "Weights leave this rank through the host's memory, since its device's cannot be shared: %s", error
        )
        return ForkingPickler.dumps(answer(hand_over(tensors, on_host=True)))


def _num_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * dtype.itemsize


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
