"""What conversations are expected to add."""

from __future__ import annotations

import random

import pytest

from ostinato_rollout.growth import ExpectedGrowth


def test_half_of_what_may_be_added_is_expected_until_conversations_end():
    """Nothing known: half of the bound, or nothing where there is none; what is added without an end makes it more."""
    growth = ExpectedGrowth()
    assert (growth.rest(4000), growth.rest(None)) == (2000, 0)
    growth.added(3200)
    assert (growth.rest(4000), growth.rest(None)) == (2100, 0)
    growth.ended()
    assert growth.rest(None) == 3200


def test_the_mean_is_learned_and_followed():
    """After thousands of ends the bound is all but forgotten, and so are they when conversations become longer."""
    growth = ExpectedGrowth()
    for mean in (1000, 5000):
        for _ in range(10_000):
            growth.added(mean)
            growth.ended()
        assert growth.rest(8000) == pytest.approx(mean, rel=0.15)
        assert growth.rest(None) == pytest.approx(mean, rel=0.01)


def test_those_under_way_count_though_they_have_not_ended():
    """Of conversations that began together and grow alike, an average over those that have ended first would be far below
    what the others still add, which is expected within a fifth."""
    draw = random.Random(7)
    lengths = sorted(int(draw.expovariate(1 / 8000)) for _ in range(4000))
    growth, step, num_under_way = ExpectedGrowth(), 50, len(lengths)
    for at in range(step, 4000, step):
        growth.added(step * num_under_way)
        while lengths[len(lengths) - num_under_way] <= at:
            growth.ended()
            num_under_way -= 1
    ended, rest = lengths[: len(lengths) - num_under_way], lengths[len(lengths) - num_under_way :]
    truth = sum(length - at for length in rest) / len(rest)
    assert sum(ended) / len(ended) < truth / 4
    assert growth.rest(None) == pytest.approx(truth, rel=0.2)
