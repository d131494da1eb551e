"""What the embedded engine has once its model is loaded, and how it makes a step.

Invariant: its parts are there together, from `load` to `close`. Knows no event loop, and of the engine's state what it is told.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ostinato_engines.batcher import Batcher, Ended
from ostinato_engines.engine_status import EngineStatus
from ostinato_engines.model_runner import ModelRunner, load_model, max_length_of
from ostinato_engines.request_desk import RequestDesk
from ostinato_engines.weights import WeightWriter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MAX_STEPS = 32
"""Steps in the worker thread without a look at the event loop; one as soon as anything happens there."""


@dataclass(slots=True)
class LoadedEngine:
    """One model, its batch, the requests before and in it, and the way to new weights."""

    max_model_len: int
    """Prompt and output together."""
    runner: ModelRunner
    batcher: Batcher
    desk: RequestDesk
    writer: WeightWriter

    @classmethod
    def load(
        cls,
        source: "str | Path | PreTrainedModel",
        *,
        device: str,
        dtype: str,
        max_model_len: int | None,
        max_num_seqs: int,
        prefill_chunk_tokens: int,
        cast_weights: bool,
    ) -> Self:
        """Loads and probes a model; see `TransformersServer` for the arguments, and its `start` for what is raised."""
        model = load_model(source, device=device, dtype=dtype)
        length = max_length_of(model, max_model_len)
        runner = ModelRunner.probed(model, max_model_len=length)
        writer = WeightWriter(model, cast=cast_weights)
        batcher = Batcher(runner, max_rows=max_num_seqs, prefill_tokens=prefill_chunk_tokens)
        return cls(length, runner, batcher, RequestDesk(batcher), writer)

    def close(self) -> None:
        """Frees the cache, and leaves the model as it was."""
        self.runner.close()

    def has_work(self, status: EngineStatus) -> bool:
        """Whether a step would compute something."""
        return status.may_step and (bool(self.batcher.num_running) or (status.may_admit and self.desk.has_waiting))

    def prepare_step(self, status: EngineStatus) -> bool:
        """Brings the batch up to date; whether there is work then."""
        self.desk.tidy()
        if not self.has_work(status):
            return False
        if status.may_admit:
            self.desk.admit()
        return True

    def step(self, undisturbed: Callable[[], bool]) -> list[Ended]:
        """Computes until a request ends, or there is something to look at; the requests that have ended."""
        for _ in range(_MAX_STEPS):
            ended = self.batcher.step()
            if ended or not self.batcher.num_running or not undisturbed():
                return ended
        return []
