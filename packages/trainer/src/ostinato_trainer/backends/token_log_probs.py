"""From hidden states to log-probabilities and entropies of chosen tokens, a chunk at a time.

The logits of a micro-batch never exist at once: beyond a fixed number of them, each chunk's are thrown away in the
forward pass and computed again in the backward pass, so memory does not grow with tokens x vocabulary. The softmax is taken in float32 (float64 for a
float64 model), whatever the model computes in, and so is the sum of the output layer's gradient over chunks. Where ranks split the vocabulary,
each computes the logits of its own part, and only a few numbers a token go between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from ostinato_engines.device import CUDA, HOST, device_memory
from ostinato_trainer.backends.base import EntropyMode

_CHUNK_ELEMENTS: Final = {HOST: 2**23}
_CHUNK_ELEMENTS_ELSEWHERE: Final = 2**28
"""Logits of one chunk: enough of them to keep the machine's matrix product busy."""
_KEPT_ELEMENTS: Final = {HOST: 2**25}
_KEPT_ELEMENTS_ELSEWHERE: Final = 2**30
_KEPT_SHARE: Final = 1 / 16
_KEPT_OF_FREE: Final = 1 / 4
"""Logits that may wait for the backward pass; those of further chunks are computed again. On CUDA they may take a share of the device's memory
and of what is free of it."""

_ADDS_MIXED: Final = TorchVersion(torch.__version__) >= "2.10"
"""Whether `addmm` on CUDA adds a 16-bit product to a float32 sum; 2.8 and 2.9 know the argument, but want the sum in 16 bits."""

Head = Callable[[Tensor], Tensor]
"""From hidden states [n, hidden] to logits [n, vocabulary]."""


def chosen_log_probs(
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    entropy: EntropyMode = EntropyMode.OFF,
    chunk_tokens: int | None = None,
    compiled: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target, and the entropy of the distribution that it was drawn from.

    With logits z and normalizer n = log sum exp z: log p = z - n, H = n - sum p z; gradients
    d log p_t / dz = onehot(t) - p and dH / dz = -p (log p + H). A plain `nn.Linear` is differentiated by these
    formulas; any other head by recomputing its chunks under autograd.

    Args:
        hidden: float [S, hidden], the states that predict the targets.
        targets: int64 [S].
        head: Maps hidden states to logits.
        vocab_size: Width of the logits.
        temperature: Divides the logits; above 0.
        entropy: Whether to compute it, and whether gradients flow through it.
        chunk_tokens: Targets per chunk; by default as many as make 2^23 logits on a CPU and 2^28 elsewhere.
        compiled: Let torch.compile fuse what happens to a chunk's logits.

    Returns:
        Two vectors [S]; the second is None where it was not asked for.
    """
    kind = hidden.device.type
    size = chunk_tokens or _chunk_tokens(kind, vocab_size)
    if isinstance(head, nn.Linear) and _is_plain(head):
        settings = _Settings(1 / temperature, entropy, size, compiled)
        chosen, spread = _LinearHead.apply(hidden, head.weight, head.bias, targets, settings)
    else:
        chosen, spread = _any_head(hidden, targets, head, temperature, entropy, size)
    return chosen, None if entropy is EntropyMode.OFF else spread


@dataclass(frozen=True)
class VocabularyShard:
    """A rank's part of a vocabulary that the ranks of a group split: ids `first` to `first + width`, `width` being the rows of its weight."""

    group: dist.ProcessGroup
    first: int

    def sum(self, values: Tensor) -> None:
        """Adds up `values` over the ranks, in place."""
        dist.all_reduce(values, group=self.group)

    def places(self, targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Where each target stands in this part (int64 [n], any place where it does not), and whether it does (bool [n])."""
        places = targets - self.first
        return places.clamp(0, width - 1), (places >= 0) & (places < width)

    def summary(
        self, logits: Tensor, targets: Tensor, scale: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """As `_summary`, of logits [n, width] of this part; equal on all ranks."""
        logits = _scaled(logits, torch.promote_types(logits.dtype, torch.float32), scale)
        largest = logits.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        weights = (logits - largest.unsqueeze(-1)).exp()
        places, held = self.places(targets, logits.shape[-1])
        of_target = logits.gather(-1, places.unsqueeze(-1)).squeeze(-1).masked_fill(~held, 0.0)
        sums = [weights.sum(-1), of_target]
        if with_entropy:
            sums.append((weights * logits).sum(-1))
        total, of_target, *mean = (summed := torch.stack(sums)).unbind()
        self.sum(summed)
        normalizer = largest + total.log()
        return of_target - normalizer, normalizer, normalizer - mean[0] / total if mean else None

    def gradient(
        self,
        logits: Tensor,
        targets: Tensor,
        scale: float,
        normalizer: Tensor,
        of_chosen: Tensor,
        entropies: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """As `_gradient`, by the logits [n, width] of this part."""
        places, held = self.places(targets, logits.shape[-1])
        of_target = of_chosen.masked_fill(~held, 0.0)
        return _gradient(logits, places, scale, normalizer, of_chosen, entropies, of_target=of_target)


def chosen_log_probs_of_shard(
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor,
    *,
    shard: VocabularyShard,
    temperature: float = 1.0,
    entropy: EntropyMode = EntropyMode.OFF,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `chosen_log_probs`, for an output layer that is split over ranks; all of them call it with the same hidden states and targets.

    The gradient by the hidden states is that of the whole vocabulary on every rank; the one by the weight is of its own rows.

    Args:
        hidden: float [S, hidden].
        targets: int64 [S], of the whole vocabulary.
        weight: float [width, hidden], the rows of this rank.
        shard: Which rows they are.
        temperature: Divides the logits; above 0.
        entropy: Whether to compute it, and whether gradients flow through it.
        chunk_tokens: As there, of this rank's logits.
    """
    kind, width = hidden.device.type, weight.shape[0]
    size = chunk_tokens or _chunk_tokens(kind, width)
    settings = _Settings(1 / temperature, entropy, size, False, shard)
    chosen, spread = _LinearHead.apply(hidden, weight, None, targets, settings)
    return chosen, None if entropy is EntropyMode.OFF else spread


class _Settings:
    """How `_LinearHead` works; opaque to autograd."""

    def __init__(
        self,
        scale: float,
        entropy: EntropyMode,
        size: int,
        compiled: bool,
        shard: VocabularyShard | None = None,
    ) -> None:
        self.scale, self.entropy, self.size, self.shard = scale, entropy, size, shard
        if shard is not None:
            self.summary, self.gradient = shard.summary, shard.gradient
            return
        self.summary = _compiled(_summary) if compiled else _summary
        self.gradient = _compiled(_gradient) if compiled else _gradient


class _LinearHead(torch.autograd.Function):
    """Output layer, softmax and choice in one, with a backward pass that computes a chunk's logits anew."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        kind = hidden.device.type
        compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        exact = torch.promote_types(compute, torch.float32)
        chosen, normalizer, spread = (hidden.new_zeros(len(targets), dtype=exact) for _ in range(3))
        with_entropy = settings.entropy is not EntropyMode.OFF
        kept: list[Tensor] = []
        num_kept = _kept_chunks(hidden.device, compute, settings.size * len(weight)) if any(ctx.needs_input_grad) else 0
        with torch.autocast(kind, enabled=False):
            table, offset = weight.to(compute), None if bias is None else bias.to(compute)
            for part in _chunks(len(targets), settings.size):
                logits = functional.linear(hidden[part].to(compute), table, offset)
                chosen[part], normalizer[part], entropies = settings.summary(
                    logits, targets[part], settings.scale, with_entropy
                )
                if entropies is not None:
                    spread[part] = entropies
                if len(kept) < num_kept:
                    kept.append(logits)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, spread, *kept)
        ctx.settings, ctx.compute, ctx.exact = settings, compute, exact
        if settings.entropy is not EntropyMode.GRADIENT:
            ctx.mark_non_differentiable(spread)
        return chosen, spread

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  torch's stub names the first argument, which a static method cannot override
        ctx: Any, *outputs: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden, weight, bias, targets, normalizer, spread, *kept = ctx.saved_tensors
        settings, compute = ctx.settings, ctx.compute
        of_chosen = outputs[0]
        of_spread = outputs[1] if settings.entropy is EntropyMode.GRADIENT else None
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=ctx.exact) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=ctx.exact) if needs_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            table, offset = weight.to(compute), None if bias is None else bias.to(compute)
            for place, part in enumerate(_chunks(len(targets), settings.size)):
                states = hidden[part].to(compute)
                logits = kept[place] if place < len(kept) else functional.linear(states, table, offset)
                entropies = None if of_spread is None else (of_spread[part], spread[part])
                gradient = settings.gradient(
                    logits, targets[part], settings.scale, normalizer[part], of_chosen[part], entropies
                )
                if grad_bias is not None:
                    grad_bias += gradient.sum(0)
                if grad_weight is not None:
                    _add_product(grad_weight, gradient, states)
                if grad_hidden is not None:
                    grad_hidden[part] = (gradient.to(compute) @ table).to(grad_hidden.dtype)
        if grad_hidden is not None and settings.shard is not None:
            settings.shard.sum(grad_hidden)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if bias is None or grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


def _summary(logits: Tensor, targets: Tensor, scale: float, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probability of each target, the normalizer, and the entropy, each [n]."""
    logits = _scaled(logits, torch.promote_types(logits.dtype, torch.float32), scale)
    normalizer = logits.logsumexp(-1)
    chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - normalizer
    if not with_entropy:
        return chosen, normalizer, None
    return chosen, normalizer, normalizer - ((logits - normalizer.unsqueeze(-1)).exp() * logits).sum(-1)


def _gradient(
    logits: Tensor,
    targets: Tensor,
    scale: float,
    normalizer: Tensor,
    of_chosen: Tensor,
    entropies: tuple[Tensor, Tensor] | None,
    *,
    of_target: Tensor | None = None,
) -> Tensor:
    """[n, vocabulary]: the gradient by the logits, before the temperature.

    Args:
        logits: As the head gave them.
        targets: int64 [n].
        scale: One over the temperature.
        normalizer: [n], of the scaled logits.
        of_chosen: [n], the gradient by the log-probabilities.
        entropies: The gradient by the entropies, and the entropies, each [n].
        of_target: [n], what of it goes to the targets' own logits; all of it by default.
    """
    shifted = _scaled(logits, normalizer.dtype, scale) - normalizer.unsqueeze(-1)
    weights = -of_chosen.unsqueeze(-1)
    if entropies is not None:
        of_spread, spread = entropies
        weights = weights - of_spread.unsqueeze(-1) * (shifted + spread.unsqueeze(-1))
    gradient = shifted.exp() * weights
    of_target = of_chosen if of_target is None else of_target
    return _scaled(gradient.scatter_add_(-1, targets.unsqueeze(-1), of_target.unsqueeze(-1)), gradient.dtype, scale)


def _scaled(values: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    values = values.to(dtype)
    return values if scale == 1.0 else values * scale


def _add_product(total: Tensor, gradient: Tensor, states: Tensor) -> None:
    """Adds gradient^T @ states to `total`, summing in its precision: [vocabulary, hidden]."""
    if states.dtype == total.dtype:
        total.addmm_(gradient.T, states)
    elif total.device.type == CUDA and _ADDS_MIXED:
        torch.addmm(total, gradient.to(states.dtype).T, states, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(gradient.T, states.to(total.dtype))


def _any_head(
    hidden: Tensor, targets: Tensor, head: Head, temperature: float, entropy: EntropyMode, size: int
) -> tuple[Tensor, Tensor]:
    def of_chunk(states: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        chosen, _, spread = _summary(head(states), wanted, 1 / temperature, entropy is not EntropyMode.OFF)
        if spread is None:
            return chosen, chosen.detach()
        return chosen, spread if entropy is EntropyMode.GRADIENT else spread.detach()

    if len(targets) <= size:
        return of_chunk(hidden, targets)
    parts = [
        checkpoint(of_chunk, states, wanted, use_reentrant=False, preserve_rng_state=False)
        for states, wanted in zip(hidden.split(size), targets.split(size), strict=True)
    ]
    chosen, spread = (torch.cat(column) for column in zip(*parts, strict=True))
    return chosen, spread


def _is_plain(layer: nn.Linear) -> bool:
    """Whether calling the layer does nothing but what its weight and bias say."""
    return type(layer) is nn.Linear and not layer._forward_hooks and not layer._forward_pre_hooks


def _chunk_tokens(kind: str, vocab_size: int) -> int:
    """Targets of one chunk on a device of the kind."""
    return max(1, _CHUNK_ELEMENTS.get(kind, _CHUNK_ELEMENTS_ELSEWHERE) // vocab_size)


def _kept_chunks(device: torch.device, dtype: torch.dtype, chunk: int) -> int:
    """Chunks of so many logits that may be kept on a device."""
    elements = _KEPT_ELEMENTS.get(device.type, _KEPT_ELEMENTS_ELSEWHERE)
    memory = device_memory(device) if device.type == CUDA else None
    if memory is not None:
        elements = int(min(_KEPT_SHARE * memory.total, _KEPT_OF_FREE * memory.available)) // dtype.itemsize
    return elements // chunk


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)
