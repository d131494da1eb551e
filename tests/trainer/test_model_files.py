"""A tokenizer that does not belong to its model is found out before the first step."""

import json
import logging
import re
import shutil
from pathlib import Path

import pytest

from ostinato_tokenization.testing import TokenizerKind, sample_chat_tokenizer
from ostinato_trainer.config.actor import ModelConfig
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.errors import ConfigError
from ostinato_trainer.model_files import check_positions, check_vocabulary, load_tokenizer, warn_of_endless_turns


def checked(quickstart_home: Path, folder: Path, change: dict[str, object]) -> None:
    """Look at the quickstart's model, whose configuration says something else in `folder`."""
    shutil.copytree(quickstart_home / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    model = ModelConfig(path=str(folder))
    check_vocabulary(load_tokenizer(model), model, {})


def test_prompts_of_tokens_that_the_model_lacks_are_refused(quickstart_home: Path, tmp_path: Path) -> None:
    """Where every prompt has a token without an embedding, no step could be taken: the token, its id, the vocabulary and the key are named."""
    with pytest.raises(
        ConfigError, match=r"model\.path must hold .* got a vocabulary of 3 and '.+', which is \d+; name a model"
    ):
        checked(quickstart_home, tmp_path / "model", {"vocab_size": 3})


def test_tokens_that_may_never_be_used_are_said(
    quickstart_home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A vocabulary that lacks the last token only is a warning; a whole one, a larger one, and none that is told are nothing."""
    whole = json.loads((quickstart_home / "model" / "config.json").read_text())["vocab_size"]
    size = load_tokenizer(ModelConfig(path=str(quickstart_home / "model"))).vocab_size
    assert size <= whole
    with caplog.at_level(logging.WARNING, logger="ostinato_trainer"):
        for number, change in enumerate(({}, {"vocab_size": size + 8}, {"vocab_size": None})):
            checked(quickstart_home, tmp_path / f"quiet_{number}", change)
        assert not caplog.records
        checked(quickstart_home, tmp_path / "said", {"vocab_size": None, "text_config": {"vocab_size": size - 1}})
    assert f"has tokens up to {size - 1}, and the model a vocabulary of {size - 1}" in caplog.text


CLOSES_BY_TEXT = """\
{%- for message in messages %}{{ ']~b]' + message.role + '\\n' + message.content + '[e~[\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ ']~b]ai\\n' }}{%- endif %}
"""
"""As that of MiniMax-M2, whose own tokenizer has these strings as tokens."""


def test_a_template_of_another_tokenizer_that_ends_no_turn_is_said(
    quickstart_home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the close of a turn is ordinary text, the log says what turns end with and which key to change; templates whose close is a token,
    or the opener of the next turn, are not spoken of."""
    (template := tmp_path / "text.jinja").write_text(CLOSES_BY_TEXT)
    with caplog.at_level(logging.WARNING, logger="ostinato_trainer"):
        load_tokenizer(ModelConfig(path=str(quickstart_home / "model")))
        for name in ("tools", "plain", "opener_stops", "several_closes"):
            warn_of_endless_turns(sample_chat_tokenizer(TokenizerKind.BYTE_LEVEL, name))
        assert not caplog.records
        load_tokenizer(ModelConfig(path=str(quickstart_home / "model"), chat_template=str(template)))
    assert re.search(r"ends no assistant turn .*actor_rollout_ref\.model\.chat_template", caplog.text)


LENGTHS = ("data.max_prompt_length=900", "data.max_response_length=256")
ENGINE = "actor_rollout_ref.rollout.name"


@pytest.mark.parametrize(
    ("model", "overrides", "words"),
    [
        (
            {"max_position_embeddings": 1024},
            LENGTHS,
            "data.max_prompt_length + data.max_response_length must be at most max_position_embeddings of the model, got 900 + 256 = 1156 > 1024",
        ),
        ({"text_config": {"max_position_embeddings": 1024}}, LENGTHS, "= 1156 > 1024"),
        (
            {"max_position_embeddings": 1024},
            ("actor_rollout_ref.rollout.max_model_len=2048",),
            "actor_rollout_ref.rollout.max_model_len must be at most max_position_embeddings of the model, got 2048 > 1024",
        ),
        ({"max_position_embeddings": 1156}, LENGTHS, None),
        ({"n_positions": 1024}, LENGTHS, "= 1156 > 1024"),
        ({"text_config": {}, "max_position_embeddings": 1024}, LENGTHS, "= 1156 > 1024"),
        ({"longest": 1024}, LENGTHS, None),
        ({"max_position_embeddings": 1024}, (*LENGTHS, f"{ENGINE}=vllm"), None),
    ],
    ids=["lengths", "nested", "max_model_len", "enough", "by another name", "beside", "unknown", "another engine"],
)
def test_sequences_longer_than_the_model_has_positions_for_are_refused(
    tmp_path: Path, model: dict[str, object], overrides: tuple[str, ...], words: str | None
) -> None:
    """Before anything is loaded the two lengths are named, and not a setting of the engine that nobody has written."""
    (tmp_path / "config.json").write_text(json.dumps(model))
    config = load_config([], [f"actor_rollout_ref.model.path={tmp_path}", f"{ENGINE}=transformers", *overrides])
    if words is None:
        check_positions(config)
        return
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_positions(config)
