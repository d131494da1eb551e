"""The tree of `ostinato sft`: conversations in, a model folder out. Keys are those of a run wherever they mean the same.

Pure data: knows no torch. The docstring below a field is what `ostinato config --sft` prints as its meaning.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from ostinato_trainer.config.actor import ModelConfig, OptimConfig
from ostinato_trainer.config.resuming import ResumeConfig

__all__ = ["SftConfig", "SftDataConfig", "SftModelConfig", "SftOptimConfig", "SftTrainerConfig"]


class SftModelConfig(ModelConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model that learns (`model`)."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the model computes in; weights and moments are kept in float32."""


class SftDataConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Conversations and batches (`data`)."""

    train_files: str | tuple[str, ...] = ()
    """Conversations to learn: one path or a list, each parquet, json or jsonl, local or `hf://datasets/OWNER/NAME/FILE`; patterns such as
    `DIR/*.parquet` are read too."""
    val_files: str | tuple[str, ...] = ()
    """Conversations to measure the loss on, in the same forms; empty means no validation."""
    messages_key: str = "messages"
    """Column that holds a conversation as a list of messages, or as JSON text of one."""
    tools_key: str = "tools"
    """Column that holds the schemas of its tools, where a row has any."""
    max_length: Annotated[int, Meta(ge=1)] = 2048
    """Longest conversation in tokens, tool schemas included."""
    truncation: Literal["drop", "error"] = "drop"
    """What becomes of a longer one: it is left out and counted, or an error."""
    train_batch_size: Annotated[int, Meta(ge=1)] = 8
    """Conversations in one optimizer step."""
    max_token_len_per_gpu: Annotated[int, Meta(ge=1)] = 4096
    """Tokens of one forward-backward pass; a longer conversation goes alone."""
    apply_chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Extra variables for the chat template, such as `enable_thinking`; those that the run will use."""

    @property
    def train_paths(self) -> tuple[str, ...]:
        """`train_files` as a tuple, whichever form was written."""
        return _as_paths(self.train_files)

    @property
    def val_paths(self) -> tuple[str, ...]:
        """`val_files` as a tuple, whichever form was written."""
        return _as_paths(self.val_files)


class SftOptimConfig(OptimConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """AdamW and its schedule (`optim`)."""

    lr: Annotated[float, Meta(ge=0)] = 2e-5
    """Learning rate after warm-up."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"
    """Course of the learning rate after warm-up; linear and cosine end at zero with the last step."""
    grad_clip: Annotated[float, Meta(gt=0)] = 1.0
    """Largest global norm of the gradient; a larger one is scaled down to it."""


class SftTrainerConfig(ResumeConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The training (`trainer`)."""

    total_epochs: Annotated[int, Meta(ge=1)] = 1
    """Passes over the conversations, unless total_training_steps says when to end."""
    total_training_steps: Annotated[int, Meta(ge=1)] | None = None
    """Optimizer steps; null follows from total_epochs."""
    test_freq: Annotated[int, Meta(ge=-1)] = -1
    """Steps between validations; -1 or 0 validates before the first and after the last step only."""
    save_freq: Annotated[int, Meta(ge=-1)] | Literal["after_each_epoch"] = 0
    """Steps between checkpoints, from which a run that was stopped goes on; -1 saves one only after the last step, 0 none."""
    logger: tuple[Literal["console", "jsonl"], ...] = ("console", "jsonl")
    """Where metrics go: console, jsonl (metrics.jsonl in default_local_dir)."""
    default_local_dir: str | None = None
    """A new or empty folder, or that of the run to go on with: of metrics, checkpoints and, when training is over, the model. Must be given."""
    seed: int = 0
    """Chooses and orders the conversations, and makes the adapters' first values."""
    device: str | None = None
    """Device to train on, as torch writes it; null picks the best one present."""


class SftConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that `ostinato sft` reads."""

    model: SftModelConfig = SftModelConfig()
    """The model that learns."""
    data: SftDataConfig = SftDataConfig()
    """Conversations and batches."""
    optim: SftOptimConfig = SftOptimConfig()
    """The optimizer."""
    trainer: SftTrainerConfig = SftTrainerConfig()
    """The training."""


def _as_paths(files: str | tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(files, str):
        return (files,) if files else ()
    return files
