"""Rewards within a whole run: the function in processes, answers of many shapes, parts of several kinds."""

import json
import math
from pathlib import Path

import pytest

from ostinato_trainer.assembly import run_training
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.quickstart.run import make_files

GRADE = """
import itertools, os, pathlib, time
numbers = itertools.count()

def compute_score(data_source, solution_str, ground_truth, extra_info, folder):
    (pathlib.Path(folder) / str(os.getpid())).touch()
    number = next(numbers)
    if number % 4 == 1:
        return {"score": float("nan")}
    if number % 4 == 2:
        return {"score": number % 3, "acc": 1.0}
    return number / 2 if number % 4 == 3 else {"score": 1.0, "note": "first"}
"""


@pytest.mark.slow
def test_a_run_with_a_function_in_processes(tmp_path: Path) -> None:
    """Answers of different shapes train and are measured, those that are none are failures, and no process outlives the run."""
    make_files(tmp_path, seed=0)
    (tmp_path / "warm_start").symlink_to(tmp_path / "model")
    pids = tmp_path / "pids"
    pids.mkdir()
    (tmp_path / "grade.py").write_text(GRADE)
    config = load_config(
        [tmp_path / "config.yaml"],
        [
            "trainer.total_training_steps=2",
            "trainer.test_freq=-1",
            "trainer.val_before_train=false",
            "trainer.save_freq=0",
            f"trainer.default_local_dir={tmp_path / 'run'}",
            "trainer.logger=[jsonl]",
            "data.train_batch_size=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.rollout.n=4",
            "data.max_response_length=48",
            "reward.executor=process",
            "reward.num_workers=1",
            f"reward.custom_reward_function.path={tmp_path / 'grade.py'}",
            f"reward.custom_reward_function.reward_kwargs={{folder: {pids}}}",
            "reward.combine.tool_rewards=0.5",
            "reward.overlong_buffer.enable=true",
            "reward.overlong_buffer.len=16",
        ],
    )
    run_training(config)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "critic/score/mean" in line]
    assert len(steps) == 2
    for step in steps:
        assert step["agent_loop/failures/reward"] == 2  # of 8
        assert math.isfinite(step["critic/score/mean"])
        assert step["reward_extra/acc/mean"] == 1.0
        assert {
            "reward_extra/outcome_reward/mean",
            "reward_extra/tool_reward/mean",
            "reward_extra/overlong_reward/min",
        } <= set(step)
    assert [path.name for path in pids.iterdir() if Path(f"/proc/{path.name}").exists()] == []
    assert len(list(pids.iterdir())) == 1
