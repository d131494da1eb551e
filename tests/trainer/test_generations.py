"""What was sampled, in files for people."""

import json
import logging

import pytest

from ostinato_agent_loop import AgentLoopOutput, RewardResult, Trajectory, TrajectoryEnd
from ostinato_rollout import Failure, FailureKind
from ostinato_trainer.metrics.generations import GenerationFiles, generation_row, generation_rows


def decode(ids):
    return " ".join(map(str, ids))


def trajectory(name, group="g", *, score=None, extra=None, num_segments=1):
    output = AgentLoopOutput(
        prompt_ids=[1, 2], response_ids=[3], response_mask=[1], num_turns=2, stop_reason=TrajectoryEnd.STOP
    )
    return Trajectory(
        group_id=group,
        trajectory_id=name,
        row={"data_source": "s", "reward_model": {"ground_truth": "7"}},
        segments=[output] * num_segments,
        reward=None if score is None else RewardResult(score, extra or {}),
        failure=Failure("tool calc", FailureKind.TOOL, "broke") if score is None else None,
    )


def test_a_line_has_prompt_answer_score_and_what_the_reward_said(tmp_path):
    """Every trajectory is one line; a failed one says its failure and has no score, one that never began has no text."""
    files = GenerationFiles(tmp_path / "rollouts", decode)
    trajectories = [
        trajectory("a", score=0.5, extra={"acc": True, "pred": "7", "odd": {1}}),
        trajectory("b", num_segments=0),
    ]
    for _ in range(2):
        files.write(3, trajectories)
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["3.jsonl"]
    first, second = map(json.loads, (tmp_path / "rollouts" / "3.jsonl").read_text().splitlines())
    assert first == {
        "step": 3, "group_id": "g", "trajectory_id": "a", "data_source": "s", "gts": "7", "input": "1 2", "output": "3",
        "num_turns": 2, "num_segments": 1, "stop_reason": "stop", "score": 0.5, "acc": True, "pred": "7", "odd": [1],
    }  # fmt: skip
    assert second["failure"] == "tool in tool calc: broke"
    assert not {"score", "output"} & set(second)


def test_the_reward_cannot_replace_what_is_known():
    """A value of the reward function under a name of ours does not hide ours."""
    forged = trajectory("a", score=0.5, extra={"output": "forged", "score": 9, "step": 9, "failure": "forged"})
    row = generation_row(forged, decode)
    assert (row["output"], row["score"]) == ("3", 0.5)
    assert not {"step", "failure"} & set(row)


@pytest.mark.parametrize("value", ["\ud800", {(1, 2): "\udfff"}, 10**400, [object()], {"a": {"\ud800"}}])
def test_values_that_json_does_not_know_end_no_run(tmp_path, value):
    """Whatever rows and reward functions hold, each trajectory has its line and can be shown by loggers."""
    odd = trajectory("a", score=0.5, extra={"odd": value})
    odd.row = {"reward_model": {"ground_truth": value}, "data_source": value}
    files = GenerationFiles(tmp_path, decode)
    files.write(3, [odd, trajectory("b", score=1.0)])
    first, second = map(json.loads, (tmp_path / "3.jsonl").read_text().splitlines())
    assert (first["score"], second["score"]) == (0.5, 1.0)
    assert json.dumps(generation_rows([odd], decode, 1), ensure_ascii=False).encode()


def test_a_row_whose_reward_model_is_no_mapping_has_no_ground_truth():
    """A dataset of the user's own may say anything there."""
    plain = trajectory("a", score=0.5)
    plain.row = {"reward_model": "rule"}
    assert generation_row(plain, decode)["gts"] is None


def test_samples_for_loggers_are_the_same_prompts_each_time():
    """The first trajectory of each of the first groups."""
    ran = [trajectory(f"{group}{number}", group, score=1.0) for group in "abc" for number in range(2)]
    assert [row["trajectory_id"] for row in generation_rows(ran, decode, 2)] == ["a0", "b0"]


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path, caplog):
    """The run goes on, with one warning."""
    (tmp_path / "file").write_text("")
    files = GenerationFiles(tmp_path / "file", decode)
    with caplog.at_level(logging.WARNING, logger="ostinato_trainer"):
        for step in (1, 2):
            files.write(step, [trajectory("a", score=1.0)])
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_run_keeps_what_it_sampled_and_shows_some_of_it(quickstart_home, tmp_path, capsys):
    """A validation alone trains and saves nothing and needs no whole batch of training rows; its samples are in the folder and on the console."""
    from ostinato_trainer.assembly import run_training
    from ostinato_trainer.config.loading import load_config

    config = load_config(
        [quickstart_home / "config.yaml"],
        [
            "trainer.val_only=true",
            "data.train_batch_size=100000",
            "actor_rollout_ref.actor.ppo_mini_batch_size=100000",
            "trainer.log_val_generations=2",
            f"trainer.validation_data_dir={tmp_path / 'val'}",
            f"trainer.rollout_data_dir={tmp_path / 'rollouts'}",
            f"trainer.default_local_dir={tmp_path / 'run'}",
            "data.val_max_samples=3",
            "data.max_response_length=48",
        ],
    )
    run_training(config)
    assert not list((tmp_path / "run").glob("global_step_*"))
    assert not (tmp_path / "rollouts").exists()
    rows = [json.loads(line) for line in (tmp_path / "val" / "0.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert all("Tools: calculator" in row["input"] for row in rows)
    assert capsys.readouterr().out.count("[step 0] output: ") == 2
    (line,) = (tmp_path / "run" / "val_only.jsonl").read_text().splitlines()
    assert any(name.startswith("val-core/") for name in json.loads(line))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
