"""vLLM behind the contract: its AsyncLLM in this process, its model in processes of its own.

This module knows who waits and which state the engine is in; what it asks of vLLM is in `ostinato_engines.vllm_engine`.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato_engines.chat import answer_chat
from ostinato_engines.engine_status import SLEEP_TAGS, EngineStatus, check_level, checked_tags
from ostinato_engines.errors import (
    EngineClosedError,
    EngineError,
    EngineNotReadyError,
    UnsupportedError,
    WeightUpdateError,
)
from ostinato_engines.request import checked_prompt, refuse_double
from ostinato_engines.second_errors import second_to
from ostinato_engines.server import AsyncServerBase, ChatCodec
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
from ostinato_engines.vllm_engine.answers import nothing_sampled, until_gone
from ostinato_engines.vllm_engine.engine_log import EngineLog
from ostinato_engines.vllm_engine.launch import LaunchOptions, can_sleep
from ostinato_engines.vllm_engine.running import RunningEngine
from ostinato_engines.vllm_engine.traffic import Traffic
from ostinato_engines.weight_routes import WeightRoute

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_LAST_ANSWERS_S = 10.0
"""Longest wait at shutdown for what vLLM still has to say of requests."""


class VLLMServer(AsyncServerBase):
    """Serves one model with the vLLM that is installed, 0.25 or newer.

    Its processes are spawned: a program that starts one keeps its own start under `if __name__ == "__main__":`.

    Args:
        model: A checkpoint in the Hugging Face format; weight updates need its safetensors files.
        dtype: Of weights and cache; "auto" takes the checkpoint's. Logprobs are float32.
        max_model_len: Prompt and output together; by default what the model has positions for.
        max_num_seqs: Requests that are computed at a time.
        max_num_batched_tokens: Tokens that one step computes for all of them.
        tensor_parallel_size: Devices that share the model.
        gpu_memory_utilization: Part of a device's memory for weights and cache together.
        enforce_eager: Starts faster and runs slower: no graphs are captured.
        seed: Of what is sampled by requests that bring no seed.
        cast_weights: Accepts weight updates in another floating-point type, rounded to `dtype`.
        lora: A LoRA adapter that all requests use; weight updates then replace what is beneath it.
        chat_codec: Renders and parses for `chat_completion` where the checkpoint has no chat template of its own.
        engine_args: More of vLLM's engine arguments, checked by name.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float | None = None,
        enforce_eager: bool = False,
        seed: int = 0,
        cast_weights: bool = False,
        lora: str | Path | None = None,
        chat_codec: ChatCodec | None = None,
        engine_args: Mapping[str, Any] | None = None,
    ) -> None:
        self._options = LaunchOptions(
            model=str(model),
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            tensor_parallel_size=tensor_parallel_size,
            gpu_memory_utilization=gpu_memory_utilization,
            enforce_eager=enforce_eager,
            seed=seed,
            cast_weights=cast_weights,
            lora=None if lora is None else str(lora),
            more=dict(engine_args or {}),
        )
        self._codec = chat_codec
        if max_model_len is not None:
            self.max_model_len = max_model_len
        self._status = EngineStatus()
        self._engine: RunningEngine | None = None
        self._traffic: Traffic | None = None
        self._log = EngineLog()
        self._changing = asyncio.Lock()

    # Life

    async def start(self) -> None:
        """Starts vLLM and loads the model; a second call does nothing.

        Raises:
            MissingDependencyError: vLLM is not installed.
            UnsupportedError: The installed vLLM lacks something.
            EngineStartError: It did not come up; the message has the lines of its log that matter, and the likely cure.
        """
        async with self._changing:
            if self._status.closed:
                raise EngineClosedError("server must not be shut down before start, got closed; create a new one")
            if self._status.loaded:
                return
            self._engine = await RunningEngine.started(self._options, self._log)
            self._traffic = Traffic(self._engine, self._status, self._log, version=self.policy_version)
            await self._engine.serve_version(self.policy_version)
            self.max_model_len = self._engine.max_model_len
            self._status.loaded = True

    async def shutdown(self) -> None:
        """Fails requests in flight with `EngineClosedError` and ends vLLM's processes; a second call does nothing."""
        if self._status.closed:
            return
        self._status.closed = True
        engine, traffic = self._engine, self._traffic
        if engine is not None and traffic is not None:
            try:
                async with asyncio.timeout(_LAST_ANSWERS_S):
                    await traffic.fail_all(lambda name: EngineClosedError(f"request {name!r} must end before shutdown"))
            except Exception as error:  # whatever keeps it from answering, its processes are to end
                logger.warning("vllm does not answer at its shutdown (%s: %s)", type(error).__name__, error)
            await engine.shutdown()
        self._engine = self._traffic = None
        self._log.close()

    async def health(self) -> Health:
        engine, traffic = self._engine, self._traffic
        if engine is None or traffic is None:
            state, detail = self._status.now()
            return Health(state, self.policy_version, detail=detail)
        if self._status.failure is None and engine.is_dead:
            traffic.crashed(EngineError("its processes are gone"))
        state, detail = self._status.now()
        running = len(traffic.under_way())
        return Health(
            state,
            self.policy_version,
            num_running=running,
            num_waiting=len(traffic.requests) - running,
            detail=engine.description if state is EngineState.READY else detail,
        )

    def capabilities(self) -> Capabilities:
        engine = self._engine
        return Capabilities(
            engine="vllm" if engine is None else f"vllm {engine.parts.version}",
            logprobs=True,
            seeds=True,
            # Whole blocks of tokens; `num_cached_tokens` says how many.
            prefix_reuse=engine is not None and engine.reuses_prefixes,
            abort=True,
            pause_modes=tuple(PauseMode),
            sleep_levels=(1, 2) if engine is not None and can_sleep(engine.parts) else (),
            weight_update=engine is not None and not engine.why_no_update,
            partial_updates=engine is not None and not engine.why_no_update,
            weight_workers=() if engine is None or engine.why_no_update else engine.workers,
            exact_policy_spans=engine is not None and engine.exact_spans,
            chat_completion=self._codec is not None or (engine is not None and engine.chat is not None),
            kv_capacity_tokens=None if engine is None else engine.kv_capacity_tokens,
        )

    def _started(self) -> tuple[RunningEngine, Traffic]:
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
        refuse_double(request_id, traffic.requests)
        room = self.max_model_len - len(prompt)
        num_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        if num_tokens == 0:
            return nothing_sampled(params, StopReason.LENGTH, self.policy_version)
        return await traffic.serve(request_id, prompt.tolist(), params, num_tokens)

    async def chat_completion(self, raw_request: Any) -> dict[str, Any]:
        """Answers an OpenAI-style request through vLLM's own endpoint, or through the injected codec.

        With a codec, the codec answers. vLLM's endpoint takes the fields that it knows; others are refused.
        """
        if self._codec is not None:
            return await answer_chat(self, self._codec, raw_request)
        self._status.require_serving()
        engine, traffic = self._started()
        if engine.chat is None:
            raise UnsupportedError(
                "chat_completion must have a chat template in the checkpoint or a ChatCodec, got neither; "
                "pass VLLMServer(..., chat_codec=...)"
            )
        try:
            return await engine.chat.answer(raw_request)
        except engine.parts.dead_error as error:
            raise traffic.crashed(error) from error

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        _, traffic = self._started()
        return await traffic.abort(list(traffic.requests) if request_ids is None else request_ids)

    # Pause and sleep

    async def pause(self, mode: PauseMode = PauseMode.ABORT) -> None:
        """Stops sampling; see `PauseMode` for what becomes of requests in flight. Later requests wait for `resume`."""
        mode = PauseMode(mode)
        engine, traffic = self._started()
        before, self._status.paused = self._status.paused, mode
        under_way = traffic.under_way()
        if mode is PauseMode.WAIT:
            if before is PauseMode.KEEP and not self._status.stale and not self._status.asleep:
                await engine.resume()  # those that it keeps are to end
            # vLLM itself would leave those in its queue that it has not begun.
            for request in under_way:
                await request.gone.wait()
            if self._status.paused is not mode:
                return
        await engine.pause(mode)
        if mode is PauseMode.ABORT:
            await until_gone(under_way)

    async def resume(self) -> None:
        engine, traffic = self._started()
        self._status.paused = None
        if not self._status.stale and not self._status.asleep:
            await engine.resume()
        for request in traffic.requests.values():
            request.leave_gate(True)

    async def sleep(self, level: int = 1) -> None:
        """Frees a device's memory: level 1 the cache, with the weights kept in the host's memory, level 2 the weights too.

        Requests in flight end aborted. After level 2 the engine serves only once it was woken and got a complete update.
        """
        engine, traffic = self._started()
        if not can_sleep(engine.parts):
            await super().sleep(level)
        check_level(level)
        async with self._changing:
            self._status.asleep.update(SLEEP_TAGS)
            self._status.stale = self._status.stale or level == 2  # also where no answer is waited for
            doomed = list(traffic.requests.values())
            for request in doomed:
                request.leave_gate(False)
            await engine.sleep(level)
            await until_gone(doomed)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        wanted = checked_tags(tags)
        engine, _ = self._started()
        async with self._changing:
            if waking := sorted(wanted & self._status.asleep):
                await engine.wake_up(waking)
            self._status.asleep -= wanted
            if not self._status.asleep and self._status.paused is None and not self._status.stale:
                await engine.resume()

    # Weights

    async def update_weights(self, manifest: WeightManifest, weights: "Iterable[tuple[str, Tensor]]") -> None:
        """Replaces the weights while nothing is computed; requests in flight are computed anew under the new ones and go on.

        The stream goes through shared memory to vLLM's worker; names, shapes and types are the checkpoint's. See
        `AsyncServerBase.update_weights` for what a failure means.
        """
        await self._replace_weights(manifest, weights)

    async def receive_weights(self, manifest: WeightManifest, route: WeightRoute) -> None:
        await self._replace_weights(manifest, route)

    async def _replace_weights(
        self, manifest: WeightManifest, weights: "Iterable[tuple[str, Tensor]] | WeightRoute"
    ) -> None:
        engine, traffic = self._started()
        engine.check_manifest(manifest)
        async with self._changing:
            self._status.require_loaded()
            self._status.require_awake_weights()
            self._status.require_base(manifest)
            self._status.begin_update()
            try:
                await engine.replace_weights(manifest, weights, is_awake=not self._status.asleep)
            except BaseException as error:
                with second_to(error, "answering the requests in flight"):
                    await traffic.fail_all(
                        lambda name: EngineNotReadyError(
                            f"request {name!r} must have complete weights, got a failed update; send a complete one"
                        )
                    )
                if engine.is_dead:
                    raise traffic.crashed(error) from error
                if isinstance(error, EngineError) or not isinstance(error, Exception):
                    raise
                raise WeightUpdateError(
                    f"vllm must take the weights, got {type(error).__name__}: {error}; send a complete update"
                ) from error
            self.policy_version = manifest.version
            traffic.note_update(manifest.version)
            self._status.end_update(manifest)
            if self._status.paused is None and not self._status.asleep:
                await engine.resume()

    async def reset_prefix_cache(self) -> None:
        """Forgets all cached state; requests in flight are computed anew where vLLM cannot do it beside them."""
        engine, _ = self._started()
        async with self._changing:
            await engine.reset_prefix_cache(is_paused=self._status.paused is not None)


__all__ = ["VLLMServer"]
