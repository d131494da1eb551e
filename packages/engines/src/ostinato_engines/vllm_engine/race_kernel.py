"""The race of `ostinato_engines.vllm_engine.race` in Triton: the same random numbers as `ostinato_engines.sampling`.

Invariant: what a row draws depends on its logits, its key and its position, not on the other rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
"""Tokens of a row that one program compares."""
_STEP = tl.constexpr(0x9E3779B97F4A7C15)
"""From one stream, position and token to the next, as in `ostinato_engines.sampling`."""


@triton.jit
def _mixed(state):
    """The finaliser of SplitMix64 on uint64."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def _race_kernel(
    logits_ptr, row_stride, keys_ptr, positions_ptr, best_ptr, token_ptr, num_blocks, vocab_size, BLOCK: tl.constexpr
):
    """Leaves the winner of one block of one row, and its score."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions_ptr + row).to(tl.int64).to(tl.uint64, bitcast=True)
    key = _mixed(tl.load(keys_ptr + row).to(tl.uint64, bitcast=True) + (position + 1) * _STEP)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    state = _mixed(key + (tokens + 1).to(tl.uint64) * _STEP)
    uniform = tl.minimum(((state >> 32).to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355)
    # log1p(-uniform), exact to the last bits where uniform is small: there races are decided.
    rest = 1.0 - uniform
    noise = tl.where(rest == 1.0, uniform, tl.log(rest) * (uniform / (rest - 1.0)))
    inside = tokens < vocab_size
    logits = tl.load(logits_ptr + row * row_stride + tokens, mask=inside, other=float("-inf"))
    scores = tl.where(inside, logits - tl.log(noise), float("-inf"))
    best, winner = tl.max(scores, axis=0, return_indices=True)
    tl.store(best_ptr + row * num_blocks + block, best)
    tl.store(token_ptr + row * num_blocks + block, block * BLOCK + winner)


def race_on_device(logits: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """See `ostinato_engines.vllm_engine.race.race`."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, vocab_size = logits.shape
    num_blocks = -(-vocab_size // _BLOCK)
    best = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((num_rows, num_blocks), dtype=torch.int64, device=logits.device)
    launch: Any = _race_kernel[(num_rows, num_blocks)]
    launch(logits, logits.stride(0), keys, positions, best, tokens, num_blocks, vocab_size, BLOCK=_BLOCK, num_warps=8)
    return tokens.gather(-1, best.argmax(-1, keepdim=True))[:, 0]
