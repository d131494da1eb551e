"""Whole runs whose ranks, engines and agent workers are actors, on a real cluster of this host."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch

from ostinato_trainer.assembly import run_training
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.errors import ConfigError

pytest.importorskip("ray")
pytest.importorskip("zmq")

from ostinato_rollout.ray_cluster.testing import local_cluster

REWARD = """async def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(letter.isdigit() for letter in solution_str) / max(1, len(solution_str))
"""
KILLING = """import os
import signal
from pathlib import Path

from ostinato_rollout.ray_cluster.testing import descendants

MARK = Path(__file__).with_name("killed_once")


class Killing:
    def on_step_end(self, step, metrics):
        if step == 3 and not MARK.exists():
            MARK.touch()
            ranks = [pid for pid in sorted(descendants(os.getpid())) if b"_RankBody" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            os.kill(ranks[-1], signal.SIGKILL)
"""
NUM_STEPS = 6
ACTORS = ("trainer.executor=ray", "trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.agent.num_workers=2")


@pytest.fixture(scope="session", autouse=True)
def cluster():
    """A cluster for all tests here, whose actors can import what lies beside this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        with local_cluster():
            yield


def steps_of(home: Path, folder: Path, *overrides: str) -> list[dict]:
    """The metrics of a run on the quickstart's task, rewarded for digits."""
    folder.mkdir()
    (folder / "reward.py").write_text(REWARD)
    settings = [
        f"trainer.total_training_steps={NUM_STEPS}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=0",
        "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={folder}",
        "data.train_batch_size=8",
        "data.max_response_length=24",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.optim.lr=5e-3",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.full_determinism=false",
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        *overrides,
    ]
    run_training(load_config([home / "config.yaml"], settings))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_of_actors_learns_as_one_process_does_though_a_rank_is_killed(
    quickstart_home: Path, tmp_path: Path
) -> None:
    """Two ranks, two replicas and two workers give the curve of one process, for seeds know nothing of where a trajectory runs; it rises; and a
    rank that is killed in the middle costs a restart from the newest checkpoint and nothing else."""
    alone = steps_of(quickstart_home, tmp_path / "local")
    (tmp_path / "killing.py").write_text(KILLING)
    callback = f"trainer.callbacks=[{tmp_path}/killing.py:Killing]"
    ranks = ("actor_rollout_ref.actor.strategy=fsdp2", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=1", callback)
    actors = steps_of(quickstart_home, tmp_path / "ray", *ACTORS, *ranks)
    assert [step["step"] for step in actors] == list(range(1, NUM_STEPS + 1))
    scores = [[step["critic/score/mean"] for step in steps] for steps in (alone, actors)]
    assert scores[1] == pytest.approx(scores[0], rel=0.05)
    assert scores[1][-1] > 2 * scores[1][0]
    assert actors[-1]["training/num_restarts"] == 1.0
    assert "of 2 must live" in next(step["restart_1"] for step in actors if "restart_1" in step)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None or torch.cuda.is_available(),
    reason="no megatron.core here, or a GPU; .ci/megatron.py makes an environment for CPUs",
)
@pytest.mark.usefixtures("megatron_on_cpu")
def test_megatrons_ranks_are_actors_too(quickstart_home: Path, tmp_path: Path) -> None:
    """Two tensor ranks give the curve of one process, and go on from their checkpoint after one was killed."""
    (tmp_path / "killing.py").write_text(KILLING)
    alone = steps_of(quickstart_home, tmp_path / "local", "trainer.total_training_steps=4")
    actors = steps_of(
        quickstart_home,
        tmp_path / "ray",
        *ACTORS,
        "actor_rollout_ref.actor.strategy=megatron",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        "trainer.total_training_steps=4",
        "trainer.save_freq=1",
        f"trainer.callbacks=[{tmp_path}/killing.py:Killing]",
    )
    assert [step["step"] for step in actors] == [1, 2, 3, 4]
    for one, other in zip(alone, actors, strict=True):
        for name in ("critic/score/mean", "actor/grad_norm", "actor/pg_loss"):
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), (one["step"], name)
    assert actors[-1]["training/num_restarts"] == 1.0


@pytest.mark.slow
def test_engines_on_machines_of_their_own_sample_ahead(quickstart_home: Path, tmp_path: Path) -> None:
    """With `rollout.nnodes` engines share nothing with training, need not sleep, and go on while the policy is trained."""
    separate = (
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        "trainer.max_staleness=1",
    )
    steps = steps_of(quickstart_home, tmp_path / "run", *ACTORS, *separate, "trainer.total_training_steps=2")
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["training/num_trajectories"] == 32.0 for step in steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("trainer.n_gpus_per_node=99",), r"must have 99 CPU on one node for engines, 1 such in all, while .* 16 CPU"),
        (("trainer.device=cuda", "trainer.n_gpus_per_node=99"), r"must have 99 CPU, 99 GPU on one node"),
        (
            ("actor_rollout_ref.rollout.agent.agent_loop_config_path=not/there.yaml",),
            r"agent_loop_config_path=not/there.yaml must be on every node",
        ),
    ],
)
def test_what_the_cluster_lacks_is_said_before_the_start(
    quickstart_home: Path, tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    """Places that no node has, and files that a node does not see, are errors, and nothing waits for them."""
    with pytest.raises(ConfigError, match=message):
        steps_of(quickstart_home, tmp_path / "run", *ACTORS, *overrides)
