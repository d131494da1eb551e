"""A server that says what a test told it to, under the contract of a real one."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ostinato_engines.errors import EngineClosedError, EngineError, EngineInputError, UnsupportedError
from ostinato_engines.server import UNKNOWN_MAX_MODEL_LEN, AsyncServerBase
from ostinato_engines.types import (
    Capabilities,
    EngineState,
    Health,
    PolicySpan,
    SamplingParams,
    StopReason,
    TokenOutput,
    WeightManifest,
)

if TYPE_CHECKING:
    from torch import Tensor

Reply = Sequence[int] | str | TokenOutput | BaseException
"""Token ids; text for `encode`; a whole output, returned as it is; or an error to raise."""


class RecordedRequest(msgspec.Struct, frozen=True):
    """What a `ScriptedServer` was asked."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams


class ScriptedServer(AsyncServerBase):
    """Replies from a script and records its requests.

    Limits hold as in a real engine: a reply is cut at the first stop id (kept) and at `max_tokens` or `max_model_len`.

    Args:
        replies: One reply per request in order of arrival, or a callable that makes the reply to a `RecordedRequest`.
        encode: Turns text replies into ids; needed for them only.
        end_token_id: Appended to text replies.
        logprob: Of every token; None leaves logprobs out.
        max_model_len: As in any engine.
        gate: If given, every request waits until it is set.
    """

    def __init__(
        self,
        replies: Iterable[Reply] | Callable[[RecordedRequest], Reply],
        *,
        encode: Callable[[str], Sequence[int]] | None = None,
        end_token_id: int | None = None,
        logprob: float | None = -0.5,
        max_model_len: int = UNKNOWN_MAX_MODEL_LEN,
        gate: asyncio.Event | None = None,
    ) -> None:
        self._script = replies if callable(replies) else None
        self._replies = iter(()) if callable(replies) else iter(replies)
        self._encode = encode
        self._end_token_id = end_token_id
        self._logprob = logprob
        self._gate = gate
        self._in_flight: dict[asyncio.Future[StopReason], str] = {}
        self._closed = False
        self.max_model_len = max_model_len
        self.requests: list[RecordedRequest] = []
        self.released: list[str] = []
        self.manifests: list[WeightManifest] = []

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams | Mapping[str, Any],
        request_id: str,
        media: Sequence[Any] = (),
    ) -> TokenOutput:
        self.refuse_media(media)
        params = SamplingParams.from_mapping(sampling_params)
        self._refuse_closed()
        prompt = list(prompt_ids)
        if not prompt or len(prompt) > self.max_model_len:
            raise EngineInputError(
                f"prompt_ids must hold 1 to {self.max_model_len} ids, got {len(prompt)}; change the prompt"
            )
        request = RecordedRequest(request_id, prompt, params)
        self.requests.append(request)
        room = self.max_model_len - len(prompt)
        room = room if params.max_tokens is None else min(room, params.max_tokens)
        if room == 0:
            return self._output([], StopReason.LENGTH)
        reply = self._next_reply(request)
        if self._gate is not None and await self._wait_for_gate(self._gate, request_id) is StopReason.ABORTED:
            return self._output([], StopReason.ABORTED)
        if isinstance(reply, BaseException):
            raise reply
        if isinstance(reply, TokenOutput):
            return reply
        return self._cut(self._ids(reply), params, room)

    def _next_reply(self, request: RecordedRequest) -> Reply:
        if self._script is not None:
            return self._script(request)
        try:
            return next(self._replies)
        except StopIteration:
            raise EngineError(
                f"replies must hold one per request, got request number {len(self.requests)}; lengthen the script"
            ) from None

    def _ids(self, reply: Sequence[int] | str) -> list[int]:
        if not isinstance(reply, str):
            return list(reply)
        if self._encode is None:
            raise EngineError("encode must be given for text replies, got None; pass ScriptedServer(..., encode=...)")
        return [*self._encode(reply), *([] if self._end_token_id is None else [self._end_token_id])]

    def _cut(self, token_ids: list[int], params: SamplingParams, room: int) -> TokenOutput:
        for place, token_id in enumerate(token_ids[:room]):
            if token_id in params.stop_token_ids:
                return self._output(token_ids[: place + 1], StopReason.STOP, token_id, params)
        reason = StopReason.LENGTH if len(token_ids) >= room else StopReason.STOP
        return self._output(token_ids[:room], reason, None, params)

    def _output(
        self,
        token_ids: list[int],
        reason: StopReason,
        stop_token_id: int | None = None,
        params: SamplingParams | None = None,
    ) -> TokenOutput:
        absent = self._logprob is None or (params is not None and not params.logprobs)
        logprobs = None if absent else [self._logprob] * len(token_ids)
        return TokenOutput(token_ids, logprobs, reason, stop_token_id, (PolicySpan(0, self.policy_version),))  # pyright: ignore[reportArgumentType]

    async def _wait_for_gate(self, gate: asyncio.Event, request_id: str) -> StopReason | None:
        ended: asyncio.Future[StopReason] = asyncio.get_running_loop().create_future()
        opened = asyncio.ensure_future(gate.wait())
        self._in_flight[ended] = request_id
        try:
            await asyncio.wait([ended, opened], return_when=asyncio.FIRST_COMPLETED)
            return ended.result() if ended.done() else None
        finally:
            opened.cancel()
            del self._in_flight[ended]
            if not ended.done():
                ended.cancel()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineClosedError("server must be running, is shut down; create a new one")

    async def chat_completion(self, raw_request: Any) -> Any:
        raise UnsupportedError("ScriptedServer cannot chat; use generate")

    async def shutdown(self) -> None:
        self._closed = True
        for ended, request_id in list(self._in_flight.items()):
            if not ended.done():
                ended.set_exception(EngineClosedError(f"request {request_id!r} must end before shutdown"))

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        count = 0
        for ended, request_id in list(self._in_flight.items()):
            if not ended.done() and (request_ids is None or request_id in request_ids):
                ended.set_result(StopReason.ABORTED)
                count += 1
        return count

    async def update_weights(self, manifest: WeightManifest, weights: "Iterable[tuple[str, Tensor]]") -> None:
        """Reads the stream to its end, keeps nothing of it, and takes the version."""
        for _ in weights:
            pass
        self.manifests.append(manifest)
        self.policy_version = manifest.version

    async def sleep(self, level: int = 1) -> None:
        """Nothing to free."""

    async def health(self) -> Health:
        state = EngineState.CLOSED if self._closed else EngineState.READY
        return Health(state, self.policy_version, len(self._in_flight))

    def capabilities(self) -> Capabilities:
        return Capabilities(
            engine="scripted", logprobs=self._logprob is not None, abort=True, weight_update=True, sleep_levels=(1, 2)
        )

    async def release(self, request_id: str) -> None:
        self.released.append(request_id)
