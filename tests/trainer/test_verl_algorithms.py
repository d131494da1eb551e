"""Advantages, losses, KL and rollout correction beside another implementation, on the same recorded inputs, where verl is installed.

Inputs hold no trajectory without a trained token and no flat group in a whitened estimator, where the two differ on purpose.
"""

import json
import math
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato_trainer.algorithms.advantages import AdvantageOptions, with_advantages
from ostinato_trainer.algorithms.aggregation import with_loss_weights
from ostinato_trainer.algorithms.kl import kl_estimate
from ostinato_trainer.algorithms.policy_losses import PolicyLossOptions, policy_loss_fn
from ostinato_trainer.algorithms.rollout_correction import correct_rollout
from ostinato_trainer.backends.base import MicroBatchOutput
from ostinato_trainer.batch import Batch
from ostinato_trainer.config.algorithm import RolloutCorrectionConfig
from ostinato_trainer.segments import Segment

pytestmark = pytest.mark.slow

PYTHON = Path(__file__).parents[2] / ".venv-peers/verl/bin/python"
WIDTH = 7
NAMES = (
    "grpo",
    "grpo_passk",
    "rloo",
    "opo",
    "gpg",
    "reinforce_plus_plus_baseline",
    "reinforce_plus_plus",
    "remax",
    "gae",
)
LOSSES = ("vanilla", "gspo", "cispo", "gpg", "sapo")
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KINDS = ("kl", "abs", "mse", "low_var_kl", "k1+", "k3+")
CORRECTIONS: tuple[dict[str, Any], ...] = (
    {"rollout_is": "token"},
    {"rollout_is": "sequence", "rollout_is_threshold": 1.5},
    {"rollout_is": "token", "rollout_is_threshold": "0.7_1.3"},
    {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
    {"rollout_is": "token", "rollout_is_batch_normalize": True},
    *({"rollout_rs": f"{level}_k1", "rollout_rs_threshold": "0.7_1.2"} for level in ("token", "seq_sum", "seq_mean")),
    *(
        {"rollout_rs": f"{level}_k{k}", "rollout_rs_threshold": 0.05}
        for level in ("token", "seq_sum", "seq_mean", "seq_max")
        for k in (2, 3)
    ),
    {"rollout_rs": "token_k2,seq_mean_k1", "rollout_rs_threshold": "0.2,1.2"},
)
SAME_METRICS = ("kl", "k3_kl", "training_ppl", "rollout_ppl", "log_ppl_diff", "ppl_ratio", "chi2_token", "chi2_seq", "rollout_is_mean",
    "rollout_is_eff_sample_size", "rollout_rs_masked_fraction", "rollout_rs_seq_masked_fraction")  # fmt: skip

PEER = """
import json, sys
import numpy as np, torch
from omegaconf import OmegaConf
from verl.trainer.ppo import core_algos as algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask as correct
from verl.workers.config import ActorConfig
torch.set_default_dtype(torch.float64)
job = json.load(open(sys.argv[1]))
rows = {name: torch.tensor(value) for name, value in job["rows"].items()}
mask, index = rows["mask"], np.array(job["groups"], dtype=object)
config = algos.AlgoConfig(gamma=job["gamma"], lam=job["lam"])
found = {"advantages": {}, "losses": {}, "kl": {}, "corrections": []}
for name in job["names"]:
    given = dict(token_level_rewards=rows["rewards"].clone(), response_mask=mask)
    if name in ("gae",):
        given |= dict(values=rows["values"], gamma=job["gamma"], lam=job["lam"])
    else:
        given["config"] = config
    if name == "remax":
        given["reward_baselines"] = torch.tensor(job["baselines"])
    elif name not in ("gae", "reinforce_plus_plus"):
        given["index"] = np.where(index == "d", "c", index) if name == "grpo_passk" else index
    advantages, returns = algos.get_adv_estimator_fn(name)(**given)
    found["advantages"][name] = [(advantages * mask).tolist(), (returns * mask).tolist()]
for name in job["losses"]:
    for mode in job["modes"]:
        actor = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=0.2, clip_ratio_low=0.2,
            clip_ratio_high=0.28, clip_ratio_c=3.0, loss_agg_mode=mode, tau_pos=1.0, tau_neg=1.05)
        new = rows["new"].clone().requires_grad_()
        loss, metrics = algos.get_policy_loss_fn(name)(old_log_prob=rows["old"], log_prob=new, advantages=rows["advantages"] * mask,
            response_mask=mask, loss_agg_mode=mode, config=actor, rollout_is_weights=rows["weights"])
        loss.backward()
        found["losses"][name + "/" + mode] = [loss.item(), new.grad.tolist(), {key: float(value) for key, value in metrics.items()}]
for kind in job["kinds"]:
    new = rows["new"].clone().requires_grad_()
    estimate = algos.kl_penalty(new, rows["old"], kind)
    (estimate * mask).sum().backward()
    found["kl"][kind] = [(estimate.detach() * mask).tolist(), new.grad.tolist()]
for options in job["corrections"]:
    options = {"rollout_is": None, **options}
    weights, kept, metrics = correct(old_log_prob=rows["old"], rollout_log_prob=rows["sampler"], response_mask=mask, **options)
    found["corrections"].append([None if weights is None else weights.batch["rollout_is_weights"].tolist(), kept.tolist(), metrics])
json.dump(found, open(sys.argv[2], "w"))
"""


def recorded():
    """Eleven rows of seven tokens: groups of one to four, tool tokens in the middle and at the end, ratios up to e^3."""
    dice = random.Random(7)
    groups = ["a"] * 4 + ["b"] * 4 + ["c"] * 2 + ["d"]
    count = len(groups)

    def numbers(low, high):
        return [[torch.tensor(dice.uniform(low, high)).item() for _ in range(WIDTH)] for _ in range(count)]

    mask = [[dice.choice([0, 1, 1]) for _ in range(WIDTH)] for _ in range(count)]
    rewards = [[0.0] * WIDTH for _ in range(count)]
    for row, tokens in enumerate(mask):
        tokens[dice.randrange(WIDTH)] = 1
        last = max(place for place, value in enumerate(tokens) if value)
        rewards[row][last] = dice.choice([0.0, 1.0, 1.0, -0.5]) + 0.01 * row
        for place in range(last):
            rewards[row][place] = -0.125 * tokens[place] * dice.random()
    old = numbers(-3.0, -0.1)
    return {
        "groups": groups, "gamma": 0.97, "lam": 0.9, "names": NAMES, "losses": LOSSES, "modes": MODES[:4], "kinds": KINDS,
        "corrections": CORRECTIONS, "baselines": [dice.random() for _ in range(count)],
        "rows": {
            "mask": [[float(value) for value in row] for row in mask], "rewards": rewards, "values": numbers(-1.0, 1.0), "old": old,
            "new": [[o + dice.choice([0.0, 0.1, -0.1, 0.5, -0.5, 3.0]) for o in row] for row in old],
            "sampler": [[torch.tensor(o + dice.uniform(-0.4, 0.4)).item() for o in row] for row in old],
            "advantages": numbers(-2.0, 2.0), "weights": numbers(0.0, 2.0),
        },
    }  # fmt: skip


def batch_of(job, *, groups=None):
    rows = job["rows"]
    segments = [
        Segment([1], [2] * WIDTH, [int(value) for value in mask], sampler, group, f"t{row}", 0.0)
        for row, (mask, sampler, group) in enumerate(
            zip(rows["mask"], rows["sampler"], groups or job["groups"], strict=True)
        )
    ]
    return Batch.from_segments(segments).with_columns(
        old_log_probs=column(rows["old"]),
        values=column(rows["values"]),
        token_rewards=column(rows["rewards"]),
        baselines=torch.tensor(job["baselines"], dtype=torch.float64),
    )


def column(rows, *, of_prompt=0.0):
    """[T] out of a table, with the token of the prompt before each row."""
    return torch.tensor([value for row in rows for value in (of_prompt, *row)], dtype=torch.float64)


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[Any, Any]:
    """The recorded inputs, and what verl makes of them."""
    if not PYTHON.exists():
        pytest.skip(f"verl is not installed at {PYTHON}; `just peers` installs it")
    folder = tmp_path_factory.mktemp("verl")
    job = recorded()
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "peer.py").write_text(PEER)
    done = subprocess.run(
        [PYTHON, "peer.py", "job.json", "found.json"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return job, json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_advantages_are_the_same(both, name):
    """Every estimator, in advantages and in returns where we give them, for a reward on every token."""
    job, found = both
    pairs = ["c" if group == "d" else group for group in job["groups"]]  # pass@k is an error there for a group of one
    batch = batch_of(job, groups=pairs if name == "grpo_passk" else None)
    got = with_advantages(batch, name, AdvantageOptions(gamma=job["gamma"], lam=job["lam"]))
    advantages, returns = (column(table) for table in found["advantages"][name])
    assert got.advantages is not None
    assert torch.allclose(got.advantages, advantages, rtol=1e-6, atol=1e-6)
    if got.returns is not None:
        assert torch.allclose(got.returns, returns, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", MODES[:4])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_the_same(both, name, mode):
    """Every loss under every aggregation, with importance weights. SAPO is fixed to seq-mean-token-mean there."""
    job, found = both
    rows = job["rows"]
    value, gradient, metrics = found["losses"][f"{name}/{mode}"]
    batch = batch_of(job)
    batch = batch.with_columns(
        advantages=torch.where(batch.loss_mask, column(rows["advantages"]), 0.0),
        rollout_is_weights=column(rows["weights"]),
    )
    batch = with_loss_weights(batch, "seq-mean-token-mean" if name == "sapo" else mode)
    new = column(rows["new"]).requires_grad_()
    options = PolicyLossOptions(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0)
    loss, got = policy_loss_fn(options, name)(MicroBatchOutput(new, None), batch)
    loss.backward()
    assert new.grad is not None
    assert loss.item() == pytest.approx(value, rel=1e-6, abs=1e-8)
    assert torch.allclose(new.grad, column(gradient), rtol=1e-6, atol=1e-9)
    for metric, there in metrics.items():
        assert float(got[metric]) == pytest.approx(there, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_divergences_are_the_same(both, kind):
    """Every estimator in value and gradient, within the ratios where neither is held back."""
    job, found = both
    mask = batch_of(job).loss_mask
    new = column(job["rows"]["new"]).requires_grad_()
    estimate = torch.where(mask, kl_estimate(new, column(job["rows"]["old"]), kind), 0.0)
    estimate.sum().backward()
    value, gradient = (column(table) for table in found["kl"][kind])
    assert new.grad is not None
    assert torch.allclose(estimate.detach(), value, rtol=1e-6, atol=1e-9)
    assert torch.allclose(new.grad, gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("number", range(len(CORRECTIONS)))
def test_corrections_are_the_same(both, number):
    """Weights, what is rejected, and the metrics that both have."""
    job, found = both
    weights, kept, metrics = found["corrections"][number]
    batch = batch_of(job)
    got, got_metrics = correct_rollout(batch, RolloutCorrectionConfig(**CORRECTIONS[number]))
    if weights is None:
        assert got.rollout_is_weights is None
    else:
        assert got.rollout_is_weights is not None
        assert torch.allclose(
            got.rollout_is_weights[batch.loss_mask], column(weights)[batch.loss_mask], rtol=1e-5, atol=1e-6
        )
    assert got.loss_mask.tolist() == column(kept).bool().tolist()
    for name in SAME_METRICS:
        if f"rollout_corr/{name}" in metrics:
            assert got_metrics[f"rollout_corr/{name}"] == pytest.approx(
                metrics[f"rollout_corr/{name}"], rel=1e-4, abs=1e-5
            )
    assert not any(math.isnan(value) for value in got_metrics.values())
