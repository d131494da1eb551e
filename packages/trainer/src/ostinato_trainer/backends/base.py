"""`TrainingBackend`: what the training loop asks of whatever holds the model, and the types of a loss.

The loop hands over flat, unpadded batches and gets flat results back. Layout (padded or packed), device, precision
and the way from hidden states to log-probabilities are the backend's own affair; the loss is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
from torch import Tensor

from ostinato_trainer.batch import Batch

if TYPE_CHECKING:
    from ostinato_engines import WeightManifest

MicroBatch = Batch
"""What a loss function sees: a part of a mini-batch with its loss weights, on the backend's device."""


@dataclass(frozen=True)
class MicroBatchOutput:
    """What the model says about the tokens of a micro-batch."""

    log_probs: Tensor
    """float [T]; entry t is log p(token t | before) at the temperature asked for. Outside the loss mask it is 0
    without a gradient."""
    entropy: Tensor | None
    """float [T]; of the distribution that token t was drawn from, 0 outside the loss mask. None unless asked for."""


LossOutput = tuple[Tensor, Mapping[str, float | Tensor]]
"""A scalar to differentiate and metrics. The losses of the micro-batches add up to the mini-batch's loss; so do the
metrics, except that of names ending in `_max` or `_min` the largest or smallest is kept."""

LossFn = Callable[[MicroBatchOutput, MicroBatch], LossOutput]


class EntropyMode(StrEnum):
    """Whether `forward_backward` computes the entropy, which costs another pass over the vocabulary."""

    OFF = "off"
    VALUE = "value"
    GRADIENT = "gradient"


class OptimizerStats(msgspec.Struct, frozen=True):
    """What one optimizer step did."""

    grad_norm: float
    """L2 norm over all parameters before clipping."""
    lr: float
    """Learning rate of this step."""
    skipped: bool = False
    """The weights, the moments and the policy version are as before."""
    reason: str | None = None
    """Why it was skipped, with the name of the first offending parameter."""


class TrainingBackend(Protocol):
    """One policy under training. Gradients accumulate over `forward_backward` until `optimizer_step` uses them up.

    One of your own calls `heartbeat.beat` after each pass through its model, by which the watchdog tells long work from a standstill.
    """

    policy_version: int

    @property
    def pads_sequences(self) -> bool:
        """Whether a micro-batch costs its sequences times its longest; else it costs its tokens alone."""
        ...

    def forward_backward(
        self,
        micro_batches: Sequence[Batch],
        loss_fn: LossFn,
        *,
        temperature: float = 1.0,
        entropy: EntropyMode = EntropyMode.OFF,
    ) -> dict[str, float]:
        """Accumulates the gradients of the summed losses and returns the merged metrics. After an error no gradient
        is left behind."""
        ...

    def log_probs(self, batch: Batch, *, temperature: float, reference: bool = False) -> Tensor:
        """float32 [T] on the CPU: entry t is log p(token t | before), 0 at the start of each sequence. No gradient."""
        ...

    def optimizer_step(self) -> OptimizerStats:
        """Clips, steps, advances the schedule and clears the gradients; skips where the gradient norm is not finite."""
        ...

    def weights(
        self, *, version: int | None = None
    ) -> tuple[WeightManifest, Callable[[], Iterable[tuple[str, Tensor]]]]:
        """What the engines need to follow: names, shapes, types, and a stream of the tensors in that order, which may
        be opened again."""
        ...

    def save(self, directory: Path) -> None:
        """Writes weights, moments and schedule, so that `load` continues exactly here."""
        ...

    def load(self, directory: Path) -> None:
        """Reads what `save` wrote; a damaged or foreign directory is refused and leaves the backend as it was."""
        ...

    def save_hf(self, directory: Path) -> None:
        """Writes an ordinary Hugging Face model folder, tokenizer files included."""
        ...

    def free_cached_memory(self) -> None:
        """Gives back to its devices what it holds there for passes to come: engines that share them are about to wake."""
        ...

    def close(self) -> None:
        """Ends what the backend has started; may be called twice. Nothing can be asked of it afterwards."""
        ...
