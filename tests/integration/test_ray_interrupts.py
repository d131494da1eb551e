"""Ctrl-C and SIGTERM during a run of actors, in a process of its own with a cluster of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("zmq")

from ostinato_rollout.ray_cluster.testing import descendants, wait_until_gone
from ostinato_trainer.quickstart.run import make_files

COMMAND = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that a shell runs in its background are started without
from ostinato_trainer.cli import main
main()
"""
LONGEST_S = 240.0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=lambda value: str(value)
)
def test_a_signal_to_the_group_frees_everything(tmp_path: Path, number: signal.Signals, expected: int) -> None:
    """After Ctrl-C in the middle of a run of actors, or SIGTERM to its process group as `timeout` sends it, the command ends with the signal's
    status and one line, and no process of its cluster is left."""
    home, out = tmp_path / "home", tmp_path / "out"
    home.mkdir()
    make_files(home, seed=0)
    arguments = [
        str(home / "config.yaml"),
        "trainer.executor=ray",
        "actor_rollout_ref.rollout.full_determinism=false",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        f"actor_rollout_ref.model.path={home / 'model'}",
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "trainer.total_training_steps=100000",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        f"trainer.default_local_dir={out}",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("RAY_ADDRESS", None)
    with (tmp_path / "log").open("w") as log:
        running = subprocess.Popen(
            [sys.executable, "-c", COMMAND, "train", *arguments],
            stdout=log,
            stderr=log,
            env=environment,
            cwd=tmp_path,
            start_new_session=True,
        )
        try:
            metrics, deadline = out / "metrics.jsonl", time.monotonic() + LONGEST_S
            while running.poll() is None and time.monotonic() < deadline:
                if metrics.exists() and metrics.stat().st_size:
                    break
                time.sleep(0.1)
            started = descendants(running.pid)
            os.killpg(running.pid, number)
            status = running.wait(LONGEST_S)
        finally:
            running.kill()
            running.wait()
    text = (tmp_path / "log").read_text()
    assert status == expected, text
    said = [line for line in text.splitlines() if " pid=" not in line]  # Ray shows what actors log with their process
    assert not any("Traceback" in line for line in said), text
    assert "interrupted: " in said[-1], text
    assert json.loads(metrics.read_text().splitlines()[0])["step"] == 1
    assert len(started) > 3
    assert not wait_until_gone(started)
