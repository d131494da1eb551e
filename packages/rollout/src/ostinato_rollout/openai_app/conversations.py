"""Which conversation a request continues: the sessions of the app and what is kept in them.

Requests with a session's name look among the conversations of that session only, those without among the others; how one
is found there is told in `ostinato_rollout.histories`.

Invariants: what was sampled in a named session is kept until it is taken, ended or expired; everything else is bounded.
Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from ostinato_rollout.histories import TrackedChat, TrackedChats, all_done, has_sampled, to_the_end
from ostinato_rollout.openai_app.errors import ApiError, UnknownSessionError
from ostinato_rollout.openai_app.limits import AppLimits
from ostinato_rollout.session import ChatSession

logger = logging.getLogger(__name__)


class SessionStore:
    """The sessions of an app.

    Args:
        open_chat: Makes a ChatSession of a session (None: of none) that shows the model these tools.
        limits: How much is kept, and how long.
    """

    def __init__(self, open_chat: Callable[[str | None, Sequence[dict]], ChatSession], limits: AppLimits) -> None:
        self._open_chat, self._limits = open_chat, limits
        self._named: dict[str, TrackedChats] = {}
        self._unnamed = self._new_session(None)
        self._ending: set[asyncio.Task[None]] = set()
        self.num_expired = 0
        """Named sessions that ended because nobody used them."""
        self.num_begun = 0
        """Conversations that were begun."""
        self.num_continued = 0
        """Requests that continued one."""

    def __contains__(self, name: str) -> bool:
        return name in self._named

    def __len__(self) -> int:
        return len(self._named)

    @property
    def num_open(self) -> int:
        """Conversations that can be continued or are being answered."""
        return sum(len(session.open) for session in (*self._named.values(), self._unnamed))

    @property
    def num_busy(self) -> int:
        """Conversations that are being answered; returns to zero."""
        sessions = (*self._named.values(), self._unnamed)
        return sum(conversation.busy for session in sessions for conversation in session.open)

    @asynccontextmanager
    async def conversation(
        self, name: str | None, messages: Sequence[dict], tools: Sequence[dict], *, anew: bool = False
    ) -> AsyncIterator[TrackedChat]:
        """Hold the conversation that `messages` continue, extended by what is new in them.

        Args:
            name: The session; None for none.
            messages: The whole history, in plain form.
            tools: What the model is shown.
            anew: Begin a conversation even where one could be continued.

        Raises:
            ApiError: 503 where there are too many sessions, 400 where one holds too many conversations.
            RolloutError: What `ChatSession.extend` raises.
        """
        session = self._session(name)
        conversation = None if anew else session.find(messages, tools)
        if conversation is None:
            conversation = self._begin(session, name, tools)
        else:
            self.num_continued += 1
        try:
            async with session.hold(conversation, messages):
                yield conversation
        finally:
            if name is not None and not session.begun and self._named.get(name) is session:
                del self._named[name]

    def check_room(self, name: str | None, num_new: int = 1) -> None:
        """Check that a session may begin so many conversations.

        Raises:
            ApiError: It would hold too many.
        """
        if name is None:
            return
        num_begun = len(self._named[name].begun) if name in self._named else 0
        if num_begun + num_new > self._limits.max_segments:
            raise ApiError(
                f"a session must hold at most {self._limits.max_segments} conversations, got {num_new} more beside the"
                f" {num_begun} of {name!r}; continue one of them, or use another session",
                code="too_many_segments",
            )

    async def take(self, name: str) -> tuple[ChatSession, ...]:
        """End a session and return its conversations in which something was sampled, closed, in the order in which they
        began; their `segments` hold what was sampled. Requests that are under way are cancelled.

        Raises:
            UnknownSessionError: There is none of this name.
        """
        session = self._named.pop(name, None)
        if session is None:
            raise UnknownSessionError(
                f"session must be known, got {name!r}; nothing was sampled in it, it has ended, or was idle for"
                f" {self._limits.idle_timeout_s:g} s"
            )
        await self._end([session])
        return tuple(chat for chat in session.begun if has_sampled(chat))

    async def expire(self) -> None:
        """End what was idle for too long."""
        bound = time.monotonic() - self._limits.idle_timeout_s
        for name in [name for name, each in self._named.items() if each.last_used < bound and not each.requests]:
            chats = await self.take(name)
            self.num_expired += 1
            logger.warning("session %r was idle; what was sampled in %d conversations is gone", name, len(chats))
        idle = [each for each in self._unnamed.open if each.last_used < bound and not each.busy]
        await self._unnamed.let_go(idle)

    async def close(self) -> None:
        """End everything; requests that are under way are cancelled."""
        sessions = [*self._named.values(), self._unnamed]
        self._named, self._unnamed = {}, self._new_session(None)
        await self._end(sessions)
        while self._ending:
            await asyncio.wait(self._ending)

    def _session(self, name: str | None) -> TrackedChats:
        if name is None:
            return self._unnamed
        session = self._named.get(name)
        if session is None:
            if len(self._named) >= self._limits.max_sessions:
                raise ApiError(
                    f"sessions must be at most {self._limits.max_sessions}, got one more; DELETE those that are over",
                    status=503,
                    code="too_many_sessions",
                )
            session = self._new_session(name)
        return session

    def _new_session(self, name: str | None) -> TrackedChats:
        return TrackedChats(
            functools.partial(self._open_chat, name),
            max_open=self._limits.max_unnamed if name is None else self._limits.max_open,
            remember=name is not None,
        )

    def _begin(self, session: TrackedChats, name: str | None, tools: Sequence[dict]) -> TrackedChat:
        self.check_room(name)
        conversation = session.begin(tools)
        if name is not None:
            self._named[name] = session
        self.num_begun += 1
        return conversation

    async def _end(self, sessions: Sequence[TrackedChats]) -> None:
        """End sessions, to the end even where the caller is cancelled."""
        await all_done([to_the_end(session.end(), self._ending) for session in sessions])
