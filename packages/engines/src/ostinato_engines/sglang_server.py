"""SGLang behind the contract: a server process of its own, asked through its native endpoints.

This module knows who waits and which state the engine is in; what it asks of SGLang is in `ostinato_engines.sglang_engine`.
"""

import asyncio
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato_engines.chat import answer_chat, decoded_body
from ostinato_engines.engine_status import EngineStatus
from ostinato_engines.errors import (
    EngineClosedError,
    EngineCrashedError,
    EngineError,
    EngineInputError,
    EngineNotReadyError,
    UnsupportedError,
    WeightUpdateError,
)
from ostinato_engines.request import checked_prompt
from ostinato_engines.server import AsyncServerBase, ChatCodec
from ostinato_engines.sglang_engine.launch import LaunchOptions
from ostinato_engines.sglang_engine.protocol import sampling_body
from ostinato_engines.sglang_engine.running import CHAT
from ostinato_engines.sglang_engine.staging import staged_weights
from ostinato_engines.sglang_engine.starting import StartedEngine, start_engine
from ostinato_engines.sglang_engine.turn import Halt, Turn
from ostinato_engines.types import (
    Capabilities,
    EngineState,
    Health,
    PauseMode,
    SamplingParams,
    StopReason,
    TokenOutput,
    WeightManifest,
)

if TYPE_CHECKING:
    from torch import Tensor

SLEEP_TAGS = ("kv_cache", "weights")
_ANSWER_S = 60.0
_AGAIN_S = 0.1
"""An abort that came before its request is repeated after so long."""
_LAST_WORD_S = 10.0


class SGLangServer(AsyncServerBase):
    """Serves one model with SGLang 0.5.17 or newer.

    Args:
        model: A folder with a checkpoint in the Hugging Face format; weight updates need its safetensors files.
        python: The interpreter whose environment has SGLang; it need not have this package.
        dtype: Of weights and cache; "auto" takes the checkpoint's. Logprobs are float32.
        max_model_len: Prompt and output together; by default what the model has positions for.
        max_num_seqs: Requests that are computed at a time.
        max_num_batched_tokens: Prompt tokens that are computed at a time.
        tensor_parallel_size: Devices that share the model.
        gpu_memory_utilization: Part of a device's memory for weights and cache together.
        enforce_eager: Starts faster and runs slower: no graphs are captured.
        seed: Of what is sampled by requests that bring no seed.
        cast_weights: Accepts weight updates in another floating-point type, rounded to `dtype`.
        chat_codec: Renders and parses for `chat_completion`, instead of SGLang's endpoint.
        engine_args: More of SGLang's arguments by name; `python -m sglang.launch_server --help` lists them.
        environment: Variables of SGLang's processes beside those of this one.
        launcher: The command that takes SGLang's arguments, instead of `python -m sglang.launch_server`.
        start_timeout_s: Longest wait for the engine to start.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        python: str | Path = sys.executable,
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float | None = None,
        enforce_eager: bool = False,
        seed: int = 0,
        cast_weights: bool = False,
        chat_codec: ChatCodec | None = None,
        engine_args: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
        start_timeout_s: float = 900.0,
    ) -> None:
        self._options = LaunchOptions(
            model=str(Path(model).absolute()),
            python=str(python),
            launcher=tuple(launcher),
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            tensor_parallel_size=tensor_parallel_size,
            gpu_memory_utilization=gpu_memory_utilization,
            enforce_eager=enforce_eager,
            seed=seed,
            cast_weights=cast_weights,
            own_chat=chat_codec is not None,
            environment=dict(environment or {}),
            more=dict(engine_args or {}),
        )
        self._start_timeout_s = start_timeout_s
        self._codec = chat_codec
        self._random = random.Random(seed)
        if max_model_len is not None:
            self.max_model_len = max_model_len
        self._status = EngineStatus()
        self._engine: StartedEngine | None = None
        self._in_flight: dict[str, Turn] = {}
        self._legs = 0
        self._serial = itertools.count()
        self._changing = asyncio.Lock()
        self._holding = False
        """New weights are being loaded: no leg begins."""
        self._frozen = False
        """SGLang itself stands still with what it had begun."""
        self._farewells: set[asyncio.Task[None]] = set()

    # Life

    async def start(self) -> None:
        """Starts SGLang and loads the model; a second call does nothing.

        Raises:
            MissingDependencyError: The interpreter has no SGLang.
            UnsupportedError: Its SGLang lacks something.
            EngineStartError: It did not come up; the message has the lines of its log that matter, and the likely cure.
        """
        async with self._changing:
            if self._status.closed:
                raise EngineClosedError("server must not be shut down before start, got closed; create a new one")
            if self._status.loaded:
                return
            self._engine = await start_engine(self._options, timeout_s=self._start_timeout_s)
            self.max_model_len = self._engine.max_model_len
            self._status.loaded = True

    async def shutdown(self) -> None:
        """Fails requests in flight with `EngineClosedError` and ends SGLang's processes; a second call does nothing."""
        if self._status.closed:
            return
        self._status.closed = True
        self._fail_all(lambda name: EngineClosedError(f"request {name!r} must end before shutdown"))
        for task in list(self._farewells):
            task.cancel()
        engine, self._engine = self._engine, None
        if engine is not None:
            # Requests in flight need no more of it.
            await engine.process.end(gently=not self._in_flight)
            await _until_gone(self._in_flight.values())

    async def health(self) -> Health:
        engine = self._engine
        if engine is not None and self._status.failure is None and not engine.process.is_running:
            self._crashed(EngineError("its process is gone"))
        state, detail = self._status.now()
        if state is EngineState.READY and engine is not None:
            detail = engine.versions
        running = sum(turn.gate is None for turn in self._in_flight.values())
        return Health(
            state, self.policy_version, num_running=running, num_waiting=len(self._in_flight) - running, detail=detail
        )

    def capabilities(self) -> Capabilities:
        engine = self._engine
        if engine is None:
            return Capabilities(engine="sglang")
        return Capabilities(
            engine=f"sglang {engine.running.info.version}",
            logprobs=True,
            seeds=True,
            prefix_reuse=engine.running.reuses_prefixes,
            abort=True,
            pause_modes=tuple(PauseMode),
            sleep_levels=(1, 2) if engine.running.can_sleep else (),
            weight_update=not engine.why_no_update,
            exact_policy_spans=True,
            chat_completion=self._codec is not None or self._has_endpoint(engine),
        )

    def _has_endpoint(self, engine: StartedEngine) -> bool:
        return self._options.has_chat and CHAT in engine.running.endpoints

    def _started(self) -> StartedEngine:
        """The engine of a server that is neither new, nor crashed, nor shut down."""
        self._status.require_loaded()
        assert self._engine is not None
        return self._engine

    # Requests

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams | Mapping[str, Any],
        request_id: str,
        media: Sequence[Any] = (),
    ) -> TokenOutput:
        """Continues a prompt; see `AsyncServerBase.generate`.

        A prompt that fills `max_model_len` ends at once with `StopReason.LENGTH` and no tokens. Ids beyond the stop ids
        of the request stop nothing.
        """
        self.refuse_media(media)
        params = SamplingParams.from_mapping(sampling_params)
        self._status.require_serving()
        engine = self._started()
        prompt = checked_prompt(prompt_ids, vocab_size=engine.vocab_size, max_model_len=self.max_model_len)
        if request_id in self._in_flight:
            raise EngineInputError(
                f"request_id must not be in flight, got {request_id!r}; await its turn, or use another id per sample"
            )
        room = self.max_model_len - len(prompt)
        num_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        turn = Turn(prompt.tolist(), params, num_tokens, seed, version=self.policy_version)
        if num_tokens == 0:
            turn.num_cached = 0
            return turn.output(StopReason.LENGTH)
        self._in_flight[request_id] = turn
        try:
            reason = await self._sample(turn)
            turn.aborted = reason is StopReason.ABORTED
            return turn.output(reason)
        finally:
            del self._in_flight[request_id]
            turn.gone.set()

    async def _sample(self, turn: Turn) -> StopReason:
        """All legs of a request."""
        while True:
            if not await self._pass_gate(turn):
                return StopReason.ABORTED
            engine = self._started()
            body = {
                "rid": f"ostinato-{next(self._serial):012d}",
                "input_ids": [*turn.prompt, *turn.token_ids],
                "sampling_params": sampling_body(
                    turn.params, max_new_tokens=turn.num_left, seed=turn.seed, vocab_size=engine.vocab_size
                ),
                "return_logprob": turn.params.logprobs,
            }
            turn.begin_leg(body["rid"], self.policy_version)
            self._legs += 1
            try:
                reason = await self._leg(engine, turn, body)
            finally:
                turn.end_leg()
                self._legs -= 1
                self._open_gates()
            if reason is not None:
                return reason

    async def _pass_gate(self, turn: Turn) -> bool:
        """Waits until a leg may begin; whether the request goes on."""
        while self._is_shut or self._legs >= self._started().max_legs:
            turn.gate = asyncio.get_running_loop().create_future()
            if not await turn.gate:
                return False
            self._status.require_serving()
        turn.gate = None
        return True

    @property
    def _is_shut(self) -> bool:
        return self._holding or self._status.paused is not None

    def _open_gates(self) -> None:
        """Lets as many requests go on as there is room for, those that came first before the others."""
        if self._is_shut or self._engine is None:
            return
        room = self._engine.max_legs - self._legs
        waiting = (turn for turn in self._in_flight.values() if turn.gate is not None and not turn.gate.done())
        for turn in itertools.islice(waiting, max(room, 0)):
            turn.leave_gate(True)

    async def _leg(self, engine: StartedEngine, turn: Turn, body: dict[str, Any]) -> StopReason | None:
        """One request to SGLang; the reason with which the turn ends, None where another leg follows."""
        try:
            answer = await engine.running.generate(body)
        except asyncio.CancelledError:
            self._say_farewell(engine, turn.rid)
            raise
        except OSError as error:
            raise turn.failure or await self._lost(error) from error
        if turn.failure is not None:
            raise turn.failure
        return turn.take(answer)

    def _say_farewell(self, engine: StartedEngine, rid: str) -> None:
        """SGLang looks after connections that are gone only now and then: it is told."""

        async def farewell() -> None:
            with suppress(EngineError, OSError):
                await engine.running.abort([rid])

        task = asyncio.ensure_future(farewell())
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)

    async def chat_completion(self, raw_request: Any) -> dict[str, Any]:
        """Answers an OpenAI-style request through SGLang's own endpoint, or through the injected codec.

        SGLang's endpoint takes the fields that it knows; others are refused. What it is answering ends aborted where the
        server pauses with `PauseMode.ABORT`, sleeps or gets new weights.
        """
        if self._codec is not None:
            return await answer_chat(self, self._codec, raw_request)
        self._status.require_serving()
        engine = self._started()
        if not self._has_endpoint(engine):
            raise UnsupportedError(
                "chat_completion must have a tokenizer in the checkpoint or a ChatCodec, got neither; "
                "pass SGLangServer(..., chat_codec=...)"
            )
        request = dict(await decoded_body(raw_request))
        known = engine.running.chat_fields
        if unknown := [key for key in request if known and key not in known]:
            raise EngineInputError(
                f"chat request must hold fields that sglang knows, got {unknown[0]!r}; remove it, or mend its name"
            )
        if request.get("stream"):
            raise EngineInputError("stream must be false, got true; ask for whole answers")
        try:
            return await engine.running.chat({"model": self._options.model, **request})
        except OSError as error:
            raise await self._lost(error) from error

    # Ending what is under way

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        self._started()
        names = list(self._in_flight) if request_ids is None else request_ids
        found = [self._in_flight[name] for name in dict.fromkeys(names) if name in self._in_flight]
        await self._halt(found, Halt.ABORT)
        await _until_gone(found)
        return sum(turn.aborted for turn in found)

    async def _halt(self, turns: Sequence[Turn], halt: Halt) -> None:
        """Returns once these have no leg under way: they end aborted, or go on when the gate opens."""
        for turn in turns:
            if halt is Halt.ABORT:
                turn.leave_gate(False)
            if turn.rid:
                turn.halt = halt
        await self._thaw()
        async with asyncio.timeout(_ANSWER_S):
            while legs := [turn for turn in turns if turn.rid]:
                engine = self._started()
                try:
                    await engine.running.abort([turn.rid for turn in legs if turn.rid])
                except OSError as error:
                    raise await self._lost(error) from error
                with suppress(TimeoutError):
                    await asyncio.wait_for(_until_between(legs), _AGAIN_S)

    async def _clear(self, halt: Halt) -> None:
        """Ends or interrupts everything, chat and what nobody waits for included, and forgets all cached state."""
        turns = list(self._in_flight.values())
        if halt is Halt.ABORT:
            for turn in turns:
                turn.leave_gate(False)
        legs = [turn for turn in turns if turn.rid]
        for turn in legs:
            turn.halt = halt
        await self._thaw()
        engine = self._started()
        async with asyncio.timeout(_ANSWER_S):
            await engine.running.abort_all()
            await self._halt(legs, halt)
        await engine.running.drop_cache()

    async def _thaw(self) -> None:
        """What SGLang froze ends only once it computes."""
        if self._frozen:
            await self._started().running.thaw()
            self._frozen = False

    def _fail_all(self, error_for: Callable[[str], EngineError]) -> None:
        """Answers everybody with an error."""
        for name, turn in self._in_flight.items():
            turn.failure = failure = error_for(name)
            turn.leave_gate(failure)

    async def _lost(self, error: OSError) -> EngineError:
        """What a call gets whose connection broke off: the end of the engine, where that is why."""
        engine = self._engine
        if engine is not None and not self._status.closed:
            with suppress(TimeoutError):
                await asyncio.wait_for(engine.process.ended(), _LAST_WORD_S)
        if self._status.closed or engine is None:
            return EngineClosedError("server must be running, is shut down; create a new server")
        if engine.process.is_running:
            return EngineCrashedError(f"sglang must answer, got {type(error).__name__}: {error}; ask again")
        return self._crashed(error)

    def _crashed(self, error: BaseException) -> EngineCrashedError:
        """Notes that the engine is dead, and why, as far as its log tells."""
        assert self._engine is not None
        crash = EngineCrashedError(f"engine must not crash, got an error:{self._engine.explain(error)}")
        if self._status.failure is None and not self._status.closed:
            self._status.failure = crash
        return crash

    # Pause and sleep

    async def pause(self, mode: PauseMode = PauseMode.ABORT) -> None:
        """Stops sampling; see `PauseMode` for what becomes of requests in flight. Later requests wait for `resume`."""
        mode = PauseMode(mode)
        engine = self._started()
        self._status.paused = mode
        under_way = [turn for turn in self._in_flight.values() if turn.rid]
        if mode is PauseMode.KEEP:
            if under_way:
                self._frozen = True
                await engine.running.freeze()
        elif mode is PauseMode.WAIT:
            await self._thaw()
            for turn in under_way:
                await turn.gone.wait()
        else:
            await self._halt(under_way, Halt.ABORT)
            await _until_gone(under_way)

    async def resume(self) -> None:
        self._started()
        self._status.paused = None
        await self._thaw()
        self._open_gates()

    async def sleep(self, level: int = 1) -> None:
        """Frees a device's memory: level 1 the cache, level 2 the weights too; both keep their captured graphs.

        Requests in flight end aborted. After level 2 the engine serves only once it was woken and got a complete update.
        """
        engine = self._started()
        if not engine.running.can_sleep:
            await super().sleep(level)
        if level not in (1, 2):
            raise EngineInputError(f"level must be 1 or 2, got {level!r}; 1 frees the cache, 2 the weights as well")
        async with self._changing:
            self._status.require_loaded()
            new = set(SLEEP_TAGS[:level]) - self._status.asleep
            doomed = list(self._in_flight.values())
            was_awake = not self._status.asleep
            self._status.asleep |= new
            self._status.stale = self._status.stale or level == 2
            if was_awake:
                await self._clear(Halt.ABORT)
                await _until_gone(doomed)
            if new:
                await engine.running.release_memory(new)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        wanted = set(SLEEP_TAGS if tags is None else tags)
        if unknown := wanted - set(SLEEP_TAGS):
            raise EngineInputError(f"tags must be among {', '.join(SLEEP_TAGS)}, got {unknown.pop()!r}; None wakes all")
        engine = self._started()
        async with self._changing:
            self._status.require_loaded()
            if waking := wanted & self._status.asleep:
                await engine.running.resume_memory(waking)
                self._status.asleep -= waking

    # Weights

    async def update_weights(self, manifest: WeightManifest, weights: "Iterable[tuple[str, Tensor]]") -> None:
        """Replaces the weights; requests in flight are computed anew under the new ones and go on.

        The stream is written to a file in the host's memory while sampling goes on, and loaded from there while nothing is
        computed; names, shapes and types are the checkpoint's. See `AsyncServerBase.update_weights` for what a failure
        means.
        """
        self._started().check_manifest(manifest)
        async with self._changing:
            engine = self._started()
            if "weights" in self._status.asleep:
                raise EngineNotReadyError("weights must be awake, are asleep; call wake_up(['weights']) first")
            try:
                async with staged_weights(manifest, weights) as folder:
                    self._holding = True
                    await self._clear(Halt.INTERRUPT)
                    self._status.stale = True
                    await engine.running.load_weights(str(folder), manifest.version)
            except BaseException as error:
                raise await self._update_failed(error) from error
            finally:
                self._holding = False
            self.policy_version = manifest.version
            self._status.stale = False
            self._open_gates()

    async def _update_failed(self, error: BaseException) -> BaseException:
        """Everybody learns that there are no complete weights; what the caller of the update gets."""
        self._status.stale = True
        self._fail_all(
            lambda name: EngineNotReadyError(
                f"request {name!r} must have complete weights, got a failed update; send a complete one"
            )
        )
        if not isinstance(error, Exception):
            return error
        with suppress(EngineError, OSError, TimeoutError):
            await self._clear(Halt.ABORT)
        if isinstance(error, OSError):
            return await self._lost(error)
        if isinstance(error, EngineError):
            return error
        return WeightUpdateError(
            f"sglang must take the weights, got {type(error).__name__}: {error}; send a complete update"
        )

    async def reset_prefix_cache(self) -> None:
        """Forgets all cached state; requests in flight are computed anew."""
        self._started()
        async with self._changing:
            if self._status.asleep:
                return
            self._holding = True
            try:
                await self._clear(Halt.INTERRUPT)
            finally:
                self._holding = False
                self._open_gates()


async def _until_between(turns: Iterable[Turn]) -> None:
    for turn in turns:
        await turn.between.wait()


async def _until_gone(turns: Iterable[Turn]) -> None:
    """Returns once those who wait for these requests have their answers."""
    async with asyncio.timeout(_ANSWER_S):
        for turn in list(turns):
            await turn.gone.wait()


__all__ = ["SGLangServer"]
