"""Whole runs on a Ray cluster of several nodes of this host, in a process of its own: one process knows one cluster."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("zmq")

from ostinato_rollout.ray_cluster.testing import descendants

PROGRAM = '''
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

from ray.cluster_utils import Cluster

from ostinato_rollout.ray_cluster.testing import descendants, wait_until_gone
from ostinato_trainer.assembly import run_training
from ostinato_trainer.config.loading import load_config

HOME, FOLDER, REWARD = (Path(argument) for argument in sys.argv[1:])
NODE = {"object_store_memory": 80 << 20, "include_dashboard": False}


def add_node(cluster, number):
    """A node with one CPU and an address of its own, whose processes are in a folder of their own."""
    own = FOLDER / f"node{number}"
    own.mkdir()
    os.chdir(own)
    try:
        return cluster.add_node(num_cpus=1, node_ip_address=f"127.0.0.{number}", **NODE)
    finally:
        os.chdir(FOLDER)


def run(steps, on_step):
    """Two ranks and engines, each on a node of its own: how that has ended, and its metrics."""
    settings = [
        "trainer.executor=ray",
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=1",
        "trainer.max_ckpt_to_keep=1",
        "trainer.logger=[jsonl]",
        f"trainer.total_training_steps={steps}",
        "trainer.default_local_dir=run",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "actor_rollout_ref.rollout.full_determinism=false",
        "data.train_batch_size=4",
        "data.max_response_length=16",
        f"reward.custom_reward_function.path={REWARD}",
        f"ray_kwargs.ray_init.address={cluster.address}",
    ]
    ended = ""
    try:
        run_training(load_config([HOME / "config.yaml"], settings), on_step=on_step)
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"
    rows = (FOLDER / "run" / "metrics.jsonl").read_text().splitlines()
    return {"ended": ended, "steps": [json.loads(row) for row in rows], "lost": lost}


def has_a_rank(node):
    """Whether a rank is among what a node has started."""
    started = descendants(node.all_processes["raylet"][0].process.pid)
    return any(b"_RankBody" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in started)


def lose_a_node(step, metrics):
    """After two steps and after four, a node with a rank ends, with all that runs there: left alone, a rank would do more steps."""
    if step != 2 * (len(lost) + 1):
        return
    node = next(node for node in nodes if has_a_rank(node))
    nodes.remove(node)
    lost.append(node.node_ip_address)
    started = descendants(node.all_processes["raylet"][0].process.pid)
    cluster.remove_node(node, allow_graceful=False)
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


cluster, lost = Cluster(), []
try:
    cluster.add_node(num_cpus=0, **NODE)
    nodes = [add_node(cluster, number) for number in (2, 3, 4, 5)]
    (FOLDER / "ended.json").write_text(json.dumps(run(6, lose_a_node)))
finally:
    started = descendants(os.getpid())
    cluster.shutdown()
    left = wait_until_gone(started)
    assert not left, f"no process must be left of the cluster, got {left}"
'''
REWARD = """async def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(letter.isdigit() for letter in solution_str) / max(1, len(solution_str))
"""
LONGEST_S = 900.0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_lost_node_costs_a_restart_and_too_few_nodes_end_the_run(quickstart_home: Path, tmp_path: Path) -> None:
    """Ranks of two nodes learn from engines of a third, though all processes are in folders of their own and the checkpoints' folder is a relative
    path. Of a lost node a fourth takes the place, from the newest checkpoint on; without one more, the error names what is missing and the host of
    each loss. No process of the nodes is left."""
    ended = run_of_nodes(quickstart_home, tmp_path)
    steps, (first, second), why = ended["steps"], ended["lost"], ended["ended"]
    assert [step["step"] for step in steps] == [1, 2, 3, 4], why
    assert all(step["training/num_trajectories"] == 16.0 for step in steps)
    assert [step.get("training/num_restarts", 0.0) for step in steps] == [0.0, 0.0, 1.0, 1.0]
    assert why.startswith("TrainingInterrupted: the run must find places again"), why
    assert "the cluster must have 1 CPU on one node for engines, 3 such in all" in why
    cause, _, next_cause = why.partition("It had lost: 1. ")[2].partition("; 2. ")
    assert first in cause, why
    assert second in next_cause, why


def run_of_nodes(home: Path, folder: Path) -> dict:
    """What became of the program's run."""
    (folder / "program.py").write_text(PROGRAM)
    (folder / "reward.py").write_text(REWARD)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, folder / "program.py", home, folder, folder / "reward.py"]
    with (folder / "log").open("w") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder)
        try:
            status = running.wait(LONGEST_S)
        finally:
            started = descendants(running.pid)
            running.kill()
            running.wait()
            for pid in started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    text = (folder / "log").read_text(errors="replace")[-20_000:]
    assert status == 0, text
    return json.loads((folder / "ended.json").read_text())
