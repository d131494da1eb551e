"""The tables of renamed and unread keys agree with the tree."""

import pytest

from ostinato_trainer.config import Config
from ostinato_trainer.config_loading import load_config
from ostinato_trainer.config_renames import REFUSED_VALUES, RENAMED_NAMES, RENAMED_PATHS, UNREAD_NAMES, UNREAD_SECTIONS
from ostinato_trainer.config_schema import schema_keys, schema_sections
from ostinato_trainer.errors import ConfigError

PLACES = {*schema_keys(Config), *schema_sections(Config)}


@pytest.mark.parametrize("old", [*RENAMED_NAMES, *RENAMED_PATHS])
def test_every_replacement_exists(old: str) -> None:
    """What a message tells to write is a key or node of the tree, and the old spelling is none."""
    assert {**RENAMED_NAMES, **RENAMED_PATHS}[old] in PLACES
    assert old not in PLACES


@pytest.mark.parametrize("old", RENAMED_NAMES)
def test_every_renamed_name_is_an_error_that_names_the_replacement(old: str) -> None:
    """A name that other frameworks use fails naming ours, wherever it stands."""
    for place in (old, f"trainer.{old}", f"actor_rollout_ref.rollout.{old}"):
        with pytest.raises(ConfigError) as caught:
            load_config([], [f"{place}=1"])
        assert RENAMED_NAMES[old] in str(caught.value)


def test_unread_names_are_no_keys_of_the_tree() -> None:
    """Nothing is refused as unread that the tree has."""
    last_names = {path.rpartition(".")[2] for path in PLACES}
    assert not last_names & set(UNREAD_NAMES)
    assert not last_names & set(RENAMED_NAMES)
    assert not PLACES & set(UNREAD_SECTIONS)


def test_refused_values_speak_of_places_that_exist() -> None:
    """Every refused value belongs to a key or node of the tree."""
    assert {path for path, _ in REFUSED_VALUES} <= PLACES
