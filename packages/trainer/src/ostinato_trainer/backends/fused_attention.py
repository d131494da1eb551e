"""`fused_attention`: the kernels of the package flash-attn-4, for GPUs that are better served by them than by torch's own.

Torch's attention over sequences of any length was written for an older generation of GPUs; on Hopper and Blackwell these kernels take about half
of its time. The package is no dependency: it is used where somebody has installed it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from ostinato_engines.device import CUDA, device_generation

_logger = logging.getLogger(__name__)

_GENERATIONS: Final = (9, 10)
"""Major compute capabilities that the package has forward and backward kernels for: Hopper and Blackwell."""
_WIDEST_HEAD: Final = 128
_HEAD_STEP: Final = 8


def fused_attention(query: Tensor, value: Tensor) -> Callable[..., Tensor] | None:
    """The attention to use for such tensors, or None where torch's own has to do.

    Args:
        query: [1, heads, T, width].
        value: [1, key-value heads, T, width].

    Returns:
        A function of query, key and value as they are, the sequences' starts (int32 [N+1]), the longest length, the scale of the scores (None
        for 1 / sqrt(width)) and the window (None for all tokens before), that gives [1, heads, T, width].
    """
    widths = (query.shape[-1], value.shape[-1])
    if query.device.type != CUDA or query.dtype not in (torch.float16, torch.bfloat16):
        return None
    if max(widths) > _WIDEST_HEAD or any(width % _HEAD_STEP for width in widths):
        return None
    return _attend if _is_served(query.device) else None  # pyright: ignore[reportReturnType]  the decorator's stub knows no arguments


@torch.compiler.assume_constant_result  # so that compiled layers do not look for the package
def _is_served(device: torch.device) -> bool:
    """Whether the package is there, and has kernels for the device."""
    return device_generation(device) in _GENERATIONS and _kernels() is not None


@torch.compiler.disable  # what the package does before it starts a kernel cannot be traced
def _attend(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    kernels = _kernels()
    assert kernels is not None
    rows = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    answer = kernels(
        *rows,
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=scaling,
        causal=window is None,
        window_size=(None, None) if window is None else (window - 1, 0),
    )
    attended: Tensor = answer[0] if isinstance(answer, tuple) else answer
    return attended.transpose(0, 1).unsqueeze(0)


@cache
def _kernels() -> Callable[..., Any] | None:
    try:
        from flash_attn.cute import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    except Exception as error:  # an installation that is broken in whatever way is one that cannot be used
        _logger.warning(
            "The package flash-attn-4 cannot be loaded (%s: %s); torch's attention is used. Install it again, or take it away",
            type(error).__name__,
            error,
        )
        return None
    _logger.info("Attention uses the kernels of the package flash-attn-4")
    return flash_attn_varlen_func
