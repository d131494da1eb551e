"""Whole runs under each family of algorithms: what a step reports, and that a steered weight is taken up again."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ostinato_trainer.assembly import run_training
from ostinato_trainer.config.loading import load_config

pytestmark = pytest.mark.slow

SMALL = (
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "actor_rollout_ref.rollout.n=3",
    "data.max_response_length=48",
    "trainer.logger=[jsonl]",
)
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str) % 3)
"""
ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"


def run(home: Path, output: Path, steps: int, *overrides: str, save_freq: int = -1) -> list[dict[str, Any]]:
    """The metrics of the run's steps."""
    reward = output.parent / "reward.py"
    reward.write_text(REWARD)
    own = (
        f"trainer.default_local_dir={output}",
        f"trainer.total_training_steps={steps}",
        f"trainer.save_freq={save_freq}",
        f"reward.custom_reward_function.path={reward}",
    )
    run_training(load_config([home / "config.yaml"], [*SMALL, *own, *overrides]))
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "actor/grad_norm" in record]


@pytest.mark.parametrize(
    ("overrides", "metric"),
    [
        (("algorithm.adv_estimator=opo", f"{ACTOR}.policy_loss.loss_mode=gspo"), "actor/pg_clipfrac"),
        (("algorithm.adv_estimator=gpg", f"{ACTOR}.policy_loss.loss_mode=gpg"), "actor/ppo_kl"),
        (("algorithm.adv_estimator=remax", f"{ACTOR}.policy_loss.loss_mode=sapo"), "actor/ppo_kl"),
        (("algorithm.adv_estimator=reinforce_plus_plus_baseline", f"{ACTOR}.policy_loss.loss_mode=cispo"), "actor/ppo_kl"),
        ((f"{ACTOR}.calculate_entropy=true", f"{CORRECTION}.bypass_mode=true"), "actor/entropy"),
        ((f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold='0.5_5.0'"), "rollout_corr/rollout_is_mean"),
        ((f"{CORRECTION}.rollout_is=sequence", f"{CORRECTION}.rollout_rs=seq_mean_k1", f"{CORRECTION}.rollout_rs_threshold=2"),
            "rollout_corr/rollout_rs_masked_fraction"),
    ],
)  # fmt: skip
def test_a_step_runs_and_reports(
    quickstart_home: Path, tmp_path: Path, overrides: tuple[str, ...], metric: str
) -> None:
    """One step of two optimizer steps: finite gradients, nothing skipped, the metric that belongs to the choice."""
    (record,) = run(quickstart_home, tmp_path / "run", 1, *overrides)
    assert math.isfinite(record[metric])
    assert record["actor/grad_norm"] > 0
    assert record["actor/num_skipped_steps"] == 0
    assert record["rollout_corr/num_unknown_tokens"] == 0
    if f"{CORRECTION}.bypass_mode=true" not in overrides:
        assert abs(record["rollout_corr/kl"]) < 1e-3  # one process, float32 on both sides


def test_a_steered_weight_goes_on_where_it_stood(quickstart_home: Path, tmp_path: Path) -> None:
    """Two steps in one go and one and one report the same weights of the divergence."""
    keys = (
        "algorithm.use_kl_in_reward=true",
        "algorithm.adv_estimator=reinforce_plus_plus",
        "algorithm.kl_ctrl.type=adaptive",
    )
    keys = (*keys, "algorithm.kl_ctrl.horizon=20", "algorithm.kl_ctrl.kl_coef=0.1")
    whole = run(quickstart_home, tmp_path / "whole", 2, *keys)
    run(quickstart_home, tmp_path / "parts", 1, *keys, save_freq=1)
    parts = run(quickstart_home, tmp_path / "parts", 2, *keys)
    name = "actor/reward_kl_penalty_coeff"
    assert [record[name] for record in parts] == [record[name] for record in whole]
    assert whole[0][name] == 0.1
    assert whole[1][name] == pytest.approx(0.1 * (1 - 0.2 * 6 / 20))  # no divergence at first: as fast down as it goes
