"""The requests that are under way in one vLLM: who waits at the gate, who is computed, and what each is answered.

Invariant: each request is answered once, and whoever ends requests returns once their callers have the answers.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ostinato_engines.engine_status import EngineStatus
from ostinato_engines.errors import EngineCrashedError, EngineError, EngineInputError
from ostinato_engines.types import SamplingParams, StopReason, TokenOutput
from ostinato_engines.vllm_engine.answers import Conversing, nothing_sampled, to_token_output, until_gone
from ostinato_engines.vllm_engine.diagnosis import explain
from ostinato_engines.vllm_engine.engine_log import EngineLog
from ostinato_engines.vllm_engine.held import HeldAnswer
from ostinato_engines.vllm_engine.running import RunningEngine
from ostinato_engines.vllm_engine.sampling import to_vllm


class Traffic:
    """Belongs to one server.

    Args:
        engine: Started.
        status: Of the server; its failure is noted here.
        log: Of the engine: it tells why it died.
        version: Of the weights that serve now.
    """

    def __init__(self, engine: RunningEngine, status: EngineStatus, log: EngineLog, *, version: int) -> None:
        self._engine, self._status, self._log = engine, status, log
        self._version = version
        self.requests: dict[str, Conversing] = {}
        """By conversation."""
        self._serial = itertools.count()

    def under_way(self) -> list[Conversing]:
        """Those that vLLM knows."""
        return [request for request in self.requests.values() if request.gate is None]

    # One request

    async def serve(self, request_id: str, prompt: list[int], params: SamplingParams, num_tokens: int) -> TokenOutput:
        """What is sampled after a prompt, once the server is not paused.

        Args:
            request_id: Of nothing that is under way.
            prompt: The whole context.
            params: How to sample.
            num_tokens: At most so many, of which there is at least one.
        """
        engine = self._engine
        request = Conversing(f"{request_id}#{next(self._serial)}", [self._version])
        self.requests[request_id] = request
        try:
            if not await self._pass_gate(request):
                request.aborted = True
                return nothing_sampled(params, StopReason.ABORTED, self._version)
            hold = None if engine.why_no_hold else request.engine_id
            asked = to_vllm(params, max_tokens=num_tokens, parts=engine.parts, hold=hold)
            result, held = await self._answer(request, prompt, asked)
            output = to_token_output(result, params, request, exact=engine.exact_spans, answer=held)
            request.aborted = output.stop_reason is StopReason.ABORTED
            return output
        finally:
            del self.requests[request_id]
            request.gone.set()

    async def _pass_gate(self, request: Conversing) -> bool:
        """Waits while the server is paused; whether the request goes on."""
        while self._status.paused is not None:
            request.gate = asyncio.get_running_loop().create_future()
            if not await request.gate:
                return False
            self._status.require_serving()
        request.gate = None
        request.versions = [self._version]
        return True

    async def _answer(self, request: Conversing, prompt: list[int], asked: Any) -> tuple[Any, HeldAnswer | None]:
        """vLLM's output of one request and what was held of it, or the error that its caller gets."""
        engine = self._engine
        try:
            answer = await engine.generate(prompt, asked, request.engine_id)
        except engine.parts.dead_error as error:
            raise request.failure or self.crashed(error) from error
        except EngineError:
            raise
        except engine.parts.refusals as error:
            raise EngineInputError(
                f"request {request.engine_id!r} must be one that vllm serves, got {error}; mend the request"
            ) from error
        # vLLM's other errors concern this request only.
        except Exception as error:
            raise EngineCrashedError(
                f"vllm must serve request {request.engine_id!r}, got {type(error).__name__}: {error}; see its log"
            ) from error
        if request.failure is not None:
            raise request.failure
        return answer

    # All that are under way

    def note_update(self, version: int) -> None:
        """New weights serve: what is under way is computed anew under them."""
        self._version = version
        for request in self.requests.values():
            request.versions.append(version)
            request.num_preempted += 1

    async def abort(self, request_ids: Sequence[str]) -> int:
        """Ends these requests with what they have; how many it ended."""
        found = [self.requests[name] for name in dict.fromkeys(request_ids) if name in self.requests]
        for request in found:
            request.leave_gate(False)
        await self._engine.abort([request.engine_id for request in found])
        await until_gone(found)
        return sum(request.aborted for request in found)

    async def fail_all(self, error_for: Callable[[str], EngineError]) -> None:
        """Answers everybody with an error."""
        requests = list(self.requests.items())
        for name, request in requests:
            request.failure = failure = error_for(name)
            request.leave_gate(failure)
        if requests and not self._engine.is_dead:
            await self._engine.abort([request.engine_id for _, request in requests])
        await until_gone([request for _, request in requests])

    def crashed(self, error: BaseException) -> EngineCrashedError:
        """Notes that the engine is dead, and why, as far as its log tells."""
        crash = EngineCrashedError(f"engine must not crash, got an error:{explain(self._log.tail(), error)}")
        if self._status.failure is None and not self._status.closed:
            self._status.failure = crash
        return crash
