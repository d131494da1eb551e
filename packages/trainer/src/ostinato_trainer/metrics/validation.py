"""Metrics of a validation rollout: n samples of each prompt, by data source.

Failed samples are in no mean: they are counted beside it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from ostinato_agent_loop import Trajectory
from ostinato_trainer.metrics.spreads import spread
from ostinato_trainer.rewards.metrics import numbers_of

__all__ = ["ValidationSample", "pass_at_k", "sample_metrics", "validation_metrics"]


class ValidationSample(msgspec.Struct, frozen=True):
    """One answer to one validation prompt."""

    data_source: str
    prompt_id: str
    """Samples of one prompt share it."""
    values: Mapping[str, float]
    """What the reward function found, by name: `score`, `acc`, ... Empty where the trajectory failed."""
    failed: bool = False
    answer: str | None = None
    """What the sample answers, in a spelling in which equal answers are equal; majority votes need it."""


def validation_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The metrics of `sample_metrics` from a validation rollout, and `val-aux/num_turns/{mean,max,min}`.

    A row without `data_source` counts under `unknown`. The reward function's extra value `pred`, a text, is the answer.
    """
    metrics = sample_metrics(_sample_of(trajectory) for trajectory in trajectories)
    done = [trajectory for trajectory in trajectories if trajectory.failure is None and trajectory.segments]
    return metrics | spread("val-aux/num_turns", [trajectory.segments[-1].num_turns for trajectory in done])


def sample_metrics(samples: Iterable[ValidationSample]) -> dict[str, float]:
    """Validation by data source: `val-core/<source>/<core>/...`, the rest under `val-aux/<source>/...`.

    The core value is `acc` where there is one, else `score`. N is the number of samples of a prompt, the largest where
    they differ; each figure is a mean over prompts:

    - `mean@N`: the mean over a prompt's samples.
    - `best@N/mean`, `worst@N/mean`, `std@N` (of the population), for N above 1.
    - `maj@N/mean`, where samples have answers: the value of the answer that most of a prompt's samples give, of several
      the one given first.
    - `pass@k` for k = 1, 2, 4, ... and N, for the core value where it is 0 or 1 everywhere; see `pass_at_k`. A prompt
      with fewer than k samples is left out of it.

    Failed samples are in none of them; `val-aux/<source>/num_failed` counts them. Standard deviation and worst value
    are under `val-aux` for the core value too.
    """
    by_source: dict[str, dict[str, list[ValidationSample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        by_source[sample.data_source][sample.prompt_id].append(sample)
    metrics: dict[str, float] = {}
    for source, prompts in by_source.items():
        number = max(len(group) for group in prompts.values())
        names = dict.fromkeys(name for group in prompts.values() for sample in group for name in sample.values)
        core = "acc" if "acc" in names else "score"
        for name in names:
            aux = f"val-aux/{source}/{name}"
            groups = [[sample for sample in group if name in sample.values] for group in prompts.values()]
            groups = [group for group in groups if group]
            values = [np.array([sample.values[name] for sample in group], dtype=np.float64) for group in groups]
            main = f"val-core/{source}/{name}" if name == core else aux
            metrics |= _over_prompts(main, aux, number, values)
            if number > 1 and any(sample.answer is not None for group in groups for sample in group):
                metrics[f"{main}/maj@{number}/mean"] = float(
                    np.mean([_majority_value(group, name) for group in groups])
                )
            if name == core:
                metrics |= _passes(main, number, values)
        num_failed = sum(sample.failed for group in prompts.values() for sample in group)
        metrics[f"val-aux/{source}/num_failed"] = float(num_failed)
    return metrics


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Chance that at least one of k samples, drawn from `num_samples` without putting back, is right.

    The unbiased estimator `1 - C(n - c, k) / C(n, k)` of Chen et al., arXiv:2107.03374, section 2.1.

    Args:
        num_samples: n, at least k.
        num_right: c, from 0 to n.
        k: At least 1.
    """
    if num_samples - num_right < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def _over_prompts(main: str, aux: str, number: int, values: Sequence[np.ndarray]) -> dict[str, float]:
    metrics = {f"{main}/mean@{number}": float(np.mean([of_prompt.mean() for of_prompt in values]))}
    if number > 1:
        metrics[f"{main}/best@{number}/mean"] = float(np.mean([of_prompt.max() for of_prompt in values]))
        metrics[f"{aux}/worst@{number}/mean"] = float(np.mean([of_prompt.min() for of_prompt in values]))
        metrics[f"{aux}/std@{number}"] = float(np.mean([of_prompt.std() for of_prompt in values]))
    return metrics


def _passes(main: str, number: int, values: Sequence[np.ndarray]) -> dict[str, float]:
    if number == 1 or any(((of_prompt != 0) & (of_prompt != 1)).any() for of_prompt in values):
        return {}
    powers = (1 << exponent for exponent in range(number.bit_length()))
    metrics = {}
    for k in dict.fromkeys((*powers, number)):
        enough = [of_prompt for of_prompt in values if of_prompt.size >= k]
        if enough:
            chances = [pass_at_k(of_prompt.size, int(of_prompt.sum()), k) for of_prompt in enough]
            metrics[f"{main}/pass@{k}"] = float(np.mean(chances))
    return metrics


def _majority_value(group: Sequence[ValidationSample], name: str) -> float:
    """The value of the first sample that gives the commonest answer; one without an answer votes for nothing."""
    votes = Counter(sample.answer for sample in group if sample.answer)
    if not votes:
        return float(np.mean([sample.values[name] for sample in group]))
    (winner, _), *_ = votes.most_common(1)
    return float(next(sample.values[name] for sample in group if sample.answer == winner))


def _sample_of(trajectory: Trajectory) -> ValidationSample:
    source = str(trajectory.row.get("data_source") or "unknown")
    if trajectory.failure is not None or trajectory.reward is None:
        return ValidationSample(source, trajectory.group_id, {}, failed=True)
    answer = trajectory.reward.extra.get("pred")
    return ValidationSample(
        source,
        trajectory.group_id,
        {**numbers_of(trajectory.reward), "score": trajectory.reward.score},
        answer=answer if isinstance(answer, str) else None,
    )
