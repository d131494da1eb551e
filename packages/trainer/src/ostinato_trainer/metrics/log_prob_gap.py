"""How far the engine's log-probabilities are from the trainer's, and what the likely cause is.

Where both compute the same policy on the same tokens, every difference is an error: of precision, of sampling parameters, of weights that
are not the trainer's. It is measured in every step; what looks wrong is said once for each cause.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from torch import Tensor

from ostinato_agent_loop import Trajectory
from ostinato_trainer.batch import Batch
from ostinato_trainer.config import Config
from ostinato_trainer.errors import PolicyMismatchError

__all__ = ["LogProbGapWatch", "fresh_tokens", "log_prob_gap"]

logger = logging.getLogger(__name__)

_LARGEST_MEAN: Final = {"float32": 0.005, "bfloat16": 0.05}
"""Mean of |difference of log-probabilities| up to which rounding explains it, by the type that the trainer computes in. Half precision on
both sides gives about 0.01 to 0.03; float32 on both sides 1e-5."""
_FARTHEST: Final = 1.0
"""The same up to which steps of training explain it, on tokens of earlier versions: probabilities that differ e-fold on average are no drift."""
_LONGEST_UNKNOWN: Final = 10
"""Steps without a token of the current policy after which engines are asked for some."""
_ROLLOUT: Final = "actor_rollout_ref.rollout"
_CHECK: Final = f"{_ROLLOUT}.log_prob_check"


def log_prob_gap(rollout_log_probs: Tensor, log_probs: Tensor, mask: Tensor) -> dict[str, float]:
    """The gap on the tokens that the engine sampled.

    Args:
        rollout_log_probs: float [T], NaN where the engine reported none.
        log_probs: float [T], the trainer's, of the policy at the start of the step.
        mask: bool [T].

    Returns:
        `training/rollout_probs_diff_{mean,max,std}` of |p_rollout - p_trainer|;
        `training/rollout_log_probs_diff_{mean,max}`; `training/rollout_actor_probs_pearson_corr`, absent where a side
        is constant; and `training/rollout_log_probs_missing`, the share of tokens without one. Only the last where no
        token can be compared, nothing where there is no token. Divergences are `rollout_correction`'s.
    """
    num_tokens = int(mask.sum())
    if not num_tokens:
        return {}
    known = mask & ~rollout_log_probs.isnan()
    rollout, trainer = rollout_log_probs[known].double(), log_probs[known].double()
    metrics = {"training/rollout_log_probs_missing": 1.0 - rollout.numel() / num_tokens}
    if not rollout.numel():
        return metrics
    differences = (rollout.exp() - trainer.exp()).abs()
    metrics |= {
        "training/rollout_probs_diff_mean": float(differences.mean()),
        "training/rollout_probs_diff_max": float(differences.max()),
        "training/rollout_probs_diff_std": float(differences.std(correction=0)),
        "training/rollout_log_probs_diff_mean": float((rollout - trainer).abs().mean()),
        "training/rollout_log_probs_diff_max": float((rollout - trainer).abs().max()),
    }
    centred, other = rollout.exp() - rollout.exp().mean(), trainer.exp() - trainer.exp().mean()
    scale = float(centred.square().sum().sqrt() * other.square().sum().sqrt())
    if scale > 0:
        metrics["training/rollout_actor_probs_pearson_corr"] = float((centred * other).sum()) / scale
    return metrics


def fresh_tokens(batch: Batch, trajectories: Sequence[Trajectory], policy_version: int) -> Tensor:
    """bool [T]: trained tokens that the engine sampled from the policy of that version, as far as it said; where it said nothing, True.

    Args:
        batch: Made of the healthy ones of `trajectories`, in their order.
        trajectories: With the versions of their tokens.
        policy_version: Of the policy whose log-probabilities the tokens are compared with.
    """
    fresh = batch.loss_mask.clone()
    outputs = [
        output
        for trajectory in trajectories
        if trajectory.failure is None and trajectory.reward is not None
        for output in trajectory.segments
    ]
    starts = batch.cu_seqlens.tolist()
    for place, output in enumerate(outputs):
        spans = output.policy_versions
        first, end = starts[place] + len(output.prompt_ids), starts[place + 1]
        for number, span in enumerate(spans):
            if span.version != policy_version:
                until = first + spans[number + 1].start if number + 1 < len(spans) else end
                fresh[first + span.start : until] = False
    return fresh


class LogProbGapWatch:
    """Measures the gap of each step, and warns about what rounding does not explain, or stops the run.

    Args:
        config: The whole tree; `log_prob_check` is obeyed, the sampling keys and the trainer's type are evidence.
    """

    def __init__(self, config: Config) -> None:
        check, self._dtype = config.actor_rollout_ref.rollout.log_prob_check, config.actor_rollout_ref.actor.dtype
        self._bound = check.max_mean_diff or _LARGEST_MEAN.get(self._dtype, _LARGEST_MEAN["float32"])
        self._stops = check.action == "stop"
        self._sampling = _unlike_the_policy(config)
        self._temperature = config.actor_rollout_ref.rollout.temperature
        self._bypassed = config.algorithm.rollout_correction.bypass_mode
        self._in_turn = config.trainer.max_staleness == 0
        self._said: set[str] = set()
        self._num_unknown = 0
        """Steps in a row without a token of the current policy."""
        self._agreed: tuple[int, float] | None = None
        """The last step in which both agreed, and its mean."""

    def observe(self, batch: Batch, trajectories: Sequence[Trajectory], policy_version: int) -> dict[str, float]:
        """The metrics of `log_prob_gap` over all trained tokens, and `training/log_probs_agree`, 1 or 0.

        What is held to the bound are the tokens that were sampled from this very policy: others may differ, which
        `training/off_policy` and the rollout correction speak of, but not by more than steps of training can. Where sampling and training
        take turns, there must be no others.

        Args:
            batch: With `old_log_probs`; without, or where they are the engine's own (`bypass_mode`), there is nothing to compare.
            trajectories: See `fresh_tokens`.
            policy_version: Of the policy that `old_log_probs` are of: the number of finished steps.

        Raises:
            PolicyMismatchError: Both do not compute the same policy, and `log_prob_check.action` is stop.
        """
        if batch.old_log_probs is None or self._bypassed:
            return {}
        metrics = log_prob_gap(batch.rollout_log_probs, batch.old_log_probs, batch.loss_mask)
        fresh = fresh_tokens(batch, trajectories, policy_version)
        gap = log_prob_gap(batch.rollout_log_probs, batch.old_log_probs, fresh)
        missing = metrics.get("training/rollout_log_probs_missing", 0.0)
        if missing:
            self._say(
                "missing",
                f"the engine reported no log-probability for {missing:.1%} of the sampled tokens: whether it samples from the trained "
                "policy cannot be checked there; its capabilities, or `logprobs` of the sampling parameters, say why",
            )
        num_others = batch.num_loss_tokens - int(fresh.sum())
        if self._in_turn and num_others:
            self._alarm(
                "versions",
                f"step {policy_version + 1}: {num_others / batch.num_loss_tokens:.1%} of the sampled tokens are said to be of another policy version "
                f"than {policy_version}, the current one, though trainer.max_staleness is 0; likely cause: a weight update that an engine did not "
                "take, or a server of your own that gives its tokens without policy_versions; mend that, since staleness cannot be known otherwise",
            )
        mean = gap.get("training/rollout_log_probs_diff_mean")
        if mean is None:
            self._num_unknown += 1
            self._look_at_others(policy_version + 1, metrics)
            return metrics
        self._num_unknown = 0
        return {**metrics, **self._judge(policy_version + 1, gap)}

    @property
    def wants_probe(self) -> bool:
        """Whether it has been unknown for long if both agree: `observe_probe` would tell."""
        return self._num_unknown >= _LONGEST_UNKNOWN

    def observe_probe(self, probe: Batch, policy_version: int) -> dict[str, float]:
        """As `observe`, on tokens that engines sampled of the current policy for this alone.

        Args:
            probe: With `old_log_probs`.
            policy_version: Of the policy.
        """
        assert probe.old_log_probs is not None
        self._num_unknown = 0
        gap = log_prob_gap(probe.rollout_log_probs, probe.old_log_probs, probe.loss_mask)
        return self._judge(policy_version + 1, gap) if "training/rollout_log_probs_diff_mean" in gap else {}

    def _judge(self, step: int, gap: Mapping[str, float]) -> dict[str, float]:
        mean = gap["training/rollout_log_probs_diff_mean"]
        agrees = mean <= self._bound  # NaN is not
        if agrees:
            self._agreed = (step, mean)
        else:
            self._alarm(*self._cause(step, mean, gap["training/rollout_log_probs_diff_max"]))
        return {"training/log_probs_agree": float(agrees)}

    def _look_at_others(self, step: int, metrics: Mapping[str, float]) -> None:
        """Where no token is of the current policy, and all that is known is how far it is from earlier ones."""
        mean = metrics.get("training/rollout_log_probs_diff_mean")
        if mean is None or self._sampling or mean <= _FARTHEST:  # NaN is not
            return
        self._alarm(
            "far",
            f"step {step}: log-probabilities of engine and trainer differ by {mean:.3g} on average, on tokens of earlier policies alone, more than "
            f"steps of training explain{self._before()}; likely cause: the engine's weights are not the trainer's (another model, a weight update "
            "that did not arrive whole); compare the two on one prompt, or with trainer.max_staleness=0, before training on",
        )

    def _cause(self, step: int, mean: float, largest: float) -> tuple[str, str]:
        seen = (
            f"step {step}: log-probabilities of engine and trainer differ by {mean:.3g} on average (at most {largest:.3g}) on tokens of the "
            f"current policy, more than the {self._bound:g} of {_CHECK}.max_mean_diff{self._before()}"
        )
        if self._sampling:
            return "sampling", (
                f"{seen}; likely cause: {', '.join(self._sampling)} make the engine sample from another distribution than the policy's, "
                "which the trainer computes; write their neutral values, or set algorithm.rollout_correction.rollout_is"
            )
        if mean < 0.1 and self._dtype == "float32" and self._agreed is None:
            return "precision", (
                f"{seen}; likely cause: the engine computes in a shorter type than the trainer's float32, or with other kernels; "
                "let both compute in the same type, or set algorithm.rollout_correction.rollout_is=token"
            )
        unscaled = (
            f", it reports log-probabilities without {_ROLLOUT}.temperature={self._temperature:g}"
            if self._temperature != 1.0
            else ""
        )
        return "weights", (
            f"{seen}; likely cause: the engine's weights are not the trainer's (old ones, another model, a weight update that did not arrive "
            f"whole){unscaled}, or it applies sampling parameters of its own, such as a generation_config.json beside the model; "
            "compare the two on one prompt before training on"
        )

    def _before(self) -> str:
        return "" if self._agreed is None else f" (in step {self._agreed[0]} it was {self._agreed[1]:.3g})"

    def _alarm(self, cause: str, text: str) -> None:
        """Warns of a cause when it is first seen, or ends the run."""
        if self._stops:
            raise PolicyMismatchError(f"{text}; or write {_CHECK}.action=warn")
        self._say(cause, text)

    def _say(self, cause: str, text: str) -> None:
        if cause not in self._said:
            self._said.add(cause)
            logger.warning("%s", text)


def _unlike_the_policy(config: Config) -> list[str]:
    """Sampling keys under which the engine samples from something else than the policy at `temperature`, as written."""
    rollout = config.actor_rollout_ref.rollout
    keys = (("top_p", 1.0), ("top_k", -1), ("repetition_penalty", 1.0))
    return [
        f"{_ROLLOUT}.{name}={getattr(rollout, name)}" for name, neutral in keys if getattr(rollout, name) != neutral
    ]
