"""The node `algorithm`: from rewards to advantages, the divergence in the reward, and what corrects for another sampler.

Pure data: knows no torch. The docstring below a field is what `ostinato config` prints as its meaning.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from ostinato_trainer.config.sampling import FilterGroupsConfig
from ostinato_trainer.errors import ConfigError

__all__ = ["AlgorithmConfig", "KLControlConfig", "Rejection", "RolloutCorrectionConfig"]

_CORRECTION = "algorithm.rollout_correction"
_REJECTIONS = tuple(
    f"{level}_{kind}"
    for level in ("token", "seq_sum", "seq_mean", "seq_max")
    for kind in ("k1", "k2", "k3")
    if (level, kind) != ("seq_max", "k1")
)


class KLControlConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Weight of the divergence in the reward (`algorithm.kl_ctrl`)."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """Keep the weight, or steer it so that the divergence comes to target_kl."""
    kl_coef: Annotated[float, Meta(ge=0)] = 0.001
    """The weight; where it is adaptive, the one to start from."""
    horizon: Annotated[float, Meta(gt=0)] = 10000.0
    """Trajectories over which an adaptive weight moves by as much as the divergence is off, at most 20 %."""
    target_kl: Annotated[float, Meta(gt=0)] = 0.1
    """Divergence a token that an adaptive weight steers towards."""


class Rejection(Struct, frozen=True):
    """One rule of `rollout_rs`: what of a token or a trajectory must lie within which bounds."""

    name: str
    """As it was written."""
    level: Literal["token", "seq_sum", "seq_mean", "seq_max"]
    """A token, or the sum, mean or maximum over a trajectory's trained tokens."""
    kind: Literal["k1", "k2", "k3"]
    """Estimator of the divergence of the sampler from the policy."""
    lower: float | None
    """Bound of the ratio sampler / policy; k1 only."""
    upper: float
    """For k1 a bound of that ratio, else of the divergence."""


class RolloutCorrectionConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is done about tokens that another distribution sampled than the one that is trained (`algorithm.rollout_correction`)."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Multiply the policy loss by importance weights policy / sampler: of each token, or of the whole trajectory; null does not."""
    rollout_is_threshold: float | str = 2.0
    """Largest weight, larger ones are cut to it; or a band such as "0.5_5.0" (in quotes), outside of which a weight is 0 (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch."""
    rollout_rs: str | None = None
    """Do not train on what lies too far off: token_k1, token_k2, token_k3, or seq_sum_, seq_mean_ with k1 to k3, seq_max_ with k2, k3;
    several with commas. k1 is log(sampler / policy), k2 half its square, k3 the third estimator of the divergence."""
    rollout_rs_threshold: float | str | None = None
    """Bounds of rollout_rs, one for all or one each with commas: for k1 of the ratio, "0.5_2.0" or a number and its reciprocal; else the
    largest."""
    bypass_mode: bool = False
    """Take the sampler's own log-probabilities for those at the start of the step: saves a pass, and the clipped ratio does the correction."""

    @property
    def weight_bounds(self) -> tuple[float | None, float]:
        """Lower bound, None where weights are cut at the upper one, and upper bound of importance weights.

        Raises:
            ConfigError: `rollout_is_threshold` is no such thing.
        """
        key = f"{_CORRECTION}.rollout_is_threshold"
        lower, upper = _bounds(self.rollout_is_threshold, key)
        if lower is None and upper < 1:
            raise ConfigError(
                f'{key} must be at least 1, or a band, got {upper:g}; write a band in quotes, "0.5_2.0", as YAML reads 0.5_2 as 0.52'
            )
        return lower, upper

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """The rules of `rollout_rs`; none where it is null.

        Raises:
            ConfigError: a rule does not exist, or its bounds are missing or wrong.
        """
        if self.rollout_rs is None:
            return ()
        names = tuple(dict.fromkeys(name.strip() for name in self.rollout_rs.split(",") if name.strip()))
        key = f"{_CORRECTION}.rollout_rs_threshold"
        for name in names or ("",):
            if name not in _REJECTIONS:
                raise ConfigError(
                    f"{_CORRECTION}.rollout_rs must be of {', '.join(_REJECTIONS)}, got {name!r}; choose one or several of them"
                )
        if self.rollout_rs_threshold is None:
            raise ConfigError(f"{key} must be given while rollout_rs is {self.rollout_rs}, got null; write {key}=2.0")
        texts = [text.strip() for text in str(self.rollout_rs_threshold).split(",")]
        if len(texts) not in (1, len(names)):
            raise ConfigError(
                f"{key} must hold one bound or {len(names)}, as many as rollout_rs, got {len(texts)}; write one for each, with commas"
            )
        texts = texts * len(names) if len(texts) == 1 else texts
        return tuple(_rejection(name, text, key) for name, text in zip(names, texts, strict=True))


class AlgorithmConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """From rewards to advantages (`algorithm`)."""

    adv_estimator: str = "grpo"
    """Advantage estimator by name: grpo, rloo, opo, gpg, grpo_passk, reinforce_plus_plus, reinforce_plus_plus_baseline, remax, gae (with a
    critic), or one's own: file.py:function, or the name that it was registered under."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide the advantages of grpo and grpo_passk by the group's standard deviation; false is Dr. GRPO."""
    gamma: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Discount from one trained token to the next, in gae and reinforce_plus_plus."""
    lam: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Decay of generalized advantage estimation, in gae; 1 is the return minus the value."""
    whiten_advantages: bool = True
    """Give the advantages of gae, reinforce_plus_plus and reinforce_plus_plus_baseline mean 0 and variance 1 over the batch's tokens."""
    use_kl_in_reward: bool = False
    """Take the divergence from the reference policy, a frozen copy of the starting weights, off the reward of each token."""
    kl_penalty: Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"] = "kl"
    """Estimator of that divergence: k1 (kl), abs, k2 (mse) or k3 (low_var_kl)."""
    kl_ctrl: KLControlConfig = KLControlConfig()
    """Weight of that divergence."""
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    """Which groups are sampled anew because they teach nothing."""
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    """What is done about tokens that another distribution sampled than the one that is trained."""


def _rejection(name: str, text: str, key: str) -> Rejection:
    level, kind = name.rsplit("_", 1)
    lower, upper = _bounds(text, key)
    if kind != "k1" and lower is not None:
        raise ConfigError(
            f"{key} must be one number for {name}, the largest divergence, got {text}; write the upper one only"
        )
    if kind == "k1" and lower is None:
        lower, upper = min(upper, 1 / upper), max(upper, 1 / upper)
    return Rejection(name, level, kind, lower, upper)  # pyright: ignore[reportArgumentType]


def _bounds(value: float | str, key: str) -> tuple[float | None, float]:
    """Lower and upper of "lo_hi", or None and the number."""
    parts = str(value).split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError as error:
        raise ConfigError(
            f'{key} must be a number or a band like "0.5_2.0", got {value!r}; write one of the two'
        ) from error
    lower, upper = (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[-1])
    if len(numbers) > 2 or not 0 < numbers[0] <= upper < float("inf"):
        raise ConfigError(
            f"{key} must be positive and finite, a band with its lower bound first, got {value}; write 0.5_2.0"
        )
    return lower, upper
