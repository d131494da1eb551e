"""SGLang behind the contract: a server process of its own, asked through its native endpoints.

This module knows who waits and which state the engine is in; what it asks of SGLang is in `ostinato_engines.sglang_engine`.
"""

import asyncio
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato_engines.chat import answer_chat, decoded_body
from ostinato_engines.engine_status import SLEEP_TAGS, EngineStatus, check_level, checked_tags
from ostinato_engines.errors import (
    EngineClosedError,
    EngineError,
    EngineInputError,
    EngineNotReadyError,
    UnsupportedError,
)
from ostinato_engines.request import checked_prompt, refuse_double
from ostinato_engines.server import AsyncServerBase, ChatCodec
from ostinato_engines.sglang_engine.device_weights import DeviceWeights
from ostinato_engines.sglang_engine.launch import LaunchOptions
from ostinato_engines.sglang_engine.running import CHAT
from ostinato_engines.sglang_engine.staging import staged_weights
from ostinato_engines.sglang_engine.starting import StartedEngine, start_engine
from ostinato_engines.sglang_engine.traffic import Traffic, until_gone
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
        share_device: Weight updates lie on a device that SGLang sees, too, and go from there to its own memory.
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
        share_device: bool = False,
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
        self._share_device = share_device
        self._start_timeout_s = start_timeout_s
        self._codec = chat_codec
        self._random = random.Random(seed)
        if max_model_len is not None:
            self.max_model_len = max_model_len
        self._status = EngineStatus()
        self._engine: StartedEngine | None = None
        self._traffic: Traffic | None = None
        self._changing = asyncio.Lock()

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
            self._traffic = Traffic(self._engine, self._status, version=self.policy_version)
            self.max_model_len = self._engine.max_model_len
            self._status.loaded = True

    async def shutdown(self) -> None:
        """Fails requests in flight with `EngineClosedError` and ends SGLang's processes; a second call does nothing."""
        if self._status.closed:
            return
        self._status.closed = True
        engine, traffic = self._engine, self._traffic
        if engine is not None and traffic is not None:
            traffic.fail_all(lambda name: EngineClosedError(f"request {name!r} must end before shutdown"))
            # What is in flight needs no more of it.
            await engine.process.end(gently=not traffic.turns)
            await until_gone(traffic.turns.values())

    async def health(self) -> Health:
        engine, traffic = self._engine, self._traffic
        if engine is None or traffic is None:
            state, detail = self._status.now()
            return Health(state, self.policy_version, detail=detail)
        if self._status.failure is None and not engine.process.is_running:
            traffic.crashed(EngineError("its process is gone"))
        state, detail = self._status.now()
        running = sum(turn.gate is None for turn in traffic.turns.values())
        return Health(
            state,
            self.policy_version,
            num_running=running,
            num_waiting=len(traffic.turns) - running,
            detail=engine.versions if state is EngineState.READY else detail,
        )

    @property
    def versions(self) -> str:
        """Of SGLang and what it runs on; empty before it has started."""
        return "" if self._engine is None else self._engine.versions

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
            kv_capacity_tokens=engine.running.info.max_total_num_tokens,
            chat_completion=self._codec is not None or self._has_endpoint(engine),
        )

    def _has_endpoint(self, engine: StartedEngine) -> bool:
        return self._options.has_chat and CHAT in engine.running.endpoints

    def _started(self) -> tuple[StartedEngine, Traffic]:
        """The engine of a server that is neither new, nor crashed, nor shut down, and what is under way there."""
        self._status.require_loaded()
        assert self._engine is not None
        assert self._traffic is not None
        return self._engine, self._traffic

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
        engine, traffic = self._started()
        prompt = checked_prompt(prompt_ids, vocab_size=engine.vocab_size, max_model_len=self.max_model_len)
        refuse_double(request_id, traffic.turns)
        room = self.max_model_len - len(prompt)
        num_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        turn = Turn(prompt.tolist(), params, num_tokens, seed, version=self.policy_version)
        if num_tokens == 0:
            turn.num_cached = 0
            return turn.output(StopReason.LENGTH)
        return await traffic.serve(request_id, turn)

    async def chat_completion(self, raw_request: Any) -> dict[str, Any]:
        """Answers an OpenAI-style request through SGLang's own endpoint, or through the injected codec.

        SGLang's endpoint takes the fields that it knows; others are refused. What it is answering ends aborted where the
        server pauses with `PauseMode.ABORT`, sleeps or gets new weights.
        """
        if self._codec is not None:
            return await answer_chat(self, self._codec, raw_request)
        self._status.require_serving()
        engine, traffic = self._started()
        if not self._has_endpoint(engine):
            raise UnsupportedError(
                "chat_completion must have a tokenizer in the checkpoint or a ChatCodec, got neither; "
                "pass SGLangServer(..., chat_codec=...)"
            )
        request = await decoded_body(raw_request)
        if not isinstance(request, Mapping):
            raise EngineInputError(
                f"raw_request must be a mapping, got {type(request).__name__}; decode the body first"
            )
        engine.running.check_chat(request)
        try:
            return await engine.running.chat({"model": self._options.model, **request})
        except OSError as error:
            raise await traffic.lost(error) from error

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        _, traffic = self._started()
        names = list(traffic.turns) if request_ids is None else request_ids
        found = [traffic.turns[name] for name in dict.fromkeys(names) if name in traffic.turns]
        await traffic.halt(found, Halt.ABORT)
        await until_gone(found)
        return sum(turn.aborted for turn in found)

    # Pause and sleep

    async def pause(self, mode: PauseMode = PauseMode.ABORT) -> None:
        """Stops sampling; see `PauseMode` for what becomes of requests in flight. Later requests wait for `resume`."""
        mode = PauseMode(mode)
        _, traffic = self._started()
        self._status.paused = mode
        under_way = [turn for turn in traffic.turns.values() if turn.rid]
        if mode is PauseMode.KEEP:
            await traffic.freeze()
        elif mode is PauseMode.WAIT:
            await traffic.thaw()
            for turn in under_way:
                await turn.gone.wait()
        else:
            await traffic.halt(under_way, Halt.ABORT)
            await until_gone(under_way)

    async def resume(self) -> None:
        _, traffic = self._started()
        self._status.paused = None
        await traffic.thaw()
        traffic.open_gates()

    async def sleep(self, level: int = 1) -> None:
        """Frees a device's memory: level 1 the cache, level 2 the weights too; both keep their captured graphs.

        Requests in flight end aborted. After level 2 the engine serves only once it was woken and got a complete update.
        """
        engine, traffic = self._started()
        if not engine.running.can_sleep:
            await super().sleep(level)
        check_level(level)
        async with self._changing:
            self._status.require_loaded()
            new = set(SLEEP_TAGS[:level]) - self._status.asleep
            doomed = list(traffic.turns.values())
            was_awake = not self._status.asleep
            self._status.asleep |= new
            self._status.stale = self._status.stale or level == 2
            if was_awake:
                await traffic.clear(Halt.ABORT)
                await until_gone(doomed)
            if new:
                await engine.running.release_memory(new)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        wanted = checked_tags(tags)
        engine, _ = self._started()
        async with self._changing:
            self._status.require_loaded()
            if waking := wanted & self._status.asleep:
                await engine.running.resume_memory(waking)
                self._status.asleep -= waking

    # Weights

    async def update_weights(self, manifest: WeightManifest, weights: "Iterable[tuple[str, Tensor]]") -> None:
        """Replaces the weights; requests in flight are computed anew under the new ones and go on.

        The stream is written to a file in the host's memory while sampling goes on, and loaded from there while nothing is
        computed; with `share_device` it is copied from device to device. Names, shapes and types are the checkpoint's. See
        `AsyncServerBase.update_weights` for what a failure means.
        """
        engine, traffic = self._started()
        engine.check_manifest(manifest)
        self._status.require_base(manifest)  # which it never has: it takes whole updates only
        async with self._changing:
            self._status.require_loaded()
            self._status.require_awake_weights()
            try:
                if self._share_device:
                    traffic.holding = True
                    await traffic.clear(Halt.INTERRUPT)
                    ranks = self._options.tensor_parallel_size
                    await engine.running.take_weights(
                        DeviceWeights(manifest, weights), manifest.version, num_ranks=ranks
                    )
                else:
                    async with staged_weights(manifest, weights) as folder:
                        traffic.holding = True
                        await traffic.clear(Halt.INTERRUPT)
                        await engine.running.load_weights(str(folder), manifest.version)
            except BaseException as error:
                self._status.stale = True
                traffic.fail_all(
                    lambda name: EngineNotReadyError(
                        f"request {name!r} must have complete weights, got a failed update; send a complete one"
                    )
                )
                if isinstance(error, OSError):
                    raise await traffic.lost(error) from error
                raise
            finally:
                traffic.holding = False
            self.policy_version = traffic.version = manifest.version
            self._status.stale = False
            traffic.open_gates()

    async def reset_prefix_cache(self) -> None:
        """Forgets all cached state; requests in flight are computed anew."""
        _, traffic = self._started()
        async with self._changing:
            if self._status.asleep:
                return  # what sleeps was forgotten
            traffic.holding = True
            try:
                await traffic.clear(Halt.INTERRUPT)
            finally:
                traffic.holding = False
                traffic.open_gates()


__all__ = ["SGLangServer"]
