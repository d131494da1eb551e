"""Micro-batches hold every sequence once, keep to their budget and are balanced."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_trainer.errors import BatchError
from ostinato_trainer.partitions import (
    chunks_by_count,
    chunks_by_padded_tokens,
    chunks_by_tokens,
    chunks_of_owners,
    cost_of,
    even_chunks,
)

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=60)


def padded(lengths, chunk):
    return len(chunk) * max(lengths[place] for place in chunk)


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(1, 30))
def test_even_chunks_differ_by_one_at_most(count, size):
    """Consecutive chunks cover the range with as few pieces as possible, alike in size."""
    chunks = even_chunks(count, size)
    assert [place for chunk in chunks for place in chunk] == list(range(count))
    assert len(chunks) == -(-count // size)
    assert not chunks or max(map(len, chunks)) - min(map(len, chunks)) <= 1


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 20))
def test_chunks_by_count_cover_everything_once(lengths, size):
    """No sequence is lost or doubled and no micro-batch is too large."""
    chunks = chunks_by_count(lengths, size)
    assert sorted(place for chunk in chunks for place in chunk) == list(range(len(lengths)))
    assert max(map(len, chunks)) <= size


@settings(deadline=None)
@given(LENGTHS, st.integers(50, 300))
def test_padded_chunks_keep_the_budget(lengths, budget):
    """Sequences times longest stays within the budget, and no sequence is lost or doubled."""
    chunks = chunks_by_padded_tokens(lengths, budget)
    assert sorted(place for chunk in chunks for place in chunk) == list(range(len(lengths)))
    assert max(padded(lengths, chunk) for chunk in chunks) <= budget


@settings(deadline=None)
@given(LENGTHS, st.integers(50, 300))
def test_unpadded_chunks_keep_the_budget_and_are_few(lengths, budget):
    """Token sums stay within the budget; there are fewer than twice the micro-batches that the sum alone demands, plus one."""
    chunks = chunks_by_tokens(lengths, budget)
    assert sorted(place for chunk in chunks for place in chunk) == list(range(len(lengths)))
    assert max(sum(lengths[place] for place in chunk) for chunk in chunks) <= budget
    assert len(chunks) <= 2 * -(-sum(lengths) // budget) + 1


@settings(deadline=None)
@given(st.lists(st.integers(1, 30_000), min_size=2, max_size=40), st.integers(30_000, 200_000))
def test_costs_are_balanced_within_the_longest(lengths, budget):
    """No micro-batch costs more than another by more than one sequence's cost, where costs could be balanced; or else their tokens are."""
    chunks = chunks_by_tokens(lengths, budget)
    for weight in (cost_of, float):
        totals = [sum(weight(lengths[place]) for place in chunk) for chunk in chunks]
        if max(totals) - min(totals) <= max(map(weight, lengths)) + 1e-6:
            return
    pytest.fail(f"neither costs nor tokens are balanced: {[[lengths[place] for place in chunk] for chunk in chunks]}")


def test_a_long_sequence_gets_less_company():
    """One of 30,000 tokens and thirty of 2,000 in two micro-batches: the long one stands with fewer than half of all tokens."""
    lengths = [30_000, *[2_000] * 30]
    first, second = sorted(chunks_by_tokens(lengths, 60_000), key=lambda chunk: 0 not in chunk)
    assert sum(lengths[place] for place in first) < sum(lengths[place] for place in second)


def test_padded_chunks_are_evened_out():
    """Nine equal sequences with room for eight go five and four, not eight and one."""
    assert sorted(len(chunk) for chunk in chunks_by_padded_tokens([10] * 9, 80)) == [4, 5]


@pytest.mark.parametrize("split", [chunks_by_tokens, chunks_by_padded_tokens])
def test_a_longer_sequence_is_refused_or_goes_alone(split):
    """A sequence above the budget is an error that names the key, unless it may go alone."""
    with pytest.raises(BatchError, match="ppo_max_token_len_per_gpu"):
        split([5, 99, 5], 20)
    assert [1] in split([5, 99, 5], 20, allow_longer=True)


def test_a_size_below_one_is_refused():
    """A micro-batch of no sequence cannot be cut."""
    with pytest.raises(BatchError, match="at least 1, got 0"):
        even_chunks(3, 0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), min_size=1, max_size=40), st.integers(1, 120))
def test_what_belongs_together_stays_together(pairs, budget):
    """Each owner's sequences are in one micro-batch, none is lost, and only an owner that alone is too much exceeds the budget."""
    lengths, owners = [length for length, _ in pairs], [owner for _, owner in pairs]
    chunks = chunks_of_owners(lengths, owners, lambda chosen: sum(chosen) <= budget)
    assert sorted(place for chunk in chunks for place in chunk) == list(range(len(lengths)))
    places = [{owners[place] for place in chunk} for chunk in chunks]
    assert sum(map(len, places)) == len(set(owners))
    for chunk, of in zip(chunks, places, strict=True):
        assert len(of) == 1 or sum(lengths[place] for place in chunk) <= budget
