"""Managers that derive from none of ours: what they must have, and what they must return."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato_agent_loop import (
    AgentConfig,
    AgentConfigError,
    AgentLoopManager,
    AgentLoopOutput,
    AgentLoopOutputError,
    RewardResult,
    RolloutBatch,
    Trajectory,
    check_rollout,
    load_manager_class,
)
from ostinato_rollout import Failure, FailureKind

WHOLE = '''
class Manager:
    """Derives from nothing."""

    def __init__(self, config, *, tokens, budget, pool, tools, reward_fn, seed):
        pass

    def check_agents(self, names):
        pass

    async def generate_sequences(self, rows, *, n, sampling_params, step, validate=False):
        pass

    async def close(self):
        pass
'''


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Loads the class `Manager` of a module with this text."""

    def make(text, name):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        return load_manager_class(AgentConfig(agent_loop_manager_class=f"{name}.Manager"))

    return make


def test_a_class_that_has_what_is_needed_is_taken(load):
    """A manager need not derive from ours, and ours is the default."""
    assert load(WHOLE, "whole_manager").__name__ == "Manager"
    assert load_manager_class(AgentConfig()) is AgentLoopManager
    ours = AgentConfig(agent_loop_manager_class="ostinato_agent_loop.AgentLoopManager")
    assert load_manager_class(ours) is AgentLoopManager


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("lacks_close", "async def close(self)", "async def end(self)", "without close"),
        ("lacks_agents", "def check_agents(self, names)", "def check(self, names)", "without check_agents"),
        ("lacks_validate", ", validate=False", "", "generate_sequences cannot be called with .*validate"),
        ("wants_more", "step, validate", "step, world, validate", "argument: 'world'"),
        (
            "other_arguments",
            "config, *, tokens, budget",
            "config, *, tokenizer, budget",
            "cannot be called with config, tokens",
        ),
        ("no_class", "class Manager:", "Manager = 3\nclass Other:", "must be a class"),
    ],
)
def test_a_class_that_lacks_something_is_refused_by_name(load, name, old, new, said):
    """What is missing, or cannot be called as it will be, is said before anything starts."""
    assert old in WHOLE
    with pytest.raises(AgentConfigError, match=rf"agent\.agent_loop_manager_class.*{said}"):
        load(WHOLE.replace(old, new), name)


def test_all_that_a_class_lacks_is_said_at_once():
    """A class of another kind hears everything that it would need in one message."""
    with pytest.raises(AgentConfigError) as refusal:
        load_manager_class(AgentConfig(agent_loop_manager_class="collections.OrderedDict"))
    for lacking in ("check_agents", "generate_sequences", "close"):
        assert f"without {lacking}" in str(refusal.value)


def trajectory(group: str, number: int = 0, **members) -> Trajectory:
    """One that was scored, unless told otherwise."""
    given = {
        "segments": [AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1])],
        "reward": RewardResult(1.0),
    }
    return Trajectory(group_id=group, trajectory_id=f"{group}/{number}", row={}, **(given | members))


@given(num_rows=st.integers(0, 4), n=st.integers(1, 3), failed=st.sets(st.integers(0, 11)))
def test_a_batch_of_all_that_was_asked_for_is_taken(num_rows, n, failed):
    """Groups of any number and size pass, whichever of their trajectories have failed."""
    failure = {"failure": Failure("here", FailureKind.AGENT, "no"), "reward": None, "segments": []}
    trajectories = [
        trajectory(str(row), number, **(failure if row * n + number in failed else {}))
        for row in range(num_rows)
        for number in range(n)
    ]
    check_rollout(RolloutBatch(trajectories, {}), num_rows=num_rows, n=n)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ([trajectory("a"), trajectory("a"), trajectory("b"), trajectory("b")], "RolloutBatch, got list"),
        (None, "RolloutBatch, got NoneType"),
        (RolloutBatch([trajectory("a")] * 3, {}), "2 trajectories for each of 2 rows, got 3"),
        (RolloutBatch([trajectory("a"), trajectory("b")] * 2, {}), "group_id must be one"),
        (RolloutBatch([trajectory("a")] * 4, {}), "group_id must be one"),
        (RolloutBatch([trajectory("a"), trajectory("a"), trajectory("b"), {}], {}), r"trajectories\[3\] .*got dict"),
        (RolloutBatch([trajectory("a", reward=None), *[trajectory("a")] * 3], {}), r"trajectories\[0\] .*no reward"),
        (RolloutBatch([trajectory("a", segments=[]), *[trajectory("a")] * 3], {}), r"trajectories\[0\] .*no segment"),
    ],
)
def test_a_batch_of_something_else_is_refused(batch, said):
    """Too few trajectories, groups that are mixed up, and trajectories without reward or failure are errors that say where."""
    with pytest.raises(AgentLoopOutputError, match=said):
        check_rollout(batch, num_rows=2, n=2)
