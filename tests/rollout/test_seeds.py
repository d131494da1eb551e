"""Derived seeds."""

from hypothesis import given
from hypothesis import strategies as st

from ostinato_rollout import derive_seed


@given(st.lists(st.integers(), min_size=1, max_size=5))
def test_a_seed_depends_on_its_parts_alone_and_fits_every_generator(parts):
    """Same parts, same seed, in the range that every engine accepts."""
    assert derive_seed(*parts) == derive_seed(*parts)
    assert 0 <= derive_seed(*parts) < 2**31


def test_order_and_place_count():
    """No two of the seeds of a small grid are equal, and parts do not run into each other."""
    seeds = {derive_seed(a, b, c) for a in range(10) for b in range(10) for c in range(10)}
    assert len(seeds) == 1000
    assert derive_seed(1, 23) != derive_seed(12, 3)
