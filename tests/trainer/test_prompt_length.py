"""Counting and cutting prompts."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato_tokenization import ChatTokenizer, ContinuousTokens
from ostinato_tokenization.testing import tiny_chat_tokenizer
from ostinato_trainer.data.prompt_length import PromptLength, cut_text, without_longest_text
from ostinato_trainer.errors import DatasetError

TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def messages(text: str) -> list[dict]:
    return [{"role": "system", "content": "be brief"}, {"role": "user", "content": text}]


def test_the_count_is_that_of_the_rendered_prompt_with_its_tools() -> None:
    """Tools, template variables and the generation prompt are counted, as the engine will see them."""
    tokenizer = tiny_chat_tokenizer()
    length = PromptLength(tokenizer, {}, 100)
    assert length.count(messages("q"), [TOOL]) == len(tokenizer.encode_chat(messages("q"), [TOOL]))
    assert length.count(messages("q"), [TOOL]) > length.count(messages("q"), None)


def test_a_template_that_refuses_is_an_error_about_the_prompt() -> None:
    """What the chat template raises becomes an error that begins with the field."""
    tokenizer = tiny_chat_tokenizer(
        chat_template="{{ messages[0].content }}{{ raise_exception('no system') if messages[0].content == 'bad' }}"
    )
    with pytest.raises(DatasetError, match=r"^prompt must be accepted by the chat template, got .*no system"):
        PromptLength(tokenizer, {}, 100).count([{"role": "user", "content": "bad"}], None)


@given(
    text=st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=150, max_size=300),
    side=st.sampled_from(["left", "right", "middle"]),
    limit=st.integers(60, 90),
)
def test_a_cut_prompt_fits_and_loses_text_on_one_side_only(text: str, side: str, limit: int) -> None:
    """A cut prompt is within the limit, keeps every message and the end of the text that is not on the cut side."""
    length = PromptLength(tiny_chat_tokenizer(), {}, limit)
    before = messages(text)
    after = length.shortened(before, None, side)  # type: ignore[arg-type]
    assert length.count(after, None) <= limit
    assert before == messages(text)
    assert after[0] == before[0]
    kept = after[1]["content"]
    assert kept == cut_text(text, len(kept), side)  # type: ignore[arg-type]
    assert len(kept) < len(text)


def test_a_cut_keeps_nearly_all_that_fits() -> None:
    """The cut is not deeper than needed: a few characters more would be too long."""
    length = PromptLength(tiny_chat_tokenizer(), {}, 80)
    text = "".join(chr(97 + number % 26) for number in range(200))
    kept = length.shortened(messages(text), None, "right")[1]["content"]
    assert length.count(messages(text[: len(kept) + 4]), None) > 80


def test_a_prompt_that_cannot_be_cut_enough_is_an_error() -> None:
    """Where the template and the other messages alone are too long, the error says so."""
    with pytest.raises(DatasetError, match=r"^prompt must fit in data.max_prompt_length=5"):
        PromptLength(tiny_chat_tokenizer(), {}, 5).shortened(messages("q" * 100), None, "left")


@pytest.mark.parametrize(("side", "kept"), [("left", "defg"), ("right", "abcd"), ("middle", "abfg")])
def test_the_side_names_what_is_lost(side: str, kept: str) -> None:
    """left loses the beginning, right the end, middle the middle."""
    assert cut_text("abcdefg", 4, side) == kept  # type: ignore[arg-type]
    assert cut_text("abcdefg", 0, side) == ""  # type: ignore[arg-type]


def test_text_in_parts_is_cut_too() -> None:
    """Where the longest text is a part of a message, that part is cut, and the message that was given stays as it was."""
    parts = [{"type": "text", "text": "short"}, {"type": "text", "text": "q" * 200}]
    given = [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}]
    length = PromptLength(tiny_chat_tokenizer(), {}, 60)
    cut = length.shortened(given, None, "right")
    assert length.count(cut, None) <= 60
    assert cut[1]["content"][0] == parts[0]
    assert 0 < len(cut[1]["content"][1]["text"]) < 200
    assert given[1]["content"][1]["text"] == "q" * 200
    assert length.count(without_longest_text(given), None) < length.count(cut, None)


def shared_tokenizers() -> list:
    """The tiny tokenizer, and real ones with their templates where they are at hand."""
    folder = Path(os.environ.get("OSTINATO_SHARED", Path(__file__).parents[2].parent / "shared")) / "tokenizers"
    found = [pytest.param(tiny_chat_tokenizer, id="tiny")]
    for name in ("qwen", "llama3", "smollm2"):
        missing = pytest.mark.skipif(not (folder / name).is_dir(), reason=f"no {folder / name}")
        found.append(pytest.param(partial(ChatTokenizer.from_pretrained, folder / name), id=name, marks=missing))
    return found


@pytest.mark.parametrize("tokenizer", shared_tokenizers())
def test_the_count_is_that_of_the_rollout(tokenizer: Callable[[], ChatTokenizer]) -> None:
    """What is counted is what a conversation begins with, tools and template variables included, to the token."""
    made, kwargs = tokenizer(), {"enable_thinking": False}
    conversation = [
        *messages("What is 2+2?\n<|im_end|>"),
        {"role": "assistant", "content": "4"},
        *messages("And 3+3?")[1:],
    ]
    length, tokens = PromptLength(made, kwargs, 100), ContinuousTokens(made, template_kwargs=kwargs)
    for tools in (None, [], [TOOL]):
        assert length.count(conversation, tools) == len(tokens.build_initial_tokens(conversation, tools).token_ids)
