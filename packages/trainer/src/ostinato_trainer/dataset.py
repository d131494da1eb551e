"""Rows as agents get them: `RLHFDataset`.

Every row is checked when the dataset is made, so that a run does not stop at step 300 for what was wrong from the start;
rows are decoded again on access, so that nothing an agent changes reaches another trajectory. Order and batches are
`prompt_loader`'s.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct
from rich.console import Console
from rich.progress import Progress

from ostinato_tokenization import ChatTokenizer
from ostinato_trainer.config_data import DataConfig
from ostinato_trainer.custom_code import load_object
from ostinato_trainer.data_files import DataFile, open_data_file
from ostinato_trainer.errors import DatasetError
from ostinato_trainer.prompt_length import PromptLength
from ostinato_trainer.rows import check_row, row_item

__all__ = ["BadRow", "PromptDataset", "RLHFDataset", "ToolSchemas", "create_dataset"]

logger = logging.getLogger(__name__)

_NUM_LISTED = 10
"""Skipped rows that are listed in the log; all of them are in `bad_rows`."""

ToolSchemas = Callable[[Mapping[str, Any]], Sequence[dict] | None]
"""The tools that the agent of a row shows to the model, as the rollout will; None where it shows none."""


class PromptDataset(Protocol):
    """What the loader needs; a class named by `data.custom_cls` has at least these."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...


class BadRow(Struct, frozen=True):
    """A row that was left out because of `data.skip_bad_rows`."""

    place: str
    """File and row."""
    problem: str
    """Field, what it must be, what it was."""


class RLHFDataset:
    """Prompts with what their agents, tools and rewards need.

    Args:
        data_files: one path or several; parquet, json or jsonl; local or `hf://datasets/OWNER/NAME/FILE`.
        config: the node `data`.
        tokenizer: the policy's chat tokenizer, for lengths.
        tool_schemas: the tools of a row, which count towards the length of its prompt.

    Raises:
        DatasetError: a file or a row is not as it must be; the message names file, row, field and cure.
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        *,
        config: DataConfig,
        tokenizer: ChatTokenizer,
        tool_schemas: ToolSchemas | None = None,
    ) -> None:
        names = [data_files] if isinstance(data_files, str) else list(data_files)
        if not names:
            raise DatasetError("data_files must name at least one file, got none; set data.train_files")
        self.config = config
        self.bad_rows: list[BadRow] = []
        """Rows that were left out, in order."""
        self.num_overlong = 0
        """Rows that `data.filter_overlong_prompts` dropped."""
        self._tool_schemas = tool_schemas
        self._length = PromptLength(tokenizer, config.apply_chat_template_kwargs, config.max_prompt_length)
        self._files = [open_data_file(name) for name in names]
        self._num_cut = 0
        data_sources: dict[str | None, None] = {}
        self.agent_places: dict[str | None, str] = {}
        """The different values of agent_name, None for rows without it, and the first row that has it."""
        self.tool_places: dict[tuple[str | None, str], str] = {}
        """Pairs of agent_name and a tool that a row names, and the first row that has it."""
        self._places: list[tuple[DataFile, int]] = []
        for file, index, item in self._checked_rows():
            self._places.append((file, index))
            data_sources[item.get("data_source")] = None
            self._note_names(item, file, index)
        self.data_sources = tuple(data_sources)
        """The different values of data_source, None for rows without it."""
        self.agent_names = tuple(self.agent_places)
        """The different values of agent_name, None for rows without it."""
        self._fits = bytearray([config.filter_overlong_prompts]) * len(self._places)
        """Rows whose prompt is known to be short enough, so that it is counted once and not in every epoch."""
        self._report(names)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The fields of row `index`; see `rows.row_item`.

        Raises:
            IndexError: beyond the end.
            DatasetError: the prompt is too long and `data.truncation` is error.
        """
        file, row_index = self._places[index]
        position = index if index >= 0 else index + len(self)
        item = row_item(file.row(row_index), self.config, position)
        if self._fits[position]:
            return item
        tools = self._tools(item)
        try:
            num_tokens = self._length.count(item["raw_prompt"], tools)
            if num_tokens <= self.config.max_prompt_length:
                self._fits[position] = True
            else:
                item["raw_prompt"] = self._fitted(item["raw_prompt"], tools, num_tokens, file.place(row_index))
        except DatasetError as error:
            raise DatasetError(f"{file.place(row_index)}: {error}") from error
        return item

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def _tools(self, item: Mapping[str, Any]) -> Sequence[dict] | None:
        return None if self._tool_schemas is None else self._tool_schemas(item)

    def _checked_rows(self) -> Iterator[tuple[DataFile, int, dict[str, Any]]]:
        """Rows that are right and not too long, with their place; the others are raised, counted or dropped."""
        total = sum(len(file) for file in self._files)
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("reading rows", total=total)
            for file in self._files:
                for index, row in enumerate(file.rows()):
                    progress.advance(task)
                    item = self._checked_item(file, index, row)
                    if item is not None:
                        yield file, index, item

    def _checked_item(self, file: DataFile, index: int, row: dict[str, Any] | DatasetError) -> dict[str, Any] | None:
        if isinstance(row, DatasetError):
            return self._bad(file.place(index), str(row).removeprefix(file.place(index)).lstrip(), row)
        problem = check_row(row, self.config)
        if problem is not None:
            return self._bad(file.place(index), problem, None)
        item = row_item(row, self.config, len(self._places))
        if self.config.filter_overlong_prompts:
            try:
                num_tokens = self._length.count(item["raw_prompt"], self._tools(item))
            except DatasetError as error:
                return self._bad(file.place(index), str(error), error)
            if num_tokens > self.config.max_prompt_length:
                self.num_overlong += 1
                return None
        return item

    def _note_names(self, item: Mapping[str, Any], file: DataFile, index: int) -> None:
        """Keep the place of the first row that names an agent or a tool."""
        agent = item.get("agent_name")
        if agent not in self.agent_places:
            self.agent_places[agent] = file.place(index)
        selected = item["extra_info"].get("tool_selection")
        for tool in (*item["tools_kwargs"], *(selected if isinstance(selected, list) else ())):
            if (agent, tool) not in self.tool_places:
                self.tool_places[agent, tool] = file.place(index)

    def _bad(self, place: str, problem: str, cause: Exception | None) -> None:
        if not self.config.skip_bad_rows:
            raise DatasetError(f"{place}: {problem} (data.skip_bad_rows=true leaves such rows out)") from cause
        self.bad_rows.append(BadRow(place, problem))

    def _fitted(self, messages: list[dict], tools: Sequence[dict] | None, num_tokens: int, place: str) -> list[dict]:
        side = self.config.truncation
        if side == "error":
            raise DatasetError(
                f"prompt must have at most data.max_prompt_length={self.config.max_prompt_length} tokens, got "
                f"{num_tokens}; raise it, or write data.filter_overlong_prompts=true or data.truncation=middle"
            )
        if not self._num_cut:
            logger.warning("%s: the prompt has %d tokens and is cut (data.truncation=%s)", place, num_tokens, side)
        self._num_cut += 1
        return self._length.shortened(messages, tools, side)

    def _report(self, names: Sequence[str]) -> None:
        if self.bad_rows:
            listed = "\n".join(f"  {bad.place}: {bad.problem}" for bad in self.bad_rows[:_NUM_LISTED])
            more = len(self.bad_rows) - _NUM_LISTED
            rest = f"\n  and {more} more" if more > 0 else ""
            logger.warning("left out %d bad rows:\n%s%s", len(self.bad_rows), listed, rest)
        if self.config.filter_overlong_prompts:
            limit = self.config.max_prompt_length
            logger.info("kept %d prompts, dropped %d longer than %d tokens", len(self), self.num_overlong, limit)
        if not self._places:
            raise DatasetError(
                f"{', '.join(names)} must leave at least one row, got {len(self.bad_rows)} bad and {self.num_overlong} "
                "overlong ones only; mend the rows or raise data.max_prompt_length"
            )


def create_dataset(
    data_files: str | Sequence[str],
    *,
    config: DataConfig,
    tokenizer: ChatTokenizer,
    tool_schemas: ToolSchemas | None = None,
) -> PromptDataset:
    """An `RLHFDataset`, or an instance of the class that `data.custom_cls` names, made with the same arguments.

    Raises:
        DatasetError: see `RLHFDataset`; or the class cannot be loaded or is no dataset.
    """
    custom = config.custom_cls
    if custom.path is None or custom.name is None:
        return RLHFDataset(data_files, config=config, tokenizer=tokenizer, tool_schemas=tool_schemas)
    cls = load_object(custom.path, custom.name, key="data.custom_cls", error=DatasetError)
    if not (isinstance(cls, type) and hasattr(cls, "__len__") and hasattr(cls, "__getitem__")):
        raise DatasetError(
            f"data.custom_cls must be a class with __len__ and __getitem__, got {cls!r}; derive it from RLHFDataset"
        )
    try:
        inspect.signature(cls).bind(data_files, config=config, tokenizer=tokenizer, tool_schemas=tool_schemas)
    except TypeError as error:
        raise DatasetError(
            f"data.custom_cls must be made as {custom.name}(data_files, *, config, tokenizer, tool_schemas), got {error}; "
            "take these arguments, or **kwargs"
        ) from None
    return cls(data_files, config=config, tokenizer=tokenizer, tool_schemas=tool_schemas)
