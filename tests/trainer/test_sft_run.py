"""`ostinato sft`: from a file of conversations to a model folder that talks as they do."""

import json
from io import StringIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from ostinato_tokenization import ChatTokenizer, encode_training_conversation
from ostinato_tokenization.testing import TINY_CHAT_TEMPLATE
from ostinato_trainer import sft_run
from ostinato_trainer.cli import app, run_reporting_errors
from ostinato_trainer.errors import CheckpointError, DatasetError
from ostinato_trainer.quickstart.tiny_model import save_model, save_tokenizer
from ostinato_trainer.sft import SftSettings, sft_batch
from ostinato_trainer.sft_run import read_conversations, run_sft

SETTINGS = SftSettings(steps=3, batch_size=2, lr=1e-2, device="cpu")


def conversation(answer: str) -> dict:
    return {"messages": [{"role": "user", "content": "say it"}, {"role": "assistant", "content": answer}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    folder.mkdir(exist_ok=True)
    save_tokenizer(folder, ["user\nsay it", "assistant\nyes", "assistant\nno"] * 3)
    save_model(folder, seed=0)
    return folder


def jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(model: Path, data: str, output: Path, **changes: object) -> None:
    options = {
        "settings": SETTINGS,
        "max_length": 100,
        "chat_template": None,
        "seed": 0,
        "console": Console(quiet=True),
    }
    run_sft(model, data, output, **{**options, **changes})  # pyright: ignore[reportArgumentType]


def test_the_command_writes_a_model_that_learned(model: Path, tmp_path: Path) -> None:
    """After `ostinato sft` the folder loads with transformers and finds the conversations likelier than before."""
    row = conversation("yes")
    data, out = jsonl(tmp_path / "data.jsonl", [row, row]), tmp_path / "new" / "out"
    options = {"--model": model, "--data": data, "--output": out, "--steps": 3, "--batch-size": 2, "--lr": 1e-2}
    arguments = ["sft", *(str(part) for option in options.items() for part in option)]
    assert run_reporting_errors(lambda: app(arguments, standalone_mode=False)) == 0
    batch = sft_batch([encode_training_conversation(ChatTokenizer.from_pretrained(model), row["messages"])])
    ids, trained = batch.token_ids[None], batch.loss_mask[1:]
    losses = []
    for folder in (model, out):
        with torch.no_grad():
            table = AutoModelForCausalLM.from_pretrained(folder)(ids).logits[0, :-1].log_softmax(-1)
        losses.append(-table.gather(1, ids[0, 1:, None])[trained].mean().item())
    assert losses[1] < losses[0] - 0.5
    assert AutoTokenizer.from_pretrained(out).chat_template == AutoTokenizer.from_pretrained(model).chat_template
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_log_without_a_terminal_shows_progress(model: Path, tmp_path: Path) -> None:
    """Where no bar can move, about every tenth of the steps is a line with its loss."""
    log, data = StringIO(), jsonl(tmp_path / "data.jsonl", [conversation("yes")])
    settings = SftSettings(steps=20, batch_size=1, lr=1e-2, device="cpu")
    run(model, data, tmp_path / "out", settings=settings, console=Console(file=log, width=200))
    lines = [line for line in log.getvalue().splitlines() if line.startswith("step ")]
    assert [line.partition("  loss ")[0] for line in lines] == [f"step {step} of 20" for step in range(2, 21, 2)]
    losses = [float(line.partition("  loss ")[2]) for line in lines]
    assert losses[-1] < losses[0]


def test_the_model_carries_the_template_that_it_was_trained_with(model: Path, tmp_path: Path) -> None:
    """With --chat-template the output folder renders by it, for this project and for transformers."""
    template = tmp_path / "own.jinja"
    template.write_text(TINY_CHAT_TEMPLATE)
    data = jsonl(tmp_path / "data.jsonl", [conversation("yes")])
    run(model, data, tmp_path / "out", chat_template=str(template))
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == TINY_CHAT_TEMPLATE
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == TINY_CHAT_TEMPLATE


def test_conversations_are_chosen_by_seed_and_length(model: Path, tmp_path: Path) -> None:
    """No conversation is chosen twice or beyond the length, no more are read than are wanted, and the seed decides which."""
    tokenizer = ChatTokenizer.from_pretrained(model)
    rows = [conversation("yes" * count) for count in range(1, 31)]
    data = jsonl(tmp_path / "data.jsonl", rows)
    lengths = [len(encode_training_conversation(tokenizer, row["messages"]).token_ids) for row in rows]
    limit = lengths[19]
    everything, left_out = read_conversations(data, tokenizer, max_length=limit, number=99, seed=0)
    assert sorted(len(each.token_ids) for each in everything) == lengths[:20]
    assert left_out == 10
    chosen = [read_conversations(data, tokenizer, max_length=limit, number=5, seed=seed)[0] for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] == everything[:5]
    assert chosen[0] != chosen[2]
    assert len(chosen[2]) == 5


def test_parquet_with_json_text_is_read(model: Path, tmp_path: Path) -> None:
    """`messages` and `tools` may be JSON text, and a parquet file gives the conversation that a JSONL file gives."""
    schema = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    row = {**conversation("yes"), "tools": [{"type": "function", "function": schema}]}
    table = pa.Table.from_pylist([{name: json.dumps(value) for name, value in row.items()}])
    pq.write_table(table, tmp_path / "data.parquet")
    tokenizer = ChatTokenizer.from_pretrained(model)
    found = [
        read_conversations(data, tokenizer, max_length=1000, number=1, seed=0)[0]
        for data in (str(tmp_path / "data.parquet"), jsonl(tmp_path / "data.jsonl", [row]))
    ]
    assert found[0] == found[1]
    assert found[0] == [encode_training_conversation(tokenizer, row["messages"], row["tools"])]
    assert found[0] != [encode_training_conversation(tokenizer, row["messages"])]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, "line 1: messages must be a list of messages, got NoneType"),
        ({**conversation("yes"), "tools": "f"}, "line 1: tools must be a list of schemas, got str"),
        ({"messages": [{"role": "user", "content": "x"}]}, "line 1: messages must hold an assistant message"),
        (conversation("yes" * 500), "--max-length must leave a conversation of .*, got 100, and the shortest has"),
    ],
)
def test_a_row_that_is_no_conversation_is_named(model: Path, tmp_path: Path, row: dict, message: str) -> None:
    """A bad row is an error with file and line, and nothing is left behind."""
    data = jsonl(tmp_path / "data.jsonl", [row])
    with pytest.raises(DatasetError, match=message):
        run(model, data, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--steps", 0, "--steps must be at least 1, got 0"),
        ("--batch-size", -1, "--batch-size must be at least 1, got -1"),
        ("--lr", -1, "lr must be finite and at least 0, got -1"),
        ("--max-length", 0, "--max-length must leave a conversation"),
        ("--model", "no/model", "no/model"),
        ("--data", "no/data.jsonl", "a data file must exist, got no/data.jsonl"),
        ("--chat-template", "no/such.jinja", "chat_template must be a readable file, got no/such.jinja"),
    ],
)
def test_a_wrong_option_is_one_message(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: object, message: str
) -> None:
    """Each option that cannot be is refused with exit status 1 and a message that names it, and nothing is written."""
    data = jsonl(tmp_path / "data.jsonl", [conversation("yes")])
    options = {"--model": model, "--data": data, "--output": tmp_path / "out", option: value}
    arguments = ["sft", *(str(part) for pair in options.items() for part in pair)]
    assert run_reporting_errors(lambda: app(arguments, standalone_mode=False)) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


def test_an_output_with_something_in_it_is_refused(model: Path, tmp_path: Path) -> None:
    """What is there already is neither mixed with the model nor lost, whether folder or file."""
    data = jsonl(tmp_path / "data.jsonl", [conversation("yes")])
    for output in (tmp_path, tmp_path / "data.jsonl", tmp_path / "data.jsonl" / "below"):
        with pytest.raises(CheckpointError, match="--output"):
            run(model, data, output)
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_half_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """A full disk is one message with the cure, Ctrl-C stays what it is; either way no folder appears."""

    def fail(directory: Path, text: str) -> None:
        assert (directory / "model.safetensors").exists()
        raise error

    monkeypatch.setattr(sft_run, "write_chat_template", fail)
    data = jsonl(tmp_path / "data.jsonl", [conversation("yes")])
    expected = CheckpointError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        run(model, data, tmp_path / "out", chat_template=TINY_CHAT_TEMPLATE)
    if isinstance(error, OSError):
        assert "No space left on device; make room" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]
