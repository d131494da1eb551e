"""What clients, pools, schedulers and sessions are doing at one moment: data for a program, `text()` for people.

Knows numbers and words only; `ostinato_rollout.diagnostics` collects them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

_MAX_LINES = 40


class _Text(Protocol):
    def text(self) -> str: ...


def _lines(head: str, parts: Sequence[_Text]) -> str:
    """Return a head and a line for each part below it; what is too long for people is cut, and says so."""
    lines = [head, *(f"  {part.text()}" for part in parts[:_MAX_LINES])]
    if len(parts) > _MAX_LINES:
        lines.append(f"  and {len(parts) - _MAX_LINES} more")
    return "\n".join(lines)


class ReplicaActivity(msgspec.Struct, frozen=True, kw_only=True):
    """One replica, as a client sees it."""

    replica: int
    """Its id."""
    num_in_flight: int
    """Generations inside of it."""
    num_sessions: int
    """Conversations that have their place there."""
    held_tokens: int
    """Tokens that those count for: their length, and room to grow."""
    capacity_tokens: int | None
    """Tokens that its memory holds, where that is known."""
    max_sessions: int | None
    """Conversations that it may have, where that is bounded."""

    def text(self) -> str:
        """Return it as a line."""
        tokens = "" if self.capacity_tokens is None else f" of {self.capacity_tokens}"
        sessions = "" if self.max_sessions is None else f" of {self.max_sessions}"
        return (
            f"replica {self.replica}: {self.num_in_flight} in flight, {self.num_sessions}{sessions} conversations with"
            f" {self.held_tokens}{tokens} tokens"
        )


class ConversationActivity(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation, as a client sees it."""

    request_id: str
    """Its name."""
    stage: str
    """What is being done for it."""
    since_s: float
    """Seconds since that began."""
    replica: int | None
    """Where its place is."""
    place_in_queue: int
    """1 is the next to get a place; 0: it has one."""
    num_turns: int
    """Turns that it has had."""
    num_tokens: int
    """Its context after the last one."""
    num_aborts: int
    """How often the turn under way was aborted."""
    num_partial: int
    """Tokens that it has nevertheless."""

    def text(self) -> str:
        """Return it as a line."""
        if self.place_in_queue:
            where = f" as number {self.place_in_queue}"
        else:
            where = "" if self.replica is None else f" on replica {self.replica}"
        kept = f", {self.num_partial} tokens kept from {self.num_aborts} aborted attempts" if self.num_aborts else ""
        return (
            f"{self.request_id} {self.stage}{where} for {self.since_s:.1f} s after {self.num_turns} turns,"
            f" {self.num_tokens} tokens{kept}"
        )


class ClientActivity(msgspec.Struct, frozen=True, kw_only=True):
    """One client."""

    replicas: list[ReplicaActivity]
    """In service, by id."""
    conversations: list[ConversationActivity]
    """Under way; what has lasted longest comes first."""

    def text(self) -> str:
        """Return it as lines."""
        waiting = sum(conversation.place_in_queue > 0 for conversation in self.conversations)
        head = f"client: {len(self.conversations)} conversations, {waiting} of them waiting"
        return "\n".join([_lines(head, self.replicas), _lines("  conversations:", self.conversations)])


class OperationActivity(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a pool does on a replica."""

    replica: int
    """Its index in the pool."""
    what: str
    """As in `replica 0 must wake up`."""
    since_s: float
    """Seconds since that began."""

    def text(self) -> str:
        """Return it as a line."""
        return f"replica {self.replica} has to {self.what} for {self.since_s:.1f} s"


class ReplicaLife(msgspec.Struct, frozen=True, kw_only=True):
    """One replica, as its pool sees it."""

    replica: int
    """Its index in the pool."""
    state: str
    """As in `replica 0 is serving`."""
    since_s: float
    """Seconds since that began."""
    cause: str
    """What brought it about; empty: nothing has happened yet."""
    num_restarts: int
    """Restarts so far."""
    next_restart_in_s: float | None
    """Seconds until the next one; None: none is planned."""

    def text(self) -> str:
        """Return it as a line."""
        restarts = f", {self.num_restarts} restarts so far" if self.num_restarts else ""
        planned = "" if self.next_restart_in_s is None else f", the next one in {self.next_restart_in_s:.1f} s"
        cause = f" ({self.cause})" if self.cause else ""
        return f"replica {self.replica} is {self.state} for {self.since_s:.1f} s{restarts}{planned}{cause}"


class PoolActivity(msgspec.Struct, frozen=True, kw_only=True):
    """One pool."""

    in_service: list[int]
    """Replicas, by index."""
    lost: dict[int, str]
    """Those taken out, and why."""
    replicas: list[ReplicaLife] = []
    """All of them."""
    operations: list[OperationActivity]
    """What replicas have not answered yet."""
    last_answer: str
    """Who answered last, and to what; empty: nobody yet."""

    def text(self) -> str:
        """Return it as lines."""
        done = f", last answer: {self.last_answer}" if self.last_answer else ""
        head = _lines(f"pool: replicas {self.in_service} in service{done}", self.replicas)
        return "\n".join([head, *(f"  {operation.text()}" for operation in self.operations[:_MAX_LINES])])


class SessionActivity(msgspec.Struct, frozen=True, kw_only=True):
    """One session."""

    request_id: str
    """Its name."""
    doing: str
    """As in `r7 generates`."""
    since_s: float
    """Seconds since that began."""
    num_messages: int
    """Messages of its history."""
    num_tokens: int
    """Tokens of its current segment."""
    room: int
    """Response tokens left."""

    def text(self) -> str:
        """Return it as a line."""
        return (
            f"session {self.request_id} {self.doing} for {self.since_s:.1f} s, {self.num_messages} messages,"
            f" {self.num_tokens} tokens, room for {self.room}"
        )


class SchedulerActivity(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a scheduler."""

    num_done: int
    """Items that have ended."""
    under_way: dict[int, float]
    """Items that have not, by their place, and for how many seconds they have been running."""
    idle_s: float
    """Seconds since an item ended, or since the run began."""
    num_ready: int = 0
    """Groups that wait to be taken."""
    fates: dict[str, int] = {}
    """What became of the others, counted: `kept`, `filtered`, `failed`, `stale`, `cancelled`."""
    held_by: str = ""
    """What it waits for before it begins another item; empty: for a place."""

    def text(self) -> str:
        """Return it as lines."""
        longest = sorted(self.under_way.items(), key=lambda item: -item[1])[:_MAX_LINES]
        items = ", ".join(f"{place} ({seconds:.0f} s)" for place, seconds in longest)
        ended = "".join(f", {count} {fate}" for fate, count in self.fates.items())
        held = f"; new ones wait for {self.held_by}" if self.held_by else ""
        return (
            f"scheduler: {self.num_done} items done, the last one {self.idle_s:.1f} s ago;"
            f" {len(self.under_way)} under way: {items or 'none'}; {self.num_ready} ready{ended}{held}"
        )


Activity = PoolActivity | ClientActivity | SchedulerActivity | SessionActivity


class Dump(msgspec.Struct, frozen=True, kw_only=True):
    """What everybody was doing at one moment; encodes with msgspec."""

    at: float
    """Seconds since 1970."""
    pools: list[PoolActivity]
    clients: list[ClientActivity]
    schedulers: list[SchedulerActivity]
    sessions: list[SessionActivity]
    """What has lasted longest comes first."""

    def text(self) -> str:
        """Return it for people; long lists are cut, and say so."""
        head = f"at {time.strftime('%H:%M:%S', time.localtime(self.at))}:"
        parts = [part.text() for part in (*self.pools, *self.clients, *self.schedulers)]
        return "\n".join([head, *parts, _lines(f"sessions: {len(self.sessions)}", self.sessions)])
