"""Thresholds of the rollout correction, and which keys the chosen estimator and loss read."""

import logging

import pytest

from ostinato_trainer.config.algorithm import Rejection, RolloutCorrectionConfig
from ostinato_trainer.config.checks import check_runnable
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.errors import ConfigError
from ostinato_trainer.loop.experience import needs_reference

CORRECTION = "algorithm.rollout_correction"
ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("value", "bounds"), [(2.0, (None, 2.0)), ("2.5", (None, 2.5)), ("0.5_5.0", (0.5, 5.0)), ("1_1", (1.0, 1.0))]
)
def test_a_threshold_is_a_number_or_a_band(value, bounds):
    """A number cuts, a band has two bounds."""
    assert RolloutCorrectionConfig(rollout_is_threshold=value).weight_bounds == bounds


@pytest.mark.parametrize("value", ["5_0.5", "a", "", "0_2", "1_2_3", -1.0, float("nan"), float("inf"), "1_inf", "_2"])
def test_what_is_no_threshold_is_refused(value):
    """Reversed, not positive, not finite or no number at all: the message names the key."""
    with pytest.raises(ConfigError, match=rf"{CORRECTION}.rollout_is_threshold must be"):
        _ = RolloutCorrectionConfig(rollout_is_threshold=value).weight_bounds


def test_a_band_that_yaml_read_as_a_number_is_noticed():
    """0.5_2 without quotes is 0.52 to YAML, which as a largest weight makes no sense."""
    with pytest.raises(ConfigError, match=r"must be at least 1, or a band, got 0\.52; write a band in quotes"):
        load_config([], [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=0.5_2"])


def test_rules_of_rejection_are_read():
    """Names with commas, one threshold for all or one each; a single bound of a ratio has its reciprocal below."""
    config = RolloutCorrectionConfig(rollout_rs="token_k1, seq_max_k3,token_k1", rollout_rs_threshold="0.5_2.0,0.01")
    assert config.rejections == (
        Rejection("token_k1", "token", "k1", 0.5, 2.0),
        Rejection("seq_max_k3", "seq_max", "k3", None, 0.01),
    )
    shared = RolloutCorrectionConfig(rollout_rs="seq_mean_k1,seq_sum_k2", rollout_rs_threshold=4.0).rejections
    assert [(rule.lower, rule.upper) for rule in shared] == [(0.25, 4.0), (None, 4.0)]
    assert RolloutCorrectionConfig().rejections == ()


@pytest.mark.parametrize(
    ("rule", "threshold", "message"),
    [
        ("seq_max_k1", 2.0, "rollout_rs must be of token_k1, .*got 'seq_max_k1'"),
        ("", 2.0, "rollout_rs must be of"),
        ("token_k1", None, "rollout_rs_threshold must be given while rollout_rs is token_k1"),
        ("token_k1,token_k2,token_k3", "1.5,1.0", "must hold one bound or 3"),
        ("token_k2", "0.5_2.0", "must be one number for token_k2"),
        ("token_k3", "many", "must be a number or a band"),
        ("token_k2", 0.0, "must be positive and finite"),
    ],
)
def test_wrong_rules_are_refused_when_the_configuration_is_loaded(rule, threshold, message):
    """A rule that does not exist, or whose threshold is missing, of the wrong form or one too few."""
    with pytest.raises(ConfigError, match=message):
        _ = RolloutCorrectionConfig(rollout_rs=rule, rollout_rs_threshold=threshold).rejections
    text = "null" if threshold is None else f'"{threshold}"'
    with pytest.raises(ConfigError, match=message):
        load_config([], [f'{CORRECTION}.rollout_rs="{rule}"', f"{CORRECTION}.rollout_rs_threshold={text}"])


def test_a_loss_type_of_the_correction_is_told_where_losses_are_chosen():
    """rollout_correction.loss_type, as others have it, names the key of the loss."""
    with pytest.raises(ConfigError, match=rf"the loss is {ACTOR}\.policy_loss\.loss_mode"):
        load_config([], [f"{CORRECTION}.loss_type=reinforce"])


def test_bypassing_and_correcting_exclude_each_other():
    """Weights and rejection need the pass that bypass_mode leaves out."""
    for key in ("rollout_is=token", "rollout_rs=token_k1"):
        overrides = [f"{CORRECTION}.{key}", f"{CORRECTION}.rollout_rs_threshold=2.0", f"{CORRECTION}.bypass_mode=true"]
        with pytest.raises(ConfigError, match="must be null while bypass_mode is true"):
            load_config([], overrides)


@pytest.mark.parametrize(
    ("chosen", "written", "is_read"),
    [
        ([], "algorithm.gamma=0.9", False),
        (["algorithm.adv_estimator=gae"], "algorithm.gamma=0.9", True),
        (["algorithm.adv_estimator=gae"], "algorithm.lam=0.9", True),
        (["algorithm.adv_estimator=gae"], "algorithm.norm_adv_by_std_in_grpo=false", False),
        (["algorithm.adv_estimator=reinforce_plus_plus"], "algorithm.gamma=0.9", True),
        (["algorithm.adv_estimator=reinforce_plus_plus"], "algorithm.lam=0.9", False),
        (["algorithm.adv_estimator=rloo"], "algorithm.whiten_advantages=false", False),
        (["algorithm.adv_estimator=my_own"], "algorithm.lam=0.9", True),
        ([f"{ACTOR}.policy_loss.loss_mode=sapo"], f"{ACTOR}.tau_neg=1.2", True),
        ([f"{ACTOR}.policy_loss.loss_mode=sapo"], f"{ACTOR}.clip_ratio=0.3", False),
        ([f"{ACTOR}.policy_loss.loss_mode=gspo"], f"{ACTOR}.clip_ratio_c=5", False),
        ([f"{ACTOR}.policy_loss.loss_mode=gspo"], f"{ACTOR}.clip_ratio_low=0.0003", True),
        ([], f"{ACTOR}.tau_pos=1.2", False),
        ([], "algorithm.kl_ctrl.kl_coef=0.01", False),
        (["algorithm.use_kl_in_reward=true"], "algorithm.kl_ctrl.kl_coef=0.01", True),
        (["algorithm.use_kl_in_reward=true"], "algorithm.kl_ctrl.target_kl=0.2", False),
        (
            ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"],
            "algorithm.kl_ctrl.target_kl=0.2",
            True,
        ),
        ([], f"{CORRECTION}.rollout_is_threshold=3.0", False),
        ([f"{CORRECTION}.rollout_is=token"], f"{CORRECTION}.rollout_is_threshold=3.0", True),
        ([], f"{CORRECTION}.rollout_rs_threshold=3.0", False),
        ([f"{ACTOR}.entropy_coeff=0.1"], f"{ACTOR}.calculate_entropy=true", False),
        (["algorithm.adv_estimator=gae"], "critic.ppo_micro_batch_size_per_gpu=2", True),
        (
            ["algorithm.adv_estimator=gae", f"{ACTOR}.use_dynamic_bsz=true"],
            "critic.ppo_micro_batch_size_per_gpu=2",
            False,
        ),
        (
            ["algorithm.adv_estimator=gae", f"{ACTOR}.use_dynamic_bsz=true", "critic.use_dynamic_bsz=false"],
            "critic.ppo_micro_batch_size_per_gpu=2",
            True,
        ),
    ],
)
def test_a_key_that_the_choice_does_not_read_is_said(caplog, chosen, written, is_read):
    """A written key warns exactly where the chosen estimator, loss or correction does not read it."""
    with caplog.at_level(logging.WARNING, logger="ostinato_trainer"):
        load_config([], [*chosen, written])
    assert (f"{written.partition('=')[0]} has no effect" in caplog.text) is not is_read


def test_pass_at_k_needs_a_second():
    """grpo_passk with one trajectory a prompt can learn nothing and is refused."""
    with pytest.raises(ConfigError, match="must be at least 2 for grpo_passk"):
        load_config([], ["algorithm.adv_estimator=grpo_passk", "actor_rollout_ref.rollout.n=1"])


@pytest.mark.parametrize(
    "estimator",
    ["grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "gae"],
)
@pytest.mark.parametrize("loss", ["vanilla", "gspo", "cispo", "gpg", "sapo"])
def test_every_choice_is_runnable(estimator, loss):
    """Each estimator goes with each loss."""
    keys = ["actor_rollout_ref.model.path=m", "data.train_files=a.parquet", "actor_rollout_ref.rollout.n=4"]
    check_runnable(
        load_config([], [*keys, f"algorithm.adv_estimator={estimator}", f"{ACTOR}.policy_loss.loss_mode={loss}"])
    )


def test_a_weight_of_zero_is_not_steered():
    """An adaptive weight that starts at 0 would stay there; one that is fixed may be 0, to measure the divergence only."""
    keys = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0"]
    with pytest.raises(ConfigError, match=r"kl_coef must be above 0 while algorithm\.kl_ctrl\.type is adaptive"):
        load_config([], [*keys, "algorithm.kl_ctrl.type=adaptive"])
    load_config([], keys)


def test_a_divergence_without_a_weight_is_said(caplog):
    """use_kl_loss with a weight of 0 asks no reference and has no effect: that is said."""
    with caplog.at_level(logging.WARNING):
        config = load_config([], [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0"])
    assert f"{ACTOR}.use_kl_loss has no effect while {ACTOR}.kl_loss_coef is 0" in caplog.text
    assert not needs_reference(config)
