"""GSM8K as rows for training: `prepare_gsm8k`.

Reads `question` and `answer` (which ends in `#### N`), writes train and test parquet, and for agents with tools
`sft.jsonl`: the training questions as demonstrations. The ground truth is what follows `####`, commas removed. Files
appear whole or not at all.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import Progress

from ostinato_trainer.data.files import open_data_file
from ostinato_trainer.data.gsm8k_dialogues import Gsm8kDialogues
from ostinato_trainer.data.hub_files import HUB_SCHEME
from ostinato_trainer.errors import DatasetError
from ostinato_trainer.home_paths import home_path
from ostinato_trainer.rewards.scorers import ground_truth_of

__all__ = ["GSM8K_DATA_SOURCE", "prepare_gsm8k"]

GSM8K_DATA_SOURCE: Final = "openai/gsm8k"
_SPLITS: Final = ("train", "test")
_SUFFIXES: Final = (".jsonl", ".json", ".parquet")
_HUB_FILE: Final = "main/{split}-00000-of-00001.parquet"

_TOOL_SYSTEM: Final = (
    "You solve arithmetic word problems. Think step by step. When you have a result, check it by calling the tool "
    "calc_gsm8k_reward with the number as its answer; if it was wrong, look for the mistake and try again. "
    "End with the result on a line of its own, in the form #### NUMBER."
)
_CALCULATOR_SYSTEM: Final = (
    "You solve arithmetic word problems. Think step by step, and calculate with the tool calculator. "
    "End with the result on a line of its own, in the form #### NUMBER."
)
_PLAIN_SYSTEM: Final = (
    "You solve arithmetic word problems. Think step by step. "
    "End with the result on a line of its own, in the form #### NUMBER."
)


def prepare_gsm8k(
    input: str | Path, output: str | Path, *, agent: str = "tool_agent", checks: bool = True
) -> dict[Path, int]:
    """Write `train.parquet` and `test.parquet`, and `sft.jsonl` with `messages` and `tools` a line for `ostinato sft`.

    Args:
        input: a folder with train and test as jsonl, json or parquet, or the id of a dataset on the hub
            (`openai/gsm8k`, extra `hub`).
        output: folder to write to; made if absent.
        agent: agent program of the rows. `single_turn_agent` gets a prompt that speaks of no tool, and no `sft.jsonl`.
        checks: whether there is a tool that says if an answer is right. Accuracy that counts is measured without it.

    Returns:
        The files with their numbers of rows.

    Raises:
        DatasetError: a file or row is missing or malformed, or the output cannot be written.
    """
    if not agent:
        raise DatasetError("agent must name an agent program, got nothing; write --agent tool_agent")
    rows = {split: _read_split(input, split, agent, checks) for split in _SPLITS}
    demonstrations = _demonstrations(rows["train"], checks) if _uses_tools(agent) else []
    folder = home_path(output, "--output", DatasetError)
    written: dict[Path, int] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for split, of_split in rows.items():
            table, path = pa.Table.from_pylist(of_split), folder / f"{split}.parquet"
            _write_whole(path, lambda target, table=table: pq.write_table(table, target))
            written[path] = len(of_split)
        if demonstrations:
            path, lines = folder / "sft.jsonl", msgspec.json.Encoder().encode_lines(demonstrations)
            _write_whole(path, lambda target: target.write_bytes(lines))
            written[path] = len(demonstrations)
        return written
    except OSError as error:
        reason = error.strerror or str(error)
        raise DatasetError(
            f"{folder} must be a folder that can be written: {reason}; choose another --output"
        ) from error


def _uses_tools(agent: str) -> bool:
    return agent != "single_turn_agent"


def _demonstrations(rows: Sequence[dict[str, Any]], checks: bool) -> list[dict[str, Any]]:
    """What `sft.jsonl` holds: a conversation for each row whose annotated calculations the tools confirm."""
    dialogues, console = Gsm8kDialogues(checks=checks), Console(stderr=True)

    async def make() -> list[dict[str, Any]]:
        found = []
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            for row in progress.track(rows, description="running the tools of the demonstrations"):
                info, truth = row["extra_info"], row["reward_model"]["ground_truth"]
                messages = await dialogues.make(row["prompt"], info["answer"], truth, info.get("tools_kwargs", {}))
                if messages is not None:
                    found.append({"messages": messages, "tools": dialogues.tools})
        return found

    return asyncio.run(make())


def _read_split(source: str | Path, split: str, agent: str, checks: bool) -> list[dict[str, Any]]:
    file = open_data_file(_split_file(source, split))
    rows = []
    for index, row in enumerate(file.rows()):
        if isinstance(row, DatasetError):
            raise row
        rows.append(_gsm8k_row(row, split, index, agent, checks, file.place(index)))
    return rows


def _split_file(source: str | Path, split: str) -> str:
    folder = home_path(source, "--input", DatasetError)
    if folder.is_dir():
        found = next(
            (folder / f"{split}{suffix}" for suffix in _SUFFIXES if (folder / f"{split}{suffix}").exists()), None
        )
        if found is None:
            wanted = " or ".join(f"{split}{suffix}" for suffix in _SUFFIXES)
            raise DatasetError(
                f"--input must hold {wanted}, got {folder} without it; add the file or name another folder"
            )
        return str(found)
    name = str(source)
    is_hub_id = name.count("/") == 1 and not name.startswith((".", "/", "~")) and not folder.parent.is_dir()
    if not (is_hub_id or name.startswith(f"{HUB_SCHEME}datasets/")):
        raise DatasetError(f"--input must be a folder or a hub id such as openai/gsm8k, got {name}; check the path")
    repository = name.removeprefix(f"{HUB_SCHEME}datasets/")
    return f"{HUB_SCHEME}datasets/{repository}/{_HUB_FILE.format(split=split)}"


def _gsm8k_row(row: dict[str, Any], split: str, index: int, agent: str, checks: bool, place: str) -> dict[str, Any]:
    for field in ("question", "answer"):
        if not isinstance(row.get(field), str) or not row[field].strip():
            raise DatasetError(f"{place}: {field} must be text, got {row.get(field)!r}; mend that row")
    truth = ground_truth_of(row["answer"])
    if truth is None:
        raise DatasetError(f"{place}: answer must end with `#### NUMBER`, got {row['answer'][-40:]!r}; mend that row")
    checks = checks and _uses_tools(agent)
    system = _TOOL_SYSTEM if checks else _CALCULATOR_SYSTEM if _uses_tools(agent) else _PLAIN_SYSTEM
    return {
        "data_source": GSM8K_DATA_SOURCE,
        "agent_name": agent,
        "prompt": [
            {"role": "system", "content": system},
            {"role": "user", "content": row["question"]},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {
            "split": split,
            "index": index,
            "question": row["question"],
            "answer": row["answer"],
            "need_tools_kwargs": checks,
            **({"tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": truth}}}} if checks else {}),
        },
    }


def _write_whole(path: Path, write: Callable[[Path], object]) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        write(unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
