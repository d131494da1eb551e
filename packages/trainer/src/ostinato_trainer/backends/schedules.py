"""Learning-rate schedules as pure functions of the step number: nothing to save, nothing to resume."""

from __future__ import annotations

import math
from enum import StrEnum

from ostinato_trainer.errors import BackendError


class LrSchedule(StrEnum):
    """`optim.lr_scheduler_type`: what follows the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


def check_schedule(schedule: str, *, warmup_steps: int, total_steps: int | None) -> LrSchedule:
    """The schedule of that name, if these numbers make sense for it.

    Raises:
        BackendError: the name is unknown, the warm-up negative, or a decaying schedule has no end or one inside its
            warm-up.
    """
    try:
        kind = LrSchedule(schedule)
    except ValueError as error:
        known = ", ".join(LrSchedule)
        raise BackendError(f"lr_scheduler_type must be one of {known}, got {schedule!r}; choose one of them") from error
    if warmup_steps < 0:
        raise BackendError(f"lr_warmup_steps must be at least 0, got {warmup_steps}; 0 starts at the full rate")
    if kind is not LrSchedule.CONSTANT and (total_steps is None or total_steps < max(1, warmup_steps)):
        raise BackendError(
            f"total_steps must be at least lr_warmup_steps ({warmup_steps}) and 1 for lr_scheduler_type={kind}, "
            f"got {total_steps}; set trainer.total_training_steps or use constant"
        )
    return kind


def lr_factor(schedule: LrSchedule, step: int, *, warmup_steps: int = 0, total_steps: int | None = None) -> float:
    """Share of the base rate in force at optimizer step `step`, in [0, 1].

    Warm-up rises from `1 / warmup_steps` at step 0 to 1 at step `warmup_steps - 1`, so no step is spent at rate 0.
    The decay then falls from 1 towards 0, which it reaches at step `total_steps`, one past the last.

    Args:
        schedule: Constant, linear or cosine.
        step: Steps taken before this one, at least 0.
        warmup_steps: Length of the warm-up in steps.
        total_steps: Steps of the whole run; needed by the decaying schedules.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule is LrSchedule.CONSTANT or total_steps is None:
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if schedule is LrSchedule.LINEAR:
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))
