"""The embedded engine's states, from what has happened to it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato_engines import EngineClosedError, EngineCrashedError, EngineNotReadyError, EngineState, PauseMode
from ostinato_engines.engine_status import EngineStatus

STATUS = st.builds(
    EngineStatus,
    loaded=st.booleans(),
    paused=st.sampled_from([None, *PauseMode]),
    asleep=st.sets(st.sampled_from(["kv_cache", "weights"])),
    stale=st.booleans(),
    closed=st.booleans(),
    failure=st.sampled_from([None, MemoryError("full")]),
)
REFUSALS = {
    EngineState.CLOSED: EngineClosedError,
    EngineState.FAILED: EngineCrashedError,
    EngineState.NEW: EngineNotReadyError,
    EngineState.ASLEEP: EngineNotReadyError,
    EngineState.STALE: EngineNotReadyError,
}


@given(STATUS)
def test_every_state_that_is_not_ready_says_why(status):
    """A request is taken when ready or paused, and refused in every other state with the error and the cure of that state."""
    state, detail = status.now()
    assert (detail == "") == (state is EngineState.READY)
    if state in REFUSALS:
        with pytest.raises(REFUSALS[state], match="server must be"):
            status.require_serving()
    else:
        status.require_serving()
        assert status.may_admit == (state is EngineState.READY)


@given(STATUS)
def test_nothing_is_admitted_where_nothing_is_computed(status):
    """Waiting requests get rows only where rows are computed, and under no pause."""
    assert not status.may_admit or (status.may_step and status.paused is None)
    assert not status.may_step or not (status.closed or status.failure or status.asleep or status.stale)


def test_a_crash_keeps_its_cause():
    """The refusal of a crashed engine carries the crash."""
    cause = MemoryError("full")
    with pytest.raises(EngineCrashedError, match="full") as caught:
        EngineStatus(loaded=True, failure=cause).require_loaded()
    assert caught.value.__cause__ is cause


def test_control_is_possible_while_nothing_is_served():
    """A sleeping, paused or stale engine still takes control operations."""
    EngineStatus(loaded=True, asleep={"kv_cache"}, stale=True, paused=PauseMode.KEEP).require_loaded()
