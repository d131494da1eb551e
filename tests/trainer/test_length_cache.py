"""Counts on disk: what is counted once is not counted again, unless it may have changed."""

import logging
from pathlib import Path

import pytest

from ostinato_tokenization.testing import tiny_chat_tokenizer
from ostinato_trainer.data import length_cache
from ostinato_trainer.data.length_cache import LengthCache, cache_folder, prompt_digest
from ostinato_trainer.data.prompt_counter import PromptCounter
from ostinato_trainer.data.prompt_length import PromptLength

TOKENIZER = tiny_chat_tokenizer()
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def prompts(*texts: str, tools: list | None = None) -> list:
    return [(text, ([{"role": "user", "content": text}], tools)) for text in texts]


def counted(folder: Path, wanted: list, *, max_tokens: int = 100, tokenizer=TOKENIZER, **kwargs: str) -> int:
    """How many of the wanted prompts had to be counted; the numbers are right in any case."""
    length = PromptLength(tokenizer, kwargs, max_tokens)
    with PromptCounter(length, num_workers=1, cache=LengthCache(folder, tokenizer, kwargs)) as counter:
        for (_, number), (_, prompt) in zip(counter.measured(wanted), wanted, strict=True):
            assert number == length.count(*prompt)
    return counter.num_counted


def test_a_prompt_is_counted_once_whatever_the_limit(tmp_path: Path) -> None:
    """The next run, with another limit and other prompts beside them, counts only what is new."""
    assert counted(tmp_path, prompts("a", "bb")) == 2
    assert counted(tmp_path, prompts("bb", "a"), max_tokens=3) == 0
    assert counted(tmp_path, prompts("a", "ccc", "bb")) == 1


def test_what_a_count_depends_on_is_part_of_the_key(tmp_path: Path) -> None:
    """Other tools, template variables, a template or a vocabulary of their own make it another prompt."""
    assert counted(tmp_path, prompts("a")) == 1
    assert counted(tmp_path, prompts("a", tools=[TOOL])) == 1
    assert counted(tmp_path, prompts("a"), more="x") == 1
    assert counted(tmp_path, prompts("a"), tokenizer=tiny_chat_tokenizer(chat_template="{{ messages }}")) == 1
    assert counted(tmp_path, prompts("a")) == 0


def test_no_tools_and_an_empty_list_of_tools_are_the_same() -> None:
    """None and [] render alike and so have one key."""
    messages = [{"role": "user", "content": "q"}]
    assert prompt_digest(messages, None) == prompt_digest(messages, [])


def test_what_is_no_plain_data_is_counted_every_time(tmp_path: Path) -> None:
    """A message with a value that has no JSON form has no key, and is counted all the same."""
    messages = [{"role": "user", "content": "q", "more": object()}]
    assert prompt_digest(messages, None) is None
    for _ in range(2):
        assert counted(tmp_path, [("q", (messages, None))]) == 1


@pytest.mark.parametrize("damage", [lambda data: data[:-3], lambda data: data[:-1] + b"x", lambda data: b""])
def test_a_damaged_file_is_said_and_made_anew(damage, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that was cut or changed is not believed."""
    assert counted(tmp_path, prompts("a", "bb")) == 2
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert counted(tmp_path, prompts("a", "bb")) == 2
    assert "damaged" in caplog.text
    assert counted(tmp_path, prompts("a", "bb")) == 0


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where the folder is a file, prompts are counted and the loss is said."""
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        assert counted(tmp_path / "file", prompts("a")) == 1
    assert "not kept for the next run" in caplog.text


def test_two_runs_at_once_keep_what_both_counted(tmp_path: Path) -> None:
    """A run that ends later does not lose what another wrote meanwhile."""
    first, second = (LengthCache(tmp_path, TOKENIZER, {}) for _ in range(2))
    first.add(b"1" * 16, 1)
    second.add(b"2" * 16, 2)
    first.save()
    second.save()
    third = LengthCache(tmp_path, TOKENIZER, {})
    assert [third.get(b"1" * 16), third.get(b"2" * 16), third.get(b"3" * 16)] == [1, 2, None]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound only what the last run used is kept."""
    monkeypatch.setattr(length_cache, "_MAX_ENTRIES", 3)
    counted(tmp_path, prompts("a", "b", "c"))
    counted(tmp_path, prompts("c", "d"))
    assert counted(tmp_path, prompts("c", "d")) == 0
    assert counted(tmp_path, prompts("a")) == 1


def test_the_folder_is_the_configured_one_or_the_user_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """data.cache_dir comes before XDG_CACHE_HOME, and that before the home folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("~/x") == Path("~/x").expanduser()
    assert cache_folder(None) == tmp_path / "ostinato"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder(None) == tmp_path / ".cache" / "ostinato"
