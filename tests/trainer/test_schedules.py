"""Learning rates by step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_trainer.backends.schedules import LrSchedule, check_schedule, lr_factor
from ostinato_trainer.errors import BackendError


@settings(deadline=None)
@given(st.sampled_from(list(LrSchedule)), st.integers(0, 20), st.integers(0, 100), st.integers(0, 200))
def test_factors_stay_within_bounds(schedule, warmup, extra, step):
    """Never negative, never above 1, never 0 during warm-up."""
    factor = lr_factor(schedule, step, warmup_steps=warmup, total_steps=warmup + extra + 1)
    assert 0.0 <= factor <= 1.0
    assert step >= warmup or factor > 0.0


def test_warmup_rises_to_the_full_rate():
    """Four steps of warm-up give a quarter, a half, three quarters and all."""
    factors = [lr_factor(LrSchedule.CONSTANT, step, warmup_steps=4) for step in range(6)]
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_decays_start_at_one_and_end_at_zero():
    """Linear and cosine fall from 1 right after warm-up to 0 one past the last step, by a half in the middle, and stay there."""
    for schedule in (LrSchedule.LINEAR, LrSchedule.COSINE):
        factors = [lr_factor(schedule, step, warmup_steps=2, total_steps=12) for step in (2, 7, 11, 12, 99)]
        assert factors[0] == 1.0
        assert factors[1] == pytest.approx(0.5)
        assert factors[2] > 0
        assert factors[3:] == pytest.approx([0.0, 0.0])


@pytest.mark.parametrize(
    ("name", "warmup", "total", "message"),
    [
        ("polynomial", 0, 10, "constant, linear, cosine, got 'polynomial'"),
        ("constant", -1, None, "lr_warmup_steps must be at least 0"),
        ("linear", 0, None, "total_steps must be at least .* got None"),
        ("cosine", 20, 10, "total_steps must be at least lr_warmup_steps"),
    ],
)
def test_impossible_schedules_are_refused(name, warmup, total, message):
    """An unknown name, a negative warm-up, or a decay without an end."""
    with pytest.raises(BackendError, match=message):
        check_schedule(name, warmup_steps=warmup, total_steps=total)
