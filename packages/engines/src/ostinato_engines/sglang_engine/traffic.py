"""The requests that are under way in one SGLang: who waits at the gate, who has a leg there, and how legs are ended.

Invariant: each request is answered once, and whoever ends legs returns once SGLang has let go of them.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from ostinato_engines.engine_status import EngineStatus
from ostinato_engines.errors import EngineClosedError, EngineCrashedError, EngineError
from ostinato_engines.request import until_answered
from ostinato_engines.sglang_engine.protocol import sampling_body
from ostinato_engines.sglang_engine.starting import StartedEngine
from ostinato_engines.sglang_engine.turn import Halt, Turn
from ostinato_engines.types import StopReason, TokenOutput

_ANSWER_S = 60.0
_AGAIN_S = 0.1
"""An abort that came before its request is repeated after so long."""
_LAST_WORD_S = 10.0


class Traffic:
    """Belongs to one server.

    Args:
        engine: Started.
        status: Of the server; its failure is noted here.
        version: Of the weights that serve now.
    """

    def __init__(self, engine: StartedEngine, status: EngineStatus, *, version: int) -> None:
        self.version = version
        self._engine = engine
        self._status = status
        self.turns: dict[str, Turn] = {}
        self.holding = False
        """New weights are being loaded: no leg begins."""
        self._frozen = False
        """SGLang itself stands still with what it had begun."""
        self._num_legs = 0
        self._serial = itertools.count()
        self._farewells: set[asyncio.Task[None]] = set()

    # One request

    async def serve(self, request_id: str, turn: Turn) -> TokenOutput:
        """All legs of a request.

        Args:
            request_id: Of nothing that is under way.
            turn: With something to sample.
        """
        self.turns[request_id] = turn
        try:
            reason = await self._sample(turn)
            turn.aborted = reason is StopReason.ABORTED
            return turn.output(reason)
        finally:
            del self.turns[request_id]
            turn.gone.set()

    async def _sample(self, turn: Turn) -> StopReason:
        while True:
            if not await self._pass_gate(turn):
                return StopReason.ABORTED
            body = {
                "rid": f"ostinato-{next(self._serial):012d}",
                "input_ids": [*turn.prompt, *turn.token_ids],
                "sampling_params": sampling_body(
                    turn.params, max_new_tokens=turn.num_left, seed=turn.seed, vocab_size=self._engine.vocab_size
                ),
                "return_logprob": turn.params.logprobs,
            }
            turn.begin_leg(body["rid"], self.version)
            self._num_legs += 1
            try:
                reason = await self._leg(turn, body)
            finally:
                turn.end_leg()
                self._num_legs -= 1
                self.open_gates()
            if reason is not None:
                return reason

    async def _pass_gate(self, turn: Turn) -> bool:
        """Waits until a leg may begin; whether the request goes on."""
        while self._is_shut or self._num_legs >= self._engine.max_legs:
            turn.gate = asyncio.get_running_loop().create_future()
            if not await turn.gate:
                return False
            self._status.require_serving()
        turn.gate = None
        # An abort may have come after the gate had opened.
        return turn.halt is not Halt.ABORT

    @property
    def _is_shut(self) -> bool:
        return self.holding or self._status.paused is not None

    def open_gates(self) -> None:
        """Lets as many requests go on as there is room for, those that came first before the others."""
        if self._is_shut:
            return
        room = self._engine.max_legs - self._num_legs
        waiting = (turn for turn in self.turns.values() if turn.gate is not None and not turn.gate.done())
        for turn in itertools.islice(waiting, max(room, 0)):
            turn.leave_gate(True)

    async def _leg(self, turn: Turn, body: dict[str, Any]) -> StopReason | None:
        """One request to SGLang; the reason with which the turn ends, None where another leg follows."""
        try:
            answer = await self._engine.running.generate(body)
        except asyncio.CancelledError:
            self._say_farewell(turn.rid)
            raise
        except OSError as error:
            raise turn.failure or await self.lost(error) from error
        if turn.failure is not None:
            raise turn.failure
        return turn.take(answer)

    def _say_farewell(self, rid: str) -> None:
        """SGLang looks after connections that are gone only now and then: it is told."""

        async def farewell() -> None:
            with suppress(EngineError, OSError):
                await self._engine.running.abort([rid])

        task = asyncio.ensure_future(farewell())
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)

    # Ending legs

    async def halt(self, turns: Sequence[Turn], halt: Halt) -> None:
        """Returns once these have no leg under way: they end aborted, or go on when the gate opens.

        Raises:
            EngineCrashedError: SGLang did not let go of them in time.
        """
        for turn in turns:
            turn.halt = halt
            if halt is Halt.ABORT:
                turn.leave_gate(False)
        await self.thaw()
        try:
            async with asyncio.timeout(_ANSWER_S):
                while legs := [turn for turn in turns if turn.rid]:
                    await self._engine.running.abort([turn.rid for turn in legs])
                    with suppress(TimeoutError):
                        await asyncio.wait_for(_until_between(legs), _AGAIN_S)
        except OSError as error:
            raise await self.lost(error) from error

    async def clear(self, halt: Halt) -> None:
        """Ends or interrupts everything, chat and what nobody waits for included, and forgets all cached state."""
        turns = [turn for turn in self.turns.values() if turn.rid or halt is Halt.ABORT]
        for turn in turns:
            turn.halt = halt
        await self.thaw()
        try:
            await self._engine.running.abort_all()
            await self.halt(turns, halt)
            await self._engine.running.drop_cache()
        except OSError as error:
            raise await self.lost(error) from error

    async def freeze(self) -> None:
        """Has SGLang stand still with what it has begun."""
        if any(turn.rid for turn in self.turns.values()):
            self._frozen = True
            await self._engine.running.freeze()

    async def thaw(self) -> None:
        """What SGLang froze ends only once it computes."""
        if self._frozen:
            await self._engine.running.thaw()
            self._frozen = False

    def fail_all(self, error_for: Callable[[str], EngineError]) -> None:
        """Answers everybody with an error."""
        for name, turn in self.turns.items():
            turn.failure = failure = error_for(name)
            turn.leave_gate(failure)
            if turn.rid and not self._status.closed:
                self._say_farewell(turn.rid)

    async def lost(self, error: OSError) -> EngineError:
        """What a call gets whose connection broke off: the end of the engine, where that is why."""
        if not self._status.closed:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._engine.process.ended(), _LAST_WORD_S)
        if self._status.closed:
            return EngineClosedError("server must be running, is shut down; create a new server")
        if self._engine.process.is_running:
            return EngineCrashedError(f"sglang must answer, got {type(error).__name__}: {error}; ask again")
        return self.crashed(error)

    def crashed(self, error: BaseException) -> EngineCrashedError:
        """Notes that the engine is dead, and why, as far as its log tells."""
        crash = EngineCrashedError(f"engine must not crash, got an error:{self._engine.explain(error)}")
        if self._status.failure is None and not self._status.closed:
            self._status.failure = crash
        return crash


async def until_gone(turns: Iterable[Turn]) -> None:
    """Returns once those who wait for these requests have their answers.

    Raises:
        EngineCrashedError: That took too long.
    """
    await until_answered((turn.gone for turn in turns), limit_s=_ANSWER_S)


async def _until_between(turns: Iterable[Turn]) -> None:
    for turn in turns:
        await turn.between.wait()
