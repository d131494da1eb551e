"""The dataset: rows checked, filtered, cut and given out."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from ostinato_tokenization.testing import tiny_chat_tokenizer
from ostinato_trainer.config.data import CustomClassConfig, DataConfig
from ostinato_trainer.data.dataset import RLHFDataset, RowSample, create_dataset
from ostinato_trainer.data.prompt_loader import PromptLoader
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
        "from ostinato_trainer.data.dataset import RLHFDataset\n"
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


def test_files_of_different_columns_are_one_dataset(tmp_path: Path) -> None:
    """A column that one file lacks is absent from its rows; mappings may be JSON text in one file and not in the other."""
    pq.write_table(pa.Table.from_pylist([row("a", extra_info={"index": 7}, ability="math")]), tmp_path / "a.parquet")
    texts = {"prompt": json.dumps(row("b")["prompt"]), "extra_info": '{"index": "b-1"}', "agent_name": None}
    pq.write_table(pa.Table.from_pylist([texts]), tmp_path / "b.parquet")
    first, second = make(f"{tmp_path}/*.parquet")
    assert (first["index"], first["ability"]) == (7, "math")
    assert (second["index"], second["raw_prompt"]) == ("b-1", row("b")["prompt"])
    assert second.keys().isdisjoint({"ability", "data_source", "agent_name"})


def test_a_prompt_that_no_cut_makes_short_enough_is_found_at_the_start(tmp_path: Path) -> None:
    """Where cutting the longest message is not enough the row is an error, or is left out, when the dataset is made."""
    hopeless = {"prompt": [{"role": "user", "content": "long " * 20}] * 2}
    file = jsonl(tmp_path, [row("a"), hopeless, row("long " * 50)])
    with pytest.raises(DatasetError, match=r"line 2: prompt must fit in data.max_prompt_length=60"):
        make(file, max_prompt_length=60, truncation="left")
    dataset = make(file, max_prompt_length=60, truncation="left", skip_bad_rows=True)
    assert [len(TOKENIZER.encode_chat(item["raw_prompt"])) <= 60 for item in dataset] == [True, True]
    assert [bad.place for bad in dataset.bad_rows] == [f"{file}, line 2"]
    assert [item["index"] for item in dataset] == [0, 2]


def test_bad_rows_of_every_kind_are_listed_in_order(tmp_path: Path) -> None:
    """What is no JSON, lacks a field, or is refused by the template is listed as it stands in the file."""
    template = "{{ messages[0].content }}{{ raise_exception('too rude') if messages[0].content == 'rude' }}"
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(row("rude")), "no json", json.dumps({"a": 1}), json.dumps(row("good")), json.dumps(row("rude"))]
    path.write_text("\n".join(lines))
    tokenizer = tiny_chat_tokenizer(chat_template=template)
    with pytest.raises(DatasetError, match="line 2"):  # read before the first chunk of prompts is counted
        RLHFDataset(str(path), config=DataConfig(), tokenizer=tokenizer)
    dataset = RLHFDataset(str(path), config=DataConfig(skip_bad_rows=True), tokenizer=tokenizer)
    assert [bad.place.rpartition(" ")[2] for bad in dataset.bad_rows] == ["1", "2", "3", "5"]
    assert [bad.problem.partition(",")[0] for bad in dataset.bad_rows] == [
        "prompt must be accepted by the chat template",
        "must be a JSON object",
        "prompt must be there",
        "prompt must be accepted by the chat template",
    ]
    assert len(dataset) == 1


def test_tools_that_cannot_be_shown_are_an_error_with_the_row(tmp_path: Path) -> None:
    """What the rollout would raise for the row's agent or tools comes with the row, before the first step."""

    def schemas(item: Mapping[str, Any]) -> list[dict] | None:
        raise LookupError(f"no agent {item['agent_name']}")

    file = jsonl(tmp_path, [row("a", agent_name="nobody")])
    with pytest.raises(DatasetError, match="line 1: no agent nobody"):
        make(file, tool_schemas=schemas)


def test_lengths_are_counted_once_and_by_several_processes_alike(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two processes find what one finds; another limit, order or place of the rows counts nothing again."""
    rows = [row("x" * (number % 50) + f"{number:04}") for number in range(2500)]
    files = [jsonl(tmp_path, rows), jsonl(tmp_path, rows[::-1], "other.jsonl")]
    one, two = (str(tmp_path / name) for name in ("one", "two"))
    keys: dict[str, Any] = {"filter_overlong_prompts": True}
    limit = len(TOKENIZER.encode_chat(row("x" * 24 + "0000")["prompt"]))
    with caplog.at_level(logging.INFO, logger="ostinato_trainer"):
        serial = make(files[0], cache_dir=one, max_prompt_length=limit, filter_overlong_prompts_workers=1, **keys)
        parallel = make(files[0], cache_dir=two, max_prompt_length=limit, filter_overlong_prompts_workers=2, **keys)
        again = make(files[1], cache_dir=two, max_prompt_length=limit + 1, **keys)
    assert min(len(serial), serial.num_overlong) > 1000
    assert len(serial) + serial.num_overlong == 2500
    assert serial.prompt_lengths == parallel.prompt_lengths
    assert serial.fingerprint == parallel.fingerprint
    assert len(again) > len(serial)
    assert [number in caplog.text for number in ("(2500 counted now", "(0 counted now")] == [True, True]


def test_a_fingerprint_is_that_of_the_rows(tmp_path: Path) -> None:
    """Another content or another choice of rows is another fingerprint; another folder is not."""
    (tmp_path / "elsewhere").mkdir()
    file = jsonl(tmp_path, [row("a"), row("long " * 50)])
    moved = jsonl(tmp_path / "elsewhere", [row("a"), row("long " * 50)])
    other = jsonl(tmp_path, [row("a"), row("long " * 51)], "other.jsonl")
    own = make(file).fingerprint
    assert make(moved).fingerprint.difference(own) is None
    assert "another content" in str(make(other).fingerprint.difference(own))
    filtered = make(file, max_prompt_length=30, filter_overlong_prompts=True)
    assert "max_prompt_length" in str(filtered.fingerprint.difference(own))


def test_a_sample_looks_at_no_other_rows(tmp_path: Path) -> None:
    """A sample is the first rows, or rows drawn by a seed; what is wrong with the others does not matter."""
    file = jsonl(tmp_path, [row(str(number)) for number in range(50)] + [{"bad": 1}])

    def texts(sample: RowSample) -> list[str]:
        dataset = RLHFDataset(file, config=DataConfig(), tokenizer=TOKENIZER, sample=sample)
        return [item["raw_prompt"][0]["content"] for item in dataset]

    assert texts(RowSample(3, seed=None)) == ["0", "1", "2"]
    drawn = texts(RowSample(5, seed=4))
    assert drawn == texts(RowSample(5, seed=4)) == sorted(drawn, key=int)
    assert len(set(drawn)) == 5
    assert drawn != texts(RowSample(5, seed=5))
    with pytest.raises(DatasetError, match="line 51"):
        texts(RowSample(100, seed=4))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x", ' + json.dumps(row("a"))[1:] + "\n" + json.dumps(row("b")))
    with pytest.raises(DatasetError, match="line 1: prompt must be there once"):
        texts(RowSample(1, seed=None))


def test_a_class_that_takes_no_sample_is_refused_only_where_there_is_one(tmp_path: Path) -> None:
    """A class that is made with the four arguments works, until rows are to be drawn: then the message says what it lacks."""
    (tmp_path / "own.py").write_text(
        "class Own(list):\n    def __init__(self, data_files, *, config, tokenizer, tool_schemas):\n"
        "        super().__init__([{'raw_prompt': []}])\n"
    )
    config = DataConfig(custom_cls=CustomClassConfig(path=str(tmp_path / "own.py"), name="Own"))
    assert len(create_dataset("any", config=config, tokenizer=TOKENIZER)) == 1
    with pytest.raises(
        DatasetError, match=r"tool_schemas, sample\), got an unexpected keyword argument|got .*'sample'"
    ):
        create_dataset("any", config=config, tokenizer=TOKENIZER, sample=RowSample(1, None))


def test_a_prompt_of_tokens_that_the_model_lacks_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the tokenizer is larger than the model, the row with such a token, the token and the cure are named when the file is read, also
    for a class derived from ours; rows without one are read, and a count from an earlier run hides nothing."""
    monkeypatch.setattr("ostinato_trainer.data.dataset._WORTH_CACHING", 1)
    called = [*row("a")["prompt"], {"role": "assistant", "content": "b"}, {"role": "tool", "content": "c"}]
    file = jsonl(tmp_path, [row("a"), row("a", prompt=called)])
    vocab_size = TOKENIZER.token_id("<tool_response>")
    assert vocab_size is not None
    config = DataConfig(cache_dir=str(tmp_path / "cache"), filter_overlong_prompts_workers=1)
    assert len(create_dataset(file, config=config, tokenizer=TOKENIZER)) == 2
    (tmp_path / "own.py").write_text(
        "from ostinato_trainer.data.dataset import RLHFDataset\nclass Own(RLHFDataset): pass\n"
        "class Old(RLHFDataset):\n    def __init__(self, data_files, *, config, tokenizer, tool_schemas):\n"
        "        super().__init__(data_files, config=config, tokenizer=tokenizer, tool_schemas=tool_schemas)\n"
    )
    own, old = (CustomClassConfig(path=str(tmp_path / "own.py"), name=name) for name in ("Own", "Old"))
    wrong = rf"rows.jsonl, line 2: prompt must .* of {vocab_size}, got '<tool_response>', which is {vocab_size}; .*model\.path"
    for checked in (config, replace(config, custom_cls=own)):
        with pytest.raises(DatasetError, match=wrong):
            create_dataset(file, config=checked, tokenizer=TOKENIZER, vocab_size=vocab_size)
        kept = create_dataset(
            file, config=replace(checked, skip_bad_rows=True), tokenizer=TOKENIZER, vocab_size=vocab_size
        )
        assert [kept[index]["index"] for index in range(len(kept))] == [0]
    assert (
        len(create_dataset(file, config=replace(config, custom_cls=old), tokenizer=TOKENIZER, vocab_size=vocab_size))
        == 2
    )


def test_a_loader_goes_on_with_the_rows_of_its_files(tmp_path: Path) -> None:
    """A place saved in an epoch's middle is taken up by a new dataset of the same files, and refused once a file changed."""
    path = jsonl(tmp_path, [row(str(number)) for number in range(20)])
    first = PromptLoader(make(path), batch_size=3, shuffle=True, seed=1)
    for _ in range(8):
        first.next_batch()
    state = json.loads(json.dumps(first.state_dict()))
    second = PromptLoader(make(path), batch_size=3, shuffle=True, seed=1)
    second.load_state_dict(state)
    assert [second.next_batch() for _ in range(5)] == [first.next_batch() for _ in range(5)]
    jsonl(tmp_path, [row(str(number)) for number in range(1, 21)])
    third = PromptLoader(make(path), batch_size=3, shuffle=True, seed=1)
    with pytest.raises(DatasetError, match=r"got another content of .*rows\.jsonl .*; put the file back"):
        third.load_state_dict(state)


def test_a_terminal_sees_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a terminal a bar says what is done; elsewhere nothing is written."""
    file = jsonl(tmp_path, [row("a")])
    make(file)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    make(file)
    assert "counting prompt tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            "    def __init__(self, files, **more): raise KeyError('column')",
            r"own.py:2: KeyError: 'column'; mend the class",
        ),
        ("    def __getitem__(self, index): return 3", "mappings with raw_prompt, got 1 rows and first int"),
        ("    def __getitem__(self, index): return {'a': 1}", "got 1 rows and first dict with a"),
        ("    def __len__(self): return 0", "got 0 rows"),
    ],
)
def test_a_class_of_one_s_own_is_tried_before_the_first_step(body: str, expected: str, tmp_path: Path) -> None:
    """A class that raises, or gives what is no row, is an error with the key and the line."""
    (tmp_path / "own.py").write_text(f"class Own:\n{body}\n" + _REST_OF_A_CLASS)
    config = DataConfig(custom_cls=CustomClassConfig(path=str(tmp_path / "own.py"), name="Own"))
    with pytest.raises(DatasetError, match=f"data.custom_cls must give .*{expected}"):
        create_dataset("any", config=config, tokenizer=TOKENIZER)


_REST_OF_A_CLASS = (
    "    __init__ = locals().get('__init__', lambda self, files, **more: None)\n"
    "    __len__ = locals().get('__len__', lambda self: 1)\n"
    "    __getitem__ = locals().get('__getitem__', lambda self, index: {'raw_prompt': []})\n"
)
