"""The filters of `SamplingParams` on logits, in their order. Knows no engine."""

import math

import torch
from torch import Tensor


def filtered(scores: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """float32 [vocab] of logits to logits, -inf where a token cannot be sampled; see `SamplingParams` for the order."""
    scaled = (scores - scores.max()).double() / temperature
    if 0 < top_k < scaled.numel():
        kept = torch.zeros_like(scaled, dtype=torch.bool)
        kept[scaled.topk(top_k).indices] = True
        scaled = scaled.masked_fill(~kept, -math.inf)
    if top_p < 1:
        ordered, order = torch.sort(scaled, descending=True, stable=True)
        probs = ordered.softmax(-1)
        drop = probs.cumsum(-1) - probs >= top_p
        drop[0] = False
        scaled = scaled.index_fill(0, order[drop], -math.inf)
    if min_p > 0:
        # The most probable token is at 0.
        scaled = scaled.masked_fill(scaled < math.log(min_p), -math.inf)
    return scaled.to(scores.dtype)
