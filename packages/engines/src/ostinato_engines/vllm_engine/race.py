"""Draws one token per row, whatever the rows are seeded with, in one pass over the logits. Knows no engine.

The law is that of `ostinato_engines.sampling`: every token of the vocabulary gets an exponential random number that depends
on the row's key, the position and the token alone, and the one that is smallest in proportion to the token's probability
wins. On a device a kernel makes these numbers where it compares them, so that none is written to memory.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from ostinato_engines import device as devices
from ostinato_engines.sampling import exponentials, position_keys


def can_race(device: torch.device) -> bool:
    """Whether tokens can be drawn there: elsewhere than on the host it takes Triton."""
    return devices.device_kind(device) == devices.HOST or find_spec("triton") is not None


def race(logits: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """Draws from softmax(logits), each row by itself.

    Args:
        logits: float32 [n, vocab], -inf where a token cannot be sampled; not changed.
        keys: int64 [n], the bits of `ostinato_engines.sampling.stream_keys`.
        positions: Of the tokens that are drawn, integers [n].

    Returns:
        Token ids, int64 [n].
    """
    if devices.device_kind(logits.device) != devices.HOST:
        from ostinato_engines.vllm_engine.race_kernel import race_on_device

        return race_on_device(logits, keys, positions)
    at = position_keys(keys.numpy().view("uint64"), positions.numpy())
    noise = exponentials(at, logits.shape[-1], logits.device)
    return torch.sub(logits, noise.log_(), out=noise).argmax(-1)
