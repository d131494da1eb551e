"""From sampled tokens to a batch that can be learned from: what is asked of the backend and the critic, in which order, and what comes of it."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ostinato_trainer.algorithms.kl_control import KLController
from ostinato_trainer.batch import Batch
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.errors import BatchError
from ostinato_trainer.loop.experience import prepare_batch, with_baselines
from ostinato_trainer.loop.parts import Stopwatch
from ostinato_trainer.segments import Segment

ALGORITHM = "algorithm"
CORRECTION = "algorithm.rollout_correction"


class Backend:
    """Gives every token -1 under the policy and -1.5 under the reference, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def log_probs(self, batch, *, temperature, reference=False):
        self.asked.append("reference" if reference else "policy")
        return torch.full((batch.num_tokens,), -1.5 if reference else -1.0)


class Critic:
    """Expects 0.25 of every token."""

    def values(self, batch):
        return torch.full((batch.num_tokens,), 0.25)


def sampled(*, log_probs=(-1.0, math.nan, -1.0), reward=1.0):
    """A trajectory with a tool token in the middle, and one that ended at once."""
    return Batch.from_segments(
        [
            Segment([1], [2, 3, 4], [1, 0, 1], list(log_probs), "g", "a", reward),
            Segment([1], [2], [1], [-1.0], "g", "b", 0.0),
        ]
    )


def prepared(batch, *overrides, critic=None):
    config = load_config([], list(overrides))
    controller = KLController(config.algorithm.kl_ctrl) if config.algorithm.use_kl_in_reward else None
    parts: Any = SimpleNamespace(backend=Backend(), critic=critic, kl_controller=controller)
    clock = Stopwatch()
    got, metrics = prepare_batch(batch, config, parts, clock)
    return got, metrics, parts, list(clock.seconds)


def test_by_default_one_pass_is_enough():
    """The policy is asked once; advantages stand on trained tokens; how far the sampler is off is reported, nothing is corrected."""
    got, metrics, parts, phases = prepared(sampled(), f"{ALGORITHM}.adv_estimator=rloo")
    assert parts.backend.asked == ["policy"]
    assert phases == ["old_log_prob", "adv"]
    assert got.advantages is not None
    assert got.advantages.tolist() == [0, 1, 0, 1, 0, -1]
    assert got.rollout_is_weights is None
    assert metrics["rollout_corr/kl"] == 0.0
    assert metrics["rollout_corr/num_unknown_tokens"] == 0.0


def test_bypassing_takes_the_sampler_s_word_and_saves_the_pass():
    """old_log_probs are those of the engine, 0 where nothing is trained on, and the backend is not asked."""
    got, metrics, parts, _ = prepared(sampled(log_probs=(-0.5, math.nan, -2.0)), f"{CORRECTION}.bypass_mode=true")
    assert parts.backend.asked == []
    assert got.old_log_probs is not None
    assert got.old_log_probs.tolist() == [0, -0.5, 0, -2.0, 0, -1.0]
    assert metrics == {"rollout_corr/num_unknown_tokens": 0.0}


def test_bypassing_asks_the_policy_where_the_sampler_said_nothing():
    """An unknown token gets the policy's log-probability and is counted; the others keep the sampler's."""
    got, metrics, parts, _ = prepared(sampled(log_probs=(-0.5, math.nan, math.nan)), f"{CORRECTION}.bypass_mode=true")
    assert parts.backend.asked == ["policy"]
    assert got.old_log_probs is not None
    assert got.old_log_probs.tolist() == [0, -0.5, 0, -1.0, 0, -1.0]
    assert metrics["rollout_corr/num_unknown_tokens"] == 1.0


def test_the_divergence_is_taken_off_the_reward_and_its_weight_learns():
    """k1 is 0.5 a token; the weight of this step is reported, the next one is steered."""
    keys = [f"{ALGORITHM}.{key}" for key in ("use_kl_in_reward=true", "adv_estimator=rloo")]
    keys += [f"{ALGORITHM}.kl_ctrl.{key}" for key in ("type=adaptive", "kl_coef=0.1", "horizon=10", "target_kl=0.1")]
    got, metrics, parts, phases = prepared(sampled(), *keys)
    assert phases == ["old_log_prob", "ref", "adv"]
    assert got.token_rewards is not None
    assert got.token_rewards.tolist() == pytest.approx([0, -0.05, 0, 0.95, 0, -0.05])
    assert got.advantages is not None
    assert got.advantages.tolist() == pytest.approx([0, 0.95, 0, 0.95, 0, -0.95])
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1
    assert parts.kl_controller.coef == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))


def test_the_reference_is_asked_once_for_loss_and_reward():
    """Both at a time cost one pass; a loss term of weight 0 costs none."""
    actor = "actor_rollout_ref.actor"
    _, _, parts, _ = prepared(sampled(), f"{actor}.use_kl_loss=true", f"{ALGORITHM}.use_kl_in_reward=true")
    assert parts.backend.asked == ["policy", "reference"]
    _, _, parts, _ = prepared(sampled(), f"{actor}.use_kl_loss=true", f"{actor}.kl_loss_coef=0")
    assert parts.backend.asked == ["policy"]


def test_gae_reads_the_critic_and_its_own_keys():
    """Values come from the critic; gamma, lam and whitening from the configuration; the critic gets returns."""
    keys = [f"{ALGORITHM}.{key}" for key in ("adv_estimator=gae", "gamma=0.5", "lam=0.5", "whiten_advantages=false")]
    got, _, _, phases = prepared(sampled(), *keys, critic=Critic())
    assert phases == ["old_log_prob", "values", "adv"]
    assert got.advantages is not None
    assert got.returns is not None
    last = 1.0 - 0.25
    first = 0.5 * 0.25 - 0.25 + 0.25 * last
    assert got.advantages.tolist() == pytest.approx([0, first, 0, last, 0, -0.25])
    assert got.returns.tolist() == pytest.approx([0, first + 0.25, 0, 1.0, 0, 0])


def test_what_is_rejected_still_counts_in_the_baseline():
    """The trajectory that the sampler invented keeps its part in its sibling's advantage and has none of its own."""
    keys = [
        f"{ALGORITHM}.adv_estimator=rloo",
        f"{CORRECTION}.rollout_rs=seq_mean_k1",
        f"{CORRECTION}.rollout_rs_threshold=2.0",
    ]
    got, metrics, _, _ = prepared(sampled(log_probs=(-8.0, math.nan, -1.0)), *keys)
    assert got.loss_mask.tolist() == [False] * 5 + [True]
    assert got.advantages is not None
    assert got.advantages.tolist() == [0, 0, 0, 0, 0, -1.0]
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 0.5


def test_what_is_rejected_was_rewarded_all_the_same():
    """The rewards less the divergence, of which metrics tell, stay those of all trajectories."""
    keys = [
        f"{ALGORITHM}.use_kl_in_reward=true",
        f"{CORRECTION}.rollout_rs=seq_mean_k1",
        f"{CORRECTION}.rollout_rs_threshold=2.0",
    ]
    got, _, _, _ = prepared(sampled(log_probs=(-8.0, math.nan, -1.0)), *keys)
    assert not got.loss_mask[:5].any()
    assert got.token_rewards is not None
    assert got.token_rewards.sum().item() == pytest.approx(1.0 - 3 * 0.001 * 0.5)


def test_weights_reach_the_batch():
    """Token by token, cut at 2."""
    got, _, _, _ = prepared(sampled(log_probs=(-8.0, math.nan, -1.0)), f"{CORRECTION}.rollout_is=token")
    assert got.rollout_is_weights is not None
    assert got.rollout_is_weights.tolist() == [1, 2, 1, 1, 1, 1]


def test_every_trajectory_gets_the_baseline_of_its_group():
    """The greedy trajectory's reward; a group without one is an error that names it."""
    batch = Batch.from_segments(
        [Segment([1], [2], [1], None, group, f"{group}{n}", 1.0) for group in ("g", "h") for n in range(2)]
    )
    greedy: Any = {
        name: SimpleNamespace(reward=SimpleNamespace(score=score)) for name, score in (("h", 2.0), ("g", 0.5))
    }
    assert with_baselines(batch, {}) is batch
    baselines = with_baselines(batch, greedy).baselines
    assert baselines is not None
    assert baselines.tolist() == [0.5, 0.5, 2.0, 2.0]
    for broken in ({"g": greedy["g"]}, {**greedy, "h": SimpleNamespace(reward=None)}):
        with pytest.raises(BatchError, match="group 'h' must have a greedy trajectory with a reward"):
            with_baselines(batch, broken)
