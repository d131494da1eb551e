"""The node `data`: where rows come from and how prompts are cut to length.

Pure data: nothing here opens a file. The docstring below a field is what `ostinato config` prints as its meaning.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

__all__ = ["CustomClassConfig", "DataConfig"]


class CustomClassConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A class of the user's own, found by file and name."""

    path: str | None = None
    """Python file, or dotted module, that holds the class; null keeps the built-in class."""
    name: str | None = None
    """Name of the class in that file."""


class DataConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rows, prompts and batches (`data`)."""

    train_files: str | tuple[str, ...] = ()
    """Training rows: one path or pattern, or a list; parquet, json or jsonl, local or `hf://datasets/OWNER/NAME[@REVISION]/FILE`."""
    val_files: str | tuple[str, ...] = ()
    """Validation rows, in the same forms; empty means no validation."""
    train_max_samples: Annotated[int, Meta(ge=-1)] = -1
    """Use at most so many training rows, drawn by the seed, or the first ones without shuffle; -1 uses all."""
    val_max_samples: Annotated[int, Meta(ge=-1)] = -1
    """The same for validation rows."""
    prompt_key: str = "prompt"
    """Column that holds the prompt as a list of messages."""
    max_prompt_length: Annotated[int, Meta(ge=1)] = 512
    """Longest prompt in tokens, tool schemas and generation prompt included."""
    max_response_length: Annotated[int, Meta(ge=1)] = 512
    """Most tokens after the prompt in one trajectory: sampled tokens, tool answers and turn separators together."""
    train_batch_size: Annotated[int, Meta(ge=1)] = 1024
    """Prompts in one step; each is sampled `actor_rollout_ref.rollout.n` times."""
    shuffle: bool = True
    """Draw a new order of the training rows for every epoch."""
    seed: int | None = None
    """Seed of that order, and of the rows that `train_max_samples` and `val_max_samples` draw; null takes `trainer.seed`."""
    return_raw_chat: bool = True
    """Give agents the messages instead of token ids; only true exists."""
    return_multi_modal_inputs: bool = True
    """Heed the columns `images` and `videos`: rows that fill them are refused for now; false ignores the columns."""
    filter_overlong_prompts: bool = False
    """Drop, before training, prompts longer than `data.max_prompt_length`; the numbers kept and dropped are logged."""
    filter_overlong_prompts_workers: Annotated[int, Meta(ge=1)] | None = None
    """Processes that count the tokens of many prompts, also where none are dropped; null: a quarter of the cores, at most 8."""
    cache_dir: str | None = None
    """Folder that keeps the counted lengths for the next run; null: `ostinato` in `$XDG_CACHE_HOME`, else in `~/.cache`."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What becomes of an overlong prompt that was not dropped: an error before the first step, or a cut in its longest message."""
    apply_chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Extra variables for the chat template, such as `enable_thinking`."""
    custom_cls: CustomClassConfig = CustomClassConfig()
    """A dataset class of your own; it is built like `RLHFDataset` and needs `__len__` and `__getitem__`."""
    skip_bad_rows: bool = False
    """Leave out rows that are not as they must be instead of stopping at the first; bad_rows.*.jsonl in the run's folder lists them."""

    @property
    def train_paths(self) -> tuple[str, ...]:
        """`train_files` as a tuple, whichever form was written."""
        return _as_paths(self.train_files)

    @property
    def val_paths(self) -> tuple[str, ...]:
        """`val_files` as a tuple, whichever form was written."""
        return _as_paths(self.val_files)


def _as_paths(files: str | tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(files, str):
        return (files,) if files else ()
    return files
