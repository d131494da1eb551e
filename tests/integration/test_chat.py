"""`ostinato chat` over a real, untrained model: what it writes is noise, which is what these tests want of it."""

import io
import shutil
from pathlib import Path

import pytest

from ostinato_trainer.cli import app
from ostinato_trainer.error_reporting import run_reporting_errors


def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, *arguments: object) -> str:
    """What the chat prints for piped input; it must end well."""
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    capsys.readouterr()
    status = run_reporting_errors(lambda: app(["chat", *(str(each) for each in arguments)], standalone_mode=False))
    out, err = capsys.readouterr()
    assert status == 0, err
    assert "Traceback" not in err
    return out


def test_the_end_of_input_and_quit_leave(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A chat answers each line of its input and leaves at its end, or at /quit, after which nothing is read."""
    answered = talk(monkeypatch, capsys, "How much is 3 plus 4?\n", base / "model")
    assert len(answered.splitlines()) > 1
    left = talk(monkeypatch, capsys, "/quit\nHow much is 3 plus 4?\n", base / "model")
    assert len(left.splitlines()) == 1


def test_a_conversation_that_is_full_gives_way_to_another(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """When the model can read no more the chat says so and goes on with a new conversation instead of ending."""
    lines = "How much is 3 plus 4? " * 20 + "\n"
    out = talk(monkeypatch, capsys, lines * 12, base / "model", "--temperature", "1")
    assert out.count("here begins another") > 1


@pytest.mark.parametrize(
    "config",
    [
        "data:\n  apply_chat_template_kwargs: {mood: calm}\n",
        "model: {lora_rank: 0}\ndata:\n  max_length: 100\n  apply_chat_template_kwargs: {mood: calm}\n",
    ],
    ids=["train", "sft"],
)
def test_a_checkpoint_is_talked_to_as_it_was_trained(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: str
) -> None:
    """What the configuration of a run, or of a fine-tuning, gives the chat template, a chat gives it too: this one refuses to do without."""
    folder = tmp_path / "global_step_3"
    shutil.copytree(base / "model", folder / "huggingface")
    template = folder / "huggingface" / "chat_template.jinja"
    template.write_text("{% if not mood %}{{ raise_exception('in no mood') }}{% endif %}" + template.read_text())
    (folder / "config.yaml").write_text(config)
    assert len(talk(monkeypatch, capsys, "hello\n", folder).splitlines()) > 1


def test_what_a_model_writes_cannot_command_the_terminal(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control characters and markup that a model samples are shown, not obeyed."""
    out = talk(monkeypatch, capsys, "hello\n/new\n" * 6, base / "model", "--temperature", "2")
    assert not {character for character in out if not character.isprintable()} - {"\n", "\t"}
    assert "\ufffd" in out, "nothing was sampled that had to be replaced"
