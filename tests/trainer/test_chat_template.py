"""A model folder carries the chat template that it was trained with."""

from pathlib import Path

from ostinato_tokenization import ChatTokenizer
from ostinato_tokenization.testing import TINY_CHAT_TEMPLATE, tiny_tokenizer
from ostinato_trainer.chat_template import write_chat_template


def test_a_written_template_is_the_one_that_is_used(tmp_path: Path) -> None:
    """What is written replaces the folder's template and its variants, with tools and without."""
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (tmp_path / "chat_template.jinja").write_text("old{{ messages }}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("old{{ tools }}")
    write_chat_template(tmp_path, TINY_CHAT_TEMPLATE)
    tokenizer = ChatTokenizer.from_pretrained(tmp_path)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    for given in (None, tools):
        rendered = tokenizer.render([{"role": "user", "content": "x"}], given, add_generation_prompt=True)
        assert "old" not in rendered
        assert rendered.endswith("<|im_start|>assistant\n")
