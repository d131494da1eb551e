"""Whole runs with sharded ranks: the curve of one device, and what is left of a run whose rank was killed."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from ostinato_trainer.assembly import run_training
from ostinato_trainer.backends.ranks.workers import RankDiedError
from ostinato_trainer.config.loading import load_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KEYS = (
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.rollout.n=3",
    "data.max_response_length=48",
    "trainer.logger=[jsonl]",
    "trainer.device=cpu",
)
SHARDED = ("actor_rollout_ref.actor.strategy=fsdp2", "trainer.n_gpus_per_node=2", "trainer.max_restarts=0")
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str) % 3)
"""


def run(home: Path, output: Path, *overrides: str, on_step: Any = None) -> list[dict[str, Any]]:
    """The metrics of the run's steps."""
    reward = output.parent / "reward.py"
    reward.write_text(REWARD)
    own = (f"trainer.default_local_dir={output}", f"reward.custom_reward_function.path={reward}")
    run_training(load_config([home / "config.yaml"], [*KEYS, *own, *overrides]), on_step=on_step)
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "actor/grad_norm" in record]


def test_two_ranks_give_the_curve_of_one_device(quickstart_home: Path, tmp_path: Path) -> None:
    """Two steps, of which the second is taken up from the checkpoint of the first: rewards, losses and norms as with strategy=local."""
    local = run(quickstart_home, tmp_path / "local", "trainer.total_training_steps=2", "trainer.save_freq=-1")
    sharded = run(
        quickstart_home, tmp_path / "sharded", *SHARDED, "trainer.total_training_steps=1", "trainer.save_freq=1"
    )
    sharded = run(
        quickstart_home, tmp_path / "sharded", *SHARDED, "trainer.total_training_steps=2", "trainer.save_freq=-1"
    )
    assert len(sharded) == len(local) == 2
    for one, other in zip(local, sharded, strict=True):
        assert other["critic/score/mean"] == pytest.approx(one["critic/score/mean"], rel=1e-6)
        for name in ("actor/grad_norm", "actor/pg_loss", "actor/kl_loss", "actor/ppo_kl"):
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name


def test_ppo_with_adapters_on_ranks_that_share_tokens(quickstart_home: Path, tmp_path: Path) -> None:
    """Two steps of PPO with a critic, adapters and halves of each sequence on either rank, of which the second is taken up from the checkpoint of the
    first: rewards, losses and norms of policy and critic as with strategy=local."""
    pytest.importorskip("peft", reason="the extra lora is not installed")
    keys = (
        "algorithm.adv_estimator=gae",
        "critic.optim.lr=1e-3",
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.actor.optim.lr=1e-2",
    )
    shared = (*SHARDED, "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2")
    local = run(quickstart_home, tmp_path / "local", *keys, "trainer.total_training_steps=2", "trainer.save_freq=-1")
    for steps in (1, 2):
        sharded = run(
            quickstart_home,
            tmp_path / "sharded",
            *keys,
            *shared,
            f"trainer.total_training_steps={steps}",
            "trainer.save_freq=1",
        )
    assert len(sharded) == len(local) == 2
    names = ("grad_norm", "pg_loss", "kl_loss", "ppo_kl")
    for one, other in zip(local, sharded, strict=True):
        assert other["critic/score/mean"] == pytest.approx(one["critic/score/mean"], rel=1e-6)
        for name in (*(f"actor/{name}" for name in names), "critic/grad_norm", "critic/vf_loss", "critic/values/mean"):
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name


def test_a_killed_rank_ends_the_run_and_leaves_no_process(quickstart_home: Path, tmp_path: Path) -> None:
    """SIGKILL to one rank in the second step: an error that names it, and none of the ranks is left."""
    killed: list[int] = []

    def kill(step: int, metrics: Any) -> None:
        del step, metrics
        if not killed:
            ranks = ranks_of_this_process()
            killed.extend(ranks)
            os.kill(ranks[1], signal.SIGKILL)

    with pytest.raises(RankDiedError, match=r"rank 1 of 2 must live .* was killed by signal 9"):
        run(
            quickstart_home,
            tmp_path / "run",
            *SHARDED,
            "trainer.total_training_steps=3",
            "trainer.save_freq=-1",
            on_step=kill,
        )
    assert len(killed) == 2
    assert not [pid for pid in killed if Path(f"/proc/{pid}").exists()]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank")]


def ranks_of_this_process() -> list[int]:
    """Process ids of the ranks, in the order in which they were started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if b"ostinato_trainer.backends.ranks.process" in command and int(parent) == os.getpid():
                found.append(int(entry.name))
    return sorted(found)
