"""What a logprob must be: the sampling distribution in float64, one token at a time, written for reading."""

from collections.abc import Iterable, Sequence

import numpy as np

from ostinato_engines.types import SamplingParams

_TOP_P_TOLERANCE = 1e-6


def reference_distribution(logits: np.ndarray, params: SamplingParams, seen_ids: Iterable[int] = ()) -> np.ndarray:
    """Log-probabilities that a token is sampled with.

    Args:
        logits: [vocab] of one position.
        params: Repetition penalty, temperature, top_k, top_p and min_p apply in this order; temperature 0 reports
            temperature 1 without the others that follow.
        seen_ids: Every id of prompt and output so far, for the penalty.

    Returns:
        float64 [vocab], -inf where a token cannot be sampled.
    """
    scores = np.array(logits, np.float64)
    if params.repetition_penalty != 1.0:
        seen = sorted(set(seen_ids))
        penalty = params.repetition_penalty
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
    if params.temperature == 0:
        return _log_softmax(scores)
    scores = (scores - scores.max()) / params.temperature
    order = np.argsort(-scores, kind="stable")
    if params.top_k > 0:
        scores[order[params.top_k :]] = -np.inf
    if params.top_p < 1:
        probs = np.exp(_log_softmax(scores))[order]
        before = np.cumsum(probs) - probs
        drop = before >= params.top_p - _TOP_P_TOLERANCE
        drop[0] = False
        scores[order[drop]] = -np.inf
    if params.min_p > 0:
        scores[scores - scores.max() < np.log(params.min_p)] = -np.inf
    return _log_softmax(scores)


def reference_logprobs(
    logits: np.ndarray, prompt_ids: Sequence[int], token_ids: Sequence[int], params: SamplingParams
) -> list[float]:
    """What an engine should report for sampled tokens.

    Args:
        logits: [len(prompt_ids) + len(token_ids), vocab] of a plain forward over prompt and output.
        prompt_ids: The prompt.
        token_ids: The output.
        params: As they were sampled with.
    """
    ids = [*prompt_ids, *token_ids]
    return [
        float(reference_distribution(logits[place - 1], params, ids[:place])[ids[place]])
        for place in range(len(prompt_ids), len(ids))
    ]


def _log_softmax(scores: np.ndarray) -> np.ndarray:
    shifted = scores - scores.max()
    with np.errstate(divide="ignore"):
        return shifted - np.log(np.exp(shifted).sum())
