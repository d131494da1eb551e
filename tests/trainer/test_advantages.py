"""Group advantages against five lines of float64, and the rules for groups that have no baseline or no spread."""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_trainer.advantages import (
    AdvantageOptions,
    advantage_estimator,
    grpo,
    register_advantage_estimator,
    rloo,
    with_advantages,
)
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import AlgorithmError, BatchError
from ostinato_trainer.segments import Segment


def of_group(estimator, rewards, **options):
    return estimator(torch.tensor(rewards), torch.zeros(len(rewards), dtype=torch.int64), **options).tolist()


GROUPS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([-1.0, 0.0, 0.2, 0.25, 1.0, 3.5])), min_size=1, max_size=20
)


def by_group(pairs):
    groups = {}
    for group, reward in pairs:
        groups.setdefault(group, []).append(reward)
    return groups


@settings(deadline=None)
@given(GROUPS, st.booleans())
def test_grpo_is_its_formula(pairs, norm_by_std):
    """(r - mean) / (sample deviation + 1e-6), or without the division; a group of one has mean 0 and deviation 1."""
    groups = by_group(pairs)
    got = grpo(
        torch.tensor([reward for _, reward in pairs]),
        torch.tensor([group for group, _ in pairs]),
        norm_by_std=norm_by_std,
    )
    for (group, reward), advantage in zip(pairs, got.tolist(), strict=True):
        values = groups[group]
        mean = statistics.fmean(values) if len(values) > 1 else 0.0
        deviation = statistics.stdev(values) if len(values) > 1 else 1.0
        expected = (reward - mean) / (deviation + 1e-6) if norm_by_std else reward - mean
        assert advantage == pytest.approx(expected, abs=1e-6 if norm_by_std else 1e-7)


@settings(deadline=None)
@given(GROUPS)
def test_rloo_is_its_formula(pairs):
    """The reward minus the mean of the others; alone, the reward."""
    groups = by_group(pairs)
    got = rloo(torch.tensor([reward for _, reward in pairs]), torch.tensor([group for group, _ in pairs]))
    for (group, reward), advantage in zip(pairs, got.tolist(), strict=True):
        others = groups[group].copy()
        others.remove(reward)
        assert advantage == pytest.approx(reward - (statistics.fmean(others) if others else 0.0), abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "rewards", [[1.0] * 4, [0.81] * 5, [0.95] * 7, [0.1] * 3, [-0.7] * 6, [1e6 / 3] * 5, [0.0] * 8]
)
def test_equal_rewards_give_exactly_zero(rewards, dtype):
    """No rounding residue is divided by a deviation of nothing."""
    tensor, groups = torch.tensor(rewards, dtype=dtype), torch.zeros(len(rewards), dtype=torch.int64)
    for got in (grpo(tensor, groups), grpo(tensor, groups, norm_by_std=False), rloo(tensor, groups)):
        assert got.tolist() == [0.0] * len(rewards)


def test_nearly_equal_rewards_count_as_equal():
    """Rewards that differ by one rounding in float32 are one reward, not a signal of deviation one."""
    rewards = torch.full((6,), 0.81)
    rewards[2] = torch.nextafter(rewards[2], torch.tensor(1.0))
    assert grpo(rewards, torch.zeros(6, dtype=torch.int64)).tolist() == [0.0] * 6


def test_the_known_values():
    """[0, 1] gives +-0.7071 with and +-0.5 without the deviation; one 0 among seven 0.95 gives -0.95 leaving one out."""
    assert of_group(grpo, [0.0, 1.0]) == pytest.approx([-0.70710, 0.70710], abs=1e-5)
    assert of_group(grpo, [0.0, 1.0], norm_by_std=False) == [-0.5, 0.5]
    assert of_group(rloo, [0.0] + [0.95] * 7) == pytest.approx([-0.95] + [0.95 - 6 * 0.95 / 7] * 7, abs=1e-7)


def segment(trajectory, reward, *, group="g", mask=(1, 1)):
    return Segment([1], [2] * len(mask), list(mask), None, group, trajectory, reward)


def test_a_trajectory_counts_once_and_all_its_segments_share_its_advantage():
    """Three segments of one trajectory do not weigh three times in the mean, and each trained token gets the same number."""
    batch = Batch.from_segments(
        [segment("a", 1.0, mask=(1, 0, 1)), segment("a", 1.0), segment("a", 1.0), segment("b", 0.0)]
    )
    advantages = with_advantages(batch, "grpo", AdvantageOptions(norm_by_std=False)).advantages
    assert advantages is not None
    assert advantages.tolist() == [0, 0.5, 0, 0.5, 0, 0.5, 0.5, 0, 0.5, 0.5, 0, -0.5, -0.5]


def test_a_trajectory_without_a_trained_token_moves_nobody():
    """An empty or fully masked response has advantage 0 and does not enter its group's baseline."""
    with_dead = Batch.from_segments(
        [segment("a", 1.0), segment("b", 0.0), segment("c", 5.0, mask=(0, 0)), segment("d", 5.0, mask=())]
    )
    without = Batch.from_segments([segment("a", 1.0), segment("b", 0.0)])
    for name in ("grpo", "rloo"):
        got, expected = with_advantages(with_dead, name).advantages, with_advantages(without, name).advantages
        assert got is not None
        assert expected is not None
        assert torch.equal(got[: without.num_tokens], expected)
        assert not got[without.num_tokens :].any()


def test_a_batch_of_which_nothing_is_trained_has_no_advantage():
    """All rows masked: zeros, not an error and not NaN."""
    advantages = with_advantages(Batch.from_segments([segment("a", 1.0, mask=(0,))]), "grpo").advantages
    assert advantages is not None
    assert advantages.tolist() == [0.0, 0.0]


def test_an_unknown_estimator_lists_the_known():
    """A misspelled name is answered with the names that exist."""
    with pytest.raises(AlgorithmError, match=r"grpo, .*rloo, got 'gpro'"):
        advantage_estimator("gpro")


def test_an_own_estimator_is_registered_checked_and_masked():
    """What a user registers is found by name; a name is given once; what it returns outside the mask is dropped."""
    register_advantage_estimator("ones_for_test")(lambda batch, options: torch.full((batch.num_tokens,), 1.0))
    batch = Batch.from_segments([segment("a", 1.0, mask=(1, 0))])
    advantages = with_advantages(batch, "ones_for_test").advantages
    assert advantages is not None
    assert advantages.tolist() == [0.0, 1.0, 0.0]
    with pytest.raises(AlgorithmError, match="must be unique"):
        register_advantage_estimator("ones_for_test")(lambda batch, options: batch.rewards)
    register_advantage_estimator("short_for_test")(lambda batch, options: batch.rewards)
    with pytest.raises(BatchError, match="one finite number a token"):
        with_advantages(batch, "short_for_test")


def test_bad_rewards_are_refused():
    """A reward that is not finite, or vectors of two lengths, are errors."""
    with pytest.raises(BatchError, match="rewards must be finite, got nan"):
        grpo(torch.tensor([0.0, float("nan")]), torch.tensor([0, 0]))
    with pytest.raises(BatchError, match="vectors of one length"):
        rloo(torch.tensor([0.0, 1.0]), torch.tensor([0]))
