"""`spread`: mean, largest and smallest of some numbers, as the field's metric names end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["spread"]


def spread(name: str, values: Tensor | Sequence[float]) -> dict[str, float]:
    """`name/mean`, `name/max` and `name/min`; nothing where there are no values."""
    values = torch.as_tensor(values, dtype=torch.float64)
    if not values.numel():
        return {}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
