"""Runs in vLLM's engine core: vLLM's scheduler, which keeps what a request samples until the request ends.

Invariant: of a request that asks for it (`HOLD_KEY`), exactly one output leaves this process, the last, with everything in
it; or its tokens are taken by `TAKE`, which ends it. All other requests are served as vLLM serves them. So nothing is made,
sent and unpacked per token, which costs more than computing the token does.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ostinato_engines.vllm_engine.held import ANSWER_KEY, HOLD_KEY, SERVE_VERSION, TAKE, Held

_interface: Any = import_module("vllm.v1.core.sched.scheduler")
_aborted = import_module("vllm.v1.request").RequestStatus.FINISHED_ABORTED
if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


class _Holding(_Base):
    """The part of a scheduler that holds; the rest of `self` is vLLM's scheduler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, Held] = {}
        """By vLLM's name of the request."""
        self._version = 0

    def __call__(self, order: str, value: Any) -> Any:
        """vLLM's client calls attributes of the engine core by name; `scheduler` is one, and this is its door for us."""
        if order == TAKE:
            return self._take(value)
        if order == SERVE_VERSION:
            self._version = int(value)
            return None
        raise ValueError(f"order must be {TAKE} or {SERVE_VERSION}, got {order!r}")

    def add_request(self, request: Any) -> None:
        """Notes whether to hold its outputs."""
        super().add_request(request)
        params = request.sampling_params
        name = ((params and params.extra_args) or {}).get(HOLD_KEY)
        if name is not None:
            self._held[request.request_id] = Held(name, logprobs=params.logprobs is not None)

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """Forgets what was held of requests that end otherwise than by sampling."""
        if request_ids is None:
            self._held.clear()
        else:
            request_ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
            for name in request_ids:
                self._held.pop(name, None)
        return super().finish_requests(request_ids, finished_status)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's outputs of one step without those that are held, and with the answers of those that end."""
        logprobs = model_runner_output.logprobs
        if logprobs is not None and len(self._held) == len(self.requests):
            # Nobody needs it in vLLM's form: one object of three arrays per request.
            model_runner_output.logprobs = None
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        rows = _Rows(logprobs, model_runner_output.req_id_to_index)
        for client, batch in list(outputs.items()):
            batch.outputs = [output for output in batch.outputs if not self._hold(output, rows)]
            if not batch.outputs and batch.finished_requests is None and batch.scheduler_stats is None:
                del outputs[client]
        return outputs

    def _hold(self, output: Any, rows: "_Rows") -> bool:
        """Keeps what is in an output, if it is to be kept; whether that was all. The last one gets everything."""
        held = self._held.get(output.request_id)
        if held is None:
            return False
        token_ids = output.new_token_ids
        held.add(token_ids, rows.of(output.request_id, len(token_ids)), self._version)
        if output.prefill_stats is not None:
            held.prefill_stats = output.prefill_stats
        if output.finish_reason is None:
            return True
        del self._held[output.request_id]
        output.new_token_ids = []
        output.new_logprobs = None
        output.prefill_stats = held.prefill_stats
        output.kv_transfer_params = {**(output.kv_transfer_params or {}), ANSWER_KEY: held.encode()}
        return False

    def _take(self, names: Sequence[str] | None) -> dict[str, bytes]:
        wanted = None if names is None else set(names)
        found = {key: held for key, held in self._held.items() if wanted is None or held.name in wanted}
        self.finish_requests(list(found), _aborted)
        return {held.name: held.encode() for held in found.values()}


class _Rows:
    """The sampled tokens' logprobs of one step, by request."""

    __slots__ = ("_index", "_starts", "_values")

    def __init__(self, logprobs: Any, index: dict[str, int]) -> None:
        # The sampled token stands in the first column.
        self._values: list[float] = [] if logprobs is None else logprobs.logprobs[:, 0].tolist()
        self._starts = None if logprobs is None else logprobs.cu_num_generated_tokens
        self._index = index

    def of(self, request_id: str, count: int) -> list[float]:
        """Of the first `count` tokens that a request sampled in this step."""
        start = self._index.get(request_id, 0)
        if self._starts is not None:
            start = self._starts[start]
        return self._values[start : start + count]


class HoldingScheduler(_Holding, _interface.Scheduler):
    """For engines that wait for each step."""


class AsyncHoldingScheduler(_Holding, import_module("vllm.v1.core.sched.async_scheduler").AsyncScheduler):
    """For engines that schedule a step while another is computed."""
