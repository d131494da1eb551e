"""Runs in vLLM's workers: temperature, top_k, top_p and min_p in our order, for requests that ask for it.

The other requests of a batch are not touched. See `ostinato_engines.vllm_engine.sampling` for who asks.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ostinato_engines.vllm_engine.batch_rows import BatchRows
from ostinato_engines.vllm_engine.filtering import filtered
from ostinato_engines.vllm_engine.sampling import FILTERS_KEY

_interface: Any = import_module("vllm.v1.sample.logits_processor")


class ExactFilters(_interface.LogitsProcessor):
    """One row of the batch at a time; rows are few, since few requests combine what vLLM orders otherwise."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: BatchRows[tuple[float, int, float, float]] = BatchRows(_filters_of)

    def is_argmax_invariant(self) -> bool:
        """True: the most probable token always stays, so that greedy rows need none of this."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """Follows the requests of the batch."""
        if batch_update is not None:
            self._rows.follow(batch_update)

    def apply(self, logits: Tensor) -> Tensor:
        """float32 [batch, vocab] after penalties; vLLM's own temperature is 1 in the rows that change."""
        for index, (temperature, top_k, top_p, min_p) in self._rows.by_row.items():
            logits[index] = filtered(logits[index], temperature, top_k, top_p, min_p)
        return logits


def _filters_of(params: Any) -> tuple[float, int, float, float] | None:
    wanted = (params.extra_args or {}).get(FILTERS_KEY)
    return None if wanted is None else tuple(wanted)
