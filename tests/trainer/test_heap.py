"""Objects that last are passed over while a run trains, and only then."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from ostinato_trainer.heap import lasting_objects


class Link:
    """Holds itself, so that only the garbage collector can free it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_lived_before_stays_until_the_end_and_what_came_later_is_freed() -> None:
    """Cycles of before and of within, each dropped within: the second is collected there, the first once the block has ended."""
    before = Link()
    dropped_before = weakref.ref(before)
    with lasting_objects():
        assert gc.get_freeze_count() > 0
        within = Link()
        dropped_within = weakref.ref(within)
        del before, within
        gc.collect()
        assert dropped_within() is None
        assert dropped_before() is not None
    gc.collect()
    assert dropped_before() is None
    assert gc.get_freeze_count() == 0


def test_an_error_ends_it_too() -> None:
    """What a run has held can be freed after it has failed."""
    with pytest.raises(ValueError, match="broken"), lasting_objects():
        raise ValueError("broken")
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_has_frozen_stays_frozen() -> None:
    """A program that freezes objects itself finds them as it left them."""
    gc.freeze()
    frozen = gc.get_freeze_count()
    with lasting_objects():
        pass
    assert gc.get_freeze_count() == frozen
