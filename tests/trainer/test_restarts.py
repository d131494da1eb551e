"""Runs whose processes were lost go on by themselves, so many times and no more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ostinato_rollout import NoReplicaError
from ostinato_rollout.errors import ActorLostError, ClusterError
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
