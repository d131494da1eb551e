"""Draws one token per row, all rows at once, and reports its log-probability under what it was drawn from.

Every token of the vocabulary gets an exponential random number that depends on the row's seed, its position and the
token alone; the one that is smallest in proportion to the token's probability wins (an exponential race). So a row's
token does not depend on the other rows, and where they change its logits by rounding it almost never changes: only the
few tokens that were about to win anyway are in question, whatever the size of the vocabulary. Every row takes the path
that its own parameters ask for. Knows no requests, slots or models.
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


def position_keys(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The keys of streams (uint64 [n]) at positions (int64 [n]): uint64 [n]."""
    return _mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _STEP)


def exponentials(keys: np.ndarray, vocab_size: int, device: torch.device | str) -> Tensor:
    """One standard exponential number per row and token, float32 [n, vocab], above 0 and finite."""
    state = torch.arange(1, vocab_size + 1, device=device).mul_(_signed(_STEP))
    state = torch.from_numpy(keys.view(np.int64)).to(device)[:, None] + state
    for shift, factor in ((30, _MIX_A), (27, _MIX_B)):
        state.bitwise_xor_(_logical_shift(state, shift)).mul_(_signed(factor))
    state.bitwise_xor_(_logical_shift(state, 31))
    # 32 bits as float32 are coarse near 1 only. Near 0, where races are decided, they are as fine as they can be.
    uniform = _logical_shift(state, 32).to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def _signed(number: np.uint64) -> int:
    """The int64 with the same bits: torch has no arithmetic for uint64."""
    return int(number.astype(np.int64))


def _logical_shift(state: Tensor, bits: int) -> Tensor:
    """Shifts int64 to the right and fills with zeros."""
    return (state >> bits).bitwise_and_((1 << (64 - bits)) - 1)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The parameters of the rows that are sampled together, numpy [n] each."""

    temperature: np.ndarray
    """float32; 0 is greedy."""
    keys: np.ndarray
    """uint64, of the row's stream at this position; see `position_keys`."""
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
    logprobs = torch.log_softmax(scaled, -1)
    token_ids, logprobs = _race(logprobs, exponentials(rows.keys, logits.shape[-1], logits.device))
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


def _race(logprobs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The column that wins, and its logprob; one of probability 0 never does. Overwrites the noise."""
    index = torch.sub(logprobs, noise.log_(), out=noise).argmax(-1, keepdim=True)
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
    noise = exponentials(rows.keys, scaled.shape[-1], device).gather(-1, ids)
    index, logprobs = _race(torch.log_softmax(ordered.masked_fill(drop, -torch.inf), -1), noise)
    return ids.gather(-1, index[:, None])[:, 0], logprobs


def _select(rows: SamplingRows, pick: np.ndarray) -> SamplingRows:
    return SamplingRows(
        temperature=rows.temperature[pick],
        keys=rows.keys[pick],
        filtered=rows.filtered[pick],
        top_k=rows.top_k[pick],
        top_p=rows.top_p[pick],
        min_p=rows.min_p[pick],
    )
