"""The embedded engine in the place of SGLang's scheduler: the same rules for requests, memory and weights.

Invariant: what fails an assertion in SGLang's scheduler, and so ends its server, raises `SchedulerError` here.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ostinato_engines.transformers_server import TransformersServer
from ostinato_engines.types import PauseMode, SamplingParams, StopReason, TokenOutput, WeightManifest

GREEDY_BELOW = 1e-6
MOST_TOKENS = 128
"""SGLang's own default."""
_RESERVED = 6
"""Positions of the context that SGLang keeps back from a prompt."""


class SchedulerError(AssertionError):
    """SGLang's scheduler would be gone now."""


class RefusedError(ValueError):
    """A request that SGLang answers with status 400."""


class Model:
    """One model.

    Args:
        path: Of the checkpoint.
        dtype: Of weights and cache.
        context_length: As in SGLang: more than a request may use.
        max_running_requests: Computed at a time.
    """

    def __init__(self, path: str, *, dtype: str, context_length: int | None, max_running_requests: int) -> None:
        config = json.loads((Path(path) / "config.json").read_text())
        self.vocab_size = int(config["vocab_size"])
        self.context_length = context_length or int(config["max_position_embeddings"])
        self.engine = TransformersServer(
            path,
            dtype=str(config.get("dtype", "float32")) if dtype == "auto" else dtype,
            max_num_seqs=max_running_requests,
            cast_weights=True,
        )
        self.weight_version = "default"
        self._eos = _ends_of_text(path, config)
        self._running: set[str] = set()
        self._names: dict[str, str] = {}
        """The engine's conversation of each request."""
        self._known: dict[str, list[int]] = {}
        """Conversations of the engine that nobody computes, and what they hold."""
        self._asleep: set[str] = set()
        self._late: list[str] = []
        """Aborts that came while the scheduler stood still."""
        self._retracted: set[str] = set()
        """Requests that were put back into the queue: aborted there, they lose what they have."""
        self._may_go = asyncio.Event()
        self._may_go.set()
        self._idle = asyncio.Event()
        """Set while nothing is computed, or waits to be."""
        self._idle.set()
        self._serial = 0

    @property
    def max_req_input_len(self) -> int:
        """Prompts are shorter."""
        return self.context_length - _RESERVED

    # Requests

    async def generate(self, rid: str, input_ids: Sequence[int], sampling: Mapping[str, Any]) -> TokenOutput:
        """One request; its tokens so far where it is aborted.

        Raises:
            RefusedError: SGLang would not take it.
        """
        await self._may_go.wait()
        params, limit = self._params(sampling)
        if len(input_ids) >= self.max_req_input_len:
            raise RefusedError(
                f"The input ({len(input_ids)} tokens) is longer than the model's context length ({self.context_length} tokens)."
            )
        if any(token_id >= self.vocab_size for token_id in input_ids):
            raise RefusedError(
                f"The input_ids {list(input_ids)} contains values greater than the vocab size ({self.vocab_size})."
            )
        if rid in self._running:
            raise RefusedError(f"Duplicate request ID detected: {rid}")
        self._running.add(rid)
        self._idle.clear()
        name, cached = self._take_state(rid, input_ids)
        try:
            room = self.max_req_input_len + 5 - len(input_ids) - 1
            params = SamplingParams.from_mapping({**params, "max_tokens": min(limit, room)})
            output = await self.engine.generate(input_ids, params, name)
            self._known[name] = [*input_ids, *output.token_ids]
            if rid in self._retracted and output.stop_reason is StopReason.ABORTED:
                return TokenOutput([], [], StopReason.ABORTED)
            return output if cached else _without_cache(output)
        finally:
            self._running.discard(rid)
            self._names.pop(rid, None)
            self._retracted.discard(rid)
            if not self._running:
                self._idle.set()

    def _params(self, sampling: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """SGLang's words in ours, after its own checks."""
        temperature = float(sampling.get("temperature", 1.0))
        top_k = int(sampling.get("top_k", -1))
        penalty = float(sampling.get("repetition_penalty", 1.0))
        if not 0.0 < penalty <= 2.0:
            raise RefusedError(f"repetition_penalty must be in (0, 2] (1.0 = no penalty), got {penalty}.")
        if top_k < -1 or top_k == 0:
            raise RefusedError(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
        stops = set(sampling.get("stop_token_ids") or ())
        params = {
            "temperature": 0.0 if temperature < GREEDY_BELOW or top_k == 1 else temperature,
            "top_p": float(sampling.get("top_p", 1.0)),
            "top_k": top_k,
            "min_p": float(sampling.get("min_p", 0.0)),
            "repetition_penalty": penalty,
            "seed": sampling.get("sampling_seed"),
            "stop_token_ids": () if sampling.get("ignore_eos") else tuple(sorted(stops | self._eos)),
        }
        return params, int(sampling.get("max_new_tokens", MOST_TOKENS))

    def _take_state(self, rid: str, input_ids: Sequence[int]) -> tuple[str, bool]:
        """A conversation of the engine that begins like this prompt, or a new one."""
        fitting = [name for name, ids in self._known.items() if list(input_ids[: len(ids)]) == ids]
        best = max(fitting, key=lambda name: len(self._known[name]), default=None)
        self._serial += 1
        name = f"state-{self._serial}" if best is None else best
        if best is not None:
            del self._known[best]
        self._names[rid] = name
        return name, best is not None

    async def abort(self, rid: str, *, everything: bool) -> None:
        """Ends requests whose names begin so, as SGLang compares them; while it stands still, later."""
        found = [name for name in self._running if everything or (rid and name.startswith(rid))]
        if not self._may_go.is_set():
            self._late += found
            return
        await self.engine.abort([self._names[name] for name in found if name in self._names])

    async def pause(self, mode: str) -> None:
        """SGLang's modes: "in_place" and "retract" stand still, "abort" ends what runs and admits nothing."""
        if mode == "abort":
            await self.abort("", everything=True)
            await self._idle.wait()
        self._may_go.clear()
        if mode != "abort":
            await self.engine.pause(PauseMode.KEEP)
        if mode == "retract":
            self._retracted |= self._running

    async def go_on(self) -> None:
        """Undoes `pause`."""
        await self.engine.resume()
        self._may_go.set()
        late, self._late = self._late, []
        await self.engine.abort([self._names[name] for name in late if name in self._names])

    # Memory and weights

    async def flush(self, timeout_s: float) -> bool:
        """Drops all cached state; whether it was idle, or became so in time."""
        if not self._idle.is_set():
            try:
                await asyncio.wait_for(self._idle.wait(), timeout_s)
            except TimeoutError:
                return False
        await self._drop()
        return True

    async def _drop(self) -> None:
        self._known.clear()
        if "kv_cache" not in self._asleep:
            await self.engine.reset_prefix_cache()

    async def release(self, tags: Iterable[str]) -> None:
        """Frees memory of an idle server."""
        if self._running:
            raise SchedulerError("release_memory_occupation should be called only when server is idle.")
        new = set(tags)
        await self._drop()
        self._asleep |= new
        await self.engine.sleep(2 if "weights" in new else 1)
        await self.engine.wake_up(sorted({"kv_cache", "weights"} - self._asleep))

    async def resume(self, tags: Iterable[str]) -> None:
        """Takes memory for what has none."""
        for tag in tags:
            if tag not in self._asleep:
                raise SchedulerError(f"KeyError: '{tag}'")
            self._asleep.discard(tag)
        await self.engine.wake_up(sorted(set(tags)))

    async def update_from_disk(self, folder: str, version: str | None) -> None:
        """New weights from a folder's safetensors files; waits for what runs unless the server stands still.

        Raises:
            RefusedError: There are none.
        """
        import safetensors.torch

        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise RefusedError(f"Failed to get weights iterator: Cannot find any model weights with `{folder}`.")
        if self._may_go.is_set():
            await self._idle.wait()
        if self._running:
            raise SchedulerError("Cache flush failed after updating weights")
        named = [(name, tensor) for file in files for name, tensor in safetensors.torch.load_file(file).items()]
        manifest = WeightManifest.from_tensors(self.engine.policy_version + 1, named)
        await self.engine.update_weights(manifest, named)
        await self._drop()
        if version is not None:
            self.weight_version = version


def finish_of(output: TokenOutput) -> dict[str, Any]:
    """SGLang's account of why a request ended."""
    if output.stop_reason is StopReason.STOP:
        return {"type": "stop", "matched": output.stop_token_id}
    if output.stop_reason is StopReason.LENGTH:
        return {"type": "length", "length": len(output.token_ids)}
    if not output.token_ids:
        return {"type": "abort", "message": "Abort in waiting queue"}
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def _without_cache(output: TokenOutput) -> TokenOutput:
    return TokenOutput(
        output.token_ids, output.logprobs, output.stop_reason, output.stop_token_id, output.policy_versions, 0
    )


def _ends_of_text(path: str, config: Mapping[str, Any]) -> set[int]:
    """The ids that end a text for SGLang: those of the model and of its generation config."""
    found: set[int] = set()
    generation = Path(path) / "generation_config.json"
    sources = [config, json.loads(generation.read_text()) if generation.is_file() else {}]
    for source in sources:
        ids = source.get("eos_token_id")
        found |= set(ids) if isinstance(ids, list) else set() if ids is None else {int(ids)}
    return found
