"""What goes into a stream of groups and what comes out of it, as data.

Everything here is plain: it can be pickled, compared, and encoded with msgspec as far as prompts and results can.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Generic, TypeVar

import msgspec

from ostinato_rollout.errors import SessionInputError
from ostinato_rollout.failure import Failure

Prompt = TypeVar("Prompt")
Result = TypeVar("Result")


class OnFailure(StrEnum):
    """What becomes of a group with a run that failed, after its reruns."""

    KEEP = "keep"
    """The failure stands in the run's place; `keep_group`, if given, decides about the group."""
    DROP = "drop"
    """The group is dropped at once, its other runs are cancelled, and another prompt may be drawn."""


class Leftover(StrEnum):
    """What becomes of groups that nobody has taken when a stream ends early or is closed."""

    CANCEL = "cancel"
    """They are dropped and counted."""
    HAND_BACK = "hand_back"
    """They stay in `state()`, with the results that they have, for the stream that takes it up."""


class GroupFate(StrEnum):
    """What became of a prompt that was drawn; each has exactly one."""

    KEPT = "kept"
    """Its group was given to the consumer."""
    FILTERED = "filtered"
    """`keep_group` did not want it."""
    FAILED = "failed"
    """A run failed and failed groups are dropped, or `keep_group` failed on it."""
    STALE = "stale"
    """Its oldest version is too far behind."""
    CANCELLED = "cancelled"
    """The stream ended before it, or before somebody took it."""
    HANDED_BACK = "handed_back"
    """It is in the state that the closed stream left."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which groups a stream makes and gives out. The defaults give out every group, as soon as it is finished."""

    queue_size: int | None = 64
    """Finished groups that wait for the consumer before no more prompts are drawn; those under way then still come on top.
    A consumer that asks for more at once gets them. None: no bound."""
    in_order: bool = False
    """Give groups out in the order of their prompts; a group that is finished waits for those before it."""
    max_reruns: int = 0
    """How often a run that failed is done again."""
    on_failure: OnFailure = OnFailure.KEEP
    """What becomes of a group with a run that failed nevertheless."""
    max_dropped_in_row: int = 1000
    """Groups that may be filtered, failed or stale, one after the other, before the stream ends with an error."""
    num_groups: int | None = None
    """End after so many groups. None: when the prompts end."""
    oversample: int = 0
    """With `num_groups`: prompts under way beyond those needed. The first groups to finish count; the rest is left over."""
    leftover: Leftover = Leftover.CANCEL
    """What becomes of the rest, there and when the stream is closed."""
    max_staleness: int | None = None
    """Policy versions that the oldest part of a group may be behind when it is given out; 0: none. None: no bound."""
    groups_per_version: int | None = None
    """With `max_staleness`: groups that the consumer takes before the version moves; one that asks for more waits until it has.
    So many prompts are drawn ahead, times `max_staleness` + 1, that groups taken in the order of their prompts keep the bound."""
    close_timeout_s: float = 300.0
    """Seconds that runs may take to end once they are cancelled."""
    cancel_grace_s: float = 30.0
    """Seconds that a run or verdict past its deadline gets to tidy up when it is cancelled; then it is cancelled again, and after the
    third time left to itself."""

    def __post_init__(self) -> None:
        for name, kind in (("on_failure", OnFailure), ("leftover", Leftover)):
            value = getattr(self, name)
            if value not in list(kind):
                raise SessionInputError(f"{name} must be one of {', '.join(kind)}, got {value!r}; choose one")
            msgspec.structs.force_setattr(self, name, kind(value))
        for name, minimum in _MINIMA.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise SessionInputError(f"{name} must be at least {minimum}, got {value}; leave it out for its default")
        for name in ("close_timeout_s", "cancel_grace_s"):
            if not getattr(self, name) > 0:
                raise SessionInputError(f"{name} must be positive, got {getattr(self, name)}; give seconds")
        if self.oversample and self.num_groups is None:
            raise SessionInputError(
                f"oversample must go with num_groups, got {self.oversample} without; say how many groups are needed"
            )
        if (self.max_staleness is None) != (self.groups_per_version is None):
            raise SessionInputError(
                f"max_staleness and groups_per_version must go together, got {self.max_staleness} and"
                f" {self.groups_per_version}; give both, or none for no bound"
            )


_MINIMA = {
    "queue_size": 1,
    "max_reruns": 0,
    "max_dropped_in_row": 1,
    "num_groups": 1,
    "oversample": 0,
    "max_staleness": 0,
    "groups_per_version": 1,
}


class Run(msgspec.Struct, Generic[Prompt], frozen=True):
    """One thing to do: a prompt for the `number`th time."""

    prompt: Prompt
    index: int
    """The prompt's place among all that were drawn."""
    number: int
    """From 0 to n - 1."""
    attempt: int = 0
    """How often it was done before and failed."""


class Group(msgspec.Struct, Generic[Prompt, Result], frozen=True):
    """A prompt and the results of its n runs."""

    index: int
    """The prompt's place among all that were drawn."""
    prompt: Prompt
    results: list[Result | Failure]
    """By number. A Failure where a run raised."""
    oldest_version: int | None = None
    """Of the policies that took part in it, as far as known."""


class DroppedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group that nobody was given."""

    index: int
    fate: GroupFate
    reason: str
    """In a few words."""
    failure: Failure | None = None
    """What failed, where something did."""


class SavedGroup(msgspec.Struct, Generic[Prompt, Result], frozen=True, kw_only=True):
    """A group that is under way, or finished and not taken."""

    index: int
    prompt: Prompt
    results: dict[int, Result] = {}
    """By number: what there is. Runs that are in neither mapping are still to be done."""
    failures: dict[int, Failure] = {}
    """By number: runs that failed for good."""
    attempts: dict[int, int] = {}
    """By number: how often an unfinished run has failed."""
    oldest_version: int | None = None
    is_kept: bool = False
    """Finished, and wanted by `keep_group`."""


class StreamState(msgspec.Struct, Generic[Prompt, Result], frozen=True, kw_only=True):
    """What a later stream needs to go on. Give it prompts that begin after the first `num_drawn`."""

    num_drawn: int = 0
    """Prompts that were drawn from the source, over all streams that this one went on from."""
    groups: list[SavedGroup[Prompt, Result]] = []
    """Those of them whose group nobody was given, by index."""


class StreamCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream has done. `num_drawn` + `num_resumed` is the sum of `fates`, `num_open` and `num_ready`."""

    num_drawn: int
    """Prompts drawn by this stream."""
    num_resumed: int
    """Groups taken over from a state."""
    num_open: int
    """Groups under way."""
    num_ready: int
    """Groups that wait for the consumer."""
    num_reruns: int
    fates: dict[str, int]
    """By `GroupFate`, every one of them."""
    filtered: dict[str, int]
    """Filtered groups by the reason that `keep_group` gave."""
