"""Supervised fine-tuning on masked token sequences, through the same backend, loss weights and batches as
reinforcement learning.

It knows no conversation and no tokenizer: `ostinato_tokenization.encode_training_conversation` makes what it takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, Protocol

import msgspec
import torch

from ostinato_trainer.algorithms.aggregation import LossAggMode, aggregate, with_loss_weights
from ostinato_trainer.backends.base import LossOutput, MicroBatch, MicroBatchOutput, TrainingBackend
from ostinato_trainer.backends.local import LocalBackend, LocalBackendOptions, MemoryCures
from ostinato_trainer.backends.lora import LoraOptions
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import BatchError
from ostinato_trainer.segments import Segment

SFT_CURES: Final = MemoryCures(
    batches="lower data.max_token_len_per_gpu or data.max_length",
    passes="lower data.max_token_len_per_gpu or data.max_length",
    state="train adapters alone (model.lora_rank=16)",
)
"""By the keys of `ostinato sft`."""


class MaskedTokens(Protocol):
    """A tokenized conversation, such as `ostinato_tokenization.TrainingConversation`."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The whole conversation."""
        ...

    @property
    def mask(self) -> Sequence[int]:
        """1 where the model learns to say the token, 0 elsewhere."""
        ...


class SftSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `train_sft` needs to know besides the data."""

    steps: int
    """Optimizer steps."""
    batch_size: int
    """Conversations per step."""
    lr: float
    warmup_steps: int = 0
    lr_scheduler_type: str = "linear"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    max_tokens_per_micro_batch: int = 16384
    """Padded tokens of one forward-backward pass; a longer conversation goes alone."""
    test_freq: int = -1
    """Steps between validations; below 1 before the first and after the last step only."""
    lora: LoraOptions | None = None
    """Train adapters only."""
    use_remove_padding: bool = True
    """Pack conversations into one row where the model's attention can."""
    device: str = "auto"
    dtype: str = "float32"


class SftStep(msgspec.Struct, frozen=True):
    """What one step did."""

    step: int
    """From 1; 0 is the validation before training, where only `val_loss` means anything."""
    loss: float
    """Mean negative log-likelihood of the trained tokens of this step's batch, in nats, before the update; NaN where there are none."""
    grad_norm: float
    lr: float
    skipped: bool
    num_tokens: int = 0
    """Trained tokens of this step's batch."""
    val_loss: float | None = None
    """Mean negative log-likelihood of the trained tokens of the validation's conversations after the update, where it was measured."""


def sft_batch(conversations: Sequence[MaskedTokens]) -> Batch:
    """Conversations as a `Batch`, each a trajectory of its own.

    Raises:
        BatchError: there is none, or one has no token, a mask of another length, or a mask that trains on its first
            token.
    """
    segments = []
    for place, conversation in enumerate(conversations):
        ids, mask, name = conversation.token_ids, conversation.mask, f"conversation {place}"
        if len(ids) != len(mask):
            raise BatchError(f"{name}: mask must have {len(ids)} entries, got {len(mask)}; fix the tokenization")
        if len(mask) and mask[0]:
            raise BatchError(
                f"{name}: mask must be 0 at the first token, got {mask[0]}; nothing stands before it to predict it from"
            )
        segments.append(Segment(ids[:1], ids[1:], mask[1:], None, group_id=name, trajectory_id=name, reward=0.0))
    return Batch.from_segments(segments)


def sft_loss(output: MicroBatchOutput, batch: MicroBatch) -> LossOutput:
    """Weighted negative log-likelihood of the trained tokens; a `LossFn`."""
    loss = aggregate(-output.log_probs, batch)
    return loss, {"train/loss": loss.detach()}


def sft_steps(
    backend: TrainingBackend,
    conversations: Sequence[MaskedTokens],
    *,
    steps: int,
    batch_size: int,
    seed: int,
    max_tokens_per_micro_batch: int = 16384,
    validation: Sequence[MaskedTokens] = (),
    test_freq: int = -1,
    steps_done: int = 0,
) -> Iterator[SftStep]:
    """Takes optimizer steps on shuffled conversations; each step happens when it is asked for.

    Every epoch is a new permutation, and a batch may span two epochs, so all conversations are seen equally often and
    all batches are of one size. The loss is the mean over the trained tokens of the batch. With conversations for `validation` their loss is
    measured before the first step, every `test_freq` steps and after the last one. With `steps_done` the backend is that of a run which
    has taken so many of the `steps`, and the others follow.

    Raises:
        BatchError: see `sft_batch`; or `steps` or `batch_size` is below 1, or no token is trained on.
    """
    if steps < 1 or batch_size < 1:
        raise BatchError(f"steps and batch_size must be at least 1, got {steps} and {batch_size}; raise them")
    data, held_out = _learnable(conversations), _learnable(validation) if validation else None
    if held_out is not None and not steps_done:
        yield SftStep(0, math.nan, math.nan, math.nan, False, val_loss=validation_loss(backend, held_out))
    batches = _endless_batches(data.num_sequences, min(batch_size, data.num_sequences), seed)
    for step, chosen in enumerate(islice(batches, steps_done, max(steps, steps_done)), steps_done + 1):
        batch = with_loss_weights(data.select(chosen), LossAggMode.TOKEN_MEAN)
        metrics = backend.forward_backward(
            batch.split_by_tokens(max_tokens_per_micro_batch, padded=backend.pads_sequences, allow_longer=True),
            sft_loss,
        )
        stats = backend.optimizer_step()
        measured = step == steps or (test_freq > 0 and step % test_freq == 0)
        yield SftStep(
            step,
            metrics.get("train/loss", math.nan),
            stats.grad_norm,
            stats.lr,
            stats.skipped,
            num_tokens=batch.num_loss_tokens,
            val_loss=validation_loss(backend, held_out) if measured and held_out is not None else None,
        )


def validation_loss(backend: TrainingBackend, data: Batch) -> float:
    """Mean negative log-likelihood of the trained tokens of a batch, in nats; changes nothing."""
    return -float(backend.log_probs(data, temperature=1.0)[data.loss_mask].double().mean())


def _learnable(conversations: Sequence[MaskedTokens]) -> Batch:
    """As `sft_batch`, refused where it would teach nothing."""
    data = sft_batch(conversations)
    if data.num_loss_tokens == 0:
        raise BatchError(
            "mask must be 1 somewhere, got 0 everywhere; there is nothing to learn, check the tokenization"
        )
    return data


def train_sft(
    model_path: str | Path,
    output: str | Path,
    conversations: Sequence[MaskedTokens],
    settings: SftSettings,
    *,
    seed: int,
    validation: Sequence[MaskedTokens] = (),
) -> Iterator[SftStep]:
    """Fine-tunes the model of a folder step by step; after the last step the result is an ordinary model folder at
    `output`.

    Raises:
        BackendError: the folder holds no model.
        BatchError: see `sft_steps`.
    """
    backend = sft_backend(model_path, settings)
    yield from sft_steps(
        backend,
        conversations,
        steps=settings.steps,
        batch_size=settings.batch_size,
        seed=seed,
        max_tokens_per_micro_batch=settings.max_tokens_per_micro_batch,
        validation=validation,
        test_freq=settings.test_freq,
    )
    backend.save_hf(output)


def sft_backend(model_path: str | Path, settings: SftSettings) -> LocalBackend:
    """The model of a folder, to be trained by `settings`.

    Raises:
        BackendError: the folder holds no model, or a setting is out of range.
    """
    options = LocalBackendOptions(
        device=settings.device,
        dtype=settings.dtype,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        lr_scheduler_type=settings.lr_scheduler_type,
        lr_warmup_steps=settings.warmup_steps,
        total_steps=settings.steps,
        grad_clip=settings.grad_clip,
        max_tokens_per_forward=settings.max_tokens_per_micro_batch,
        lora=settings.lora,
        use_remove_padding=settings.use_remove_padding,
        cures=SFT_CURES,
        path_key="model.path",
    )
    return LocalBackend.from_pretrained(model_path, options)


def _endless_batches(count: int, size: int, seed: int) -> Iterator[list[int]]:
    """Batches of `size` different positions from one permutation after another.

    Where two epochs meet in a batch, a position that is in it already waits for the next batch.
    """
    generator = torch.Generator().manual_seed(seed)
    waiting: list[int] = []
    while True:
        chosen: dict[int, None] = {}
        later: list[int] = []
        while len(chosen) < size:
            if not waiting:
                waiting = torch.randperm(count, generator=generator).tolist()[::-1]
            position = waiting.pop()
            if position in chosen:
                later.append(position)
            else:
                chosen[position] = None
        waiting.extend(reversed(later))
        yield list(chosen)
