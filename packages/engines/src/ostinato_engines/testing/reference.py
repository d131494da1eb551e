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


def logprob_bounds(
    logits: np.ndarray, token_id: int, params: SamplingParams, seen_ids: Iterable[int] = (), *, slack: float
) -> tuple[float, float]:
    """What a token's logprob may be where logits are known up to rounding only.

    Rounding moves a logprob a little, and moves tokens over the edge of top_k, top_p or min_p, which changes the
    normalisation for all. The bounds are those of the largest and the smallest set that rounding can leave, so that
    with `slack` 0 both equal `reference_distribution`, but for ties.

    Args:
        logits: [vocab] of one position.
        token_id: The sampled token.
        params: As it was sampled with.
        seen_ids: As for `reference_distribution`.
        slack: By how much a logprob at temperature 1 may be off.

    Returns:
        Lowest and highest value; (inf, -inf) where the token cannot have been sampled at all.
    """
    if params.temperature == 0:
        wanted = float(reference_distribution(logits, params, seen_ids)[token_id])
        return wanted - slack, wanted + slack
    slack *= max(1.0, params.repetition_penalty, 1 / params.repetition_penalty) / min(1.0, params.temperature)
    plain = SamplingParams(temperature=params.temperature, repetition_penalty=params.repetition_penalty)
    scores = reference_distribution(logits, plain, seen_ids)
    loose, tight = (_kept(scores, params, margin) for margin in (2 * slack, -2 * slack))
    if not loose[token_id]:
        return np.inf, -np.inf
    tight[token_id] = True
    low, high = (scores[token_id] - np.log(np.exp(scores[kept]).sum()) for kept in (loose, tight))
    return float(low) - slack, float(high) + slack


def _kept(scores: np.ndarray, params: SamplingParams, margin: float) -> np.ndarray:
    """bool [vocab]: what the filters keep if every comparison is off by `margin`, in favour of keeping.

    Below 0 that may be nothing: where two tokens come first by turns, neither is certain to.
    """
    kept = np.ones(len(scores), bool)
    if 0 < params.top_k < len(scores):
        ordered = np.sort(scores)[::-1]
        edge = ordered[params.top_k - 1] - margin if margin >= 0 else ordered[params.top_k] - margin
        kept &= scores >= edge
    if params.top_p < 1 and kept.any():
        left = np.where(kept, scores, -np.inf)
        probs = np.exp(_log_softmax(left))
        ordered = np.sort(left)[::-1]
        mass = np.concatenate([[0.0], np.cumsum(np.exp(_log_softmax(ordered)))])
        before = mass[np.searchsorted(-ordered, -(left + margin))] - (probs if margin < 0 else 0.0)
        kept &= before < params.top_p - _TOP_P_TOLERANCE + margin
    if params.min_p > 0:
        kept &= scores - scores.max() >= np.log(params.min_p) - margin
    if margin >= 0:
        kept[scores.argmax()] = True
    return kept


def _log_softmax(scores: np.ndarray) -> np.ndarray:
    shifted = scores - scores.max()
    with np.errstate(divide="ignore"):
        return shifted - np.log(np.exp(shifted).sum())
