"""Which conversation a request continues: the sessions of the app and what is kept in them.

A request brings its whole history. Where that begins with all that a conversation has seen, the rest extends it, so that
its tokens stay as they were sampled; any other history begins a conversation, which is a segment of its own. Requests
with a session's name look among the conversations of that session only, those without among the others.

Invariants: a conversation serves one request at a time; what was sampled in a named session is kept until it is taken,
ended or expired; everything else is bounded. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager

import msgspec

from ostinato_rollout.openai_app.errors import ApiError, UnknownSessionError
from ostinato_rollout.openai_app.limits import AppLimits
from ostinato_rollout.openai_app.messages import START, digests
from ostinato_rollout.session import ChatSession

logger = logging.getLogger(__name__)


class Conversation:
    """One ChatSession, and the history that its client has seen of it."""

    def __init__(self, chat: ChatSession, tools: bytes) -> None:
        self.chat = chat
        self.tools = tools
        """The tools that the model was shown, as JSON."""
        self.head = START
        """Digest of the history so far."""
        self.reasoning: dict[int, str | None] = {}
        """What was thought before each answered turn, by its place in the history."""
        self.num_seen = 0
        self.answered = False
        self.busy = False
        self.last_used = time.monotonic()

    def see(self, messages: Sequence[dict]) -> None:
        """Take note of what the client has said."""
        self.head = digests(messages, self.head)[-1]
        self.num_seen += len(messages)
        self.answered = False

    def answer(self, message: dict) -> None:
        """Take note of how it was answered; `message` is what the client was sent."""
        self.see([message])
        self.reasoning[self.num_seen - 1] = message.get("reasoning_content")
        self.answered = True

    def goes_on_in(self, messages: Sequence[dict]) -> bool:
        """Tell whether a history whose digests fit may be continued here: the reasoning, where it came back, is ours, and
        there is something to answer."""
        if self.answered and len(messages) == self.num_seen:
            return False
        returned = ((messages[place].get("reasoning_content"), known) for place, known in self.reasoning.items())
        return all(not given or given == known for given, known in returned)


class _Session:
    """What belongs together under a name; or, without one, all conversations that have none."""

    def __init__(self) -> None:
        self.open: list[Conversation] = []  # can be continued; the longest idle one first
        self.order: list[ChatSession] = []  # all, as they began, for a named session
        self.requests: set[asyncio.Task] = set()
        self.closing: set[asyncio.Task[None]] = set()
        self.last_used = time.monotonic()


class SessionStore:
    """The sessions of an app.

    Args:
        open_chat: Makes a ChatSession of a session (None: of none) that shows the model these tools.
        limits: How much is kept, and how long.
    """

    def __init__(self, open_chat: Callable[[str | None, Sequence[dict]], ChatSession], limits: AppLimits) -> None:
        self._open_chat, self._limits = open_chat, limits
        self._named: dict[str, _Session] = {}
        self._unnamed = _Session()
        self._closing: set[asyncio.Task[None]] = set()
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
    ) -> AsyncIterator[Conversation]:
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
        shown = msgspec.json.encode(list(tools))
        session = self._session(name)
        conversation = None if anew else self._find(session, messages, shown)
        if conversation is None:
            conversation = self._begin(session, name, tools, shown)
        else:
            self.num_continued += 1
        task = asyncio.current_task()
        assert task is not None
        conversation.busy = True
        session.requests.add(task)
        try:
            new = messages[conversation.num_seen :]
            if new:
                await conversation.chat.extend(new)
                conversation.see(new)
            yield conversation
        finally:
            conversation.busy = False
            session.requests.discard(task)
            session.last_used = conversation.last_used = time.monotonic()
            session.open.append(session.open.pop(session.open.index(conversation)))
            await self._tidy(session, conversation, name)

    def check_room(self, name: str | None, num_new: int = 1) -> None:
        """Check that a session may begin so many conversations.

        Raises:
            ApiError: It would hold too many.
        """
        if name is None:
            return
        num_begun = len(self._named[name].order) if name in self._named else 0
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
        return tuple(chat for chat in session.order if _has_sampled(chat))

    async def expire(self) -> None:
        """End what was idle for too long."""
        bound = time.monotonic() - self._limits.idle_timeout_s
        for name in [name for name, each in self._named.items() if each.last_used < bound and not each.requests]:
            chats = await self.take(name)
            self.num_expired += 1
            logger.warning("session %r was idle; what was sampled in %d conversations is gone", name, len(chats))
        idle = [each for each in self._unnamed.open if each.last_used < bound and not each.busy]
        await self._let_go(self._unnamed, idle)

    async def close(self) -> None:
        """End everything; requests that are under way are cancelled."""
        sessions = [*self._named.values(), self._unnamed]
        self._named, self._unnamed = {}, _Session()
        await self._end(sessions)
        while self._closing:
            await asyncio.wait(self._closing)

    def _session(self, name: str | None) -> _Session:
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
            session = _Session()
        return session

    def _find(self, session: _Session, messages: Sequence[dict], shown: bytes) -> Conversation | None:
        """Return the conversation that has seen most of `messages`, all that it has seen being in them."""
        places = {digest: place for place, digest in enumerate(digests(messages), 1)}
        fitting = [
            conversation
            for conversation in session.open
            if not conversation.busy
            and conversation.tools == shown
            and places.get(conversation.head) == conversation.num_seen
            and conversation.goes_on_in(messages)
        ]
        return max(fitting, key=lambda conversation: conversation.num_seen, default=None)

    def _begin(self, session: _Session, name: str | None, tools: Sequence[dict], shown: bytes) -> Conversation:
        self.check_room(name)
        conversation = Conversation(self._open_chat(name, tools), shown)
        session.open.append(conversation)
        if name is not None:
            session.order.append(conversation.chat)
            self._named[name] = session
        self.num_begun += 1
        return conversation

    async def _tidy(self, session: _Session, conversation: Conversation, name: str | None) -> None:
        """Let go of a conversation in which nothing was sampled, and of the longest idle ones where there are too many."""
        is_empty = not _has_sampled(conversation.chat)
        leaving = [conversation] if is_empty else []
        bound = self._limits.max_unnamed if name is None else self._limits.max_open
        idle = [each for each in session.open if not each.busy and each not in leaving]
        leaving += idle[: max(0, len(session.open) - len(leaving) - bound)]
        if name is not None and is_empty:
            session.order.remove(conversation.chat)
            if not session.order and self._named.get(name) is session:
                del self._named[name]
        await self._let_go(session, leaving)

    async def _end(self, sessions: Sequence[_Session]) -> None:
        """Cancel what is under way in sessions and close their conversations."""
        await _all_done([self._to_the_end(self._end_one(session)) for session in sessions])

    async def _end_one(self, session: _Session) -> None:
        for task in session.requests:
            task.cancel()
        await _all_done(session.requests)
        await self._let_go(session, list(session.open))
        await _all_done(session.closing)  # those that were let go of before

    async def _let_go(self, session: _Session, conversations: Sequence[Conversation]) -> None:
        """Close conversations."""
        tasks = []
        for conversation in conversations:
            session.open.remove(conversation)
            task = self._to_the_end(conversation.chat.close())
            session.closing.add(task)
            task.add_done_callback(session.closing.discard)
            tasks.append(task)
        await _all_done(tasks)

    def _to_the_end(self, ending: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Start what must be done to the end even where who waits for it is cancelled."""
        task = asyncio.create_task(ending)
        self._closing.add(task)
        task.add_done_callback(self._closed)
        return task

    def _closed(self, task: asyncio.Task[None]) -> None:
        self._closing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a conversation could not be closed", exc_info=error)


async def _all_done(tasks: Collection[asyncio.Task]) -> None:
    if tasks:
        await asyncio.wait(tasks)


def _has_sampled(chat: ChatSession) -> bool:
    return any(ledger.num_sampled for ledger in chat.segments)
