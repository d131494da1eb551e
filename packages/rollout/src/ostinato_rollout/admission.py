"""How many conversations are under way at a time: what replicas hold, what conversations take, and who waits.

Invariants: places are given in order of arrival; one whose group holds a place never waits for another, so that no two
wait for each other; what a conversation takes is given back when it leaves. Knows counts, no server and no policy.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ostinato_engines import Capabilities
from ostinato_rollout.config import AdmissionConfig
from ostinato_rollout.conversation import Conversation
from ostinato_rollout.growth import ExpectedGrowth


class ReplicaAccount:
    """What one replica holds, and may hold."""

    __slots__ = ("capacity_tokens", "held_tokens", "max_sessions", "num_sessions", "used_tokens")

    def __init__(self) -> None:
        self.capacity_tokens: int | None = None
        self.max_sessions: int | None = None
        self.held_tokens = 0
        """What its conversations count for: their length, and room to grow."""
        self.used_tokens = 0
        """Their length alone."""
        self.num_sessions = 0

    @property
    def is_limited(self) -> bool:
        """Whether it can be full at all."""
        return self.capacity_tokens is not None or self.max_sessions is not None

    def has_room(self, tokens: int) -> bool:
        """Tell whether a conversation of so many tokens fits; an empty replica takes any."""
        if not self.num_sessions:
            return True
        if self.max_sessions is not None and self.num_sessions >= self.max_sessions:
            return False
        return self.capacity_tokens is None or self.held_tokens + tokens <= self.capacity_tokens


class _Waiter(NamedTuple):
    conversation: Conversation
    placed: asyncio.Future[None]


class Admission:
    """Accounts and queue of one client.

    Args:
        config: Limits.
        place: Gives a conversation that fits its replica; called in order of arrival.
        num_clients: How many clients admit to the same replicas.
    """

    def __init__(self, config: AdmissionConfig, place: Callable[[Conversation], None], *, num_clients: int = 1) -> None:
        self.config = config
        self._num_clients = num_clients
        self.accounts: dict[int, ReplicaAccount] = {}
        """By replica id; replicas in service only."""
        self.is_limited = False
        """Whether anybody can have to wait."""
        self.is_held = False
        """Whether everybody waits, whatever replicas have room for."""
        self.last_admission = time.monotonic()
        """When a place was given last."""
        self._place = place
        self._queue: dict[tuple[str | None, str], list[_Waiter]] = {}  # parties: a group's conversations, or one alone
        self._groups: Counter[str] = Counter()
        self._growth = ExpectedGrowth()

    def queue(self) -> list[str]:
        """Return the conversations that wait, the next one first."""
        return [waiter.conversation.request_id for party in self._queue.values() for waiter in party]

    def add(self, replica: int, capabilities: Capabilities) -> None:
        """Open the account of a replica, or bring its limits up to date."""
        account = self.accounts.setdefault(replica, ReplicaAccount())
        config = self.config
        if config.enable:
            account.capacity_tokens = self._share(config.kv_capacity_tokens or capabilities.kv_capacity_tokens)
            account.max_sessions = self._share(config.max_sessions or capabilities.kv_capacity_sessions)
        self._limits_changed()

    def _share(self, limit: int | None) -> int | None:
        """Return what this client may use of a limit that all clients of a replica share."""
        return None if limit is None else max(1, limit // self._num_clients)

    def remove(self, replica: int) -> None:
        """Close a replica's account; what it held is held by nobody until it moves."""
        del self.accounts[replica]
        self._limits_changed()

    def _limits_changed(self) -> None:
        self.is_limited = any(account.is_limited for account in self.accounts.values())
        self.admit_waiting()

    def _room_to_grow(self, conversation: Conversation) -> int:
        """Return for how many tokens beyond its length a conversation counts."""
        config, max_growth = self.config, conversation.max_growth
        if not self.is_limited:
            return 0
        if config.expected_tokens is not None:
            growth = max(0, config.expected_tokens - conversation.num_tokens)
        else:
            growth = self._growth.rest(max_growth)
            if max_growth is not None:
                growth = min(growth, max(0, max_growth - (conversation.num_tokens - conversation.prompt_tokens)))
        return math.ceil(config.growth_share * growth)

    def held_by_others(self, conversation: Conversation, replicas: Iterable[int]) -> dict[int, int]:
        """Return how long, together, the other conversations on each of these replicas are."""
        held = {replica: self.accounts[replica].used_tokens for replica in replicas}
        if conversation.replica in held:
            held[conversation.replica] -= conversation.num_tokens
        return held

    def with_room(self, conversation: Conversation) -> Sequence[int]:
        """Return the replicas that the conversation may be on: those with room, and where it is."""
        if conversation.replica is None:  # what is expected may have changed while it waited
            conversation.room_to_grow = self._room_to_grow(conversation)
        tokens = conversation.held_tokens
        return [
            replica
            for replica, account in self.accounts.items()
            if replica == conversation.replica or account.has_room(tokens)
        ]

    def must_wait(self, conversation: Conversation) -> bool:
        """Tell whether a new conversation has to queue."""
        if self.is_held:
            return True
        if not self.is_limited or conversation.group in self._groups:
            return False
        return bool(self._queue) or not self.with_room(conversation)

    async def wait(self, conversation: Conversation) -> None:
        """Wait in the queue until the conversation was placed; cancelling leaves the queue, or the place that it just got."""
        waiter = _Waiter(conversation, asyncio.get_running_loop().create_future())
        self._queue.setdefault(_party(conversation), []).append(waiter)
        try:
            await waiter.placed
        except asyncio.CancelledError:
            self._leave_queue(waiter)
            raise

    def _leave_queue(self, waiter: _Waiter) -> None:
        key = _party(waiter.conversation)
        party = self._queue.get(key, [])
        if waiter in party:
            party.remove(waiter)
            if not party:
                del self._queue[key]
            self.admit_waiting()

    def refuse(self, conversation: Conversation, error: Exception) -> None:
        """Let a conversation's wait, if it waits, end with an error."""
        for waiter in self._queue.get(_party(conversation), []):
            if waiter.conversation is conversation:
                if not waiter.placed.done():
                    waiter.placed.set_exception(error)
                self._leave_queue(waiter)
                return

    def hold(self) -> None:
        """Give no places until `proceed`."""
        self.is_held = True

    def proceed(self) -> None:
        """Give places again, those whose group has one already first: they never wait for room."""
        self.is_held = False
        for key in [key for key in self._queue if key[0] in self._groups]:
            self._place_party(key)
        self.admit_waiting()

    def admit_waiting(self) -> None:
        """Place those at the head of the queue that fit."""
        while self._queue and not self.is_held:
            key, party = next(iter(self._queue.items()))
            waiting = [waiter for waiter in party if not waiter.placed.done()]
            if waiting and self.is_limited and not self.with_room(waiting[0].conversation):
                return
            self._place_party(key)

    def _place_party(self, key: tuple[str | None, str]) -> None:
        for waiter in self._queue.pop(key):
            if waiter.placed.done():
                continue
            try:
                self._place(waiter.conversation)
                waiter.placed.set_result(None)
            # What a policy of the user's own raises belongs to the one who waits.
            except Exception as error:
                waiter.placed.set_exception(error)

    def settle(self, conversation: Conversation, replica: int) -> None:
        """Enter a conversation into a replica's account, and take it out of its last one's."""
        if conversation.replica is None:
            conversation.room_to_grow = self._room_to_grow(conversation)
            self.last_admission = time.monotonic()
            if conversation.group is not None:
                self._groups[conversation.group] += 1
        else:
            self._take_out(conversation)
        account = self.accounts[replica]
        account.num_sessions += 1
        account.held_tokens += conversation.held_tokens
        account.used_tokens += conversation.num_tokens
        conversation.replica = replica

    def grow(self, conversation: Conversation, num_tokens: int) -> None:
        """Note how long a conversation is now."""
        held, length = conversation.held_tokens, conversation.num_tokens
        self._growth.added(max(0, num_tokens - length))
        conversation.num_tokens = num_tokens
        conversation.room_to_grow = self._room_to_grow(conversation)
        account = self.accounts.get(conversation.replica)  # pyright: ignore[reportArgumentType]
        if account is not None:
            account.held_tokens += conversation.held_tokens - held
            account.used_tokens += num_tokens - length
        if self._queue and conversation.held_tokens < held:
            self.admit_waiting()

    def leave(self, conversation: Conversation) -> None:
        """Give back what a placed conversation holds, and learn from it."""
        self._take_out(conversation)
        conversation.replica = None
        if conversation.group is not None:
            self._groups[conversation.group] -= 1
            if not self._groups[conversation.group]:
                del self._groups[conversation.group]
        if conversation.num_turns:
            self._growth.ended()
        if self._queue:
            self.admit_waiting()

    def _take_out(self, conversation: Conversation) -> None:
        account = self.accounts.get(conversation.replica)  # pyright: ignore[reportArgumentType]
        if account is not None:
            account.num_sessions -= 1
            account.held_tokens -= conversation.held_tokens
            account.used_tokens -= conversation.num_tokens


def _party(conversation: Conversation) -> tuple[str | None, str]:
    """Return who queues together: a group, or the conversation alone."""
    group = conversation.group
    return (None, conversation.request_id) if group is None else (group, "")
