"""The rows of a run, as its configuration asks for them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ostinato_agent_loop import make_tool_executor
from ostinato_tokenization.testing import tiny_chat_tokenizer
from ostinato_trainer.config import Config
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.data.assembly import build_datasets
from ostinato_trainer.data.dataset import PromptDataset
from ostinato_trainer.errors import DatasetError

TOKENIZER = tiny_chat_tokenizer()
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
TOOLS = """
from ostinato_tools import function_tool

@function_tool
def calculate(expression: str) -> str:
    \"\"\"Evaluate an expression.

    Args:
        expression: What to evaluate.
    \"\"\"
    return expression
"""


def row(text: str, **more: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": text}], "data_source": "s", **more}


def config(folder: Path, train: Sequence[Any], val: Sequence[Any] = (), *overrides: str) -> Config:
    for name, rows in (("train", train), ("val", val)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    (folder / "tools.py").write_text(TOOLS)
    files = [f"data.train_files={folder}/train.jsonl", f"trainer.default_local_dir={folder}/run"]
    if val:
        files.append(f"data.val_files={folder}/val.jsonl")
    tools = [f"{MULTI_TURN}.enable=true", f"{MULTI_TURN}.function_tool_path={folder}/tools.py"]
    return load_config([], [*files, *tools, "data.max_prompt_length=512", *overrides])


def built(config: Config) -> tuple[PromptDataset, PromptDataset | None]:
    tools = make_tool_executor(config.actor_rollout_ref.rollout.multi_turn, TOKENIZER)
    return build_datasets(config, TOKENIZER, tools)


def texts(dataset: PromptDataset | None) -> list[str]:
    assert dataset is not None
    return [dataset[index]["raw_prompt"][0]["content"] for index in range(len(dataset))]


def test_validation_rows_may_have_another_agent(tmp_path: Path) -> None:
    """Each row is measured with the tools that its own agent shows, whatever the default agent is."""
    limit = len(TOKENIZER.encode_chat(row("q")["prompt"])) + 2
    made = config(
        *(tmp_path, [row("q")], [row("q"), row("q", agent_name="tool_agent")]),
        *("data.filter_overlong_prompts=true", f"data.max_prompt_length={limit}"),
    )
    train, val = built(made)
    assert (len(train), texts(val)) == (1, ["q"])


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"agent_name": "nobody"}, "'nobody'"),
        ({"agent_name": "tool_agent", "extra_info": {"tools_kwargs": {"search": {}}}}, "'search' in extra_info"),
        ({"agent_name": "tool_agent", "extra_info": {"tool_selection": ["search"]}}, "search"),
    ],
)
def test_an_agent_or_tool_that_is_not_there_is_named_with_its_row(more: dict, expected: str, tmp_path: Path) -> None:
    """Also of validation rows, before anything is started, and also where bad rows are left out."""
    with pytest.raises(DatasetError) as caught:
        built(config(tmp_path, [row("q")], [row("q"), row("q", **more)], "data.skip_bad_rows=true"))
    assert f"{tmp_path}/val.jsonl, line 2" in str(caught.value)
    assert expected in str(caught.value)


def test_all_bad_rows_are_listed_in_the_run_s_folder(tmp_path: Path) -> None:
    """A file for each dataset lists them one by one; of an earlier run's list nothing is left."""
    bad = [{"a": number} for number in range(30)]
    built(config(tmp_path, [row("q"), *bad], [row("q"), 3], "data.skip_bad_rows=true"))
    listed = [json.loads(line) for line in (tmp_path / "run/bad_rows.train.jsonl").read_text().splitlines()]
    assert [entry["place"] for entry in listed] == [f"{tmp_path}/train.jsonl, line {number}" for number in range(2, 32)]
    assert listed[0]["problem"].startswith("prompt must be there, got the columns a")
    assert "must be a JSON object, got int" in (tmp_path / "run/bad_rows.val.jsonl").read_text()
    built(config(tmp_path, [row("q")], [row("q")], "data.skip_bad_rows=true"))
    assert list((tmp_path / "run").iterdir()) == []


def test_samples_are_drawn_by_the_seed(tmp_path: Path) -> None:
    """train_max_samples and val_max_samples draw by data.seed, or take the first rows where nothing is shuffled."""
    rows = [row(str(number)) for number in range(40)]
    limits = ["data.train_max_samples=5", "data.val_max_samples=3"]
    train, val = map(texts, built(config(tmp_path, rows, rows, *limits, "data.seed=1")))
    assert (len(train), len(val)) == (5, 3)
    assert train == texts(built(config(tmp_path, rows, rows, *limits, "data.seed=1"))[0])
    assert train != texts(built(config(tmp_path, rows, rows, *limits, "data.seed=2"))[0])
    first = built(config(tmp_path, rows, rows, *limits, "data.shuffle=false"))
    assert [texts(dataset) for dataset in first] == [["0", "1", "2", "3", "4"], ["0", "1", "2"]]
    assert len(built(config(tmp_path, rows))[0]) == 40


def test_a_list_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """Where the run's folder is a file, that is said instead of losing the list."""
    (tmp_path / "run").touch()
    with pytest.raises(DatasetError, match=r"bad_rows\.train\.jsonl must be writable"):
        built(config(tmp_path, [row("q"), {"a": 1}], (), "data.skip_bad_rows=true"))
