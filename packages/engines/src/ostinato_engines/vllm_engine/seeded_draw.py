"""Runs in vLLM's workers: the last step of sampling, drawn for all rows at once from each request's own seed.

vLLM's first model runner draws seeded requests row by row, and every request of a rollout has a seed. Here what a request
draws depends on its seed and on the place of the token alone, so that a request that lost its state and is computed anew
draws what it would have drawn. Requests without a seed get one, from the engine's own.
"""

from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ostinato_engines.sampling import stream_keys
from ostinato_engines.vllm_engine.batch_rows import BatchRows
from ostinato_engines.vllm_engine.race import can_race, race

_interface: Any = import_module("vllm.v1.sample.logits_processor")


class RowSeeds(_interface.LogitsProcessor):
    """Knows which seed each row of the batch has; changes no logits."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        # The same in all workers that share a model: they see the same requests in the same order.
        self._draws = np.random.default_rng(vllm_config.model_config.seed)
        self._rows: BatchRows[int] = BatchRows(self._seed_of)
        self.keys = torch.empty(0, dtype=torch.int64, device=device)
        """int64 [rows of the batch]; see `race`."""

    def _seed_of(self, params: Any) -> int:
        return int(self._draws.integers(2**63)) if params.seed is None else params.seed

    def is_argmax_invariant(self) -> bool:
        """True: it changes nothing."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """Follows the requests of the batch."""
        if batch_update is None:
            return
        self._rows.follow(batch_update)
        seeds = np.array([self._rows.by_row[row] for row in range(batch_update.batch_size)], np.uint64)
        # A tensor of its own each time: steps that are still being computed read the one before.
        self.keys = torch.from_numpy(stream_keys(seeds).view(np.int64)).to(self._device, non_blocking=True)

    def apply(self, logits: Tensor) -> Tensor:
        """The logits."""
        return logits


class SeededDraw(torch.nn.Module):
    """In the place of vLLM's TopKTopPSampler; what is no batch of requests (a trial run) is left to that.

    Args:
        theirs: vLLM's.
        seeds: Of the rows.
        runner: vLLM's model runner, which knows how long each row is.
    """

    def __init__(self, theirs: Any, seeds: RowSeeds, runner: Any) -> None:
        super().__init__()
        self._theirs = theirs
        self._seeds = seeds
        self._runner = runner
        self._filtered = import_module(type(theirs).__module__).apply_top_k_top_p

    def forward(self, logits: Tensor, generators: Any, k: Tensor | None, p: Tensor | None) -> tuple[Tensor, Any]:
        """Token ids int64 [n] and logprobs float32 [n, vocab]."""
        keys = self._seeds.keys
        if len(keys) != len(logits):
            return self._theirs(logits, generators, k, p)
        logits = self._filtered(logits, k, p)
        return race(logits, keys, self._runner.seq_lens[: len(keys)]), logits.log_softmax(-1, dtype=torch.float32)


def draw_by_seeds(runner: Any) -> str:
    """Lets one of vLLM's model runners draw so.

    Returns:
        Why it cannot, and draws as vLLM does; empty where it does.
    """
    try:
        sampler, device, vocab_size = runner.sampler, runner.device, runner.model_config.get_vocab_size()
        seeds = next(each for each in runner.input_batch.logitsprocs.all if isinstance(each, RowSeeds))
        draw = SeededDraw(sampler.topk_topp_sampler, seeds, runner)
        lengths = runner.seq_lens
    except (AttributeError, StopIteration) as error:
        return f"this vllm draws elsewhere ({error})"
    if not isinstance(lengths, Tensor) or not can_race(device):
        return "this vllm counts lengths elsewhere, or there is no triton"
    # What is compiled at the first draw is compiled now.
    race(torch.zeros(1, vocab_size, device=device), torch.zeros(1, dtype=torch.int64, device=device), lengths[:1])
    sampler.topk_topp_sampler = draw
    return ""
