"""Digests of named tensors, put together as an engine keeps them. Imports torch when it is called."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

FUSED = (
    ("q_proj", "qkv_proj"),
    ("k_proj", "qkv_proj"),
    ("v_proj", "qkv_proj"),
    ("gate_proj", "gate_up_proj"),
    ("up_proj", "gate_up_proj"),
)
"""What vLLM keeps as one parameter, in the order in which it lies there and in which the model has it."""


def digests_of(tensors: Iterable[tuple[str, Any]], *, fused: bool) -> dict[str, str]:
    """SHA-256 of each parameter's bytes; of those that vLLM keeps together, of their bytes one after the other."""
    from ostinato_engines.weight_transfer.layout import as_bytes

    digests: dict[str, Any] = defaultdict(hashlib.sha256)
    for name, tensor in tensors:
        for part, whole in FUSED if fused else ():
            name = name.replace(f".{part}.", f".{whole}.")
        digests[name].update(as_bytes(tensor).cpu().numpy().data)
    return {name: digest.hexdigest() for name, digest in digests.items()}
