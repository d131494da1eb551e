"""A started vLLM engine, with what is known of it: every call into AsyncLLM is here. Knows no conversation and no state."""

import asyncio
import math
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from ostinato_engines.errors import (
    EngineCrashedError,
    EngineError,
    EngineInputError,
    UnsupportedError,
    WeightUpdateError,
)
from ostinato_engines.second_errors import second_to
from ostinato_engines.types import PauseMode, WeightManifest
from ostinato_engines.vllm_engine.checkpoint import CheckpointTensors
from ostinato_engines.vllm_engine.endpoint import ChatEndpoint, make_endpoint
from ostinato_engines.vllm_engine.engine_log import EngineLog
from ostinato_engines.vllm_engine.fan_out import send_to_all
from ostinato_engines.vllm_engine.held import (
    ANSWER_KEY,
    SERVE_VERSION,
    TAKE,
    HeldAnswer,
    decode_answer,
)
from ostinato_engines.vllm_engine.launch import LaunchOptions, start_engine
from ostinato_engines.vllm_engine.probe import VLLMParts, find_vllm
from ostinato_engines.weight_routes import WeightPlace, WeightRoute
from ostinato_engines.weight_transfer import WeightListener

if TYPE_CHECKING:
    from torch import Tensor

_LAST_WORD_S = 2.0
_REPLY_S = 600.0
"""Longest wait for a reply of the engine core: it may have to finish a step, or to move a whole model, before."""
_LOOK_S = 0.5
"""How often a wait looks whether the engine core still lives: vLLM leaves calls to a dead one unanswered."""


@dataclass(kw_only=True)
class RunningEngine:
    """One AsyncLLM."""

    llm: Any
    parts: VLLMParts
    chat: ChatEndpoint | None
    lora: Any
    tensors: CheckpointTensors | None
    why_no_update: str
    """Why weights cannot be updated; empty where they can."""
    why_no_hold: str
    """Why every token comes over by itself; empty where a request's outputs are held in the engine core until it ends."""
    why_row_by_row: str
    """Why vLLM draws seeded requests one after the other; empty where they are drawn together."""
    workers: tuple[WeightPlace, ...]
    """Where its workers have their weights, by rank."""
    _asked: set[str] = field(default_factory=set)
    _taken: dict[str, HeldAnswer] = field(default_factory=dict)

    @classmethod
    async def started(cls, options: LaunchOptions, log: EngineLog) -> Self:
        """Finds vLLM and starts it; see `VLLMServer.start` for what it raises."""
        parts = await asyncio.to_thread(find_vllm)
        llm, why_no_hold = await start_engine(options, parts, log)
        return await cls.of(llm, parts, options, why_no_hold)

    @classmethod
    async def of(cls, llm: Any, parts: VLLMParts, options: LaunchOptions, why_no_hold: str) -> Self:
        """Looks at a started engine; ends it where that fails."""
        try:
            # The answer is kept by vLLM: from now on a request is known to it as soon as it is sent.
            await llm.get_supported_tasks()
            obstacles = await llm.collective_rpc("ostinato_get_ready")
            places = await llm.collective_rpc("ostinato_place")
            tensors, why_not = _tensors_of(llm, options)
            adapter = None if options.lora is None else parts.lora_request("adapter", 1, options.lora)
            if adapter is not None:
                await llm.add_lora(adapter)
            chat = None
            if parts.chat is not None:
                chat = await make_endpoint(llm, options.model, adapter, parts.chat, parts.refusals)
        except BaseException as error:
            with second_to(error, "ending vllm"):
                await asyncio.to_thread(llm.shutdown)
            raise
        return cls(
            llm=llm,
            parts=parts,
            chat=chat,
            lora=adapter,
            tensors=tensors,
            why_no_update=why_not,
            why_no_hold=why_no_hold,
            why_row_by_row=next(filter(None, obstacles), ""),
            workers=tuple(WeightPlace(*place) for place in places),
        )

    @property
    def description(self) -> str:
        """For people: what runs, and what keeps it from being fast."""
        obstacles = "; ".join(filter(None, (self.why_no_hold, self.why_row_by_row)))
        return self.parts.versions + (f"; slower, since {obstacles}" if obstacles else "")

    @property
    def num_workers(self) -> int:
        """Processes that hold a part of the model."""
        return int(self.llm.vllm_config.parallel_config.world_size)

    @property
    def max_model_len(self) -> int:
        """Prompt and output together."""
        return int(self.llm.model_config.max_model_len)

    @property
    def vocab_size(self) -> int:
        """Ids below are valid."""
        return int(self.llm.model_config.get_vocab_size())

    @property
    def reuses_prefixes(self) -> bool:
        """Whether what is computed of a prompt serves those that begin alike."""
        return bool(self.llm.vllm_config.cache_config.enable_prefix_caching)

    @property
    def exact_spans(self) -> bool:
        """Whether it is known which tokens came from which weights."""
        return not self.why_no_hold or self.parts.weight_versions

    @property
    def kv_capacity_tokens(self) -> int | None:
        """Tokens that its cache holds, as newer ones tell it, or by its blocks; None where neither is known."""
        cache = self.llm.vllm_config.cache_config
        told = getattr(cache, "kv_cache_size_tokens", None) or (cache.num_gpu_blocks or 0) * (cache.block_size or 0)
        return int(told) or None

    @property
    def is_dead(self) -> bool:
        """Whether its processes are gone, or can no longer be heard."""
        return bool(self.llm.errored)

    async def generate(self, prompt: list[int], params: Any, engine_id: str) -> tuple[Any, HeldAnswer | None]:
        """The final output of one request, and what was held of it; cancelling it aborts it there."""
        last = None
        self._asked.add(engine_id)
        try:
            stream = self.llm.generate(self.parts.tokens_input(prompt), params, engine_id, lora_request=self.lora)
            async for output in stream:
                last = output
            if last is None:
                raise EngineError(f"vllm must answer a request, got nothing for {engine_id}")
            if self.why_no_hold:
                return last, None
            encoded = (last.kv_transfer_params or {}).get(ANSWER_KEY)
            answer = self._taken.get(engine_id) if encoded is None else decode_answer(encoded)
            if answer is None and last.outputs[0].finish_reason in ("stop", "length"):
                raise EngineError(f"vllm must hand over what was held of {engine_id}, got nothing; see its log")
            return last, answer
        finally:
            self._asked.discard(engine_id)
            self._taken.pop(engine_id, None)

    async def abort(self, engine_ids: Sequence[str] | None) -> None:
        """Ends requests, by default all that are held: their final outputs are queued when this returns."""
        if self.why_no_hold:
            ended = list(engine_ids or ())
        else:
            # Those that have ended are not found: their last outputs are on the way, with all that was held.
            taken = await self._order(TAKE, None if engine_ids is None else list(engine_ids), "end requests")
            ended = [name for name in taken if name in self._asked]
            self._taken.update((name, decode_answer(taken[name])) for name in ended)
        if ended:
            await self.llm.abort(ended)

    async def pause(self, mode: PauseMode) -> None:
        """Returns once nothing is being computed; the cache stays."""
        if mode is PauseMode.ABORT:
            await self.abort(None)
        await self._reply(self.llm.pause_generation(mode=mode.value, clear_cache=False), "pause")

    async def resume(self) -> None:
        """Computes again."""
        await self._reply(self.llm.resume_generation(), "resume")

    async def sleep(self, level: int) -> None:
        """Frees memory; requests end aborted."""
        await self.abort(None)
        await self._reply(self.llm.sleep(level), "sleep")

    async def wake_up(self, tags: list[str]) -> None:
        """Takes memory again."""
        await self._reply(self.llm.wake_up(tags), "wake up")

    async def reset_prefix_cache(self, *, is_paused: bool) -> None:
        """Drops all cached state, that of requests in flight only where vLLM cannot do it beside them."""
        if await self._reply(self.llm.reset_prefix_cache(), "reset its cache"):
            return
        if not is_paused:
            await self.pause(PauseMode.KEEP)
        await self._reset_all()
        if not is_paused:
            await self.resume()

    async def _reset_all(self) -> None:
        await self._reply(self.llm.reset_prefix_cache(reset_running_requests=True), "reset its cache")

    async def serve_version(self, version: int) -> None:
        """What tokens are said to come from, where account is kept."""
        if not self.why_no_hold:
            await self._order(SERVE_VERSION, version, "note the version")
        elif self.parts.weight_versions:
            await self._reply(self.llm.update_weight_version(str(version)), "note the version")

    async def _order(self, order: str, value: Any, what: str) -> Any:
        """Calls our scheduler; see `ostinato_engines.vllm_engine.holding`."""
        return await self._reply(self.llm.engine_core.call_utility_async("scheduler", order, value), what)

    async def _reply(self, call: Awaitable[Any], what: str, *, limit_s: float = _REPLY_S) -> Any:
        """What the engine core answers.

        Raises:
            EngineCrashedError: It died.
            EngineError: It did not answer in time.
        """
        task = asyncio.ensure_future(call)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        try:
            while not task.done():
                if self.is_dead:
                    raise EngineCrashedError(f"vllm must {what}, got no reply: its processes are gone; see its log")
                if loop.time() > deadline:
                    raise EngineError(f"vllm must {what} within {limit_s:g} s, got no reply; see its log")
                await asyncio.wait([task], timeout=_LOOK_S)
            return task.result()
        finally:
            task.cancel()

    async def shutdown(self) -> None:
        """Ends its processes."""
        # It would log the end of the processes as a failure.
        if (handler := getattr(self.llm, "output_handler", None)) is not None:
            handler.cancel()
            await asyncio.wait([handler])
        self.llm.output_processor.propagate_error(self.parts.dead_error())  # for whoever still waits
        await asyncio.to_thread(self.llm.shutdown)

    # Weights

    def check_manifest(self, manifest: WeightManifest) -> None:
        """Raises `ManifestError` unless it describes the checkpoint's tensors, `UnsupportedError` where none are taken."""
        if self.tensors is None:
            raise UnsupportedError(f"this engine cannot update its weights: {self.why_no_update}")
        self.tensors.check(manifest)

    async def replace_weights(
        self, manifest: WeightManifest, weights: "Iterable[tuple[str, Tensor]] | WeightRoute", *, is_awake: bool
    ) -> None:
        """New weights for what is sampled from now on; the engine is left paused.

        Nothing older is served afterwards: requests in flight lose their state and are computed anew.

        Args:
            manifest: What comes.
            weights: The tensors, or where the workers fetch them.
            is_awake: Whether something may be computed now.

        Raises:
            WeightUpdateError: The stream failed; everything in flight was aborted.
        """
        if is_awake:
            await self.pause(PauseMode.KEEP)
        try:
            if isinstance(weights, WeightRoute):
                await self._follow(manifest, weights)
            else:
                await self._send(manifest, weights)
            await self._reset_all()
            await self.serve_version(manifest.version)
        except BaseException as error:
            # Chat requests of vLLM's own endpoint are known to nobody else.
            if not self.is_dead:
                with second_to(error, "ending what is in flight"):
                    await self.pause(PauseMode.ABORT)
            raise

    async def _follow(self, manifest: WeightManifest, route: WeightRoute) -> None:
        """Has the workers fetch the tensors."""
        arguments = msgspec.json.encode(manifest).decode(), msgspec.json.encode(route).decode()
        follows = self.llm.collective_rpc("ostinato_follow_route", args=arguments)
        # Each wait of the workers has a limit, after which they answer; the whole takes as long as its source.
        answers = await self._reply(follows, "take the weights", limit_s=math.inf)
        if failures := [text for text in answers if text]:
            raise WeightUpdateError(f"workers must take the weights, got {failures}; send a complete update")

    async def _send(self, manifest: WeightManifest, weights: "Iterable[tuple[str, Tensor]]") -> None:
        """Streams through shared memory to the workers, each of which is told where to come for it."""
        with ExitStack() as stack:
            listeners = [stack.enter_context(WeightListener()) for _ in range(self.num_workers)]
            paths = [str(listener.path) for listener in listeners]
            receives = self.llm.collective_rpc("ostinato_receive_weights", args=(paths,))
            # Each message of the stream has a limit, the whole takes as long as its source.
            receiving = asyncio.ensure_future(self._reply(receives, "take the weights", limit_s=math.inf))
            sending = asyncio.ensure_future(send_to_all(listeners, manifest, weights, self.workers))
            try:
                await asyncio.wait([receiving, sending], return_when=asyncio.FIRST_COMPLETED)
                if not sending.done():
                    # Workers that give up before they come know why; where they came, the sender does.
                    await asyncio.wait([sending], timeout=_LAST_WORD_S)
                if not sending.done():
                    failures = [text for text in receiving.result() if text]
                    raise WeightUpdateError(f"workers must take the weights, got {failures}; send a complete update")
                await sending
            finally:
                sending.cancel()
                with suppress(Exception, asyncio.CancelledError):
                    await sending
                stack.close()  # a worker that comes too late is turned away
                with suppress(Exception):
                    await receiving


def _tensors_of(llm: Any, options: LaunchOptions) -> tuple[CheckpointTensors | None, str]:
    """What updates must name, or why there can be none."""
    config = llm.model_config
    if config.quantization is not None:
        return None, f"its weights are quantized ({config.quantization}); serve the checkpoint unquantized"
    try:
        dtype = str(config.dtype).removeprefix("torch.")
        tied = bool(getattr(config.hf_text_config, "tie_word_embeddings", False))
        return CheckpointTensors(Path(options.model), dtype=dtype, tied=tied, cast=options.cast_weights), ""
    except (UnsupportedError, EngineInputError) as error:
        return None, str(error)
