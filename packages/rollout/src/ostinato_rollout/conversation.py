"""What the client knows of one conversation: where its place is, how long it is, and what is being done for it.

Invariant: at most one turn is under way. Knows no token ids.
"""

from __future__ import annotations

import asyncio
import time
from enum import StrEnum

from ostinato_rollout.activity import ConversationActivity
from ostinato_rollout.errors import SessionStateError
from ostinato_rollout.patience import GRACE_S, done_within


class Stage(StrEnum):
    """What a conversation is doing, in words that complete `it ...`."""

    WAITING = "waits for a place"
    GENERATING = "generates"
    PAUSED = "was aborted and waits to go on"
    HELD = "waits until replicas go on"
    BETWEEN_TURNS = "is between turns"
    RELEASING = "is being released"


def num_cancellations() -> int:
    """Return how often the running task was told to end; 0: a CancelledError in it is somebody else's."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


class Conversation:
    """One conversation under way.

    Args:
        request_id: Its name.
        group: Conversations of one group belong together and never wait for each other; None: it is alone.
        prompt_tokens: Length of its first prompt.
        max_growth: Tokens that it may add over all its turns; None: unknown.
    """

    __slots__ = (
        "_ended",
        "_num_cancellations",
        "_task",
        "_turn",
        "group",
        "is_counted",
        "is_released",
        "max_growth",
        "num_aborts",
        "num_partial",
        "num_tokens",
        "num_turns",
        "prompt_tokens",
        "replica",
        "request_id",
        "room_to_grow",
        "since",
        "stage",
        "visited",
    )

    def __init__(self, request_id: str, group: str | None, *, prompt_tokens: int, max_growth: int | None) -> None:
        self.request_id, self.group = request_id, group
        self.prompt_tokens, self.max_growth = prompt_tokens, max_growth
        self.num_tokens = prompt_tokens
        """Context after the last turn."""
        self.room_to_grow = 0
        """Tokens beyond these for which it counts in its replica's memory."""
        self.num_turns = 0
        """Turns that have ended with an answer."""
        self.num_aborts = 0
        """How often the turn under way was aborted so far."""
        self.num_partial = 0
        """Tokens that the turn under way has from aborted attempts."""
        self.replica: int | None = None
        """Where its place is; None: it waits for one."""
        self.visited: set[int] = set()
        """Replicas that may keep something of it: where its place was so far."""
        self.is_counted = False
        """Its first turn is counted in flight on `replica` from the choice of the replica on, before it gets there."""
        self.is_released = False
        """Nothing may begin for it any more."""
        self.stage, self.since = Stage.WAITING, time.monotonic()
        self._turn: asyncio.Timeout | None = None
        self._task: asyncio.Task | None = None
        self._ended: asyncio.Future[None] | None = None
        self._num_cancellations = 0

    @property
    def held_tokens(self) -> int:
        """What it counts for in its replica's memory: its length, and room to grow."""
        return self.num_tokens + self.room_to_grow

    def begin(self, deadline: asyncio.Timeout) -> None:
        """Note that a turn is under way until `end`.

        Raises:
            SessionStateError: Another one is, or the conversation is over.
        """
        if self.is_released:
            raise SessionStateError(
                f"generate must come before release, got request {self.request_id!r}, which is being released; use a new id"
            )
        if self._turn is not None or self.replica is None:
            raise SessionStateError(
                f"request_id must have one turn under way at a time, got a second for {self.request_id!r};"
                " await the first, or use another id"
            )
        self._turn, self._task, self._num_cancellations = deadline, asyncio.current_task(), num_cancellations()
        self.num_aborts = self.num_partial = 0
        self.stage, self.since = Stage.GENERATING, time.monotonic()

    def end(self) -> None:
        """Note that the turn is over, however it went."""
        self._turn = self._task = None
        if self._ended is not None:
            self._ended.set_result(None)
            self._ended = None
        self.stage, self.since = Stage.BETWEEN_TURNS, time.monotonic()

    def enter(self, stage: Stage) -> None:
        """Note what is being done from now on."""
        self.stage, self.since = stage, time.monotonic()

    def released(self) -> SessionStateError:
        """Build the error of whoever waits for something of a conversation that was released meanwhile."""
        return SessionStateError(
            f"release must follow the last turn, got a release of request {self.request_id!r} while it {self.stage};"
            " await its turn first"
        )

    def check_goes_on(self) -> None:
        """Raise unless the turn may go on after a server's answer: servers may make anything of a cancellation.

        Raises:
            CancelledError: The task was cancelled since the turn began, or its deadline passed.
            SessionStateError: The conversation was released.
        """
        if num_cancellations() > self._num_cancellations:
            raise asyncio.CancelledError
        if self.is_released:
            raise self.released()

    def activity(self, place_in_queue: int) -> ConversationActivity:
        """Return what is being done for it now."""
        return ConversationActivity(
            request_id=self.request_id,
            stage=self.stage.value,
            since_s=time.monotonic() - self.since,
            replica=self.replica,
            place_in_queue=place_in_queue,
            num_turns=self.num_turns,
            num_tokens=self.num_tokens,
            num_aborts=self.num_aborts,
            num_partial=self.num_partial,
        )

    @property
    def is_under_way(self) -> bool:
        """Whether it has a turn that has not ended."""
        return self._turn is not None

    async def interrupt(self) -> None:
        """End the turn under way, and wait until nothing of it is left."""
        assert self._turn is not None
        loop = asyncio.get_running_loop()
        if self._ended is None:
            self._ended = loop.create_future()
        ended = self._ended
        if self._task is not None and self._task.cancelling() > self._num_cancellations:
            # Told again, a server would break off what it does at the end of a request; one that makes nothing of it is told again later.
            await done_within(ended, GRACE_S)
        if self._turn is not None and not self._turn.expired():
            self._turn.reschedule(loop.time())
        await asyncio.shield(ended)
