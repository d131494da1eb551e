"""A started vLLM engine, with what is known of it: every call into AsyncLLM is here. Knows no conversation and no state."""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ostinato_engines.errors import EngineError, EngineInputError, UnsupportedError, WeightUpdateError
from ostinato_engines.types import PauseMode, WeightManifest
from ostinato_engines.vllm_engine.checkpoint import CheckpointTensors
from ostinato_engines.vllm_engine.endpoint import ChatEndpoint, make_endpoint
from ostinato_engines.vllm_engine.fan_out import send_to_all
from ostinato_engines.vllm_engine.launch import LaunchOptions
from ostinato_engines.vllm_engine.probe import VLLMParts
from ostinato_engines.weight_transfer import WeightListener

if TYPE_CHECKING:
    from torch import Tensor

_LAST_WORD_S = 2.0


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

    @classmethod
    async def of(cls, llm: Any, parts: VLLMParts, options: LaunchOptions) -> Self:
        """Looks at a started engine; ends it where that fails."""
        try:
            # The answer is kept by vLLM: from now on a request is known to it as soon as it is sent.
            await llm.get_supported_tasks()
            tensors, why_not = _tensors_of(llm, options)
            chat = None if parts.chat is None else await make_endpoint(llm, options.model, parts.chat, parts.refusals)
            adapter = None if options.lora is None else parts.lora_request("adapter", 1, options.lora)
            if adapter is not None:
                await llm.add_lora(adapter)
        except BaseException:
            await asyncio.to_thread(llm.shutdown)
            raise
        return cls(llm=llm, parts=parts, chat=chat, lora=adapter, tensors=tensors, why_no_update=why_not)

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
    def is_dead(self) -> bool:
        """Whether its processes are gone, or can no longer be heard."""
        return bool(self.llm.errored)

    async def generate(self, prompt: list[int], params: Any, engine_id: str) -> Any:
        """The final output of one request; cancelling it aborts it there."""
        last = None
        stream = self.llm.generate(self.parts.tokens_input(prompt), params, engine_id, lora_request=self.lora)
        async for output in stream:
            last = output
        if last is None:
            raise EngineError(f"vllm must answer a request, got nothing for {engine_id}")
        return last

    async def abort(self, engine_ids: Sequence[str]) -> None:
        """Ends requests: their final outputs are queued when this returns."""
        if engine_ids:
            await self.llm.abort(list(engine_ids))

    async def pause(self, mode: PauseMode) -> None:
        """Returns once nothing is being computed; the cache stays."""
        await self.llm.pause_generation(mode=mode.value, clear_cache=False)

    async def resume(self) -> None:
        """Computes again."""
        await self.llm.resume_generation()

    async def sleep(self, level: int) -> None:
        """Frees memory; requests end aborted."""
        await self.llm.sleep(level)

    async def wake_up(self, tags: list[str]) -> None:
        """Takes memory again."""
        await self.llm.wake_up(tags)

    async def reset_prefix_cache(self, *, is_paused: bool) -> None:
        """Drops all cached state, that of requests in flight only where vLLM cannot do it beside them."""
        if await self.llm.reset_prefix_cache():
            return
        if not is_paused:
            await self.pause(PauseMode.KEEP)
        await self.llm.reset_prefix_cache(reset_running_requests=True)
        if not is_paused:
            await self.resume()

    async def serve_version(self, version: int) -> None:
        """What tokens are said to come from, where vLLM keeps account."""
        if self.parts.weight_versions:
            await self.llm.update_weight_version(str(version))

    async def shutdown(self) -> None:
        """Ends its processes."""
        # It would log the end of the processes as a failure.
        if (handler := getattr(self.llm, "output_handler", None)) is not None:
            handler.cancel()
            await asyncio.wait([handler])
        await asyncio.to_thread(self.llm.shutdown)

    # Weights

    def check_manifest(self, manifest: WeightManifest) -> None:
        """Raises `ManifestError` unless it describes the checkpoint's tensors, `UnsupportedError` where none are taken."""
        if self.tensors is None:
            raise UnsupportedError(f"this engine cannot update its weights: {self.why_no_update}")
        self.tensors.check(manifest)

    async def replace_weights(
        self, manifest: WeightManifest, weights: "Iterable[tuple[str, Tensor]]", *, is_awake: bool
    ) -> None:
        """New weights for what is sampled from now on; the engine is left paused.

        Nothing older is served afterwards: requests in flight lose their state and are computed anew.

        Raises:
            WeightUpdateError: The stream failed; everything in flight was aborted.
        """
        if is_awake:
            await self.pause(PauseMode.KEEP)
        try:
            await self._send(manifest, weights)
            await self.llm.reset_prefix_cache(reset_running_requests=True)
            await self.serve_version(manifest.version)
        except BaseException:
            # Chat requests of vLLM's own endpoint are known to nobody else.
            if not self.is_dead:
                await self.pause(PauseMode.ABORT)
            raise

    async def _send(self, manifest: WeightManifest, weights: "Iterable[tuple[str, Tensor]]") -> None:
        """Streams through shared memory to the workers, each of which is told where to come for it."""
        with ExitStack() as stack:
            listeners = [stack.enter_context(WeightListener()) for _ in range(self.num_workers)]
            paths = [str(listener.path) for listener in listeners]
            receiving = asyncio.ensure_future(self.llm.collective_rpc("ostinato_receive_weights", args=(paths,)))
            sending = asyncio.ensure_future(send_to_all(listeners, manifest, weights))
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
                with suppress(Exception):
                    await receiving
                with suppress(Exception, asyncio.CancelledError):
                    await sending


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
