"""The error tree: picklable, and at home in the standard library's."""

import inspect
import pickle

import pytest

from ostinato_trainer import errors

LEAVES = [
    member
    for _, member in inspect.getmembers(errors, inspect.isclass)
    if issubclass(member, errors.TrainerError) and member is not errors.TrainerError
]


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.__name__)
def test_every_leaf_survives_pickling(leaf: type[Exception]) -> None:
    """An error raised in another process arrives with its class and its message."""
    error = leaf("x must be 1, got 2; write x=1")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is leaf
    assert str(copy) == str(error)


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.__name__)
def test_every_leaf_is_a_standard_error(leaf: type[Exception]) -> None:
    """Whoever catches ValueError, OSError, RuntimeError, LookupError or ImportError catches the trainer's errors of that sort."""
    assert issubclass(leaf, errors.TrainerError)
    assert issubclass(leaf, ValueError | OSError | RuntimeError | LookupError | ImportError)
