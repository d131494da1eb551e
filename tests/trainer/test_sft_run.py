"""`ostinato sft`: from a file of conversations to a model folder that talks as they do."""

import json
import re
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ostinato_engines import SamplingParams
from ostinato_engines.testing import ScriptedServer
from ostinato_rollout import ChatSession, LLMServerClient, SessionBudget, SessionConfig
from ostinato_tokenization import ChatTokenizer, ContinuousTokens, encode_training_conversation
from ostinato_tokenization.testing import TINY_CHAT_TEMPLATE, tiny_chat_tokenizer
from ostinato_tools import get_parser
from ostinato_trainer.cli import app
from ostinato_trainer.config.docs import config_rows
from ostinato_trainer.config.loading import load_tree
from ostinato_trainer.config.sft import SftConfig
from ostinato_trainer.error_reporting import run_reporting_errors
from ostinato_trainer.errors import CheckpointError, ConfigError, DatasetError, TrainerError, TrainingInterrupted
from ostinato_trainer.quickstart.tiny_model import save_model, save_tokenizer
from ostinato_trainer.sft import run as sft_run
from ostinato_trainer.sft.checks import check_sft
from ostinato_trainer.sft.data import Conversations, read_conversations
from ostinato_trainer.sft.run import run_sft
from ostinato_trainer.sft.steps import sft_batch

SHORT = ("trainer.total_training_steps=3", "data.train_batch_size=2", "optim.lr=1e-2", "data.max_length=100")


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


def configured(model: Path, data: str, output: Path, *overrides: str) -> SftConfig:
    places = (f"model.path={model}", f"data.train_files={data}", f"trainer.default_local_dir={output}")
    return load_tree(SftConfig, [], [*SHORT, *places, "trainer.device=cpu", *overrides])[0]


def run(model: Path, data: str, output: Path, *overrides: str, console: Console | None = None) -> list[dict]:
    """The records of the run's metrics."""
    run_sft(configured(model, data, output, *overrides), console=console or Console(quiet=True))
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def read(data: str | list[str], tokenizer: ChatTokenizer, *overrides: str, **options: Any) -> Conversations:
    config = load_tree(SftConfig, [], [*overrides])[0].data
    return read_conversations([data] if isinstance(data, str) else data, tokenizer, config, **{"seed": 0, **options})


def command(*arguments: object) -> int:
    return run_reporting_errors(lambda: app(["sft", *map(str, arguments)], standalone_mode=False))


def test_the_command_writes_a_model_that_learned(model: Path, tmp_path: Path) -> None:
    """After `ostinato sft` the folder loads with transformers and finds the conversations likelier than before."""
    row = conversation("yes")
    data, out = jsonl(tmp_path / "data.jsonl", [row, row]), tmp_path / "new" / "out"
    options = {"--model": model, "--data": data, "--output": out, "--steps": 3, "--batch-size": 2, "--lr": 1e-2}
    assert command("trainer.device=cpu", *(part for option in options.items() for part in option)) == 0
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
    log, data = StringIO(), jsonl(tmp_path / "data.jsonl", [conversation("yes"), conversation("yes" * 200)])
    overrides = ("trainer.total_training_steps=20", "data.train_batch_size=1")
    run(model, data, tmp_path / "out", *overrides, console=Console(file=log, width=200))
    assert "conversations: 1; 1 longer than 100 tokens were left out" in log.getvalue()
    lines = [line for line in log.getvalue().splitlines() if line.startswith("step ")]
    assert [line.partition("  loss ")[0] for line in lines] == [f"step {step} of 20" for step in range(2, 21, 2)]
    losses = [float(line.partition("  loss ")[2]) for line in lines]
    assert losses[-1] < losses[0]


def test_the_model_carries_the_template_that_it_was_trained_with(model: Path, tmp_path: Path) -> None:
    """With --chat-template the output folder renders by it, for this project and for transformers."""
    template = tmp_path / "own.jinja"
    template.write_text(TINY_CHAT_TEMPLATE)
    data = jsonl(tmp_path / "data.jsonl", [conversation("yes")])
    run(model, data, tmp_path / "out", f"model.chat_template={template}")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == TINY_CHAT_TEMPLATE
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == TINY_CHAT_TEMPLATE


def test_tokens_that_the_model_lacks_are_found_when_they_are_read(model: Path, tmp_path: Path) -> None:
    """A conversation with a token beyond the model's vocabulary is an error that names row, token and cure, before a step is taken; a tokenizer
    that is larger than the model harms no conversation that does without those tokens."""
    small = tmp_path / "small"
    shutil.copytree(model, small)
    tokenizer = ChatTokenizer.from_pretrained(small)
    vocab_size = tokenizer.token_id("<tool_response>")
    assert vocab_size is not None
    network = AutoModelForCausalLM.from_pretrained(small)
    network.resize_token_embeddings(vocab_size)
    network.save_pretrained(small)
    plain = conversation("yes")
    called = {
        "messages": [*plain["messages"], {"role": "tool", "content": "c"}, {"role": "assistant", "content": "no"}]
    }
    data = jsonl(tmp_path / "data.jsonl", [plain, called, plain])
    with pytest.raises(
        DatasetError,
        match=rf"data.jsonl, line 2: .* of {vocab_size}, got '<tool_response>', which is {vocab_size}; name",
    ):
        run(small, data, tmp_path / "out")
    assert len(run(small, jsonl(tmp_path / "plain.jsonl", [plain, plain]), tmp_path / "out")) == 3


def test_conversations_are_chosen_by_seed_and_length(model: Path, tmp_path: Path) -> None:
    """No conversation is chosen twice or beyond the length, no more are read than are wanted, and the seed decides which."""
    tokenizer = ChatTokenizer.from_pretrained(model)
    rows = [conversation("yes" * count) for count in range(1, 31)]
    data = jsonl(tmp_path / "data.jsonl", rows)
    lengths = [len(encode_training_conversation(tokenizer, row["messages"]).token_ids) for row in rows]
    limit = lengths[19]
    short = f"data.max_length={limit}"
    everything = read(data, tokenizer, short)
    assert sorted(len(each.token_ids) for each in everything.encoded) == lengths[:20]
    assert everything.num_overlong == 10
    chosen = [read(data, tokenizer, short, number=5, seed=seed).encoded for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] == everything.encoded[:5]
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
        read(data, tokenizer).encoded
        for data in (str(tmp_path / "data.parquet"), jsonl(tmp_path / "data.jsonl", [row]))
    ]
    assert found[0] == found[1]
    assert found[0] == [encode_training_conversation(tokenizer, row["messages"], row["tools"])]
    assert found[0] != [encode_training_conversation(tokenizer, row["messages"])]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, "line 1: messages must be there, got the columns prompt; add it or set data.messages_key"),
        ({"messages": "x"}, "line 1: messages must be a list of messages, got str"),
        ({**conversation("yes"), "tools": "f"}, "line 1: tools must be a list of schemas, got str"),
        ({"messages": [{"role": "user", "content": "x"}]}, "line 1: messages must hold an assistant message"),
        (conversation("yes" * 500), r"data\.max_length must leave a conversation of .*, got 100, and the shortest has"),
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
        ("--steps", 0, "--steps: trainer.total_training_steps must be int >= 1 | null, got 0"),
        ("--batch-size", -1, "--batch-size: data.train_batch_size must be int >= 1, got -1"),
        ("--lr", -1, "--lr: optim.lr must be float >= 0, got -1"),
        ("--max-length", 1, "data.max_length must leave a conversation"),
        ("--model", "no/model", "no/model"),
        ("--data", "no/data.jsonl", "a data file must exist, got no/data.jsonl"),
        ("--chat-template", "no/such.jinja", "error: model.chat_template must be a readable file, got no/such.jinja"),
    ],
)
def test_a_wrong_option_is_one_message(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: object, message: str
) -> None:
    """Each option that cannot be is refused with exit status 1 and a message that names it, and nothing is written."""
    data = jsonl(tmp_path / "data.jsonl", [conversation("yes")])
    options = {"--model": model, "--data": data, "--output": tmp_path / "out", option: value}
    assert command(*(part for pair in options.items() for part in pair)) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


@pytest.mark.parametrize("name", ["max_position_embeddings", "n_positions"])
def test_a_conversation_beyond_the_model_s_positions_is_refused_before_the_first_step(
    model: Path, tmp_path: Path, name: str
) -> None:
    """Whatever a model's configuration calls them; a length below leaves such conversations out, and that is what is advised."""
    short = tmp_path / "model"
    shutil.copytree(model, short)
    config = json.loads((short / "config.json").read_text())
    del config["max_position_embeddings"]
    (short / "config.json").write_text(json.dumps({**config, name: 20}))
    data = jsonl(tmp_path / "data.jsonl", [conversation("yes"), conversation("yes" * 20)])
    with pytest.raises(ConfigError, match=r"data\.max_length must be at most .* write data\.max_length=20,"):
        run(short, data, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_one_device_does_not_do_is_said(caplog: pytest.LogCaptureFixture, model: Path, tmp_path: Path) -> None:
    """Layers are not computed again: whoever asks for it hears of what saves memory here."""
    data, key = jsonl(tmp_path / "data.jsonl", [conversation("yes")]), "model.enable_gradient_checkpointing"
    check_sft(configured(model, data, tmp_path / "out", f"{key}=true"), [key])
    assert f"{key} has no effect while one device trains" in caplog.text


def test_an_output_with_something_in_it_is_refused(model: Path, tmp_path: Path) -> None:
    """What is there already is neither mixed with the model nor lost, whether folder or file."""
    data = jsonl(tmp_path / "data.jsonl", [conversation("yes")])
    for output in (tmp_path, tmp_path / "data.jsonl", tmp_path / "data.jsonl" / "below"):
        with pytest.raises(CheckpointError, match=r"trainer\.default_local_dir must be .*choose another"):
            run(model, data, output)
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]
    with pytest.raises(CheckpointError, match=r"folder, .* with chat_template\.jinja; choose another --output"):
        run(model, data, model)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_half_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """A full disk is one message with the cure, Ctrl-C stays what it is; either way nothing of the model appears, and another try succeeds."""

    def fail(directory: Path, text: str) -> None:
        assert (directory / "model.safetensors").exists()
        raise error

    monkeypatch.setattr(sft_run, "write_chat_template", fail)
    data, template = jsonl(tmp_path / "data.jsonl", [conversation("yes")]), tmp_path / "own.jinja"
    template.write_text(TINY_CHAT_TEMPLATE)
    expected = CheckpointError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        run(model, data, tmp_path / "out", f"model.chat_template={template}")
    if isinstance(error, OSError):
        assert "No space left on device" in str(caught.value)
        assert "make room" in str(caught.value)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["metrics.jsonl"]
    monkeypatch.undo()
    run(model, data, tmp_path / "out", f"model.chat_template={template}")
    assert (tmp_path / "out" / "metrics.1.jsonl").is_file()
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def sampled(tokenizer: ChatTokenizer, text: str) -> list[int]:
    """The ids that a model would sample for a text: control tokens in it are control tokens."""
    ids: list[int] = []
    for piece in filter(None, re.split(r"(<\|im_end\|>|</?tool_call>)", text)):
        control = tokenizer.token_id(piece)
        ids += tokenizer.encode_text(piece) if control is None else [control]
    return ids


async def test_what_is_learned_of_a_trajectory_is_what_was_sampled(tmp_path: Path) -> None:
    """A rollout's messages, written to a file and read for fine-tuning, give the rollout's own ids, and their mask is 1 exactly on its sampled
    tokens, over two turns with a tool's answer between."""
    tokenizer = tiny_chat_tokenizer()
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 + 30"}}\n</tool_call><|im_end|>'
    turns = [sampled(tokenizer, text) for text in (call, "It is 42.<|im_end|>")]
    server = ScriptedServer(turns)
    await server.start()
    parameters = {"type": "object", "properties": {}}
    tools = [{"type": "function", "function": {"name": "calculator", "parameters": parameters}}]
    session = ChatSession(
        client=LLMServerClient([server]),
        tokens=ContinuousTokens(tokenizer),
        config=SessionConfig(),
        budget=SessionBudget(500, 500),
        parser=get_parser("hermes"),
        tools=tools,
    )
    await session.extend([{"role": "user", "content": "What is 12 + 30?"}])
    asked = (await session.generate(SamplingParams())).tool_calls[0]
    await session.extend([{"role": "tool", "content": "42", "tool_call_id": asked.id, "name": asked.name}])
    await session.generate(SamplingParams())
    await session.close()
    (ledger,) = session.segments
    data = jsonl(tmp_path / "data.jsonl", [{"messages": session.messages, "tools": tools}])
    (learned,) = read(data, tokenizer).encoded
    mask = [0] * len(ledger.prompt_ids) + list(ledger.response_mask)
    assert list(learned.token_ids) == [*ledger.prompt_ids, *ledger.response_ids]
    assert list(learned.mask) == mask
    assert [token for token, bit in zip(learned.token_ids, learned.mask, strict=True) if bit] == [*turns[0], *turns[1]]


def test_several_files_and_columns_of_other_names_are_read(model: Path, tmp_path: Path) -> None:
    """All rows of all files are there once, under whatever name the columns have."""
    tokenizer = ChatTokenizer.from_pretrained(model)
    rows = [conversation(answer) for answer in ("yes", "no", "yes no")]
    files = [jsonl(tmp_path / f"{at}.jsonl", [{"chat": row["messages"]}]) for at, row in enumerate(rows)]
    found = read(files, tokenizer, "data.messages_key=chat").encoded
    expected = [encode_training_conversation(tokenizer, row["messages"]) for row in rows]
    assert sorted(each.token_ids for each in found) == sorted(each.token_ids for each in expected)


def test_an_overlong_conversation_may_be_an_error(model: Path, tmp_path: Path) -> None:
    """With truncation=error the first conversation that is too long is named with its place and length."""
    data = jsonl(tmp_path / "data.jsonl", [conversation("yes" * 500)])
    with pytest.raises(DatasetError, match=r"data.jsonl, line 1: a conversation must have at most data.max_length=100"):
        run(model, data, tmp_path / "out", "data.truncation=error")


def test_epochs_validation_and_metrics(model: Path, tmp_path: Path) -> None:
    """Two epochs over three conversations in batches of two are three steps; the validation's loss is there before, between and after, and falls."""
    data = jsonl(tmp_path / "data.jsonl", [conversation("yes")] * 3)
    overrides = (
        "trainer.total_training_steps=null",
        "trainer.total_epochs=2",
        "trainer.test_freq=2",
        f"data.val_files=[{data}]",
    )
    records = run(model, data, tmp_path / "out", *overrides)
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    losses = {record["step"]: record["val/loss"] for record in records if "val/loss" in record}
    assert list(losses) == [0, 2, 3]
    assert losses[3] < losses[2] < losses[0]
    assert losses[0] == pytest.approx(
        records[1]["train/loss"], rel=1e-5
    )  # of the same conversations, before the first update
    assert [record["train/epoch"] for record in records[1:]] == pytest.approx([2 / 3, 4 / 3, 2.0])
    assert [record["train/lr"] for record in records[1:]] == pytest.approx([1e-2, 1e-2 * 2 / 3, 1e-2 / 3])
    assert all(record["train/num_tokens"] > 0 and record["train/grad_norm"] > 0 for record in records[1:])


def test_a_file_of_settings_and_options_go_together(model: Path, tmp_path: Path) -> None:
    """A YAML file, overrides and options are merged in that order, and the run is what they say."""
    data, settings = jsonl(tmp_path / "data.jsonl", [conversation("yes")]), tmp_path / "sft.yaml"
    settings.write_text(f"model: {{path: {model}}}\ntrainer: {{total_training_steps: 9, device: cpu}}\noptim.lr: 0.5\n")
    code = command(
        settings,
        "optim.lr=0.25",
        "trainer.total_training_steps=7",
        "--data",
        data,
        "--steps",
        2,
        "--output",
        tmp_path / "out",
    )
    assert code == 0
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [record["train/lr"] for record in records] == [0.25, 0.125]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.path=null"], "model.path must be given, got none; write --model PATH"),
        (["data.train_files=[]", "trainer.default_local_dir=null"], "2 problems"),
        (["trainer.test_freq=3"], "data.val_files must name a file while trainer.test_freq is 3"),
        (["actor_rollout_ref.model.path=x"], "actor_rollout_ref.model.path is not a key; write model.path"),
        (["learning_rate=1"], "learning_rate is not a key; write optim.lr"),
        (["data.max_lenght=1"], "did you mean data.max_length"),
        (
            ["data.apply_chat_template_kwargs={tools: []}"],
            "data.apply_chat_template_kwargs must not hold what every prompt",
        ),
        (["trainer.resume_mode=resume_path"], "trainer.resume_from_path must name a checkpoint"),
        (["trainer.nonsense=1"], "`ostinato config --sft` lists all keys"),
    ],
)
def test_settings_that_cannot_be_are_refused(model: Path, tmp_path: Path, overrides: list[str], message: str) -> None:
    """What is missing, contradicts itself, or is called otherwise here is one message with the cure."""
    data = jsonl(tmp_path / "data.jsonl", [conversation("yes")])
    with pytest.raises(ConfigError) as caught:
        run(model, data, tmp_path / "out", *overrides)
    assert message in str(caught.value)


def test_adapters_are_trained_and_merged(model: Path, tmp_path: Path) -> None:
    """With a rank only adapters are trained; the folder holds the merged model, and the adapters beside it."""
    pytest.importorskip("peft")
    data = jsonl(tmp_path / "data.jsonl", [conversation("yes")])
    records = run(model, data, tmp_path / "out", "model.lora_rank=2", "model.target_modules=[q_proj]", "optim.lr=0.1")
    assert records[-1]["train/loss"] < records[0]["train/loss"]
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "out"))
    assert set(before) == set(after)
    changed = {name.rpartition(".self_attn.")[2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"q_proj.weight"}
    assert (tmp_path / "out" / "lora_adapter" / "adapter_config.json").is_file()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.lora_rank=2", "model.target_modules=[w_pack]"], "model.target_modules must name linear layers"),
        (["model.lora_adapter_path=nowhere"], "model.lora_adapter_path must hold adapters"),
    ],
)
def test_messages_about_adapters_name_the_keys_of_a_fine_tuning(
    model: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    """Adapters that cannot be made are refused by the keys that `ostinato sft` has, not by those of a run."""
    pytest.importorskip("peft")
    data = jsonl(tmp_path / "data.jsonl", [conversation("yes")])
    with pytest.raises(TrainerError) as caught:
        run(model, data, tmp_path / "out", *overrides)
    assert str(caught.value).startswith(message)
    assert "actor_rollout_ref" not in str(caught.value)


def test_every_key_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """`ostinato config --sft` shows each key of the tree with a meaning, and refuses a prefix that none begins with."""
    assert all(row.meaning for row in config_rows(SftConfig))
    assert run_reporting_errors(lambda: app(["config", "--sft", "data.max_length"], standalone_mode=False)) == 0
    assert "Longest conversation in tokens" in capsys.readouterr().out
    assert run_reporting_errors(lambda: app(["config", "--sft", "critic"], standalone_mode=False)) == 1


def test_patterns_are_read_and_progress_is_told(model: Path, tmp_path: Path) -> None:
    """A pattern stands for the files that it matches, and who asks is told of every conversation how many there are of how many."""
    for answer in ("yes", "no"):
        jsonl(tmp_path / f"{answer}.jsonl", [conversation(answer)])
    told: list[tuple[int, int]] = []
    found = read(
        str(tmp_path / "*.jsonl"),
        ChatTokenizer.from_pretrained(model),
        on_progress=lambda count, wanted: told.append((count, wanted)),
    )
    assert len(found.encoded) == 2
    assert told == [(1, 2), (2, 2)]


def test_what_a_template_leaves_out_is_said_once(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Tools, calls and reasoning that the chat template does not show are named, each once; what it shows is not."""
    tokenizer = ChatTokenizer.from_pretrained(model)
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    row = conversation("yes")
    row["messages"][1] |= {"tool_calls": [call], "reasoning_content": "why"}
    schema = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    row["tools"] = [{"type": "function", "function": schema}]
    data = jsonl(tmp_path / "data.jsonl", [row, row])
    read(data, tokenizer)
    assert [record.getMessage().partition("leaves out ")[2].partition(",")[0] for record in caplog.records] == [
        "reasoning_content"
    ]
    caplog.clear()
    blind = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    blind += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    read(data, ChatTokenizer.from_pretrained(model, chat_template=blind))
    assert {record.getMessage().partition("leaves out ")[2].partition(",")[0] for record in caplog.records} == {
        "tools",
        "tool_calls",
        "reasoning_content",
    }
    assert len(caplog.records) == 3


def test_a_run_in_which_nothing_is_learned_is_an_error(model: Path, tmp_path: Path) -> None:
    """Where no gradient is finite every step is skipped, and the run ends with an error and without a model instead of one that is as before."""
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    weights = load_file(broken / "model.safetensors")
    save_file(
        {name: value * float("nan") for name, value in weights.items()}, broken / "model.safetensors", {"format": "pt"}
    )
    data = jsonl(tmp_path / "data.jsonl", [conversation("yes")])
    with pytest.raises(
        TrainingInterrupted, match=r"must learn something, but none of 3 steps had a gradient that is finite"
    ):
        run(broken, data, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["metrics.jsonl"]
