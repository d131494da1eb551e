"""The remote server's end of one connection, from hello to its loss: a lost one is replaced, never mended.

Invariants: every call ends, with its answer or with an error that says what was waited for; what is kept of prompts is
what the service keeps, or less, and ends with the connection.
"""

import asyncio
import itertools
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from ostinato_engines import EngineError, EngineInputError, SamplingParams, TokenOutput
from ostinato_engines.request import refuse_double
from ostinato_rollout.transport import wire
from ostinato_rollout.transport.errors import NotBegunError, ReplicaLostError
from ostinato_rollout.transport.mailbox import Mailbox, dial
from ostinato_rollout.transport.prompts import ID_BYTES, KeptPrompt, KeptPrompts
from ostinato_rollout.transport.stats import TransportStats

logger = logging.getLogger(__name__)

T = TypeVar("T")

_HELLO_S = 0.5


def _check_name(request_id: object) -> None:
    """Raise EngineInputError for what the service cannot read as a name: it would part from the whole connection."""
    if isinstance(request_id, str):
        with suppress(UnicodeEncodeError):
            request_id.encode()
            return
    raise EngineInputError(f"request_id must be Unicode text, got {request_id!r:.80}; name the conversation")


class LinkOptions(msgspec.Struct, frozen=True):
    """How a connection is made and kept; see `RemoteServer`."""

    address: str
    key: bytes | None
    silence_s: float
    max_frame_bytes: int
    max_kept_bytes: int


class _Waiting:
    """A call under way."""

    __slots__ = ("answer", "send_again", "since", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self.send_again: Callable[[], None] | None = None
        """Of a generation: sends its prompt whole."""
        self.since = time.time()
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()


class Link:
    """One connection, on the event loop that made it.

    Args:
        options: How it is made.
        stats: Counted up.
        on_policy_version: Gets the replica's version with each answer.
        remote: Tells the remote server that connects from all others, also of other processes.
    """

    def __init__(
        self, options: LinkOptions, stats: TransportStats, on_policy_version: Callable[[int], None], remote: bytes
    ) -> None:
        self._options = options
        self._remote = remote
        self._stats = stats
        self._on_policy_version = on_policy_version
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._prompts: KeptPrompts[str] = KeptPrompts(options.max_kept_bytes)
        self._talking: set[str] = set()
        self._welcome: asyncio.Future[wire.Welcome] = self._loop.create_future()
        self._interval_s = options.silence_s / wire.TICKS
        self._has_heard = False
        self._num_silent_ticks = 0
        self._heard_at = time.time()
        self._num_answers = 0
        self.lost: EngineError | None = None
        """Why nothing can be asked any more."""
        self.service = b""
        """Which service answers, once it has; see `wire.Welcome`."""
        self._mailbox = Mailbox(
            dial(options.address, options.key, max_frame_bytes=options.max_frame_bytes), self._receive
        )
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_up(self) -> bool:
        """Whether calls can be made from the running loop."""
        return self.lost is None and self._loop is asyncio.get_running_loop()

    @property
    def num_waiting(self) -> int:
        """Calls under way."""
        return len(self._waiting)

    @property
    def num_kept(self) -> int:
        """Conversations of which something is kept."""
        return len(self._prompts)

    async def open(self, timeout_s: float) -> None:
        """Says hello, and waits for the welcome.

        Raises:
            ReplicaLostError: Nobody answers, or refuses.
        """
        name = f"process {os.getpid()} of {socket.gethostname()}"
        hello = wire.Hello(wire.PROTOCOL, wire.proof_of(self._options.key), name, self._remote)
        try:
            async with asyncio.timeout(timeout_s):
                welcome = await self._say_until_welcome(hello)
        except TimeoutError as error:
            lost = ReplicaLostError(
                f"replica at {self._options.address} must answer within {timeout_s:g} s, got nothing; "
                "see whether it runs, and whether both ends have the same key"
            )
            self.fail(lost)
            raise lost from error
        self.service = welcome.service
        self._interval_s = min(self._interval_s, welcome.silence_s / wire.TICKS)
        self._tick()

    async def _say_until_welcome(self, hello: wire.Hello) -> wire.Welcome:
        """Says hello until somebody answers: a service that was about to end may have taken the first one with it."""
        while not self._welcome.done():
            self._send(hello)
            await asyncio.wait([self._welcome], timeout=min(self._interval_s, _HELLO_S))
        return await self._welcome

    # Calls

    async def generate(self, prompt: memoryview, params: SamplingParams, request_id: str) -> TokenOutput:
        """`AsyncServerBase.generate`; only what is new of the prompt travels.

        Args:
            prompt: The ids of the whole prompt, as int32; given back once they are sent.
            params: Checked.
            request_id: The conversation.
        """
        _check_name(request_id)
        refuse_double(request_id, self._talking)
        length = len(prompt) // ID_BYTES
        number, call = self._enter(f"generate of request {request_id!r} ({length} prompt tokens)")
        self._talking.add(request_id)
        try:
            with prompt:
                kept = self._send_prompt(prompt, params, request_id, number)
            call.send_again = lambda: self._send_whole(kept, params, request_id, number)
            try:
                answer = await call.answer
            except NotBegunError as error:
                error.prompt = bytes(kept.ids)
                raise
        finally:
            self._talking.discard(request_id)
            self._leave(number)
        if self._prompts.get(request_id) is kept:
            kept.sampled(answer.token_ids, turn=number)
            self._prompts.keep(request_id, kept)
        return answer

    def _send_prompt(self, prompt: memoryview, params: SamplingParams, request_id: str, number: int) -> KeptPrompt:
        """Sends what the service does not have of a prompt, and keeps the whole."""
        kept = self._prompts.get(request_id)
        if kept is not None and kept.is_start_of(prompt):
            known, with_output = len(kept), kept.output_goes_on_in(prompt)
            new = prompt[kept.num_bytes if with_output else len(kept.ids) :]
        else:
            kept, known, with_output, new = KeptPrompt(), 0, False, prompt
            self._stats.num_whole += 1
        self._check_size(len(new))
        length = len(prompt) // ID_BYTES
        self._stats.num_generates += 1
        self._stats.num_prompt_tokens += length
        self._stats.num_sent_tokens += len(new) // ID_BYTES
        kept.grow(new, with_output=with_output, turn=number)
        self._prompts.keep(request_id, kept)
        self._send(wire.Generate(number, request_id, known, with_output, length, kept.digest, params), new)
        return kept

    def _send_whole(self, kept: KeptPrompt, params: SamplingParams, request_id: str, number: int) -> None:
        """Sends a prompt again that the service could not put together."""
        self._check_size(len(kept.ids))
        self._stats.num_resent += 1
        self._stats.num_sent_tokens += len(kept)
        message = wire.Generate(number, request_id, 0, False, len(kept), kept.digest, params, again=True)
        self._send(message, bytes(kept.ids))

    async def call(self, method: str, argument: Any, kind: type[T]) -> T:
        """Another method.

        Raises:
            EngineInputError: The argument is not a plain value.
        """
        try:
            raw = wire.encode_raw(argument)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise EngineInputError(f"{method} must get plain values, got {error}; they cross a process") from error
        self._check_size(len(bytes(raw)))
        number, call = self._enter(method)
        try:
            self._send(wire.Call(number, method, raw))
            return wire.decode_raw(await call.answer, kind)
        except msgspec.MsgspecError as error:
            self._stats.num_malformed += 1
            raise ReplicaLostError(
                f"{method} must be answered with {kind.__name__}, got {error}; use the same version at both ends"
            ) from error
        finally:
            self._leave(number)

    def _enter(self, what: str) -> tuple[int, _Waiting]:
        """A call begins, unless the connection has been lost since it was chosen."""
        if self.lost is not None:
            raise type(self.lost)(str(self.lost))
        number, call = next(self._numbers), _Waiting(what)
        self._waiting[number] = call
        return number, call

    def _leave(self, number: int) -> None:
        """The caller goes, answered or not; a call without an answer is cancelled."""
        answer = self._waiting.pop(number).answer
        if not answer.done() or answer.cancelled():
            self._send(wire.Cancel(number))
        else:
            # A caller that was cancelled does not look at it.
            answer.exception()

    def forget(self, request_id: str) -> None:
        """The conversation is over."""
        self._prompts.forget(request_id)

    # Messages

    def _send(self, message: wire.Request, ids: bytes | memoryview | None = None) -> None:
        if self.lost is None:
            self._mailbox.send([wire.encode(message)] if ids is None else [wire.encode(message), ids])

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._options.max_frame_bytes:
            raise EngineInputError(
                f"a message must have at most {self._options.max_frame_bytes} bytes, got {num_bytes}; "
                "raise max_frame_bytes at both ends"
            )

    def _receive(self, frames: list[bytes]) -> None:
        try:
            (frame,) = frames
            reply = wire.decode_reply(frame)
        except (ValueError, RecursionError, msgspec.MsgspecError) as error:
            self._stats.num_malformed += 1
            logger.warning("a message of the replica at %s could not be read: %r", self._options.address, str(error))
            return
        self._has_heard, self._heard_at = True, time.time()
        match reply:
            case wire.Output(number, version, output):
                self._on_policy_version(version)
                self._resolve(number, output)
            case wire.Answer(number, version, result):
                self._on_policy_version(version)
                self._resolve(number, result)
            case wire.Failed(number, version):
                self._on_policy_version(version)
                self._resolve(number, wire.error_of(reply))
            case wire.Forgotten(number):
                self._send_again(number)
            case wire.Pong(version):
                self._on_policy_version(version)
            case wire.Welcome():
                if not self._welcome.done():
                    self._welcome.set_result(reply)
            case wire.Refused(reason):
                self._lose(f"must serve this connection, got a refusal: {reason}")
            case wire.Stranger(number):
                self._lose("must know this connection, got that it does not (any more); was it restarted?", number)
            case wire.Closing():
                self._lose("must go on, got its end")

    def _resolve(self, number: int, outcome: Any) -> None:
        """Answers a call; nobody waits for one that was cancelled."""
        call = self._waiting.get(number)
        if call is None or call.answer.done():
            return
        self._num_answers += 1
        if isinstance(outcome, Exception):
            call.answer.set_exception(outcome)
        else:
            call.answer.set_result(outcome)

    def _send_again(self, number: int) -> None:
        """Sends a prompt whole, unless nobody waits for its generation any more."""
        call = self._waiting.get(number)
        if call is not None and call.send_again is not None and not call.answer.done():
            try:
                call.send_again()
            except EngineInputError as error:
                self._send(wire.Cancel(number))
                self._resolve(number, error)

    # Life

    def _tick(self) -> None:
        """Judges the silence and sends a sign of life; time in which this process itself stood still does not count."""
        self._mailbox.drain()
        if self.lost is not None:
            return
        self._num_silent_ticks = 0 if self._has_heard else self._num_silent_ticks + 1
        self._has_heard = False
        if self._num_silent_ticks > wire.TICKS:
            self._lose(f"must give a sign of life within {self._options.silence_s:g} s, got silence; see its log")
            return
        self._send(wire.Ping(next(self._numbers)))
        self._timer = self._loop.call_later(self._interval_s, self._tick)

    def _lose(self, what: str, first_not_begun: int | None = None) -> None:
        """The replica is lost; calls from a number on may be known not to have been begun there."""
        self._stats.num_lost += 1
        now = time.time()
        heard = f"last heard of it {now - self._heard_at:.1f} s ago, after {self._num_answers} answers"
        logger.warning("lost the replica at %s, which %s; %s", self._options.address, what, heard)

        def error_for(number: int, call: _Waiting) -> ReplicaLostError:
            is_begun = first_not_begun is None or number < first_not_begun
            return (ReplicaLostError if is_begun else NotBegunError)(
                f"replica at {self._options.address} {what}; waited for {call.what} since "
                f"{time.strftime('%H:%M:%S', time.localtime(call.since))} ({now - call.since:.1f} s), {heard}"
            )

        self.fail(ReplicaLostError(f"replica at {self._options.address} {what}"), error_for)

    def fail(self, error: EngineError, error_for: Callable[[int, _Waiting], EngineError] | None = None) -> None:
        """Ends the connection at once; all calls under way end with an error."""
        if self.lost is not None:
            return
        self.lost = error
        self._end(flush=False)
        self._prompts.clear()
        for number, call in self._waiting.items():
            if not call.answer.done():
                call.answer.set_exception(error if error_for is None else error_for(number, call))
        if not self._welcome.done():
            self._welcome.set_exception(error)
            # Whoever opens the connection may have gone.
            self._welcome.exception()

    def close(self, error: EngineError) -> None:
        """Says goodbye: the service frees what it has of this connection; calls under way end with the error."""
        if self.lost is None:
            self._send(wire.Goodbye())
            self._end(flush=True)
            self.fail(error)

    def _end(self, *, flush: bool) -> None:
        self._mailbox.close(flush=flush)
        if self._timer is not None:
            self._timer.cancel()
