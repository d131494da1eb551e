"""The reference of keys that `ostinato config` prints."""

import msgspec
import pytest

from ostinato_trainer.config import Config
from ostinato_trainer.config.docs import config_rows
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.config.schema import schema_keys, type_text

ROWS = {row.key: row for row in config_rows()}


def test_every_key_says_what_it_means() -> None:
    """No key is without type, default and a meaning that is a sentence."""
    for row in ROWS.values():
        assert row.type, row.key
        assert row.default, row.key
        assert row.meaning.rstrip().endswith((".", ")", "`")), (row.key, row.meaning)


def test_inherited_keys_have_their_owner_s_meaning() -> None:
    """Keys that other packages define are documented where they are defined."""
    assert "tool" in ROWS["actor_rollout_ref.rollout.multi_turn.max_parallel_calls"].meaning
    assert "render" in ROWS["actor_rollout_ref.rollout.multi_turn.use_inference_chat_template"].meaning


@pytest.mark.parametrize("key", [key for key in ROWS if "kwargs" not in key.rpartition(".")[2]])
def test_printed_defaults_are_what_an_override_would_write(key: str) -> None:
    """Writing the printed default as an override changes nothing."""
    assert load_config([], [f"{key}={ROWS[key].default}"]) == Config()


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("data.train_files", "str | list of str"),
        ("data.truncation", "error | left | right | middle"),
        ("data.apply_chat_template_kwargs", "mapping"),
        ("data.max_prompt_length", "int >= 1"),
        ("trainer.total_training_steps", "int >= 1 | null"),
        ("trainer.logger", "list of (console | jsonl | tensorboard | mlflow | wandb | trackio)"),
        ("actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode", "strict | ignore_strippable | disable"),
    ],
)
def test_types_read_like_yaml(key: str, text: str) -> None:
    """Types are printed as a writer of YAML would say them."""
    assert ROWS[key].type == text
    assert type_text(schema_keys(Config)[key].type) == text


def test_the_tree_is_made_of_frozen_strict_nodes() -> None:
    """Every node is frozen and forbids unknown fields."""
    for key in schema_keys(Config).values():
        assert key.owner.__struct_config__.frozen, key.owner
        assert key.owner.__struct_config__.forbid_unknown_fields, key.owner
    assert msgspec.convert({}, Config) == Config()
