"""Which conversation a history continues: conversations whose client brings the whole history each time.

Where a history begins with all that a conversation has seen, the rest extends it, so that its tokens stay as they were
sampled; any other history begins a conversation, which is a segment of its own.

Invariants: two histories have the same digest if, and but for collisions of the hash only if, they say the same, however
that is written; a conversation serves one request at a time; what was sampled is kept where that was asked for. Knows no
HTTP and no agent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import Any

import msgspec

from ostinato_rollout.errors import SessionInputError
from ostinato_rollout.session import ChatSession

logger = logging.getLogger(__name__)

START = b""
"""The digest of no messages."""


def digests(messages: Sequence[dict], start: bytes = START) -> list[bytes]:
    """Return for each message the digest of the history that ends with it, `start` being that of what came before.

    Reasoning is not part of it: many clients do not send it back.

    Args:
        messages: In plain form: role, content (text, or empty), and name, tool_call_id and tool_calls where there are any.
        start: Where the chain begins.

    Raises:
        SessionInputError: One holds half of a surrogate pair, which is no text.
    """
    found = []
    digest = start
    for index, message in enumerate(messages):
        said = (
            message["role"],
            message["content"] or "",
            message.get("name"),
            message.get("tool_call_id"),
            [
                (call["id"], call["function"]["name"], _canonical(call["function"]["arguments"]))
                for call in message.get("tool_calls", ())
            ],
        )
        try:
            digest = blake2b(digest + msgspec.json.encode(said), digest_size=20).digest()
        except UnicodeEncodeError as error:
            raise SessionInputError(
                f"messages[{index}] must be valid Unicode, got half of a surrogate pair ({error}); replace it"
            ) from error
        found.append(digest)
    return found


def _canonical(arguments: str) -> Any:
    """Return what the arguments say, without how they are written; as they are where they are no JSON."""
    try:
        value = msgspec.json.decode(arguments)
        return ["json", msgspec.json.encode(value, order="deterministic").decode()]
    except (msgspec.MsgspecError, RecursionError):
        return ["text", arguments]


class TrackedChat:
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


class TrackedChats:
    """Conversations that belong together, as those of one client's session do.

    Args:
        open_chat: Makes a ChatSession that shows the model these tools.
        max_open: Conversations that can still be continued; beyond it the longest idle one is closed.
        remember: Keep all conversations in which something was sampled, closed ones too.
    """

    def __init__(
        self, open_chat: Callable[[Sequence[dict]], ChatSession], *, max_open: int, remember: bool = True
    ) -> None:
        self._open_chat, self._max_open, self._remember = open_chat, max_open, remember
        self.open: list[TrackedChat] = []
        """What can be continued or is being answered; the longest idle one first."""
        self.begun: list[ChatSession] = []
        """All that are remembered, as they began."""
        self.requests: dict[asyncio.Task, None] = {}
        """Who holds a conversation now, the first one first."""
        self.last_used = time.monotonic()
        self._closing: set[asyncio.Task[None]] = set()

    def find(self, messages: Sequence[dict], tools: Sequence[dict]) -> TrackedChat | None:
        """Return the idle conversation that has seen most of `messages`, all that it has seen being in them."""
        shown = _shown(tools)
        places = {digest: place for place, digest in enumerate(digests(messages), 1)}
        fitting = [
            tracked
            for tracked in self.open
            if not tracked.busy
            and tracked.tools == shown
            and places.get(tracked.head) == tracked.num_seen
            and tracked.goes_on_in(messages)
        ]
        return max(fitting, key=lambda tracked: tracked.num_seen, default=None)

    def begin(self, tools: Sequence[dict]) -> TrackedChat:
        """Begin a conversation; `hold` it at once."""
        tracked = TrackedChat(self._open_chat(tools), _shown(tools))
        self.open.append(tracked)
        if self._remember:
            self.begun.append(tracked.chat)
        return tracked

    @asynccontextmanager
    async def hold(self, tracked: TrackedChat, messages: Sequence[dict]) -> AsyncIterator[None]:
        """Hold an idle conversation, extended by what is new in `messages`, the whole history in plain form. Afterwards
        one in which nothing was sampled is forgotten, and the longest idle ones beyond the limit are closed.

        Raises:
            RolloutError: What `ChatSession.extend` raises.
        """
        task = asyncio.current_task()
        assert task is not None
        tracked.busy = True
        self.requests[task] = None
        try:
            new = messages[tracked.num_seen :]
            if new:
                await tracked.chat.extend(new)
                tracked.see(new)
            yield
        finally:
            tracked.busy = False
            self.requests.pop(task, None)
            self.last_used = tracked.last_used = time.monotonic()
            self.open.append(self.open.pop(self.open.index(tracked)))
            await self.let_go(self._leaving(tracked))

    def _leaving(self, tracked: TrackedChat) -> list[TrackedChat]:
        leaving = []
        if not has_sampled(tracked.chat):
            leaving.append(tracked)
            if self._remember:
                self.begun.remove(tracked.chat)
        idle = [each for each in self.open if not each.busy and each not in leaving]
        return leaving + idle[: max(0, len(self.open) - len(leaving) - self._max_open)]

    async def let_go(self, leaving: Sequence[TrackedChat]) -> None:
        """Close conversations, which then cannot be continued any more."""
        tasks = []
        for tracked in leaving:
            self.open.remove(tracked)
            tasks.append(to_the_end(tracked.chat.close(), self._closing))
        await all_done(tasks)

    async def end(self) -> None:
        """Cancel what is under way, and close every conversation."""
        for task in self.requests:
            task.cancel()
        await all_done(self.requests)
        await self.let_go(list(self.open))
        await all_done(self._closing)  # those that were let go of before


def has_sampled(chat: ChatSession) -> bool:
    """Tell whether anything was sampled in a conversation."""
    return any(ledger.num_sampled for ledger in chat.segments)


def to_the_end(ending: Coroutine[None, None, None], running: set[asyncio.Task[None]]) -> asyncio.Task[None]:
    """Start what must be done to the end even where who waits for it is cancelled; it is in `running` until then."""

    def ended(task: asyncio.Task[None]) -> None:
        running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a conversation could not be closed", exc_info=error)

    task = asyncio.create_task(ending)
    running.add(task)
    task.add_done_callback(ended)
    return task


async def all_done(tasks: Collection[asyncio.Task]) -> None:
    """Wait until all tasks have ended, however they ended."""
    if tasks:
        await asyncio.wait(tasks)


def _shown(tools: Sequence[dict]) -> bytes:
    return msgspec.json.encode(list(tools))
