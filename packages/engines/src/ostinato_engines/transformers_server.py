"""The embedded engine: a Transformers model served in this process, on whatever device it has.

This module is the asyncio side: who waits, who is told what, and which state the engine is in. What changes the batch
happens between steps, under the step loop's lock. Steps run in a worker thread, or on the event loop with
`full_determinism`, where batches then depend on the program alone.
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
    from ostinato_engines.batcher import Batcher, Ended
    from ostinato_engines.model_runner import ModelRunner, load_model, max_length_of
    from ostinato_engines.request import Request, checked_prompt
    from ostinato_engines.request_desk import RequestDesk
    from ostinato_engines.sampling import stream_keys
    from ostinato_engines.weight_transfer import RouteFollower, follow_route
    from ostinato_engines.weights import WeightWriter
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] not in ("torch", "transformers"):
        raise
    raise MissingDependencyError(
        f"{error.name} must be installed for TransformersServer; run `pip install 'ostinato-engines[transformers]'`"
    ) from error

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_MAX_STEPS = 32
"""Steps in the worker thread without a look at the event loop; one as soon as anything happens there."""


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
        self._runner: ModelRunner | None = None
        self._batcher: Batcher | None = None
        self._desk: RequestDesk | None = None
        self._writer: WeightWriter | None = None
        self._steps = StepLoop(
            inline=full_determinism,
            has_work=self._has_work,
            prepare=self._prepare_step,
            step=self._step,
            deliver=self._deliver,
            num_arrived=lambda: 0 if self._desk is None else self._desk.num_arrived,
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
        model = load_model(self._source, device=self._device, dtype=self._dtype)
        self.max_model_len = max_length_of(model, self._asked_max_model_len)
        self._runner = ModelRunner.probed(model, max_model_len=self.max_model_len)
        self._writer = WeightWriter(model, cast=self._cast_weights)
        self._batcher = Batcher(self._runner, max_rows=self._max_num_seqs, prefill_tokens=self._prefill_chunk_tokens)
        self._desk = RequestDesk(self._batcher)
        self._status.loaded = True

    async def shutdown(self) -> None:
        """Fails requests in flight with `EngineClosedError` and frees everything; a second call does nothing."""
        if self._status.closed:
            return
        self._status.closed = True
        self._steps.bind()
        async with self._steps.between_steps():
            if self._desk is not None:
                self._desk.fail_all(lambda request: EngineClosedError(f"{request} must end before shutdown"))
            if self._runner is not None:
                self._runner.close()
            self._runner = self._batcher = self._desk = self._writer = None
            self._follower.close()
        await self._steps.close()

    async def health(self) -> Health:
        state, detail = self._status.now()
        if self._desk is None:
            return Health(state, self.policy_version, detail=detail)
        return Health(state, self.policy_version, self._desk.num_running, self._desk.num_waiting, detail)

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
            weight_workers=() if self._runner is None else (devices.place_of(self._device),),
            exact_policy_spans=True,
            media=False,
            chat_completion=self._codec is not None,
            # Rows of the full length: whatever a conversation's tokens, it takes one.
            kv_capacity_sessions=self._max_num_seqs,
        )

    def _parts(self) -> "tuple[Batcher, RequestDesk, WeightWriter]":
        """What `start` made, of a server that is neither new, nor crashed, nor shut down."""
        self._status.require_loaded()
        assert self._batcher is not None
        assert self._desk is not None
        assert self._writer is not None
        return self._batcher, self._desk, self._writer

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
        batcher, desk, _ = self._parts()
        self._steps.bind()
        prompt = checked_prompt(prompt_ids, vocab_size=batcher.vocab_size, max_model_len=self.max_model_len)
        desk.refuse_double(request_id)
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
            request.serve_under(batcher.policy_version, 0)
            return request.output([], [], StopReason.LENGTH)
        desk.arrive(request)
        self._steps.disturb()
        self._steps.wake()
        try:
            return await request.future
        finally:
            if desk.depart(request):
                self._steps.disturb()

    async def chat_completion(self, raw_request: Any) -> dict[str, Any]:
        """Answers an OpenAI-style request through the injected codec; without one it says what is missing."""
        if self._codec is None:
            raise UnsupportedError(
                "chat_completion must have a ChatCodec, got none; pass TransformersServer(..., chat_codec=...)"
            )
        return await answer_chat(self, self._codec, raw_request)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        _, desk, _ = self._parts()
        self._steps.bind()
        requests = desk.in_flight(request_ids)
        async with self._steps.between_steps():
            return desk.abort(requests)

    async def release(self, request_id: str) -> None:
        if self._desk is None:
            return
        self._steps.bind()
        self._desk.release(request_id)
        if not self._steps.lock.locked():
            self._desk.tidy()

    # Pause and sleep

    async def pause(self, mode: PauseMode = PauseMode.ABORT) -> None:
        """Stops sampling; see `PauseMode` for what becomes of requests in flight. Later requests wait for `resume`."""
        mode = PauseMode(mode)
        batcher, desk, _ = self._parts()
        self._steps.bind()
        self._status.paused = mode
        if mode is PauseMode.WAIT:
            self._steps.wake()
            while self._status.paused is mode and self._batcher is not None and batcher.num_running:
                await self._steps.next_step()
        async with self._steps.between_steps():
            if mode is PauseMode.ABORT:
                desk.abort(desk.in_flight())

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
        batcher, desk, writer = self._parts()
        self._steps.bind()
        self._status.asleep.add("kv_cache")
        async with self._steps.between_steps():
            desk.abort(desk.in_flight())
            batcher.drop()
            if level == 2:
                self._status.asleep.add("weights")
                self._status.stale = True
                writer.discard()
            devices.empty_cache(self._device)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        wanted = checked_tags(tags)
        _, _, writer = self._parts()
        self._steps.bind()
        async with self._steps.between_steps():
            if "weights" in wanted & self._status.asleep:
                writer.allocate()
            self._status.asleep -= wanted

    # Weights

    async def update_weights(self, manifest: WeightManifest, weights: "Iterable[tuple[str, Tensor]]") -> None:
        """Replaces the weights between two steps; requests in flight are computed anew under the new ones and go on.

        See `AsyncServerBase.update_weights` for what a failure means. The iterable runs in the worker thread.
        """
        batcher, desk, writer = self._parts()
        self._status.require_awake_weights()
        writer.check(manifest)
        self._status.require_base(manifest)
        self._steps.bind()
        async with self._steps.between_steps():
            self._status.require_loaded()
            self._status.require_base(manifest)
            self._status.begin_update()
            cancelled = threading.Event()
            try:
                await self._steps.run(
                    lambda: writer.write(manifest, weights, cancelled=cancelled.is_set), on_cancel=cancelled.set
                )
            except BaseException:
                desk.fail_all(
                    lambda request: EngineNotReadyError(
                        f"{request} must have complete weights, got a failed update; send a complete one"
                    )
                )
                raise
            desk.tidy()
            batcher.weights_changed(manifest.version)
            self.policy_version = manifest.version
            self._status.end_update(manifest)
        self._steps.wake()

    async def receive_weights(self, manifest: WeightManifest, route: WeightRoute) -> None:
        await follow_route(self.update_weights, self._follower, manifest, route)

    async def reset_prefix_cache(self) -> None:
        batcher, desk, _ = self._parts()
        self._steps.bind()
        async with self._steps.between_steps():
            desk.tidy()
            batcher.table.free_idle()

    # The step loop's questions

    def _has_work(self) -> bool:
        if self._batcher is None or self._desk is None or not self._status.may_step:
            return False
        return bool(self._batcher.num_running) or (self._status.may_admit and self._desk.has_waiting)

    def _prepare_step(self) -> bool:
        if self._desk is None:
            return False
        self._desk.tidy()
        if not self._has_work():
            return False
        if self._status.may_admit:
            self._desk.admit()
        return True

    def _step(self) -> "list[Ended]":
        assert self._batcher is not None
        for _ in range(_MAX_STEPS):
            ended = self._batcher.step()
            if ended or not self._batcher.num_running or not self._steps.undisturbed:
                return ended
        return []

    def _deliver(self, ended: "list[Ended]") -> bool:
        assert self._desk is not None
        return self._desk.deliver(ended)

    def _crash(self, error: BaseException) -> None:
        self._status.failure = error
        cure = "lower max_num_seqs or max_model_len" if devices.is_out_of_memory(error) else "create a new server"

        def failed(request: Request) -> EngineError:
            crash = EngineCrashedError(
                f"engine must not crash, got {type(error).__name__}: {error} while serving {request}; {cure}"
            )
            crash.__cause__ = error
            return crash

        if self._desk is not None:
            self._desk.fail_all(failed)
