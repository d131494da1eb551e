"""Policies by themselves."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato_rollout import (
    BalancedTokens,
    LeastInFlight,
    RandomReplica,
    RoundRobin,
    RoutingConfig,
    RoutingPolicy,
    SessionInputError,
    StickyLeastInFlight,
    make_policy,
)


def test_a_conversation_stays_within_the_margin_and_moves_beyond_it():
    """With a margin of 4, a replica with three more under way than the best is kept, one with four more is left."""
    policy = StickyLeastInFlight(move_margin=4)
    assert policy.choose("a", {0: 3, 1: 0, 2: 1}, 0) == 0
    assert policy.choose("a", {0: 4, 1: 0, 2: 1}, 0) == 1
    assert policy.choose("a", {0: 104, 1: 101, 2: 102}, 0) == 0


def test_without_a_margin_a_conversation_never_moves():
    """None keeps a conversation on a replica that is in service, however busy."""
    assert StickyLeastInFlight(move_margin=None).choose("a", {0: 500, 1: 0}, 0) == 0
    assert StickyLeastInFlight(move_margin=None).choose("a", {0: 500, 1: 0}, None) == 1


def test_a_conversation_begins_where_others_hold_the_least():
    """By tokens, not by how many conversations there are."""
    assert BalancedTokens().choose_by_tokens("a", 10, {0: 500, 1: 90, 2: 200}, None) == 1


def test_a_conversation_moves_when_that_pays():
    """With a ratio of 0.5 and 100 tokens of its own, it leaves others with more than 1.5 times the least and 100 more."""
    policy = BalancedTokens(move_ratio=0.5)
    assert policy.choose_by_tokens("a", 100, {0: 1600, 1: 1000}, 0) == 0
    assert policy.choose_by_tokens("a", 100, {0: 1601, 1: 1000}, 0) == 1
    assert policy.choose_by_tokens("a", 700, {0: 700, 1: 0}, 0) == 0
    assert policy.choose_by_tokens("a", 700, {0: 701, 1: 0}, 0) == 1
    assert BalancedTokens(move_ratio=None).choose_by_tokens("a", 1, {0: 10**6, 1: 0}, 0) == 0


@given(
    lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=12),
    num_replicas=st.integers(1, 4),
    seed=st.integers(0, 3),
)
def test_conversations_that_grow_no_more_come_to_rest(lengths, num_replicas, seed):
    """Asked again and again, conversations move a few times and then stay: nobody goes to and fro."""
    policy, place = BalancedTokens(seed, 0), dict.fromkeys(range(len(lengths)), 0)
    for _ in range(len(lengths) + 2):
        num_moves = 0
        for name, length in enumerate(lengths):
            held = dict.fromkeys(range(num_replicas), 0)
            for other, replica in place.items():
                held[replica] += lengths[other] if other != name else 0
            chosen = policy.choose_by_tokens(str(name), length, held, place[name])
            num_moves += chosen != place[name]
            place[name] = chosen
    assert num_moves == 0


def test_least_in_flight_stays_where_that_costs_nothing():
    """Every turn goes where least is under way, and to the last turn's replica if no other has less."""
    policy = LeastInFlight()
    assert policy.choose("a", {0: 1, 1: 0}, 0) == 1
    assert [policy.choose("a", {0: 0, 1: 0, 2: 0}, 2) for _ in range(20)] == [2] * 20


def test_ties_are_drawn_evenly_and_by_the_seed():
    """Ties go to every replica about as often, in an order that the seed decides."""
    draws = [[StickyLeastInFlight(seed).choose("a", dict.fromkeys(range(4), 0), None)] for seed in range(2)]
    assert draws[0] == [StickyLeastInFlight(0).choose("a", dict.fromkeys(range(4), 0), None)]
    policy = StickyLeastInFlight(3)
    counts = Counter(policy.choose("a", dict.fromkeys(range(4), 0), None) for _ in range(400))
    assert min(counts.values()) > 60


def test_round_robin_takes_one_after_the_other():
    """The next id comes next, also where replicas come and go, and the lowest after the highest."""
    policy = RoundRobin()
    assert [policy.choose("a", {0: 0, 1: 0, 2: 0}, None) for _ in range(4)] == [0, 1, 2, 0]
    assert [policy.choose("a", {0: 0, 2: 0, 5: 0}, None) for _ in range(4)] == [2, 5, 0, 2]


def test_random_choices_repeat_with_their_seed():
    """The same seed draws the same replicas, another one others."""
    in_flight = dict.fromkeys(range(5), 0)

    def draws(seed):
        policy = RandomReplica(seed)
        return [policy.choose("a", in_flight, None) for _ in range(30)]

    assert draws(1) == draws(1) != draws(2)
    assert set(draws(1)) == set(in_flight)


@given(
    name=st.sampled_from(RoutingPolicy),
    in_flight=st.dictionaries(st.integers(0, 20), st.integers(0, 50), min_size=1),
    data=st.data(),
)
def test_every_policy_chooses_one_of_what_it_is_shown(name, in_flight, data):
    """Whatever the counts and the last replica, the choice is a key of the counts, for every policy of a configuration."""
    policy = make_policy(RoutingConfig(policy=name), seed=1)
    for _ in range(3):
        previous = data.draw(st.none() | st.sampled_from(sorted(in_flight)))
        assert policy.choose("a", in_flight, previous) in in_flight


def test_settings_reach_the_policy():
    """The margin and the seed of a configuration are those of the policy, and each name makes its own."""
    assert make_policy(RoutingConfig(move_ratio=2), seed=5) == BalancedTokens(5, 2)
    assert make_policy(RoutingConfig(policy=RoutingPolicy.STICKY, move_margin=7), seed=5) == StickyLeastInFlight(5, 7)
    assert make_policy(RoutingConfig(policy=RoutingPolicy.LEAST_IN_FLIGHT), seed=5) == LeastInFlight(5)
    assert make_policy(RoutingConfig(policy=RoutingPolicy.RANDOM), seed=5) == RandomReplica(5)
    assert make_policy(RoutingConfig(policy=RoutingPolicy.ROUND_ROBIN), seed=5) == RoundRobin()


def test_a_margin_of_nothing_is_refused():
    """A conversation that moved for no difference would never keep its prefix."""
    with pytest.raises(SessionInputError, match="move_margin must be at least 1, got 0; None never moves"):
        StickyLeastInFlight(move_margin=0)
    with pytest.raises(ValueError, match="move_margin must be at least 1, got 0"):
        RoutingConfig(policy=RoutingPolicy.STICKY, move_margin=0)
    with pytest.raises(SessionInputError, match="move_ratio must be at least 0, got -1; None never moves"):
        BalancedTokens(move_ratio=-1)
    with pytest.raises(ValueError, match=r"move_ratio must be at least 0, got -0\.5"):
        RoutingConfig(move_ratio=-0.5)


def test_a_setting_of_another_policy_is_refused():
    """What would be ignored is an error that says for which policy it is."""
    with pytest.raises(ValueError, match="move_margin must be left out with policy balanced, got 4; it is for sticky"):
        RoutingConfig(move_margin=4)
    with pytest.raises(
        ValueError, match="move_ratio must be left out with policy round_robin, got None; it is for bal"
    ):
        RoutingConfig(policy=RoutingPolicy.ROUND_ROBIN, move_ratio=None)
