"""What `ostinato serve` decides before it serves: names, formats and engines."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from ostinato_engines import EngineLoadError
from ostinato_engines.engine_process import EngineProcess
from ostinato_engines.transformers_server import TransformersServer
from ostinato_tokenization.testing import tiny_chat_tokenizer
from ostinato_tools import UnknownParserError
from ostinato_trainer.serve import ServeSettings, _engine, _name_of, _parser

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


@pytest.mark.parametrize(
    ("tool_format", "template", "name", "says"),
    [
        (None, None, "hermes", ""),
        ("auto", None, "hermes", ""),
        ("mistral", None, "mistral", ""),
        ("mistral", PLAIN, "mistral", ""),
        (None, PLAIN, None, "requests with tools are refused"),
        ("auto", PLAIN, None, "--format names one"),
    ],
)
def test_the_format_is_the_given_one_or_the_templates(
    tool_format: str | None, template: str | None, name: str | None, says: str
) -> None:
    """A format that is named is taken; else the chat template tells it, or it is said that there will be no tools."""
    options = {} if template is None else {"chat_template": template}
    console = Console(file=io.StringIO(), width=200)
    parser = _parser(tool_format, tiny_chat_tokenizer(**options), console)
    assert (None if parser is None else parser.name) == name
    printed = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert says in printed
    assert bool(printed) == bool(says)


def test_a_format_that_there_is_not_is_refused() -> None:
    """A wrong name is an error that names the option and lists the right ones."""
    with pytest.raises(UnknownParserError, match=r"^--format: parser must be one of .*hermes"):
        _parser("smoke_signals", tiny_chat_tokenizer(), Console(file=io.StringIO()))


def test_a_model_is_called_as_its_folder(tmp_path: Path) -> None:
    """The name is that of the folder, and of the step for a checkpoint's inner folder."""
    assert _name_of(tmp_path / "my-model") == "my-model"
    assert _name_of(tmp_path / "global_step_7" / "huggingface") == "global_step_7"


def test_the_engine_is_here_or_under_its_interpreter(tmp_path: Path) -> None:
    """Without an interpreter the engine is made in this process; with one, it is an engine process; unknown names are refused."""
    assert isinstance(_engine(tmp_path, ServeSettings(max_model_len=32)), TransformersServer)
    elsewhere = _engine(tmp_path, ServeSettings(engine="vllm", engine_python=Path("~/none/bin/python")))
    assert isinstance(elsewhere, EngineProcess)
    with pytest.raises(EngineLoadError, match="engine must be one of"):
        _engine(tmp_path, ServeSettings(engine="abacus"))
