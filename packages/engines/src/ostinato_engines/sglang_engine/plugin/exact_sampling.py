"""Filters and draws one token per row in the order of our contract. Knows torch only.

A token's draw depends on its row's seed, its position and the logits of its row: not on what else is in the batch, nor on
whether the row was computed as a prompt or token by token. Every token of the vocabulary gets an exponential number; the
one that is smallest in proportion to the token's probability wins, which rounding of the logits rarely changes.
"""

import torch
from torch import Tensor

TOP_P_TOLERANCE = 1e-6
"""Float32 cannot tell masses closer than this."""
_STEP, _MIX_A, _MIX_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_COLUMN, _FOLD_A, _FOLD_B = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35


def filter_rows(scores: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor) -> Tensor:
    """Sets what cannot be sampled to -inf, in place: top_k, then top_p, then min_p.

    Args:
        scores: float32 [n, vocab], logits after penalties and temperature.
        top_ks: int [n]; at least the vocabulary's size keeps all.
        top_ps: float [n]; 1 keeps all.
        min_ps: float [n]; 0 keeps all.
    """
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    ordered.masked_fill_(rank >= top_ks[:, None], -torch.inf)
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs
    dropped = (before >= (top_ps - TOP_P_TOLERANCE)[:, None]) & (top_ps < 1)[:, None]
    dropped[:, 0] = False
    ordered.masked_fill_(dropped, -torch.inf)
    ordered.masked_fill_(ordered < ordered[:, :1] + min_ps.log()[:, None], -torch.inf)
    return scores.scatter_(-1, order, ordered)


def draw(logprobs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """One token per row.

    Args:
        logprobs: float32 [n, vocab], -inf where a token cannot be sampled.
        seeds: int64 [n].
        positions: int [n], of the token before the one that is drawn.

    Returns:
        int64 [n].
    """
    return race(logprobs, row_keys(seeds, positions.to(torch.int64)))


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Keys of unrelated streams for neighbouring seeds and positions, int64 [n] of 64 random bits each."""
    state = _mix(seeds + _signed(_STEP, 64))
    return _mix(state + (positions + 1) * _signed(_STEP, 64))


def race(logprobs: Tensor, keys: Tensor) -> Tensor:
    """The winners of exponential races, int64 [n]: each token runs with its probability's speed.

    Args:
        logprobs: float32 [n, vocab].
        keys: int64 [n], of `row_keys`.
    """
    columns = torch.arange(logprobs.shape[-1], dtype=torch.int32, device=logprobs.device) * _signed(_COLUMN, 32)
    # Two's complement wraps: the low and the high half of a key.
    state = columns + keys.to(torch.int32)[:, None]
    state = (state ^ _shifted(state, 16)) * _signed(_FOLD_A, 32)
    state = state ^ (keys >> 32).to(torch.int32)[:, None]
    state = (state ^ _shifted(state, 13)) * _signed(_FOLD_B, 32)
    state = (state ^ _shifted(state, 16)) & 0x7FFFFFFF
    # Above 0 and below 1; finest near 0, where races are decided.
    uniform = ((state.to(torch.float32) + 0.5) * 2.0**-31).clamp(max=1 - 2.0**-24)
    return (logprobs - (-torch.log1p(-uniform)).log()).argmax(-1)


def _mix(state: Tensor) -> Tensor:
    """The finaliser of SplitMix64 on int64."""
    state = (state ^ _shifted(state, 30)) * _signed(_MIX_A, 64)
    state = (state ^ _shifted(state, 27)) * _signed(_MIX_B, 64)
    return state ^ _shifted(state, 31)


def _shifted(state: Tensor, bits: int) -> Tensor:
    """A shift to the right that brings in zeros."""
    width = torch.iinfo(state.dtype).bits
    return (state >> bits) & ((1 << (width - bits)) - 1)


def _signed(number: int, width: int) -> int:
    """The signed integer with the same bits."""
    return number - (1 << width) if number >= 1 << (width - 1) else number
