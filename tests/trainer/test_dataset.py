"""The dataset: rows checked, filtered, cut and given out."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ostinato_tokenization.testing import tiny_chat_tokenizer
from ostinato_trainer.config_data import CustomClassConfig, DataConfig
from ostinato_trainer.dataset import RLHFDataset, create_dataset
from ostinato_trainer.errors import DatasetError

TOKENIZER = tiny_chat_tokenizer()
TOOL = {"type": "function", "function": {"name": "f", "description": "d" * 40, "parameters": {"type": "object"}}}


def row(text: str, **more: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": text}], "data_source": "s", **more}


def jsonl(folder: Path, rows: list[Any], name: str = "rows.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(each) + "\n" for each in rows))
    return str(folder / name)


def make(files: Any, **keys: Any) -> RLHFDataset:
    schemas = keys.pop("tool_schemas", None)
    return RLHFDataset(files, config=DataConfig(**keys), tokenizer=TOKENIZER, tool_schemas=schemas)


def test_several_files_are_one_dataset(tmp_path: Path) -> None:
    """Rows of several files, of different forms, follow one another."""
    pq.write_table(pa.Table.from_pylist([row("c")]), tmp_path / "b.parquet")
    dataset = make([jsonl(tmp_path, [row("a"), row("b")]), str(tmp_path / "b.parquet")])
    assert [item["raw_prompt"][0]["content"] for item in dataset] == ["a", "b", "c"]
    assert [item["index"] for item in dataset] == [0, 1, 2]
    assert len(dataset) == 3
    with pytest.raises(IndexError):
        dataset[3]


def test_the_kinds_of_rows_are_known(tmp_path: Path) -> None:
    """The different data sources and agents are collected, so that a run can refuse unknown ones at its start."""
    dataset = make(jsonl(tmp_path, [row("a", agent_name="x"), row("b"), {"prompt": row("c")["prompt"]}]))
    assert dataset.data_sources == ("s", None)
    assert dataset.agent_names == ("x", None)


def test_a_bad_row_stops_with_file_row_and_field(tmp_path: Path) -> None:
    """A row without prompt is an error with file, row number, field and the way to leave such rows out."""
    file = jsonl(tmp_path, [row("a"), {"question": "q"}])
    with pytest.raises(DatasetError) as caught:
        make(file)
    for part in (f"{file}, line 2", "prompt must be there, got the columns question", "data.skip_bad_rows=true"):
        assert part in str(caught.value)


def test_bad_rows_can_be_left_out_and_are_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With skip_bad_rows the good rows remain and the bad ones are counted and listed with their reasons."""
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\nnot json\n' + json.dumps(row("good")) + "\n")
    with caplog.at_level(logging.WARNING, logger="ostinato_trainer"):
        dataset = make(str(tmp_path / "rows.jsonl"), skip_bad_rows=True)
    assert len(dataset) == 1
    assert [bad.place.rpartition(", ")[2] for bad in dataset.bad_rows] == ["line 1", "line 2"]
    assert "left out 2 bad rows" in caplog.text


def test_only_bad_rows_are_an_error(tmp_path: Path) -> None:
    """A dataset that nothing is left of is an error that counts why."""
    with pytest.raises(DatasetError, match="1 bad and 0 overlong"):
        make(jsonl(tmp_path, [{"a": 1}]), skip_bad_rows=True)


def test_overlong_prompts_are_counted_with_their_tools(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A prompt that fits alone, and not with the tools that its agent shows, is dropped; the numbers are logged."""
    limit = len(TOKENIZER.encode_chat(row("abc")["prompt"])) + 5
    file = jsonl(tmp_path, [row("abc", agent_name="tool_agent"), row("abc")])

    def schemas(item: Mapping[str, Any]) -> list[dict] | None:
        return [TOOL] if item.get("agent_name") == "tool_agent" else None

    with caplog.at_level(logging.INFO, logger="ostinato_trainer"):
        dataset = make(file, filter_overlong_prompts=True, max_prompt_length=limit, tool_schemas=schemas)
    assert len(dataset) == 1
    assert dataset.num_overlong == 1
    assert "agent_name" not in dataset[0]
    assert "kept 1 prompts, dropped 1" in caplog.text
    assert len(make(file, filter_overlong_prompts=True, max_prompt_length=limit)) == 2


def test_template_variables_count_too(tmp_path: Path) -> None:
    """The filter renders with apply_chat_template_kwargs."""
    template = "{{ messages[0].content }}{% if verbose %}" + "x" * 50 + "{% endif %}"
    tokenizer = tiny_chat_tokenizer(chat_template=template)
    file = jsonl(tmp_path, [row("a")])
    for verbose, kept in ((True, False), (False, True)):
        config = DataConfig(
            filter_overlong_prompts=True, max_prompt_length=20, apply_chat_template_kwargs={"verbose": verbose}
        )
        if kept:
            assert len(RLHFDataset(file, config=config, tokenizer=tokenizer)) == 1
        else:
            with pytest.raises(DatasetError, match="1 overlong"):
                RLHFDataset(file, config=config, tokenizer=tokenizer)


def test_overlong_prompts_are_an_error_before_the_first_step(tmp_path: Path) -> None:
    """truncation=error names the first such row, how many there are, and the limit that would do, when the dataset is made."""
    file = jsonl(tmp_path, [row("a"), row("long " * 50), row("long " * 60), row("long " * 40)])
    with pytest.raises(DatasetError) as caught:
        make(file, max_prompt_length=20)
    longest = len(TOKENIZER.encode_chat(row("long " * 60)["prompt"]))
    expected = (
        f"{file}, line 2: prompt must have at most data.max_prompt_length=20 tokens",
        f"2 further rows with up to {longest}; write data.max_prompt_length={longest}",
    )
    assert all(part in str(caught.value) for part in expected), caught.value
    assert len(make(file, max_prompt_length=longest)) == 4


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_an_overlong_prompt_can_be_cut(side: str, tmp_path: Path) -> None:
    """Other truncations give out a prompt that fits."""
    dataset = make(jsonl(tmp_path, [row("long " * 50)]), max_prompt_length=30, truncation=side)
    assert len(TOKENIZER.encode_chat(dataset[0]["raw_prompt"])) <= 30


def test_items_are_fresh(tmp_path: Path) -> None:
    """What an agent does to its messages does not reach the next one."""
    dataset = make(jsonl(tmp_path, [row("a")]))
    dataset[0]["raw_prompt"].append({"role": "user", "content": "more"})
    assert len(dataset[0]["raw_prompt"]) == 1


def test_a_class_of_one_s_own_takes_its_place(tmp_path: Path) -> None:
    """data.custom_cls names a class that is made with the same arguments."""
    (tmp_path / "own.py").write_text(
        "from ostinato_trainer.dataset import RLHFDataset\n"
        "class Loud(RLHFDataset):\n"
        "    def __getitem__(self, index):\n"
        "        return super().__getitem__(index) | {'loud': True}\n"
        "class Narrow(RLHFDataset):\n"
        "    def __init__(self, data_files): pass\n"
        "number = 3\n"
    )
    file = jsonl(tmp_path, [row("a")])
    custom = CustomClassConfig(path=str(tmp_path / "own.py"), name="Loud")
    dataset = create_dataset(file, config=DataConfig(custom_cls=custom), tokenizer=TOKENIZER)
    assert dataset[0]["loud"] is True
    assert isinstance(create_dataset(file, config=DataConfig(), tokenizer=TOKENIZER), RLHFDataset)
    for name, expected in (("number", "must be a class"), ("Narrow", r"must be made as Narrow\(data_files")):
        wrong = CustomClassConfig(path=str(tmp_path / "own.py"), name=name)
        with pytest.raises(DatasetError, match=f"data.custom_cls {expected}"):
            create_dataset(file, config=DataConfig(custom_cls=wrong), tokenizer=TOKENIZER)


def test_no_files_are_an_error() -> None:
    """An empty list of files names the key to set."""
    with pytest.raises(DatasetError, match=r"data.train_files"):
        make([])
