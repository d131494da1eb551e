"""Advantages token by token, against plain loops in float64: tool tokens are no steps, segments are one chain."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_trainer.algorithms.advantages_token import (
    chain_order,
    discounted_sums,
    gae,
    outcome_rewards,
    token_rewards_of,
    whiten,
)
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import BatchError
from ostinato_trainer.segments import Segment

CHAINS = st.lists(st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=9), max_size=5)


def segment(trajectory, mask, *, reward=1.0):
    return Segment([1], [2] * len(mask), list(mask), None, "g", trajectory, reward)


def flat(chains):
    rewards = torch.tensor([reward for chain in chains for reward, _ in chain], dtype=torch.float64)
    values = torch.tensor([value for chain in chains for _, value in chain], dtype=torch.float64)
    trajectory = torch.tensor([number for number, chain in enumerate(chains) for _ in chain], dtype=torch.int64)
    return rewards, values, trajectory


@settings(deadline=None)
@given(CHAINS, st.sampled_from([0.0, 0.5, 0.95, 1.0]), st.sampled_from([0.0, 0.9, 1.0]))
def test_gae_is_its_recursion(chains, gamma, lam):
    """delta + gamma lam A backwards over every chain, the critic's returns being A + V; nothing crosses from chain to chain."""
    expected, returns = [], []
    for chain in chains:
        following, running, backwards = 0.0, 0.0, []
        for reward, value in reversed(chain):
            running = reward + gamma * following - value + gamma * lam * running
            following = value
            backwards.append(running)
        expected += backwards[::-1]
        returns += [advantage + value for advantage, (_, value) in zip(backwards[::-1], chain, strict=True)]
    advantages, got_returns = gae(*flat(chains), gamma=gamma, lam=lam)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-12)
    assert got_returns.tolist() == pytest.approx(returns, abs=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.999, 1.0])
def test_discounted_sums_hold_over_thousands_of_tokens(decay):
    """Doubling gives what the loop backwards gives, for chains of 1 to 3000 tokens side by side."""
    lengths = [1, 2, 3, 64, 65, 3000, 1000]
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    trajectory = torch.repeat_interleave(torch.tensor([5, 0, 9, 2, 1, 7, 3]), torch.tensor(lengths))
    expected, running = [], 0.0
    for place in reversed(range(len(values))):
        ends = place + 1 == len(values) or trajectory[place + 1] != trajectory[place]
        running = float(values[place]) + (0.0 if ends else decay * running)
        expected.append(running)
    assert discounted_sums(values, trajectory, decay).tolist() == pytest.approx(expected[::-1], abs=1e-11)


def test_with_gamma_and_lam_one_it_is_the_return_minus_the_value():
    """A trajectory's reward stands on its last token and reaches all of them undiminished."""
    advantages, returns = gae(*flat([[(0.0, 0.5), (0.0, -1.0), (2.0, 0.25)]]), gamma=1.0, lam=1.0)
    assert advantages.tolist() == [1.5, 3.0, 1.75]
    assert returns.tolist() == [2.0, 2.0, 2.0]


def test_the_reward_stands_on_the_last_trained_token():
    """Also where the trajectory ends in tool tokens, and where its last segment has no trained token at all."""
    batch = Batch.from_segments(
        [
            segment("a", (1, 0, 1, 0, 0), reward=3.0),
            segment("b", (1, 1), reward=-1.0),
            segment("b", (0, 1, 0), reward=-1.0),
            segment("b", (0, 0), reward=-1.0),
            segment("c", (0, 0), reward=9.0),
        ]
    )
    rewards = token_rewards_of(batch)
    assert [(place, rewards[place].item()) for place in rewards.nonzero().squeeze(1).tolist()] == [(3, 3.0), (11, -1.0)]
    assert outcome_rewards(batch).tolist() == [3.0, -1.0, 9.0]


def test_a_chain_goes_through_all_segments_in_their_order():
    """Segments of one trajectory follow each other even where another's stand between them."""
    batch = Batch.from_segments([segment("a", (1, 0, 1)), segment("b", (1,)), segment("a", (0, 1))])
    assert chain_order(batch).tolist() == [1, 3, 8, 5]


def test_token_rewards_take_the_place_of_the_outcome():
    """Where they are given, an outcome is their sum; they must be finite."""
    batch = Batch.from_segments([segment("a", (1, 0, 1)), segment("b", (1,))])
    rewards = torch.tensor([0, 0.5, 0, 0.25, 0, -1.0], dtype=torch.float64)
    assert outcome_rewards(batch.with_columns(token_rewards=rewards)).tolist() == [0.75, -1.0]
    with pytest.raises(BatchError, match="token_rewards must be finite, got nan"):
        outcome_rewards(batch.with_columns(token_rewards=torch.tensor([0, math.nan, 0, 0, 0, 0])))


def test_a_reward_on_a_tool_token_counts_for_the_token_before():
    """In the middle, at the end, and in the prompt of the next segment; none is lost, and nothing without a trained token pays anybody."""
    batch = Batch.from_segments(
        [segment("a", (1, 0, 1, 0)), segment("dead", (0,)), segment("b", (1, 0)), segment("a", (0, 1, 0))]
    )
    rewards = torch.tensor([0, 1, 2, 4, 8, 0, 64, 0, 0.5, 0.25, 16, 32, 128, 256], dtype=torch.float64)
    batch = batch.with_columns(token_rewards=rewards)
    assert token_rewards_of(batch).tolist() == [0, 3, 0, 60, 0, 0, 0, 0, 0.75, 0, 0, 0, 384, 0]
    assert outcome_rewards(batch).tolist() == [447.0, 0.0, 0.75]


@pytest.mark.parametrize("place", [0, 1, 4])
def test_a_reward_that_nothing_earned_is_refused(place):
    """Before the first trained token of its trajectory there is nobody to pay, whatever stands before it in the batch."""
    batch = Batch.from_segments([segment("a", (0, 1, 0)), segment("b", (1,))])
    rewards = torch.zeros(6).index_fill(0, torch.tensor(place), 4.0)
    name = "b" if place == 4 else "a"
    with pytest.raises(
        BatchError, match=rf"trajectory '{name}': token_rewards must be 0 before the first trained token, got 4.0"
    ):
        token_rewards_of(batch.with_columns(token_rewards=rewards))


@settings(deadline=None)
@given(st.lists(st.floats(-100, 100), max_size=12))
def test_whitening_is_its_formula(values):
    """Mean and sample variance over all; equal or lone numbers become exactly 0."""
    got = whiten(torch.tensor(values, dtype=torch.float64)).tolist()
    if not values or max(values) - min(values) <= 5e-7 * max(abs(max(values)), abs(min(values))):
        assert got == [0.0] * len(values)
        return
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    assert got == pytest.approx([(value - mean) / math.sqrt(variance + 1e-8) for value in values], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("values", [[], [3.0], [0.95] * 7, [1e6 / 3] * 5])
def test_whitening_without_spread_is_zero(values):
    """No token, one token, or tokens that differ by rounding only: nothing is divided by a variance of nothing."""
    assert whiten(torch.tensor(values, dtype=torch.float64)).tolist() == [0.0] * len(values)
