"""The nodes `algorithm.filter_groups` and `trainer.watchdog`: see `config`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

__all__ = ["FilterGroupsConfig", "WatchdogConfig"]


class FilterGroupsConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Dynamic sampling: groups whose trajectories are all alike are dropped, and other prompts sampled instead (`algorithm.filter_groups`)."""

    enable: bool = False
    """Drop such groups: their advantages are zero, and they teach nothing."""
    metric: str = "score"
    """What must differ within a group: score, or a value that the reward function gives beside it, such as acc."""
    max_num_gen_batches: Annotated[int, Meta(ge=0)] = 10
    """Batches of prompts that one step may sample before the run ends with an error, for each step that is sampled at that time; 0 sets no
    limit."""


class WatchdogConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is done when nothing happens (`trainer.watchdog`). Trajectories, tools, rewards and engines have deadlines of their own.

    Something happens where a phase begins or ends, with each pass through a model, and while sampling whatever trajectories do.
    """

    warn_after_s: Annotated[float, Meta(gt=0)] | None = 600.0
    """Seconds in which nothing happens before the log says what is waited for, since when, and where each thread is; then again after twice,
    four times as long. null: never."""
    fail_after_s: Annotated[float, Meta(gt=0)] | None = 14400.0
    """Seconds in which nothing happens before the run ends with an error; above the deadlines of trajectories and rewards, so that those
    are dropped before. null: never."""
