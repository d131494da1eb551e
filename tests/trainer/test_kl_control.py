"""The divergence that is taken off the reward, and the weight that is steered."""

import json
import math

import pytest
import torch

from ostinato_trainer.algorithms.advantages import AdvantageOptions, with_advantages
from ostinato_trainer.algorithms.kl_control import KLController, with_kl_in_reward
from ostinato_trainer.batch import Batch
from ostinato_trainer.config.algorithm import KLControlConfig
from ostinato_trainer.errors import BatchError, CheckpointError
from ostinato_trainer.segments import Segment


def batch():
    """Two segments of one trajectory with tool tokens, a short one, and one of which nothing is trained on."""
    segments = [
        Segment([1], [2, 3, 4], [1, 0, 1], None, "g", "a", 1.0),
        Segment([1], [2, 3], [1, 0], None, "g", "a", 1.0),
        Segment([1], [2], [1], None, "g", "b", 0.0),
        Segment([1], [2], [0], None, "g", "c", 5.0),
    ]
    made = Batch.from_segments(segments)
    policy = torch.full((11,), -1.0)
    reference = torch.tensor([math.nan, -1.5, 7, -2.0, math.inf, -1.0, 0, 0, -0.5, 0, 0])
    return made.with_columns(old_log_probs=policy, ref_log_probs=reference)


def test_each_trained_token_pays_for_its_own_divergence():
    """reward - coef x k1 by token, the outcome on the last trained one; masked slots, rubbish in them too, pay nothing."""
    got, kl = with_kl_in_reward(batch(), "kl", 0.1)
    assert got.token_rewards is not None
    assert got.token_rewards.tolist() == pytest.approx([0, -0.05, 0, -0.1, 0, 1.0, 0, 0, 0.05, 0, 0])
    assert kl == pytest.approx(((0.5 + 1.0 + 0.0) / 3 + -0.5) / 2)


def test_an_outcome_estimator_sees_the_sum():
    """Leave-one-out over 1 - 0.15 and 0 + 0.05."""
    got = with_advantages(with_kl_in_reward(batch(), "k1", 0.1)[0], "rloo", AdvantageOptions()).advantages
    assert got is not None
    assert got.tolist() == pytest.approx([0, 0.8, 0, 0.8, 0, 0.8, 0, 0, -0.8, 0, 0])


def test_nothing_trained_has_no_divergence():
    """A batch without a trained token: 0, not NaN."""
    made = Batch.from_segments([Segment([1], [2], [0], None, "g", "a", 1.0)])
    _, kl = with_kl_in_reward(made.with_columns(old_log_probs=torch.zeros(2), ref_log_probs=torch.ones(2)), "k3", 0.1)
    assert kl == 0.0


def test_what_is_missing_is_named():
    """Without the reference's or the policy's log-probabilities there is no divergence."""
    for column in ("old_log_probs", "ref_log_probs"):
        with pytest.raises(BatchError, match=f"{column} must be set"):
            with_kl_in_reward(batch().with_columns(**{column: None}), "k1", 0.1)


def test_a_divergence_that_is_not_finite_is_named():
    """A reference or policy that gives NaN on a trained token is said as such, not as a reward that is wrong."""
    broken = batch().with_columns(ref_log_probs=torch.full((11,), math.nan))
    with pytest.raises(BatchError, match="divergence from the reference must be finite, got nan"):
        with_kl_in_reward(broken, "k1", 0.1)


def test_a_fixed_weight_stays():
    """Whatever the divergence, and also where a state of another weight is loaded."""
    controller = KLController(KLControlConfig(kl_coef=0.02))
    controller.update(50.0, 1000)
    controller.load_state_dict({"coef": 0.5})
    assert controller.coef == 0.02


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(0.1, 1.0), (0.11, 1 + 0.1 * 0.01), (5.0, 1 + 0.2 * 0.01), (0.0, 1 - 0.2 * 0.01), (-3.0, 1 - 0.2 * 0.01)],
)
def test_an_adaptive_weight_is_steered(kl, factor):
    """beta (1 + clip(KL / target - 1, +-0.2) n / horizon), with n = 100 of 10000."""
    controller = KLController(KLControlConfig(type="adaptive", kl_coef=0.02, target_kl=0.1, horizon=10000))
    controller.update(kl, 100)
    assert controller.coef == pytest.approx(0.02 * factor)


def test_a_weight_never_sticks_and_is_never_nan():
    """More trajectories than the horizon move the weight by a fifth at most, so that it comes back; a divergence that is no number is
    refused and changes nothing."""
    controller = KLController(KLControlConfig(type="adaptive", horizon=10))
    with pytest.raises(BatchError, match="kl must be a number"):
        controller.update(math.nan, 4)
    assert controller.coef == 0.001
    controller.update(0.0, 1000)
    assert controller.coef == pytest.approx(0.0008)
    controller.update(50.0, 1000)
    assert controller.coef == pytest.approx(0.00096)


def test_a_resumed_controller_goes_on():
    """Its state is plain data, and steering on from it gives what never stopping gives; a foreign state is refused."""
    config = KLControlConfig(type="adaptive", horizon=100)
    whole, first, second = KLController(config), KLController(config), KLController(config)
    for controller in (whole, first):
        controller.update(0.3, 8)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for controller in (whole, second):
        controller.update(0.05, 8)
    assert second.coef == whole.coef
    for foreign in ({}, {"coef": None}, {"coef": math.nan}, {"coef": -1.0}):
        with pytest.raises(CheckpointError, match="must hold a coefficient"):
            second.load_state_dict(foreign)
