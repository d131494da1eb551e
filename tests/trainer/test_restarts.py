"""Runs whose processes were lost go on by themselves, so many times and no more."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from ostinato_rollout import NoReplicaError
from ostinato_rollout.errors import ActorLostError, ClusterError
from ostinato_trainer.assembly import run_training
from ostinato_trainer.backends.ranks.workers import RankDiedError
from ostinato_trainer.config import Config
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.errors import ConfigError, TrainingInterrupted
from ostinato_trainer.restarts import is_loss, restart_metrics, run_with_restarts


class Attempts:
    """Raises what it is given, one for each attempt, and then ends well."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors, self.seen = list(errors), []

    def __call__(self, config: Config, causes: Sequence[str]) -> None:
        self.seen.append((config.trainer.resume_mode, tuple(causes)))
        if self.errors:
            raise self.errors.pop(0)


def config_of(folder: Path, *overrides: str) -> Config:
    """A run in a folder."""
    return load_config([], [f"trainer.default_local_dir={folder}", "trainer.max_restarts=2", *overrides])


def test_a_lost_run_goes_on_and_knows_why(tmp_path: Path) -> None:
    """Each attempt is told the causes before it, and the last one's end is the run's."""
    attempts = Attempts(RankDiedError("rank 1"), ActorLostError("actor"))
    run_with_restarts(config_of(tmp_path), attempts)
    assert [len(causes) for _, causes in attempts.seen] == [0, 1, 2]
    assert attempts.seen[-1][1] == ("RankDiedError: rank 1", "ActorLostError: actor")
    assert restart_metrics(attempts.seen[-1][1]) == {"training/num_restarts": 2.0}
    assert restart_metrics(()) == {}


def test_too_many_losses_end_the_run_with_their_history(tmp_path: Path) -> None:
    """After `trainer.max_restarts` the error has every cause."""
    attempts = Attempts(RankDiedError("first"), NoReplicaError("second"), RankDiedError("third"))
    with pytest.raises(
        TrainingInterrupted, match=r"1\. RankDiedError: first; 2\. NoReplicaError: second; 3\. RankDiedError: third"
    ):
        run_with_restarts(config_of(tmp_path), attempts)


@pytest.mark.parametrize("error", [ConfigError("the cluster must have 2 CPU"), ClusterError("2 CPU must be free")])
def test_a_cluster_without_room_after_a_loss_ends_the_run_with_both(tmp_path: Path, error: Exception) -> None:
    """What the places of the lost processes were, and what is missing now, are in one error."""
    attempts = Attempts(RankDiedError("rank 1 on 10.0.0.3"), error)
    with pytest.raises(
        TrainingInterrupted, match=r"find places again .* 2 CPU.*It had lost: 1\. RankDiedError: rank 1 on 10\.0\.0\.3"
    ):
        run_with_restarts(config_of(tmp_path), attempts)


def test_without_restarts_the_loss_itself_is_raised(tmp_path: Path) -> None:
    """`trainer.max_restarts=0` changes nothing about an error."""
    with pytest.raises(RankDiedError, match="it"):
        run_with_restarts(config_of(tmp_path, "trainer.max_restarts=0"), Attempts(RankDiedError("it")))


@pytest.mark.parametrize("error", [ConfigError("c"), ClusterError("no room"), ValueError("v"), KeyboardInterrupt()])
def test_what_is_no_loss_ends_the_run_at_once(tmp_path: Path, error: BaseException) -> None:
    """Errors of settings, data and code, and Ctrl-C, are never tried again."""
    attempts = Attempts(error)
    with pytest.raises(type(error)):
        run_with_restarts(config_of(tmp_path), attempts)
    assert len(attempts.seen) == 1


def test_a_loss_behind_another_error_is_one() -> None:
    """What was raised because a process was lost tells of the loss."""
    error = RuntimeError("outer")
    error.__cause__ = RankDiedError("inner")
    assert is_loss(error)
    assert not is_loss(RuntimeError("alone"))


@pytest.mark.parametrize(("has_checkpoint", "mode"), [(True, "auto"), (False, "disable")])
def test_a_run_that_begins_anew_goes_on_from_its_own_checkpoint(
    tmp_path: Path, has_checkpoint: bool, mode: str
) -> None:
    """`resume_mode=disable` is about what lay there before, not about what the run has written itself."""

    def attempt(config: Config, causes: Sequence[str]) -> None:
        if not causes:
            if has_checkpoint:
                (tmp_path / "global_step_1").mkdir()
            raise RankDiedError("lost")
        assert config.trainer.resume_mode == mode

    run_with_restarts(config_of(tmp_path, "trainer.resume_mode=disable"), attempt)


LOSING = """from pathlib import Path

from ostinato_trainer.backends.ranks.workers import RankDiedError

MARK = Path(__file__).with_name("lost_once")


class Losing:
    def on_step_end(self, step, metrics):
        if step == 2 and not MARK.exists():
            MARK.touch()
            raise RankDiedError("rank 1 of 2 must live to answer log_probs, but its process was killed by signal 9")
"""


def run_of(home: Path, folder: Path, *overrides: str) -> list[dict]:
    """The metrics of a short run of the quickstart's task in one process."""
    settings = [
        "trainer.total_training_steps=3",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=1",
        "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={folder}",
        "data.train_batch_size=2",
        "data.max_response_length=12",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=2",
        *overrides,
    ]
    run_training(load_config([home / "config.yaml"], settings))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_lost_run_takes_itself_up_from_its_newest_checkpoint(quickstart_home: Path, tmp_path: Path) -> None:
    """A loss in step 2 costs nothing that was saved: the curve is that of a run that lost nothing, and its metrics say how often it began again."""
    whole = run_of(quickstart_home, tmp_path / "whole")
    (tmp_path / "losing.py").write_text(LOSING)
    lossy = run_of(quickstart_home, tmp_path / "lossy", f"trainer.callbacks=[{tmp_path}/losing.py:Losing]")
    assert [step["step"] for step in lossy] == [1, 2, 3]
    assert [step["critic/score/mean"] for step in lossy] == [step["critic/score/mean"] for step in whole]
    assert [step["actor/grad_norm"] for step in lossy] == [step["actor/grad_norm"] for step in whole]
    assert [step.get("training/num_restarts") for step in lossy] == [None, None, 1.0]
    assert "rank 1 of 2" in lossy[2]["restart_1"]
