"""From hidden states to log-probabilities and entropies of chosen tokens, a chunk at a time.

The logits of a micro-batch never exist at once: each chunk's are thrown away in the forward pass and computed again
in the backward pass, so memory does not grow with tokens x vocabulary. The softmax is taken in float32 (float64 for a
float64 model), whatever the model computes in.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ostinato_trainer.backend import EntropyMode

_CHUNK_ELEMENTS = 2**25

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
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target, and the entropy of the distribution that it was drawn from.

    Args:
        hidden: float [S, hidden], the states that predict the targets.
        targets: int64 [S].
        head: Maps hidden states to logits.
        vocab_size: Width of the logits.
        temperature: Divides the logits; above 0.
        entropy: Whether to compute it, and whether gradients flow through it.
        chunk_tokens: Targets per chunk; by default as many as make 2^25 logits.

    Returns:
        Two vectors [S]; the second is None where it was not asked for.
    """

    def of_chunk(states: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(states)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if temperature != 1.0:
            logits = logits / temperature
        normalizer = logits.logsumexp(-1)
        chosen = logits.gather(-1, wanted.unsqueeze(-1)).squeeze(-1) - normalizer
        if entropy is EntropyMode.OFF:
            return chosen, chosen.detach()
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy is EntropyMode.GRADIENT):
            return chosen, normalizer - (logits.softmax(-1) * logits).sum(-1)

    size = chunk_tokens or max(1, _CHUNK_ELEMENTS // vocab_size)
    if len(targets) <= size:
        chosen, spread = of_chunk(hidden, targets)
    else:
        parts = [
            checkpoint(of_chunk, states, wanted, use_reentrant=False, preserve_rng_state=False)
            for states, wanted in zip(hidden.split(size), targets.split(size), strict=True)
        ]
        chosen, spread = (torch.cat(column) for column in zip(*parts, strict=True))
    return chosen, None if entropy is EntropyMode.OFF else spread
