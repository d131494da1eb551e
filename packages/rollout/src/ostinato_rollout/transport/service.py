"""A replica served to other processes: any server of the contract behind one socket.

Invariants: every call that can be read gets one answer while its caller is there; nothing that arrives ends the service.
"""

import asyncio
import hmac
import logging
import secrets
from array import array
from collections.abc import Awaitable, Callable
from typing import Self

import msgspec

from ostinato_engines import (
    AsyncServerBase,
    EngineCrashedError,
    EngineInputError,
    PolicySpan,
    StopReason,
    TokenOutput,
    as_token_output,
)
from ostinato_engines.forwarding import answers_of, error_name
from ostinato_rollout.transport import wire
from ostinato_rollout.transport.caller import Caller
from ostinato_rollout.transport.callers import Callers
from ostinato_rollout.transport.errors import TransportInputError
from ostinato_rollout.transport.mailbox import Mailbox, checked_key, listen
from ostinato_rollout.transport.prompts import ID_BYTES, KeptPrompt, KeptPrompts
from ostinato_rollout.transport.stats import ServiceStats

logger = logging.getLogger(__name__)

LOOPBACK = "tcp://127.0.0.1:*"
MAX_KEPT_BYTES = 1 << 30
_STUCK_TICKS = 60 * wire.TICKS


class ReplicaService:
    """Serves one server of the contract to any number of remote servers.

    It starts the server when the first of them asks for it, and ends when one of them shuts it down. All belong to the
    loop that starts the service.

    Args:
        server: The replica.
        address: Where to listen: on loopback with a free port, unless told otherwise; `ipc:///path` also works. Beyond
            this host a key is needed.
        key: Shared with the remote servers; at least 16 bytes. It also encrypts. Without it whoever is on this host may call.
        silence_s: A caller whose process gives no sign of life for so long has gone; callers get signs of life four times
            within it.
        max_frame_bytes: Longest message.
        max_kept_bytes: Of the prompts that are kept; those idle for longest are forgotten first, and sent again when needed.

    Raises:
        TransportInputError: An argument cannot be used.
    """

    def __init__(
        self,
        server: AsyncServerBase,
        address: str = LOOPBACK,
        *,
        key: str | bytes | None = None,
        silence_s: float = wire.SILENCE_S,
        max_frame_bytes: int = wire.MAX_FRAME_BYTES,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        if not 0 < silence_s < float("inf"):
            raise TransportInputError(f"silence_s must be positive, got {silence_s!r}; give seconds")
        self._server = server
        self.address = address
        """Where it listens; with the real port once started."""
        self._key = checked_key(key)
        self._token = secrets.token_bytes(16)
        self._silence_s = silence_s
        self._max_frame_bytes = max_frame_bytes
        self._answers = answers_of(server) | {"start": self._start_server, "abort": self._abort}
        self._starting = asyncio.Lock()
        self._is_started = False
        self._prompts: KeptPrompts[tuple[bytes, str]] = KeptPrompts(max_kept_bytes)
        self.stats = ServiceStats()
        """What it has seen so far."""
        self._callers = Callers(server, self._prompts, self.stats)
        self._closing: asyncio.Task[None] | None = None
        self._mailbox: Mailbox | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()

    # Life

    async def start(self) -> None:
        """Listens; returns once `address` is the real one.

        Raises:
            AddressError: Nothing can listen there.
        """
        if self._mailbox is not None:
            raise TransportInputError("service must be started once, got a second start; create a new one")
        socket, self.address = listen(
            self.address, self._key, max_frame_bytes=self._max_frame_bytes, silence_s=self._silence_s
        )
        self._mailbox = Mailbox(socket, self._receive)
        self._tick()

    async def wait_closed(self) -> None:
        """Waits until somebody shuts the server down, or the service is closed."""
        await self._ended.wait()

    async def close(self) -> None:
        """Ends all calls, frees all conversations and tells the callers; the server itself is left as it is."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()
        for caller in self._callers:
            self._send(caller.identity, wire.Closing())
            self._callers.part_from(caller)
        if self._mailbox is not None:
            self._mailbox.close(flush=True)
        await self._callers.left()

    def _tick(self) -> None:
        """Gives everybody a sign of life, and parts from those who are not there to take it.

        A process that is there may stand still, as one that trains does, for sixty times as long.
        """
        if self._mailbox is None or self._ended.is_set():
            return
        self._mailbox.drain()
        for caller in self._callers:
            caller.num_silent_ticks = 0 if caller.has_spoken else caller.num_silent_ticks + 1
            caller.has_spoken = False
            is_there = self._send(caller.identity, wire.Pong(self._version))
            if not is_there or caller.num_silent_ticks > _STUCK_TICKS:
                self._callers.part_from_vanished(caller)
        self._timer = asyncio.get_running_loop().call_later(self._silence_s / wire.TICKS, self._tick)

    async def _close_after_shutdown(self, caller: Caller) -> None:
        """Lets the server's last errors reach their callers, and ends."""
        await self._callers.answered()
        if self._callers.get(caller.identity) is caller:
            self._callers.part_from(caller)
        await self.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @property
    def num_callers(self) -> int:
        """Connections."""
        return len(self._callers)

    @property
    def num_calls(self) -> int:
        """Calls under way, of all callers."""
        return sum(caller.num_calls for caller in self._callers)

    @property
    def num_conversations(self) -> int:
        """Conversations that have not been released."""
        return sum(len(caller.conversations) for caller in self._callers)

    @property
    def num_kept_bytes(self) -> int:
        """Of prompts."""
        return self._prompts.num_bytes

    @property
    def _version(self) -> int:
        """The server's policy version as a number that crosses, whatever kind of integer it is."""
        return int(self._server.policy_version)

    # Messages

    def _receive(self, frames: list[bytes]) -> None:
        identity, *parts = frames
        caller = self._callers.get(identity)
        try:
            request = wire.decode_request(parts[0])
            if len(parts) != (2 if isinstance(request, wire.Generate) else 1):
                raise ValueError(f"{type(request).__name__} does not come in {len(parts)} frames")
            if caller is not None:
                self._serve(caller, request, parts)
            elif isinstance(request, wire.Hello):
                self._welcome(identity, request)
            elif isinstance(request, wire.Generate | wire.Call | wire.Ping):
                self._send(identity, wire.Stranger(request.number))
        # Whatever arrives: the sender is told, and it is counted.
        except (ValueError, IndexError, RecursionError, msgspec.MsgspecError) as error:
            self.stats.num_malformed += 1
            logger.warning("a message could not be served: %r", str(error))
            self._send(identity, wire.Refused(f"a message could not be served: {error}"))
            if caller is not None:
                self._callers.part_from(caller)

    def _serve(self, caller: Caller, request: wire.Request, parts: list[bytes]) -> None:
        caller.has_spoken = True
        if isinstance(request, wire.Generate | wire.Call) and caller.is_under_way(request.number):
            raise ValueError(f"call {request.number} is under way")
        match request:
            case wire.Generate():
                self._generate(caller, request, parts[1])
            case wire.Call(number):
                caller.begin(number, self._answered(caller, number, lambda: self._call(caller, request)))
            case wire.Cancel(number):
                caller.cancel(number)
            case wire.Ping():
                self._send(caller.identity, wire.Pong(self._version))
            case wire.Goodbye():
                self._callers.part_from(caller)
            case wire.Hello():
                self._send(caller.identity, wire.Welcome(self._silence_s, self._token))

    def _send(self, identity: bytes, message: wire.Reply) -> bool:
        """Sends a message; whether anybody is there to take it."""
        frame = wire.encode(message)
        if len(frame) > self._max_frame_bytes and isinstance(message, wire.Output | wire.Answer):
            what = f"an answer must have at most {self._max_frame_bytes} bytes, got {len(frame)}; raise max_frame_bytes"
            frame = wire.encode(wire.Failed(message.number, message.policy_version, EngineInputError.__name__, what))
        is_taken = self._mailbox is not None and self._mailbox.send([identity, frame])
        self.stats.num_undelivered += not is_taken
        return is_taken

    def _welcome(self, identity: bytes, hello: wire.Hello) -> None:
        reason = ""
        if hello.protocol != wire.PROTOCOL:
            reason = f"protocol must be {wire.PROTOCOL}, got {hello.protocol}; install the same version at both ends"
        elif not hmac.compare_digest(hello.proof, wire.proof_of(self._key)):
            reason = "key must be the service's, got another; give both ends the same"
        if reason:
            self.stats.num_refused += 1
            logger.warning("refused %s: %s", hello.name, reason)
            self._send(identity, wire.Refused(reason))
            return
        self._callers.enter(identity, hello.name, hello.remote)
        self._send(identity, wire.Welcome(self._silence_s, self._token))

    # Calls

    def _generate(self, caller: Caller, message: wire.Generate, new: bytes) -> None:
        """Puts the prompt together and begins, or asks for all of it."""
        number, request_id = message.number, message.request_id
        if message.again and caller.forgotten.pop(number, None) is None:
            return  # It has been aborted or cancelled.
        if number in caller.forgotten:
            raise ValueError(f"call {number} waits for its prompt")
        if len(new) % ID_BYTES:
            raise ValueError(f"ids come in {ID_BYTES} bytes each, got {len(new)}")
        key = (caller.identity, request_id)
        kept = self._prompts.get(key) if message.known else KeptPrompt()
        if kept is not None and message.known == len(kept):
            kept.grow(new, with_output=message.with_output, turn=number)
            if (kept.digest, len(kept)) == (message.digest, message.length):
                self._begin_turn(caller, message, kept)
                return
        if not message.known:
            raise ValueError(f"the whole prompt of request {request_id!r} is not what its hash says")
        self._prompts.forget(key)
        self.stats.num_forgotten += 1
        caller.forgotten[number] = request_id
        self._send(caller.identity, wire.Forgotten(number))

    def _begin_turn(self, caller: Caller, message: wire.Generate, kept: KeptPrompt) -> None:
        request_id = message.request_id
        self._prompts.keep((caller.identity, request_id), kept)
        self._callers.open(caller, request_id)
        prompt = array("i")
        prompt.frombytes(kept.ids)
        work = self._answered(caller, message.number, lambda: self._continue(caller, message, prompt, kept))
        caller.begin(message.number, work, request_id=request_id)

    async def _continue(
        self, caller: Caller, message: wire.Generate, prompt: "array[int]", kept: KeptPrompt
    ) -> wire.Output:
        """One generation of the server."""
        self.stats.num_generates += 1
        request_id = message.request_id
        await caller.cancelled_turn(request_id)
        output = as_token_output(await self._server.generate(prompt, message.sampling_params, request_id))
        kept.sampled(output.token_ids, turn=message.number)
        key = (caller.identity, request_id)
        if self._prompts.get(key) is kept:
            self._prompts.keep(key, kept)
        return wire.Output(message.number, self._version, output)

    async def _call(self, caller: Caller, call: wire.Call) -> wire.Answer:
        """Another method of the server."""
        method = self._answers.get(call.method)
        if method is None:
            raise EngineInputError(f"method must be one of {', '.join(self._answers)}, got {call.method!r}")
        try:
            if call.method == "release":
                await self._callers.over(caller, wire.decode_raw(call.argument, str))
            result = await method(call.argument)
        except msgspec.MsgspecError as error:
            self.stats.num_malformed += 1
            raise EngineInputError(f"{call.method} must get what it takes, got {error}") from error
        if call.method == "shutdown":
            self._closing = asyncio.ensure_future(self._close_after_shutdown(caller))
        return wire.Answer(call.number, self._version, wire.encode_raw(result))

    async def _answered(self, caller: Caller, number: int, work: Callable[[], Awaitable[wire.Reply]]) -> None:
        """Answers a call, whatever becomes of it, unless its caller has cancelled it."""
        try:
            self._send(caller.identity, await work())
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            self._fail(caller, number, EngineCrashedError.__name__, "request was cancelled, though nobody cancelled it")
        # The border between two processes: the caller is told, whatever it is.
        except Exception as error:
            self._fail(caller, number, error_name(error), str(error) or type(error).__name__)

    def _fail(self, caller: Caller, number: int, name: str, message: str) -> None:
        message = message.encode(errors="backslashreplace").decode()  # what others raised need not be Unicode
        self._send(caller.identity, wire.Failed(number, self._version, name, message))

    async def _start_server(self, raw: msgspec.Raw) -> wire.Description:
        async with self._starting:
            if not self._is_started:
                await self._server.start()
                self._is_started = True
        server = self._server
        return wire.Description(server.capabilities(), server.max_model_len, server.versions)

    async def _abort(self, raw: msgspec.Raw) -> int:
        """Of the server's requests, and of those whose prompt is on its way."""
        names = wire.decode_names(raw)
        wanted = None if names is None else set(names)
        version = self._version
        nothing = TokenOutput([], None, StopReason.ABORTED, policy_versions=(PolicySpan(0, version),))
        num_aborted = 0
        for caller in self._callers:
            for number in caller.abort_forgotten(wanted):
                self._send(caller.identity, wire.Output(number, version, nothing))
                num_aborted += 1
        return num_aborted + await self._server.abort(names)
