"""Rows as agents get them: `RLHFDataset`.

Every row is checked and every prompt counted when the dataset is made, so that a run does not stop at step 300 for what was
wrong from the start; rows are decoded again on access, so that nothing an agent changes reaches another trajectory. Order
and batches are `prompt_loader`'s.
"""

from __future__ import annotations

import inspect
import logging
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

from msgspec import Struct
from rich.console import Console
from rich.progress import Progress

from ostinato_tokenization import ChatTokenizer
from ostinato_trainer.config.data import DataConfig
from ostinato_trainer.custom_code import load_object, place_of
from ostinato_trainer.data.bad_rows import BadRow, log_bad_rows
from ostinato_trainer.data.count_workers import Prompt
from ostinato_trainer.data.files import open_data_file
from ostinato_trainer.data.fingerprint import DataFingerprint, rows_digest
from ostinato_trainer.data.length_cache import LengthCache, cache_folder
from ostinato_trainer.data.paths import data_file_names
from ostinato_trainer.data.prompt_counter import PromptCounter, default_num_workers
from ostinato_trainer.data.prompt_length import PromptLength, without_longest_text
from ostinato_trainer.data.row_sample import RowSample
from ostinato_trainer.data.rows import check_row, row_item
from ostinato_trainer.errors import DatasetError

__all__ = ["BadRow", "PromptDataset", "RLHFDataset", "RowSample", "ToolSchemas", "create_dataset"]

logger = logging.getLogger(__name__)

_WORTH_CACHING = 2000
"""Rows from which on their lengths are kept on disk: fewer are counted in less time than it takes to look them up."""

ToolSchemas = Callable[[Mapping[str, Any]], Sequence[dict] | None]
"""The tools that the agent of a row shows to the model, as the rollout will; None where it shows none."""


class PromptDataset(Protocol):
    """What the loader needs; a class named by `data.custom_cls` has at least these."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...


class RLHFDataset:
    """Prompts with what their agents, tools and rewards need.

    Args:
        data_files: one path or several, which may be patterns; parquet, json or jsonl; local or
            `hf://datasets/OWNER/NAME[@REVISION]/FILE`.
        config: the node `data`.
        tokenizer: the policy's chat tokenizer, for lengths.
        tool_schemas: the tools of a row, which count towards the length of its prompt.
        sample: which rows are looked at; None: all.
        vocab_size: below which the ids of prompts must be, where the tokenizer has ids that the model has no embedding for.

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
        sample: RowSample | None = None,
        vocab_size: int | None = None,
    ) -> None:
        names = data_file_names([data_files] if isinstance(data_files, str) else list(data_files))
        if not names:
            raise DatasetError("data_files must name at least one file, got none; set data.train_files")
        self.config = config
        self.bad_rows: list[BadRow] = []
        """Rows that were left out, in order."""
        self.num_overlong = 0
        """Rows that `data.filter_overlong_prompts` dropped."""
        self.agent_places: dict[str | None, str] = {}
        """The different values of agent_name, None for rows without it, and the first row that has it."""
        self.tool_places: dict[tuple[str | None, str], str] = {}
        """Pairs of agent_name and a tool that a row names, and the first row that has it."""
        self._tool_schemas = tool_schemas
        self._length = PromptLength(
            tokenizer, config.apply_chat_template_kwargs, config.max_prompt_length, vocab_size=vocab_size
        )
        self._files = [open_data_file(name) for name in names]
        self._ends = list(accumulate(len(file) for file in self._files))
        self._data_sources: dict[str | None, None] = {}
        self._numbers, self._lengths = array("q"), array("q")
        self._bad: list[tuple[int, str]] = []
        with PromptCounter(
            self._length,
            num_workers=config.filter_overlong_prompts_workers or default_num_workers(),
            cache=_cache(config, self._length) if self._num_used(sample) >= _WORTH_CACHING else None,
        ) as counter:
            self._read(counter, sample)
            self._check_overlong(counter)
        self.bad_rows = [BadRow(self._place(number), problem) for number, problem in sorted(self._bad)]
        self._report(names, counter.num_counted)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The fields of row `index`; see `rows.row_item`. A prompt that is too long comes cut, as `data.truncation` says.

        Raises:
            IndexError: beyond the end.
        """
        number = self._numbers[index]
        item = self._item(number)
        if self._lengths[index] > self.config.max_prompt_length and self.config.truncation != "error":
            item["raw_prompt"] = self._length.shortened(
                item["raw_prompt"], self._tools(item, number), self.config.truncation
            )
        return item

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    @property
    def data_sources(self) -> tuple[str | None, ...]:
        """The different values of data_source, None for rows without it."""
        return tuple(self._data_sources)

    @property
    def agent_names(self) -> tuple[str | None, ...]:
        """The different values of agent_name, None for rows without it."""
        return tuple(self.agent_places)

    @property
    def prompt_lengths(self) -> Sequence[int]:
        """Tokens of each prompt, before any cut, tools and generation prompt included."""
        return self._lengths

    @cached_property
    def fingerprint(self) -> DataFingerprint:
        """What the rows are, whatever their files are called."""
        files = [(file.name, file.digest) for file in self._files]
        return DataFingerprint(files=files, rows=rows_digest(self._numbers))

    def _read(self, counter: PromptCounter, sample: RowSample | None) -> None:
        """Keep the rows that are right and not too long; the others are raised, or left out and counted."""
        console = Console(stderr=True)
        total = self._num_used(sample)
        if total >= _WORTH_CACHING:
            logger.info("reading %d rows and counting the tokens of their prompts", total)
        chosen = None if sample is None or total == self._ends[-1] else sample.chosen(self._ends[-1])
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("counting prompt tokens", total=total)
            for row, length in counter.measured(self._right_rows(chosen)):
                progress.advance(task)
                if isinstance(length, str):
                    self._leave_out(row.number, length)
                elif self.config.filter_overlong_prompts and length > self.config.max_prompt_length:
                    self.num_overlong += 1
                else:
                    self._numbers.append(row.number)
                    self._lengths.append(length)
                    self._note_names(row)

    def _num_used(self, sample: RowSample | None) -> int:
        return self._ends[-1] if sample is None else min(sample.num_rows, self._ends[-1])

    def _right_rows(self, chosen: Sequence[int] | None) -> Iterator[tuple[_Row, Prompt]]:
        for number, row in self._raw_rows(chosen):
            if isinstance(row, DatasetError):
                self._leave_out(number, str(row))
                continue
            problem = check_row(row, self.config)
            if problem is not None:
                self._leave_out(number, problem)
                continue
            item = row_item(row, self.config, number)
            prompt = item["raw_prompt"], self._tools(item, number)
            yield _Row(number, item.get("agent_name"), item.get("data_source"), _tools_named(item)), prompt

    def _raw_rows(self, chosen: Sequence[int] | None) -> Iterator[tuple[int, dict[str, Any] | DatasetError]]:
        if chosen is None:
            yield from enumerate(row for file in self._files for row in file.rows())
            return
        for number in chosen:
            try:
                yield number, self._raw_row(number)
            except DatasetError as error:
                yield number, error

    def _raw_row(self, number: int) -> dict[str, Any]:
        file = bisect_right(self._ends, number)
        return self._files[file].row(number - (self._ends[file - 1] if file else 0))

    def _place(self, number: int) -> str:
        file = bisect_right(self._ends, number)
        return self._files[file].place(number - (self._ends[file - 1] if file else 0))

    def _item(self, number: int) -> dict[str, Any]:
        return row_item(self._raw_row(number), self.config, number)

    def _tools(self, item: Mapping[str, Any], number: int) -> Sequence[dict] | None:
        if self._tool_schemas is None:
            return None
        try:
            return self._tool_schemas(item)
        except Exception as error:  # no such agent or tool; or whatever the function of a user does
            raise DatasetError(f"{self._place(number)}: {error}") from error

    def _note_names(self, row: _Row) -> None:
        """Keep the place of the first row that names an agent or a tool."""
        self._data_sources[row.data_source] = None
        if row.agent not in self.agent_places:
            self.agent_places[row.agent] = self._place(row.number)
        for tool in row.tools:
            if (row.agent, tool) not in self.tool_places:
                self.tool_places[row.agent, tool] = self._place(row.number)

    def _leave_out(self, number: int, problem: str) -> None:
        place = self._place(number)
        problem = problem.removeprefix(place).removeprefix(":").lstrip()
        if not self.config.skip_bad_rows:
            raise DatasetError(f"{place}: {problem} (data.skip_bad_rows=true leaves such rows out)")
        self._bad.append((number, problem))

    def _check_overlong(self, counter: PromptCounter) -> None:
        """Refuse prompts that are too long, or that no cut makes short enough."""
        limit = self.config.max_prompt_length
        overlong = [index for index, length in enumerate(self._lengths) if length > limit]
        if not overlong:
            return
        first = self._place(self._numbers[overlong[0]])
        if self.config.truncation == "error":
            longest = max(self._lengths)
            others = f", and {len(overlong) - 1} further rows with up to {longest}" if len(overlong) > 1 else ""
            raise DatasetError(
                f"{first}: prompt must have at most data.max_prompt_length={limit} tokens, got "
                f"{self._lengths[overlong[0]]}{others}; write data.max_prompt_length={longest}, "
                "data.filter_overlong_prompts=true or data.truncation=middle"
            )
        logger.warning(
            "%d prompts are longer than %d tokens and are cut (data.truncation=%s); the first is %s",
            *(len(overlong), limit, self.config.truncation, first),
        )
        shortest = counter.measured((index, self._shortest(self._numbers[index])) for index in overlong)
        hopeless = {index for index, length in shortest if isinstance(length, str) or length > limit}
        for index in sorted(hopeless):
            self._leave_out(self._numbers[index], self._length.too_long_to_cut)
        kept = [index for index in range(len(self._numbers)) if index not in hopeless]
        self._numbers = array("q", [self._numbers[index] for index in kept])
        self._lengths = array("q", [self._lengths[index] for index in kept])

    def _shortest(self, number: int) -> Prompt:
        item = self._item(number)
        return without_longest_text(item["raw_prompt"]), self._tools(item, number)

    def _report(self, names: Sequence[str], num_counted: int) -> None:
        log_bad_rows(self.bad_rows)
        if self.config.filter_overlong_prompts:
            limit = self.config.max_prompt_length
            logger.info("kept %d prompts, dropped %d longer than %d tokens", len(self), self.num_overlong, limit)
        if not len(self):
            raise DatasetError(
                f"{', '.join(names)} must leave at least one row, got {len(self.bad_rows)} bad and {self.num_overlong} "
                "overlong ones only; mend the rows or raise data.max_prompt_length"
            )
        logger.info(
            "%d prompts of %d to %d tokens (%d counted now, the others known)",
            *(len(self), min(self._lengths), max(self._lengths), num_counted),
        )


class _Row(Struct, frozen=True):
    """What is kept of a row while its prompt is counted."""

    number: int
    agent: str | None
    data_source: str | None
    tools: tuple[str, ...]


def _tools_named(item: Mapping[str, Any]) -> tuple[str, ...]:
    return (*item["tools_kwargs"], *(item["extra_info"].get("tool_selection") or ()))


def _cache(config: DataConfig, length: PromptLength) -> LengthCache | None:
    """None also where a prompt's tokens matter, and not only their number."""
    folder = cache_folder(config.cache_dir)
    if folder is None or length.vocab_size is not None:
        return None
    return LengthCache(folder, length.tokenizer, config.apply_chat_template_kwargs)


def _takes(cls: type, name: str) -> bool:
    parameters = inspect.signature(cls).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def create_dataset(
    data_files: str | Sequence[str],
    *,
    config: DataConfig,
    tokenizer: ChatTokenizer,
    tool_schemas: ToolSchemas | None = None,
    sample: RowSample | None = None,
    vocab_size: int | None = None,
) -> PromptDataset:
    """An `RLHFDataset`, or an instance of the class that `data.custom_cls` names, made with the same arguments.

    A class of the user's own is given `sample` only where there is one, and `vocab_size` where it is an `RLHFDataset` that takes it.

    Raises:
        DatasetError: see `RLHFDataset`; or the class cannot be loaded, made or used as a dataset.
    """
    custom = config.custom_cls
    arguments: dict[str, Any] = {"config": config, "tokenizer": tokenizer, "tool_schemas": tool_schemas}
    if sample is not None:
        arguments["sample"] = sample
    if custom.path is None or custom.name is None:
        return RLHFDataset(data_files, **arguments, vocab_size=vocab_size)
    cls = load_object(custom.path, custom.name, key="data.custom_cls", error=DatasetError)
    if not (isinstance(cls, type) and hasattr(cls, "__len__") and hasattr(cls, "__getitem__")):
        raise DatasetError(
            f"data.custom_cls must be a class with __len__ and __getitem__, got {cls!r}; derive it from RLHFDataset"
        )
    if vocab_size is not None and issubclass(cls, RLHFDataset) and _takes(cls, "vocab_size"):
        arguments["vocab_size"] = vocab_size
    try:
        inspect.signature(cls).bind(data_files, **arguments)
    except TypeError as error:
        raise DatasetError(
            f"data.custom_cls must be made as {custom.name}(data_files, *, {', '.join(arguments)}), got {error}; "
            "take these arguments, or **kwargs"
        ) from None
    try:
        dataset = cls(data_files, **arguments)
        num_rows, first = len(dataset), dataset[0]
    except DatasetError:
        raise
    except Exception as error:  # the user's code
        raise DatasetError(
            f"data.custom_cls must give rows, got {place_of(error, custom.path)}; mend the class"
        ) from error
    if num_rows < 1 or not isinstance(first, Mapping) or not ({"raw_prompt", "prompt"} & first.keys()):
        raise DatasetError(
            f"data.custom_cls must give mappings with raw_prompt, got {num_rows} rows and first "
            f"{type(first).__name__} with {', '.join(map(str, first)) if isinstance(first, Mapping) else 'no keys'}; "
            "return what RLHFDataset returns"
        )
    return dataset
