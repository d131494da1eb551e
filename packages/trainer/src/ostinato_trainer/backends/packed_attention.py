"""`packed_attention`: causal attention within each sequence of a packed row, by the contract that `transformers` models call attention by.

Invariant: a token sees the tokens before it in its own sequence and nothing else; no mask of all tokens by all tokens exists. It knows no model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ostinato_engines.device import CUDA
from ostinato_trainer.backends.fused_attention import fused_attention
from ostinato_trainer.backends.sequence_ranks import SequenceRanks
from ostinato_trainer.errors import BackendError

PACKED_ATTENTION: Final = "ostinato_packed"
"""Name under which `packed_attention` is registered with `transformers`."""

_HARMLESS: Final = frozenset(
    {
        "cu_seq_lens_k",
        "max_length_k",
        "output_attentions",
        "output_hidden_states",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""What models pass to an attention function beside what `packed_attention` reads and that changes nothing here."""

_packing: ContextVar[Sequence[int] | None] = ContextVar("packing", default=None)
"""Lengths of the sequences in the row that is being computed."""


def register_packed_attention() -> None:
    """Makes `PACKED_ATTENTION` known to `transformers`, with its mask: none for packed rows."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, _packed_mask)


@contextmanager
def as_packed(lengths: Sequence[int]) -> Iterator[None]:
    """Inside the block, rows are packed: models get no mask. `lengths` of the sequences are what no layer has to ask the device for."""
    token = _packing.set(lengths)
    try:
        yield
    finally:
        _packing.reset(token)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    sequence_ranks: SequenceRanks | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a packed row, as `transformers` calls an attention function.

    Args:
        module: The layer that asks.
        query: float [1, heads, T, width].
        key: float [1, key-value heads, T, width].
        value: As `key`.
        attention_mask: Read only where there are no sequence lengths: then this is `sdpa`.
        scaling: Of the scores; 1 / sqrt(width) by default.
        dropout: Must be 0.
        sliding_window: How many tokens a token sees, itself included; None for all.
        is_causal: Must not be false.
        cu_seq_lens_q: int32 [N+1]; sequence n is the tokens from entry n to entry n+1.
        max_length_q: Longest sequence.
        sequence_ranks: With whom the row is shared; query, key and value are of this rank's stretch of it then, and so is what is returned.
        others: What else the model says of its attention.

    Returns:
        float [1, T, heads, width], and no weights.

    Raises:
        BackendError: the model asks for an attention that this is not, or has heads that the ranks cannot share.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **others
        )
    _check_kind(module, dropout, is_causal, others)
    if sequence_ranks is None:
        return _attended(query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window).transpose(1, 2), None
    shared = _shared(query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window, sequence_ranks)  # pyright: ignore[reportCallIssue]  the decorator's stub knows no arguments
    return shared.transpose(1, 2), None


@torch.compiler.disable  # ranks exchange what no graph may reorder
def _shared(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
    ranks: SequenceRanks,
) -> Tensor:
    """[1, heads, own tokens, width], of queries, keys and values of the own tokens."""
    ranks.check_heads(query.shape[1])
    query, key, value = (ranks.heads(states) for states in (query, key, value))
    return ranks.tokens(_attended(query, key, value, starts, longest, scaling, window))


def _attended(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    """[1, heads, T, width], by whatever is fastest here."""
    fused = fused_attention(query, value)
    if fused is not None:
        return fused(query, key, value, starts, longest, scaling, window)
    if query.device.type == CUDA and query.dtype in (torch.float16, torch.bfloat16) and _VARLEN is not None:
        return _varlen(query, key, value, starts, longest, scaling, window).transpose(0, 1).unsqueeze(0)
    return _by_sequence(query, key, value, starts, scaling, window)  # pyright: ignore[reportCallIssue]  the decorator's stub knows no arguments


@torch.compiler.disable  # it would be compiled anew for every number of sequences
def _by_sequence(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """[1, heads, T, width]: one call of torch's attention a sequence, so that no mask of T x T exists.

    On CUDA only flash attention (16 bits, no mask) takes fewer key heads than heads: anything else torch would compute by whole tables of
    scores, so there each head gets its own.
    """
    shares = query.device.type != CUDA
    if not shares:
        key, value = (_for_every_head(states, query.shape[1]) for states in (key, value))
    lengths = list(_packing.get() or starts.diff().tolist())  # a layer that is computed again asks the device
    parts = []
    for one_query, one_key, one_value in zip(
        *(states.split(lengths, dim=2) for states in (query, key, value)), strict=True
    ):
        length = one_query.shape[2]
        band = None if window is None or window >= length else _band(length, window, query.device)
        parts.append(
            functional.scaled_dot_product_attention(
                one_query, one_key, one_value, attn_mask=band, is_causal=band is None, scale=scaling, enable_gqa=shares
            )
        )
    return torch.cat(parts, dim=2)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    """[T, heads, width]: torch's flash attention over sequences of any length, which needs a GPU and 16 bits."""
    assert _VARLEN is not None
    groups = query.shape[1] // key.shape[1]
    query, key, value = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    extra: dict[str, Any] = {}
    if groups > 1 and _VARLEN_GROUPS:
        extra["enable_gqa"] = True
    elif groups > 1:
        key, value = (_for_every_head(states, query.shape[1]) for states in (key, value))
    left = -1 if window is None else window - 1
    return _VARLEN(query, key, value, starts, starts, longest, longest, scale=scaling, window_size=(left, 0), **extra)


def _for_every_head(states: Tensor, num_heads: int) -> Tensor:
    """Keys or values, each of their heads (dimension 1) as often as heads ask for it."""
    return states.repeat_interleave(num_heads // states.shape[1], dim=1)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """bool [length, length]: each token and the `window - 1` before it."""
    places = torch.arange(length, device=device)
    distance = places.unsqueeze(1) - places
    return (distance >= 0) & (distance < window)


def _check_kind(module: nn.Module, dropout: float, is_causal: bool | None, others: dict[str, Any]) -> None:
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    asked = [name for name, given in others.items() if given is not None and name not in _HARMLESS]
    if dropout:
        asked.append("dropout")
    if not causal:
        asked.append("is_causal=False")
    if asked:
        raise BackendError(f"packed attention must be plain causal attention, got {', '.join(asked)}; pad this model")


def _varlen_attention() -> tuple[Callable[..., Any] | None, bool]:
    """Torch's own attention over sequences of any length, where it is and takes a window and a scale; and whether it knows grouped heads."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None, False
    known = inspect.signature(varlen_attn).parameters
    return (varlen_attn if {"window_size", "scale"} <= set(known) else None), "enable_gqa" in known


_VARLEN, _VARLEN_GROUPS = _varlen_attention()


def _packed_mask(*arguments: Any, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """No mask for packed rows; what `sdpa` would take for any other caller."""
    from transformers.masking_utils import sdpa_mask

    return None if _packing.get() is not None else sdpa_mask(*arguments, attention_mask=attention_mask, **options)
