"""Where SGLang's sampling differs from our contract, and what is put there instead.

| SGLang by itself | here |
| --- | --- |
| logprobs ignore top_k, top_p and min_p, which see each other's discarded mass | those of the distribution that is sampled from |
| seeds count with batch-invariant kernels only | always, and for every request |
| the repetition penalty sees the output, one token late, and forgets it when a request is computed anew | prompt and output |
"""

import hashlib
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .exact_sampling import filter_rows, race, row_keys

BACKEND = "ostinato"
"""What `--sampling-backend` must name."""
_PENALTIES = "ostinato_repetition_penalties"
"""Attribute of a batch's accumulated penalties: float32 [n, 1], each row's own."""


def install() -> None:
    """Puts everything in its place.

    Raises:
        AttributeError: This SGLang has no such place.
    """
    sampler: Any = import_module("sglang.srt.layers.sampler")
    batch_info: Any = import_module("sglang.srt.sampling.sampling_batch_info")
    penalties: Any = import_module("sglang.srt.sampling.penaltylib")
    runner: Any = import_module("sglang.srt.model_executor.model_runner")
    _count_prompts(penalties.BatchedRepetitionPenalizer)
    _remember_penalties(penalties.BatchedPenalizerOrchestrator, penalties.BatchedRepetitionPenalizer)
    _count_the_last_token(runner.ModelRunner)
    _take_seeds(batch_info.SamplingBatchInfo)
    sampler.register_sampler_backend(BACKEND, lambda: _sampler_class(sampler.Sampler)())


def _take_seeds(batch_info: Any) -> None:
    """Every batch carries its requests' seeds; a request without one gets that of its name."""
    batch_info.adjusted_from_schedule_batch  # noqa: B018  raises where there is no such place

    def adjusted_from_schedule_batch(self: Any, batch: Any, vocab_size: int) -> None:
        seeds = [_seed_of(request) for request in batch.reqs]
        self.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(batch.device, non_blocking=True)

    batch_info.adjusted_from_schedule_batch = adjusted_from_schedule_batch


def _seed_of(request: Any) -> int:
    """The same on every rank."""
    seed = request.sampling_params.sampling_seed
    if seed is None:
        seed = int.from_bytes(hashlib.sha256(str(request.rid).encode()).digest()[:7], "big")
    return seed


def _count_prompts(penalizer: Any) -> None:
    """The repetition penalty starts with the tokens that are there, those sampled before a retraction too."""
    prepare = penalizer._prepare

    def _prepare(self: Any) -> None:
        prepare(self)
        for row, request in enumerate(self.orchestrator.reqs()):
            penalty = request.sampling_params.repetition_penalty
            if penalty != 1.0:
                seen = sorted({*request.origin_input_ids, *request.output_ids})
                ids = torch.tensor(seen, dtype=torch.int64, device=self.cumulated_repetition_penalties.device)
                self.cumulated_repetition_penalties[row, ids] = penalty

    penalizer._prepare = _prepare


def _remember_penalties(orchestrator: Any, penalizer: Any) -> None:
    """A batch that is computed takes along what each row's penalty is."""
    accumulate = orchestrator.accumulate_scaling_penalties

    def accumulate_scaling_penalties(self: Any) -> Tensor | None:
        accumulated = accumulate(self)
        if accumulated is not None:
            setattr(accumulated, _PENALTIES, self.penalizers[penalizer].repetition_penalties)
        return accumulated

    orchestrator.accumulate_scaling_penalties = accumulate_scaling_penalties


def _count_the_last_token(model_runner: Any) -> None:
    """While the next step is prepared the last token is on the device only: it is counted there."""
    sample = model_runner.sample

    def sample_with_penalties(self: Any, logits_output: Any, forward_batch: Any) -> Any:
        accumulated = forward_batch.sampling_info.acc_scaling_penalties
        if accumulated is not None and forward_batch.forward_mode.is_decode():
            ids = forward_batch.input_ids[: len(accumulated)].to(torch.int64)
            accumulated.scatter_(1, ids[:, None], getattr(accumulated, _PENALTIES))
        return sample(self, logits_output, forward_batch)

    model_runner.sample = sample_with_penalties


def _sampler_class(base: Any) -> Any:
    """A sampler in SGLang's frame: `base` does what it does for all rows, ours what our contract says."""
    run_race = torch.compile(race, dynamic=True)

    class ExactSampler(base):
        def forward(
            self,
            logits_output: Any,
            sampling_info: Any,
            return_logprob: bool,
            top_logprobs_nums: Any,
            token_ids_logprobs: Any,
            positions: Tensor,
            **later: Any,
        ) -> Tensor:
            if sampling_info.is_all_greedy:
                return super().forward(
                    logits_output,
                    sampling_info,
                    return_logprob,
                    top_logprobs_nums,
                    token_ids_logprobs,
                    positions,
                    **later,
                )
            logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
            logprobs, token_ids = _sample(logits, sampling_info, positions, run_race)
            if return_logprob:
                result = self.output_logprob_processor.compute_logprobs(
                    logprobs, top_logprobs_nums, token_ids_logprobs, token_ids
                )
                result.write_output_to(logits_output)
            self._sync_token_ids_across_tp(token_ids, sampling_info)
            return token_ids

    return ExactSampler


def _sample(logits: Tensor, info: Any, positions: Tensor, run_race: Any) -> tuple[Tensor, Tensor]:
    """Log-probabilities float32 [n, vocab] of what is sampled from, and the tokens int32 [n].

    A greedy row (top_k 1) takes its most probable token, with its probability among all.
    """
    scores = logits.float().div_(info.temperatures)
    greedy = info.top_ks <= 1
    if info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling:
        filters = (info.top_ks < scores.shape[-1]) | (info.top_ps < 1) | (info.min_ps > 0)
        rows = (filters & ~greedy).nonzero().squeeze(-1)
        if len(rows):
            scores[rows] = filter_rows(scores[rows], info.top_ks[rows], info.top_ps[rows], info.min_ps[rows])
    logprobs = scores.log_softmax(-1)
    drawn = run_race(logprobs, row_keys(info.sampling_seed, positions.to(torch.int64)))
    return logprobs, torch.where(greedy, scores.argmax(-1), drawn).to(torch.int32)
