"""The keys of the data: what is refused, what is said to have no effect, and what other names stand for."""

import logging

import pytest

from ostinato_trainer.config.data import DataConfig
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.errors import ConfigError


def test_one_path_and_several_are_alike() -> None:
    """A path alone is a list of one, and an empty text is none."""
    assert DataConfig(train_files="a", val_files=("b", "c")).train_paths == ("a",)
    assert DataConfig(train_files="a", val_files=("b", "c")).val_paths == ("b", "c")
    assert DataConfig().train_paths == DataConfig(train_files="").train_paths == ()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.train_max_samples=0", "data.train_max_samples must be at least 1, or -1 for all rows"),
        ("data.val_max_samples=0", "write data.val_max_samples=-1"),
        ("data.train_max_samples=-2", "data.train_max_samples"),
        ("data.filter_overlong_prompts_workers=0", "data.filter_overlong_prompts_workers"),
        ("data.apply_chat_template_kwargs.add_generation_prompt=false", "got add_generation_prompt; remove it"),
        ("data.truncation=start", "error | left | right | middle"),
        ("data.return_raw_chat=false", "write data.return_raw_chat=true"),
        ("data.max_samples=3", "write data.train_max_samples"),
        ("data.dataset_num_proc=3", "write data.filter_overlong_prompts_workers"),
        ("data.use_shm=true", "rows are read from their files"),
        ("data.sampler.class_path=x", "data.shuffle and data.seed"),
    ],
)
def test_what_cannot_be_is_refused_with_the_cure(override: str, expected: str) -> None:
    """Values out of range, and keys of other systems, are errors that say what to write."""
    with pytest.raises(ConfigError) as caught:
        load_config([], [override])
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.filter_overlong_prompts=true", "data.truncation=left"], "data.truncation has no effect"),
        (["data.filter_overlong_prompts=true", "data.truncation=error"], None),
        (["data.val_max_samples=3"], "data.val_max_samples has no effect"),
        (["data.val_max_samples=3", "data.val_files=a.jsonl"], None),
    ],
)
def test_keys_without_effect_are_named(
    overrides: list[str], said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """What another key keeps from having an effect is said, and nothing else is."""
    with caplog.at_level(logging.WARNING):
        load_config([], overrides)
    if said is None:
        assert "has no effect" not in caplog.text
    else:
        assert said in caplog.text
