"""The rows of a run: training and validation datasets, made as the configuration says and checked against what is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ostinato_agent_loop import agent_loop_class
from ostinato_agent_loop.rows import row_tool_selection
from ostinato_tokenization import ChatTokenizer
from ostinato_tools import ToolExecutor
from ostinato_trainer.config import Config
from ostinato_trainer.data.bad_rows import write_bad_rows
from ostinato_trainer.data.dataset import PromptDataset, RowSample, create_dataset
from ostinato_trainer.data.row_names import check_row_names

__all__ = ["build_datasets"]


def build_datasets(
    config: Config, tokenizer: ChatTokenizer, tools: ToolExecutor, *, vocab_size: int | None = None
) -> tuple[PromptDataset, PromptDataset | None]:
    """Training rows and validation rows, if there are any; prompts are measured with the tools that their agents show.

    Rows that are left out are listed in the run's folder.

    Args:
        config: The whole tree.
        tokenizer: Of the policy.
        tools: What agents may show.
        vocab_size: Below which the ids of prompts must be, where the tokenizer has ids beyond.

    Raises:
        DatasetError: A file or a row is not as it must be, or names an agent or a tool that is not there.
    """
    default_agent = config.actor_rollout_ref.rollout.agent.default_agent_loop

    def schemas_of(row: Mapping[str, Any]) -> Sequence[dict] | None:
        if not agent_loop_class(row.get("agent_name") or default_agent).needs_tools:
            return None
        selected = row_tool_selection(row)  # a name that is not there is `check_row_names`' to refuse
        known = None if selected is None else [name for name in selected if name in tools.registry]
        return tools.registry.schemas(known)

    def rows(paths: Sequence[str], max_samples: int, name: str) -> PromptDataset:
        dataset = create_dataset(
            paths,
            config=config.data,
            tokenizer=tokenizer,
            tool_schemas=schemas_of,
            sample=_sample(config, max_samples),
            vocab_size=vocab_size,
        )
        if config.data.skip_bad_rows:
            path = Path(config.trainer.local_dir) / f"bad_rows.{name}.jsonl"
            write_bad_rows(getattr(dataset, "bad_rows", ()), path)  # a class of the user's own need not have it
        check_row_names(dataset, default_agent=default_agent, registry=tools.registry)
        return dataset

    data = config.data
    train_rows = rows(data.train_paths, data.train_max_samples, "train")
    return train_rows, rows(data.val_paths, data.val_max_samples, "val") if data.val_paths else None


def _sample(config: Config, max_samples: int) -> RowSample | None:
    if max_samples == -1:
        return None
    return RowSample(max_samples, seed=config.data_seed if config.data.shuffle else None)
