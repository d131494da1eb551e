"""Errors and failures as data."""

from __future__ import annotations

import asyncio
import pickle

import msgspec
import pytest

from ostinato_engines import EngineInputError
from ostinato_rollout import (
    BudgetExceededError,
    Failure,
    FailureKind,
    NoReplicaError,
    ReplicaError,
    RequestTimeoutError,
    RolloutError,
    SessionInputError,
    SessionStateError,
    classify,
)
from ostinato_tokenization import TokenizationError
from ostinato_tools import ToolError

LEAVES = [
    (BudgetExceededError("m", limit="max_model_len", needed=3, room=2), ValueError),
    (NoReplicaError("m"), RuntimeError),
    (ReplicaError("m", replica=4), RuntimeError),
    (RequestTimeoutError("m"), TimeoutError),
    (SessionInputError("m"), ValueError),
    (SessionStateError("m"), RuntimeError),
]


@pytest.mark.parametrize(
    ("error", "standard"), LEAVES, ids=lambda value: getattr(value, "__name__", type(value).__name__)
)
def test_errors_are_one_tree_of_standard_errors_that_survive_pickling(error, standard):
    """Each leaf is a RolloutError and a standard error, and keeps its facts through pickle."""
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(error, RolloutError)
    assert isinstance(error, standard)
    assert (type(again), again.args, vars(again)) == (type(error), error.args, vars(error))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimeoutError(), FailureKind.TIMEOUT),
        (RequestTimeoutError("m"), FailureKind.TIMEOUT),
        (ReplicaError("m"), FailureKind.ENGINE),
        (EngineInputError("m"), FailureKind.ENGINE),
        (TokenizationError("m"), FailureKind.TOKENIZATION),
        (ToolError("m"), FailureKind.TOOL),
        (asyncio.CancelledError(), FailureKind.CANCELLED),
        (KeyError("m"), FailureKind.AGENT),
    ],
)
def test_a_failure_counts_as_the_kind_of_its_error(error, kind):
    """The kind follows from the class of the error, and the failure survives the wire."""
    failure = Failure.from_error(error, "here")
    assert classify(error) is kind
    assert (failure.where, failure.kind) == ("here", kind)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(failure), type=Failure) == failure
