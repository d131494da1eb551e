"""What a checkpoint holds of a run beside its models goes to disk and back, and what is missing or foreign is named."""

import math
import random

import pytest

from ostinato_engines import EngineInputError
from ostinato_trainer.checkpoints.run_state import RunState, read_run_state
from ostinato_trainer.errors import CheckpointError


class Counter:
    """A part of a run."""

    def __init__(self, count=0):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_parts_and_generators_come_back(tmp_path):
    """Every part goes on from its state, and random numbers are those that would have come."""
    random.seed(1)
    RunState.of(7, {"first": Counter(3), "second": Counter(4)}, {"wandb": "abc"}).write(tmp_path)
    expected = [random.random() for _ in range(3)]
    state = read_run_state(tmp_path)
    assert (state.step, state.loggers) == (7, {"wandb": "abc"})
    first, second = Counter(), Counter()
    state.restore_parts({"first": first, "second": second})
    state.restore_random()
    assert (first.count, second.count) == (3, 4)
    assert [random.random() for _ in range(3)] == expected


def test_a_part_without_a_state_is_named(tmp_path):
    """A run that has a part more than the one that was saved is refused, before any part is changed."""
    RunState.of(7, {"first": Counter(3)}, {}).write(tmp_path)
    first = Counter()
    with pytest.raises(
        CheckpointError, match=r"must hold the state of kl_controller, got only first; go on with the config"
    ):
        read_run_state(tmp_path).restore_parts({"first": first, "kl_controller": Counter()})
    assert first.count == 0


def test_a_state_that_is_no_data_is_refused(tmp_path):
    """A part whose state cannot be written as JSON is an error at the save, not at the resume."""
    with pytest.raises(CheckpointError, match=r"state_dict\(\) must give plain JSON data"):
        RunState.of(1, {"first": Counter(object())}, {}).write(tmp_path)


@pytest.mark.parametrize("value", [math.nan, math.inf, {1: 2}, b"x"])
def test_a_state_that_would_come_back_changed_is_refused(tmp_path, value):
    """What JSON writes as something else is an error with the part's name, and no file."""
    with pytest.raises(CheckpointError, match=r"state_dict\(\) of first must come back from JSON as it was"):
        RunState.of(1, {"first": Counter([value])}, {}).write(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text", [None, "", "{}", '{"step": "x"}', '{"step": 1, "parts": {}, "loggers": {}, "random": {}, "more": 1}']
)
def test_a_damaged_or_foreign_file_is_refused(tmp_path, text):
    """No file, no JSON, or JSON of something else is refused with the path."""
    if text is not None:
        (tmp_path / "run_state.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"run_state.json must be the state of a run"):
        read_run_state(tmp_path)


def test_generators_without_a_state_are_refused():
    """A state in which the generators are missing does not leave them as they are in silence."""
    with pytest.raises(EngineInputError, match="random_state"):
        RunState(step=1, parts={}, loggers={}, random={}).restore_random()
