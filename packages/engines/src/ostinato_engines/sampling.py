"""Draws one token per row, all rows at once, and reports its log-probability under what it was drawn from.

A row's uniform number depends on its seed and its position alone, so its token does not depend on the other rows,
and every row takes the path that its own parameters ask for. Knows no requests, slots or models.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ostinato_engines.device import supports_float64

TOP_P_TOLERANCE = 1e-6
"""Float32 cannot tell masses closer than this: a token stays while the mass before it is further below top_p."""

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)


def _mix(state: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014); uint64 in and out."""
    state = (state ^ (state >> np.uint64(30))) * _MIX_A
    state = (state ^ (state >> np.uint64(27))) * _MIX_B
    return state ^ (state >> np.uint64(31))


def stream_keys(seeds: np.ndarray) -> np.ndarray:
    """Turns seeds (uint64 [n], neighbours welcome) into keys of unrelated streams, uint64 [n]."""
    return _mix(_mix(seeds + _STEP) ^ _STEP)


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in the open interval (0, 1) per (key, position); float64 [n], a multiple of 2**-53."""
    state = _mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _STEP)
    return ((state >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The parameters of the rows that are sampled together, numpy [n] each."""

    temperature: np.ndarray
    """float32; 0 is greedy."""
    uniform: np.ndarray
    """float64 in (0, 1)."""
    filtered: np.ndarray
    """bool: whether top_k, top_p or min_p of the row removes anything."""
    top_k: np.ndarray
    """int64; 0 keeps all."""
    top_p: np.ndarray
    min_p: np.ndarray


def sample(logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Draws from softmax(logits / temperature) after top_k, top_p and min_p.

    Args:
        logits: float32 [n, vocab], penalties applied already.
        rows: The rows' parameters.

    Returns:
        Token ids int64 [n] and their log-probabilities float32 [n].
    """
    greedy = rows.temperature == 0.0
    if greedy.all():
        return argmax(logits)
    scaled = logits
    if (rows.temperature != 1.0).any():
        divisor = np.where(greedy, np.float32(1.0), rows.temperature)
        # The largest logit goes to zero before the division, so that no temperature overflows.
        scaled = (logits - logits.amax(-1, keepdim=True)) / torch.from_numpy(divisor).to(logits.device)[:, None]
    filtered = rows.filtered & ~greedy
    if filtered.all():
        return _draw_filtered(scaled, rows)
    token_ids, logprobs = _draw(torch.log_softmax(scaled, -1), rows.uniform)
    for subset, drawn in (
        (filtered, lambda index, pick: _draw_filtered(scaled[index], _select(rows, pick))),
        (greedy, lambda index, pick: argmax(logits[index])),
    ):
        if subset.any():
            pick = np.flatnonzero(subset)
            index = torch.from_numpy(pick).to(logits.device)
            token_ids[index], logprobs[index] = drawn(index, pick)
    return token_ids, logprobs


def penalize(logits: Tensor, seen_ids: list[Tensor | None], penalties: list[float]) -> None:
    """Applies repetition penalties in place: positive logits of seen tokens are divided, negative ones multiplied.

    Args:
        logits: [n, vocab].
        seen_ids: Per row the ids of prompt and output so far, None for a row without penalty.
        penalties: Per row, above 0.
    """
    for row, (ids, penalty) in enumerate(zip(seen_ids, penalties, strict=True)):
        if ids is not None:
            values = logits[row, ids]
            logits[row, ids] = torch.where(values > 0, values / penalty, values * penalty)


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The most probable token of each row, the lowest id among equals, and its logprob at temperature 1."""
    largest, token_ids = logits.max(-1)
    return token_ids, largest - logits.logsumexp(-1)


def _draw(logprobs: Tensor, uniform: np.ndarray) -> tuple[Tensor, Tensor]:
    """Inverts the cumulative distribution; a token of probability 0 is never drawn."""
    precise = torch.float64 if supports_float64(logprobs.device) else torch.float32
    mass = logprobs.exp().cumsum(-1, dtype=precise)
    total = mass[:, -1:]
    target = torch.from_numpy(uniform).to(device=logprobs.device, dtype=precise)[:, None] * total
    # Rounding may lift the product to the whole mass, behind which there is no token.
    target = torch.minimum(target, total * (1 - torch.finfo(precise).eps))
    index = torch.searchsorted(mass, target, right=True).clamp_(max=mass.shape[-1] - 1)
    return index[:, 0], logprobs.gather(-1, index)[:, 0]


def _draw_filtered(scaled: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """top_k, then top_p on what is left, then min_p; ties fall to the lower id; the most probable token always stays."""
    device = scaled.device
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[-1], device=device)
    top_k = torch.from_numpy(np.where(rows.top_k > 0, rows.top_k, scaled.shape[-1])).to(device)[:, None]
    ordered = ordered.masked_fill(rank >= top_k, -torch.inf)
    probs = ordered.softmax(-1)
    precise = torch.float64 if supports_float64(device) else torch.float32
    before = probs.cumsum(-1, dtype=precise) - probs
    top_p = torch.from_numpy(rows.top_p).to(device=device, dtype=precise)[:, None]
    drop = (before >= top_p - TOP_P_TOLERANCE) & (top_p < 1.0)
    min_p = torch.from_numpy(rows.min_p).to(device=device, dtype=probs.dtype)[:, None]
    drop |= probs < min_p * probs[:, :1]
    drop[:, 0] = False
    index, logprobs = _draw(torch.log_softmax(ordered.masked_fill(drop, -torch.inf), -1), rows.uniform)
    return ids.gather(-1, index[:, None])[:, 0], logprobs


def _select(rows: SamplingRows, pick: np.ndarray) -> SamplingRows:
    return SamplingRows(
        temperature=rows.temperature[pick],
        uniform=rows.uniform[pick],
        filtered=rows.filtered[pick],
        top_k=rows.top_k[pick],
        top_p=rows.top_p[pick],
        min_p=rows.min_p[pick],
    )
