"""Whether layers are compiled by torch.compile, and how a layer is made ready for training: compiled, or computed again in the backward pass.

Invariants: names of parameters stay as they are; a layer is compiled once for passes with gradients and once for those without, however many
sequences there are and however long; and what cannot be compiled is found out before the first pass, not within it. It knows no model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch
import torch._dynamo
import torch._dynamo.exc
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ostinato_engines.device import CUDA
from ostinato_trainer.errors import BackendError

__all__ = ["COMPILE_KEY", "compiler_failures_named", "prepare_layers", "resolve_compile"]

COMPILE_KEY: Final = "actor_rollout_ref.actor.use_torch_compile"

_logger = logging.getLogger(__name__)

_MAX_TEXT: Final = 300
_MAX_VARIANTS: Final = 32
"""Kinds of a layer that are compiled: with gradients or without, frozen, with adapters or without, of the policy or the critic, full or sliding
attention. Of further ones torch would compile none; its own limit is 8."""


def resolve_compile(choice: bool | None, device: torch.device) -> bool:
    """Whether layers on a device are compiled.

    Args:
        choice: What was asked for; None compiles on CUDA where the compiler works.
        device: Of the layers.

    Raises:
        BackendError: it was asked for, and the compiler does not work here.
    """
    if choice is False or (choice is None and device.type != CUDA):
        return False
    obstacle = _obstacle(device)
    if obstacle is None:
        _logger.info(
            "Layers are compiled: the first passes take some seconds longer, all others less; %s=false does without",
            COMPILE_KEY,
        )
        return True
    if choice:
        raise BackendError(
            f"{COMPILE_KEY} must be false where torch.compile does not work, got true: {obstacle}; write {COMPILE_KEY}=false, or install what "
            "is missing"
        )
    _logger.warning("Layers are not compiled, which costs speed: torch.compile does not work here: %s", obstacle)
    return False


def prepare_layers(layers: Iterable[nn.Module], *, compiled: bool = False, recomputed: bool = False) -> None:
    """Changes how layers compute, in place; layers are alike, so what is compiled for one serves all.

    Args:
        layers: Of one model.
        compiled: Let torch.compile fuse each layer.
        recomputed: Keep only a layer's inputs for the backward pass and compute the rest again. Such layers cannot be copied.
    """
    if compiled:
        limits: Any = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, _MAX_VARIANTS)
    for layer in layers:
        if recomputed:  # around what is compiled, which may then consist of several parts
            layer.forward = _recomputing(torch.compile(layer.forward, dynamic=True) if compiled else layer.forward)
        elif compiled:
            layer.compile(dynamic=True)


@contextmanager
def compiler_failures_named() -> Iterator[None]:
    """Raises BackendError, which names the key, where a layer within the block cannot be compiled."""
    try:
        yield
    except torch._dynamo.exc.TorchDynamoException as error:
        text = " ".join(str(error).split())[:_MAX_TEXT]
        raise BackendError(
            f"{COMPILE_KEY} must be false for a model that torch.compile cannot compile, got {type(error).__name__}: {text}; write "
            f"{COMPILE_KEY}=false"
        ) from error


def _recomputing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward pass that keeps its inputs only."""

    def recomputed(*arguments: Any, **named: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False, **named)

    return recomputed


@cache
def _obstacle(device: torch.device) -> str | None:
    """Why nothing can be compiled for a device, or None where a small function could be."""

    def trial(values: Tensor) -> Tensor:
        return (values.sigmoid() * values).sum(-1)

    try:
        torch.compile(trial, dynamic=True)(torch.ones(2, 8, device=device))
    except Exception as error:  # compilers fail in many ways, each of which is the reason why nothing is compiled
        return f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_TEXT]}"
    return None
