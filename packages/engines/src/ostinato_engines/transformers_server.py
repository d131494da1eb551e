"""The embedded engine: a Transformers model served in this process, on whatever device it has.

This module is the asyncio side: who waits, who is told what, and which state the engine is in. What changes the batch
happens between steps, under the step loop's lock. Steps run in a worker thread, or on the event loop with
`full_determinism`, where batches then depend on the program alone.
"""

import asyncio
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ostinato_engines import device as devices
from ostinato_engines.chat import answer_chat
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
    EngineState,
    Health,
    PauseMode,
    SamplingParams,
    StopReason,
    TokenOutput,
    WeightManifest,
)

try:
    from ostinato_engines.batcher import Batcher, Ended
    from ostinato_engines.model_runner import ModelRunner, load_model, max_length_of
    from ostinato_engines.request import Request, checked_prompt
    from ostinato_engines.sampling import stream_keys
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
SLEEP_TAGS = ("kv_cache", "weights")


class TransformersServer(AsyncServerBase):
    """Serves one model with continuous batching and a key-value cache that lives across a conversation's turns.

    Args:
        model: A checkpoint in the Hugging Face format, or a model, which the server owns from then on.
        device: "auto", or a kind that `ostinato_engines.device` knows.
        dtype: Of weights and cache; logits and logprobs are float32.
        max_model_len: Prompt and output together; by default what the model has positions for.
        max_num_seqs: Conversations that keep state at a time; the longest idle one gives way.
        prefill_chunk_tokens: Prompt tokens per step, padding included.
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
        prefill_chunk_tokens: int = 2048,
        full_determinism: bool = False,
        seed: int = 0,
        cast_weights: bool = False,
        chat_codec: ChatCodec | None = None,
    ) -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("prefill_chunk_tokens", prefill_chunk_tokens)):
            if not isinstance(value, int) or value < 1:
                raise EngineInputError(f"{name} must be an integer of at least 1, got {value!r}; leave it out")
        self._source = model
        self._device = devices.pick_device(device)
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
        self._runner: ModelRunner | None = None
        self._batcher: Batcher | None = None
        self._writer: WeightWriter | None = None
        self._steps = StepLoop(
            inline=full_determinism,
            has_work=self._has_work,
            prepare=self._prepare_step,
            step=self._step,
            deliver=self._deliver,
            num_arrived=lambda: self._num_arrived,
            crashed=self._crash,
        )
        self._num_arrived = 0
        self._waiting: deque[Request] = deque()
        self._in_flight: dict[str, Request] = {}
        self._abandoned: list[Request] = []
        self._released: list[str] = []
        self._paused: PauseMode | None = None
        self._asleep: set[str] = set()
        self._stale = False
        self._closed = False
        self._failure: BaseException | None = None

    # Life

    async def start(self) -> None:
        """Loads the model; a second call does nothing.

        Raises:
            EngineLoadError: No such model.
            UnsupportedError: A model that this engine cannot serve.
        """
        if self._closed:
            raise EngineClosedError("server must not be shut down before start, got closed; create a new one")
        if self._batcher is not None:
            return
        self._steps.bind()
        async with self._steps.between_steps():
            if self._batcher is None:
                await self._steps.run(self._load)

    def _load(self) -> None:
        model = load_model(self._source, device=self._device, dtype=self._dtype)
        self.max_model_len = max_length_of(model, self._asked_max_model_len)
        runner = ModelRunner(model, max_model_len=self.max_model_len)
        try:
            runner.probe()
        except BaseException:
            runner.close()
            raise
        self._runner = runner
        self._writer = WeightWriter(model, cast=self._cast_weights)
        self._batcher = Batcher(runner, max_rows=self._max_num_seqs, prefill_tokens=self._prefill_chunk_tokens)

    async def shutdown(self) -> None:
        """Fails requests in flight with `EngineClosedError` and frees everything; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._steps.bind()
        async with self._steps.between_steps():
            self._fail_all(
                lambda request: EngineClosedError(f"request {request.request_id!r} must end before shutdown")
            )
            if self._runner is not None:
                self._runner.close()
            self._runner = self._batcher = self._writer = None
        await self._steps.close()

    async def health(self) -> Health:
        state, detail = self._state()
        running = 0 if self._batcher is None else self._batcher.num_running
        waiting = sum(not request.ended for request in self._waiting)
        return Health(state, self.policy_version, min(running, len(self._in_flight)), waiting, detail)

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
            exact_policy_spans=True,
            media=False,
            chat_completion=self._codec is not None,
        )

    def _state(self) -> tuple[EngineState, str]:
        if self._closed:
            return EngineState.CLOSED, "shut down; create a new server"
        if self._failure is not None:
            return EngineState.FAILED, f"crashed with {self._failure!r}; create a new server"
        if self._batcher is None:
            return EngineState.NEW, "not started; call start() first"
        if self._asleep:
            return EngineState.ASLEEP, f"asleep ({', '.join(sorted(self._asleep))}); call wake_up() first"
        if self._stale:
            return EngineState.STALE, "without complete weights; call update_weights() with all of them first"
        if self._paused is not None:
            return EngineState.PAUSED, f"paused ({self._paused}); call resume()"
        return EngineState.READY, ""

    def _serving(self) -> Batcher:
        state, detail = self._state()
        if state is EngineState.CLOSED:
            raise EngineClosedError(f"server must be running, is {detail}")
        if state is EngineState.FAILED:
            raise EngineCrashedError(f"server must be running, has {detail}") from self._failure
        if state not in (EngineState.READY, EngineState.PAUSED):
            raise EngineNotReadyError(f"server must be ready, is {detail}")
        assert self._batcher is not None
        return self._batcher

    def _loaded(self) -> Batcher:
        if self._batcher is None or self._failure is not None or self._closed:
            return self._serving()
        return self._batcher

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
        batcher = self._serving()
        self._steps.bind()
        prompt = checked_prompt(prompt_ids, vocab_size=batcher.vocab_size, max_model_len=self.max_model_len)
        if request_id in self._in_flight:
            raise EngineInputError(
                f"request_id must not be in flight, got {request_id!r}; await its turn, or use another id per sample"
            )
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
        self._in_flight[request_id] = request
        self._waiting.append(request)
        self._num_arrived += 1
        self._steps.disturb()
        self._steps.wake()
        try:
            return await request.future
        finally:
            if self._in_flight.get(request_id) is request:
                del self._in_flight[request_id]
            if not request.ended:
                request.ended = True
                self._abandoned.append(request)
                self._steps.disturb()

    async def chat_completion(self, raw_request: Any) -> dict[str, Any]:
        """Answers an OpenAI-style request through the injected codec; without one it says what is missing."""
        if self._codec is None:
            raise UnsupportedError(
                "chat_completion must have a ChatCodec, got none; pass TransformersServer(..., chat_codec=...)"
            )
        return await answer_chat(self, self._codec, raw_request)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        self._loaded()
        self._steps.bind()
        targets = [
            request
            for request_id in (list(self._in_flight) if request_ids is None else request_ids)
            if (request := self._in_flight.get(request_id)) is not None and not request.ended
        ]
        async with self._steps.between_steps():
            return self._abort_now(targets)

    def _abort_now(self, targets: Iterable[Request]) -> int:
        count = 0
        for request in targets:
            if request.ended:
                continue
            count += 1
            if self._batcher is None:
                continue
            if request.row >= 0:
                request.resolve(self._batcher.abort(request))
            else:
                request.serve_under(self._batcher.policy_version, 0)
                request.resolve(request.output([], [], StopReason.ABORTED))
        return count

    async def release(self, request_id: str) -> None:
        if self._batcher is None:
            return
        self._steps.bind()
        self._released.append(request_id)
        if not self._steps.lock.locked():
            self._tidy()

    # Pause and sleep

    async def pause(self, mode: PauseMode = PauseMode.ABORT) -> None:
        """Stops sampling; see `PauseMode` for what becomes of requests in flight. Later requests wait for `resume`."""
        mode = PauseMode(mode)
        self._loaded()
        self._steps.bind()
        self._paused = mode
        if mode is PauseMode.WAIT:
            self._steps.wake()
            while self._paused is mode and self._batcher is not None and self._batcher.num_running:
                await self._steps.next_step()
        async with self._steps.between_steps():
            if mode is PauseMode.ABORT:
                self._abort_now(list(self._in_flight.values()))

    async def resume(self) -> None:
        self._loaded()
        self._steps.bind()
        self._paused = None
        self._steps.wake()

    async def sleep(self, level: int = 1) -> None:
        """Frees the cache (level 1) and the weights (level 2); requests in flight end aborted.

        After level 2 the engine serves only once it was woken and got a complete weight update.
        """
        if level not in (1, 2):
            raise EngineInputError(f"level must be 1 or 2, got {level!r}; 1 frees the cache, 2 the weights as well")
        batcher = self._loaded()
        self._steps.bind()
        self._asleep.add("kv_cache")
        async with self._steps.between_steps():
            self._abort_now(list(self._in_flight.values()))
            batcher.drop()
            if level == 2:
                assert self._writer is not None
                self._asleep.add("weights")
                self._stale = True
                self._writer.discard()
            devices.empty_cache(self._device)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        wanted = set(SLEEP_TAGS if tags is None else tags)
        if unknown := wanted - set(SLEEP_TAGS):
            raise EngineInputError(f"tags must be among {', '.join(SLEEP_TAGS)}, got {unknown.pop()!r}; None wakes all")
        self._loaded()
        self._steps.bind()
        async with self._steps.between_steps():
            if "weights" in wanted & self._asleep:
                assert self._writer is not None
                self._writer.allocate()
            self._asleep -= wanted

    # Weights

    async def update_weights(self, manifest: WeightManifest, weights: "Iterable[tuple[str, Tensor]]") -> None:
        """Replaces the weights between two steps; requests in flight are computed anew under the new ones and go on.

        See `AsyncServerBase.update_weights` for what a failure means. The iterable runs in the worker thread.
        """
        batcher = self._loaded()
        writer = self._writer
        assert writer is not None
        if "weights" in self._asleep:
            raise EngineNotReadyError("weights must be awake, are asleep; call wake_up(['weights']) first")
        writer.check(manifest)
        self._steps.bind()
        async with self._steps.between_steps():
            self._loaded()
            self._stale = True
            cancelled = threading.Event()
            try:
                await self._steps.run(
                    lambda: writer.write(manifest, weights, cancelled=cancelled.is_set), on_cancel=cancelled.set
                )
            except BaseException:
                self._fail_all(
                    lambda request: EngineNotReadyError(
                        f"request {request.request_id!r} must have complete weights, got a failed update; send a complete one"
                    )
                )
                raise
            self._tidy()
            batcher.weights_changed(manifest.version)
            self.policy_version = manifest.version
            self._stale = False
        self._steps.wake()

    async def reset_prefix_cache(self) -> None:
        batcher = self._loaded()
        self._steps.bind()
        async with self._steps.between_steps():
            self._tidy()
            batcher.table.free_idle()

    # Between and around steps

    def _has_work(self) -> bool:
        if self._batcher is None or self._closed or self._asleep or self._stale or self._paused is PauseMode.KEEP:
            return False
        return bool(self._batcher.num_running) or (self._paused is None and bool(self._waiting))

    def _prepare_step(self) -> bool:
        self._tidy()
        if self._batcher is None or not self._has_work():
            return False
        if self._paused is None:
            self._batcher.admit(self._waiting)
        return True

    def _step(self) -> "list[Ended]":
        batcher = self._batcher
        assert batcher is not None
        for _ in range(_MAX_STEPS):
            ended = batcher.step()
            if ended or not batcher.num_running or not self._steps.undisturbed:
                return ended
        return []

    def _deliver(self, ended: "list[Ended]") -> bool:
        for request, outcome in ended:
            if not request.ended:
                request.resolve(outcome)
        return bool(ended)

    def _tidy(self) -> None:
        """Takes out requests whose callers went away, and frees conversations that are over. Between steps only."""
        if self._batcher is None:
            return
        for request in self._abandoned:
            if request.row >= 0 and request in self._batcher.table.requests:
                self._batcher.abort(request)
        self._abandoned.clear()
        for request_id in self._released:
            self._batcher.release(request_id)
        self._released.clear()

    def _crash(self, error: BaseException) -> None:
        self._failure = error
        cure = "lower max_num_seqs or max_model_len" if devices.is_out_of_memory(error) else "create a new server"

        def failed(request: Request) -> EngineError:
            crash = EngineCrashedError(
                f"engine must not crash, got {type(error).__name__}: {error} while serving {request.request_id!r}; {cure}"
            )
            crash.__cause__ = error
            return crash

        self._fail_all(failed)

    def _fail_all(self, error_for: Callable[[Request], EngineError]) -> None:
        for request in list(self._in_flight.values()):
            if not request.ended:
                request.resolve(error_for(request))
        self._waiting.clear()
        self._abandoned.clear()
        if self._batcher is not None:
            self._batcher.drop()


__all__ = ["TransformersServer"]
