"""The embedded engine: a Transformers model served in this process, on whatever device it has.

This module is the asyncio side: who waits, who is told what, and which state the engine is in. What changes the batch
happens between steps, under the step loop's lock. Steps run in a worker thread, or on the event loop with
`full_determinism`, where batches then depend on the program alone. What is computed is in `ostinato_engines.loaded_engine`.
"""

import asyncio
import random
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ostinato_engines import device as devices
from ostinato_engines.chat import answer_chat
from ostinato_engines.engine_status import EngineStatus, check_level, checked_tags
from ostinato_engines.errors import (
    EngineClosedError,
    EngineCrashedError,
    EngineError,
    EngineInputError,
    EngineNotReadyError,
    MissingDependencyError,
    UnsupportedError,
)
from ostinato_engines.server import AsyncServerBase, ChatCodec
from ostinato_engines.step_loop import StepLoop
from ostinato_engines.types import (
    Capabilities,
    Health,
    PauseMode,
    SamplingParams,
    StopReason,
    TokenOutput,
    WeightManifest,
)
from ostinato_engines.weight_routes import WeightRoute

try:
    from ostinato_engines.batcher import Ended
    from ostinato_engines.loaded_engine import LoadedEngine
    from ostinato_engines.request import Request, checked_prompt
    from ostinato_engines.sampling import stream_keys
    from ostinato_engines.weight_transfer import RouteFollower, follow_route
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] not in ("torch", "transformers"):
        raise
    raise MissingDependencyError(
        f"{error.name} must be installed for TransformersServer; run `pip install 'ostinato-engines[transformers]'`"
    ) from error

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class TransformersServer(AsyncServerBase):
    """Serves one model with continuous batching and a key-value cache that lives across a conversation's turns.

    Args:
        model: A checkpoint in the Hugging Face format, or a model, which the server owns from then on.
        device: "auto", or a kind that `ostinato_engines.device` knows.
        dtype: Of weights and cache; logits and logprobs are float32.
        max_model_len: Prompt and output together; by default what the model has positions for.
        max_num_seqs: Conversations that keep state at a time; the longest idle one gives way.
        prefill_chunk_tokens: Prompt tokens per step, padding included; by default 2048 on the host, 4096 elsewhere.
        full_determinism: The same program gives bitwise the same tokens on the same machine, as long as it awaits nothing
            between turns that takes time of its own (a thread, a socket): that decides which requests share a batch.
        seed: Of the generator behind requests that bring no seed.
        cast_weights: Accepts weight updates in another floating-point type, rounded to `dtype`.
        chat_codec: Renders and parses for `chat_completion`.
    """

    def __init__(
        self,
        model: "str | Path | PreTrainedModel",
        *,
        device: str = "auto",
        dtype: str = "float32",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        prefill_chunk_tokens: int | None = None,
        full_determinism: bool = False,
        seed: int = 0,
        cast_weights: bool = False,
        chat_codec: ChatCodec | None = None,
    ) -> None:
        self._device = devices.pick_device(device)
        if prefill_chunk_tokens is None:
            prefill_chunk_tokens = 2048 if self._device == devices.HOST else 4096
        for name, value in (("max_num_seqs", max_num_seqs), ("prefill_chunk_tokens", prefill_chunk_tokens)):
            if not isinstance(value, int) or value < 1:
                raise EngineInputError(f"{name} must be an integer of at least 1, got {value!r}; leave it out")
        self._source = model
        self._dtype = dtype
        self._asked_max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._inline = full_determinism
        self._cast_weights = cast_weights
        self._codec = chat_codec
        self._random = random.Random(seed)
        if max_model_len is not None:
            self.max_model_len = max_model_len
        self._status = EngineStatus()
        self._follower = RouteFollower(self._device)
        self._engine: LoadedEngine | None = None
        self._steps = StepLoop(
            inline=full_determinism,
            has_work=lambda: self._engine is not None and self._engine.has_work(self._status),
            prepare=lambda: self._engine is not None and self._engine.prepare_step(self._status),
            step=self._step,
            deliver=self._deliver,
            num_arrived=lambda: 0 if self._engine is None else self._engine.desk.num_arrived,
            crashed=self._crash,
        )

    # Life

    async def start(self) -> None:
        """Loads the model; a second call does nothing.

        Raises:
            EngineLoadError: No such model.
            UnsupportedError: A model that this engine cannot serve.
        """
        if self._status.closed:
            raise EngineClosedError("server must not be shut down before start, got closed; create a new one")
        if self._status.loaded:
            return
        self._steps.bind()
        async with self._steps.between_steps():
            if not self._status.loaded:
                await self._steps.run(self._load)

    def _load(self) -> None:
        self._engine = LoadedEngine.load(
            self._source,
            device=self._device,
            dtype=self._dtype,
            max_model_len=self._asked_max_model_len,
            max_num_seqs=self._max_num_seqs,
            prefill_chunk_tokens=self._prefill_chunk_tokens,
            cast_weights=self._cast_weights,
        )
        self.max_model_len = self._engine.max_model_len
        self._status.loaded = True

    async def shutdown(self) -> None:
        """Fails requests in flight with `EngineClosedError` and frees everything; a second call does nothing."""
        if self._status.closed:
            return
        self._status.closed = True
        self._steps.bind()
        async with self._steps.between_steps():
            if self._engine is not None:
                self._engine.desk.fail_all(lambda request: EngineClosedError(f"{request} must end before shutdown"))
                self._engine.close()
            self._engine = None
            self._follower.close()
        await self._steps.close()

    async def health(self) -> Health:
        state, detail = self._status.now()
        if self._engine is None:
            return Health(state, self.policy_version, detail=detail)
        desk = self._engine.desk
        return Health(state, self.policy_version, desk.num_running, desk.num_waiting, detail)

    def capabilities(self) -> Capabilities:
        return Capabilities(
            engine="transformers",
            logprobs=True,
            seeds=True,
            full_determinism=self._inline,
            prefix_reuse=True,
            abort=True,
            pause_modes=tuple(PauseMode),
            sleep_levels=(1, 2),
            weight_update=True,
            partial_updates=True,
            weight_workers=() if self._engine is None else (devices.place_of(self._device),),
            exact_policy_spans=True,
            media=False,
            chat_completion=self._codec is not None,
            # Rows of the full length: whatever a conversation's tokens, it takes one.
            kv_capacity_sessions=self._max_num_seqs,
        )

    def _running(self) -> LoadedEngine:
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
        of the request stop nothing: the engine knows no end-of-text of its own.
        """
        self.refuse_media(media)
        params = SamplingParams.from_mapping(sampling_params)
        self._status.require_serving()
        engine = self._running()
        self._steps.bind()
        prompt = checked_prompt(prompt_ids, vocab_size=engine.batcher.vocab_size, max_model_len=self.max_model_len)
        engine.desk.refuse_double(request_id)
        room = self.max_model_len - len(prompt)
        num_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        request = Request(
            request_id=request_id,
            prompt=prompt,
            params=params,
            limit=len(prompt) + num_tokens,
            stream_key=int(stream_keys(np.array([seed], np.uint64))[0]),
            future=asyncio.get_running_loop().create_future(),
        )
        if num_tokens == 0:
            request.serve_under(engine.batcher.policy_version, 0)
            return request.output([], [], StopReason.LENGTH)
        engine.desk.arrive(request)
        self._steps.disturb()
        self._steps.wake()
        try:
            return await request.future
        finally:
            if engine.desk.depart(request):
                self._steps.disturb()

    async def chat_completion(self, raw_request: Any) -> dict[str, Any]:
        """Answers an OpenAI-style request through the injected codec; without one it says what is missing."""
        if self._codec is None:
            raise UnsupportedError(
                "chat_completion must have a ChatCodec, got none; pass TransformersServer(..., chat_codec=...)"
            )
        return await answer_chat(self, self._codec, raw_request)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        desk = self._running().desk
        self._steps.bind()
        requests = desk.in_flight(request_ids)
        async with self._steps.between_steps():
            return desk.abort(requests)

    async def release(self, request_id: str) -> None:
        if self._engine is None:
            return
        self._steps.bind()
        self._engine.desk.release(request_id)
        if not self._steps.lock.locked():
            self._engine.desk.tidy()

    # Pause and sleep

    async def pause(self, mode: PauseMode = PauseMode.ABORT) -> None:
        """Stops sampling; see `PauseMode` for what becomes of requests in flight. Later requests wait for `resume`."""
        mode = PauseMode(mode)
        engine = self._running()
        self._steps.bind()
        self._status.paused = mode
        if mode is PauseMode.WAIT:
            self._steps.wake()
            while self._status.paused is mode and self._engine is not None and engine.batcher.num_running:
                await self._steps.next_step()
        async with self._steps.between_steps():
            if mode is PauseMode.ABORT:
                engine.desk.abort(engine.desk.in_flight())

    async def resume(self) -> None:
        self._status.require_loaded()
        self._steps.bind()
        self._status.paused = None
        self._steps.wake()

    async def sleep(self, level: int = 1) -> None:
        """Frees the cache (level 1) and the weights (level 2); requests in flight end aborted.

        After level 2 the engine serves only once it was woken and got a complete weight update.
        """
        check_level(level)
        engine = self._running()
        self._steps.bind()
        self._status.asleep.add("kv_cache")
        async with self._steps.between_steps():
            engine.desk.abort(engine.desk.in_flight())
            engine.batcher.drop()
            if level == 2:
                self._status.asleep.add("weights")
                self._status.stale = True
                engine.writer.discard()
            devices.empty_cache(self._device)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        wanted = checked_tags(tags)
        engine = self._running()
        self._steps.bind()
        async with self._steps.between_steps():
            if "weights" in wanted & self._status.asleep:
                engine.writer.allocate()
            self._status.asleep -= wanted

    # Weights

    async def update_weights(self, manifest: WeightManifest, weights: "Iterable[tuple[str, Tensor]]") -> None:
        """Replaces the weights between two steps; requests in flight are computed anew under the new ones and go on.

        See `AsyncServerBase.update_weights` for what a failure means. The iterable runs in the worker thread.
        """
        engine = self._running()
        self._status.require_awake_weights()
        engine.writer.check(manifest)
        self._status.require_base(manifest)
        self._steps.bind()
        async with self._steps.between_steps():
            self._status.require_loaded()
            self._status.require_base(manifest)
            self._status.begin_update()
            cancelled = threading.Event()
            try:
                await self._steps.run(
                    lambda: engine.writer.write(manifest, weights, cancelled=cancelled.is_set), on_cancel=cancelled.set
                )
            except BaseException:
                engine.desk.fail_all(
                    lambda request: EngineNotReadyError(
                        f"{request} must have complete weights, got a failed update; send a complete one"
                    )
                )
                raise
            engine.desk.tidy()
            engine.batcher.weights_changed(manifest.version)
            self.policy_version = manifest.version
            self._status.end_update(manifest)
        self._steps.wake()

    async def receive_weights(self, manifest: WeightManifest, route: WeightRoute) -> None:
        await follow_route(self.update_weights, self._follower, manifest, route)

    async def reset_prefix_cache(self) -> None:
        engine = self._running()
        self._steps.bind()
        async with self._steps.between_steps():
            engine.desk.tidy()
            engine.batcher.table.free_idle()

    # The step loop's questions

    def _step(self) -> "list[Ended]":
        assert self._engine is not None
        return self._engine.step(lambda: self._steps.undisturbed)

    def _deliver(self, ended: "list[Ended]") -> bool:
        assert self._engine is not None
        return self._engine.desk.deliver(ended)

    def _crash(self, error: BaseException) -> None:
        self._status.failure = error
        cure = "lower max_num_seqs or max_model_len" if devices.is_out_of_memory(error) else "create a new server"

        def failed(request: Request) -> EngineError:
            crash = EngineCrashedError(
                f"engine must not crash, got {type(error).__name__}: {error} while serving {request}; {cure}"
            )
            crash.__cause__ = error
            return crash

        if self._engine is not None:
            self._engine.desk.fail_all(failed)
