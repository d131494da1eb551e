"""GSM8K becomes rows."""

import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ostinato_tokenization.testing import tiny_chat_tokenizer
from ostinato_trainer.config.data import DataConfig
from ostinato_trainer.data.dataset import RLHFDataset
from ostinato_trainer.data.prepare import prepare
from ostinato_trainer.data.prepare_gsm8k import prepare_gsm8k
from ostinato_trainer.errors import DatasetError

SHARED = Path(os.environ.get("OSTINATO_SHARED", Path(__file__).parents[3] / "shared"))
GSM8K = SHARED / "data" / "gsm8k"
QUESTION = {"question": "2000 + 34?", "answer": "It is <<2000+34=2034>>2034.\n#### 2,034"}


def source(folder: Path, train: list[dict], test: list[dict] | None = None) -> Path:
    for split, rows in (("train", train), ("test", test or train)):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_row_has_the_fields_of_the_field(tmp_path: Path) -> None:
    """A question becomes prompt, ground truth without commas, and the arguments of the checking tool."""
    written = prepare_gsm8k(source(tmp_path, [QUESTION]), tmp_path / "out")
    assert written == {tmp_path / "out" / name: 1 for name in ("train.parquet", "test.parquet", "sft.jsonl")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in written}
    row = pq.read_table(tmp_path / "out" / "test.parquet").to_pylist()[0]
    assert list(row) == ["data_source", "agent_name", "prompt", "ability", "reward_model", "extra_info"]
    assert (row["data_source"], row["agent_name"], row["ability"]) == ("openai/gsm8k", "tool_agent", "math")
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert row["prompt"][1]["content"] == QUESTION["question"]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "2034"}
    assert row["extra_info"] == {
        "split": "test",
        "index": 0,
        **QUESTION,
        "need_tools_kwargs": True,
        "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "2034"}}},
    }


def test_another_agent_can_be_named(tmp_path: Path) -> None:
    """The agent is written into the rows; the one without tools gets a prompt that speaks of none, and no demonstrations."""
    prepare("gsm8k", source(tmp_path, [QUESTION]), tmp_path / "out", agent="single_turn_agent")
    row = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()[0]
    assert row["agent_name"] == "single_turn_agent"
    assert "calc_gsm8k_reward" not in row["prompt"][0]["content"]
    assert row["extra_info"]["need_tools_kwargs"] is False
    assert not (tmp_path / "out" / "sft.jsonl").exists()


def test_demonstrations_come_from_training_questions_only(tmp_path: Path) -> None:
    """`sft.jsonl` holds the row's prompt, the calls and the schemas, and nothing of the test split."""
    held_out = {"question": "7 + 1?", "answer": "<<7+1=8>>\n#### 8"}
    prepare_gsm8k(source(tmp_path, [QUESTION], [held_out]), tmp_path / "out")
    [line] = (tmp_path / "out" / "sft.jsonl").read_text().splitlines()
    conversation = json.loads(line)
    prompt = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()[0]["prompt"]
    assert list(conversation) == ["messages", "tools"]
    assert conversation["messages"][:2] == prompt
    assert [message["role"] for message in conversation["messages"][2:]] == [*["assistant", "tool"] * 2, "assistant"]
    assert {tool["function"]["name"] for tool in conversation["tools"]} == {"calc_gsm8k_reward", "calculator"}


def test_rows_for_measuring_have_no_tool_that_knows_the_answer(tmp_path: Path) -> None:
    """Without checks neither prompt, demonstration nor row speaks of the checking tool; what is said last stands before the result."""
    prepare("gsm8k", source(tmp_path, [QUESTION]), tmp_path / "out", checks=False)
    for name in ("train", "test"):
        row = pq.read_table(tmp_path / "out" / f"{name}.parquet").to_pylist()[0]
        assert row["agent_name"] == "tool_agent"
        assert "calculator" in row["prompt"][0]["content"]
        assert "calc_gsm8k_reward" not in json.dumps(row)
    conversation = json.loads((tmp_path / "out" / "sft.jsonl").read_text())
    assert [tool["function"]["name"] for tool in conversation["tools"]] == ["calculator"]
    assert "calc_gsm8k_reward" not in json.dumps(conversation)
    assert conversation["messages"][-1]["content"] == "It is 2034.\n#### 2034"
    item = RLHFDataset(str(tmp_path / "out" / "train.parquet"), config=DataConfig(), tokenizer=tiny_chat_tokenizer())[0]
    assert item["tools_kwargs"] == {}


def test_what_was_written_is_a_dataset(tmp_path: Path) -> None:
    """The rows pass the dataset's checks and give agents what they read."""
    prepare_gsm8k(source(tmp_path, [QUESTION] * 3), tmp_path / "out")
    files = str(tmp_path / "out" / "train.parquet")
    item = RLHFDataset(files, config=DataConfig(), tokenizer=tiny_chat_tokenizer())[2]
    assert item["index"] == 2
    assert item["tools_kwargs"] == {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "2034"}}}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"question": "q", "answer": "no mark"}, "line 2: answer must end with `#### NUMBER`"),
        ({"question": "q"}, "line 2: answer must be text"),
        ({"question": "", "answer": "#### 1"}, "line 2: question must be text"),
    ],
)
def test_a_malformed_question_is_named(row: dict, expected: str, tmp_path: Path) -> None:
    """A row that is no GSM8K question is an error with file and line, and nothing is written."""
    with pytest.raises(DatasetError, match=expected.replace("`", ".")):
        prepare_gsm8k(source(tmp_path, [QUESTION, row]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_input_is_named(tmp_path: Path) -> None:
    """A folder without the files, a path that is not there, and an unknown data set are errors that say so."""
    with pytest.raises(DatasetError, match=r"train.jsonl or train.json or train.parquet"):
        prepare_gsm8k(tmp_path, tmp_path / "out")
    with pytest.raises(DatasetError, match="must be a folder or a hub id"):
        prepare_gsm8k(tmp_path / "no", tmp_path / "out")
    with pytest.raises(DatasetError, match="must be one of gsm8k"):
        prepare("gsm9k", tmp_path, tmp_path / "out")


def test_an_output_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """An output folder below a file is an error with the folder."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DatasetError, match="--output"):
        prepare_gsm8k(source(tmp_path, [QUESTION]), tmp_path / "file" / "out")


@pytest.mark.skipif(not GSM8K.exists(), reason=f"needs {GSM8K}")
def test_the_real_data_set_is_prepared_whole(tmp_path: Path) -> None:
    """All 7,473 and 1,319 questions get a ground truth that is a number; 7,376 solutions are annotated and confirmed."""
    written = prepare_gsm8k(GSM8K, tmp_path)
    assert list(written.values()) == [7473, 1319, 7376]
    truths = pq.read_table(tmp_path / "train.parquet", columns=["reward_model"]).to_pylist()
    assert all(
        float(row["reward_model"]["ground_truth"]) == float(row["reward_model"]["ground_truth"]) for row in truths
    )
