"""Cutting long texts: by characters or tokens, on the side that is said."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato_tools import ToolConfigError, ToolExecutor, TruncateSide, TruncateUnit
from ostinato_tools.testing import fake_registry, make_call
from ostinato_tools.truncation import truncate, truncate_tokens

SIDES = st.sampled_from(list(TruncateSide))
MARKS = {"left": "(truncated)...", "right": "...(truncated)", "middle": "...(truncated)..."}


def words(text: str) -> list[str]:
    """A tokenizer: a word or any other character is one token, a character beyond ASCII two."""
    tokens: list[str] = []
    for token in re.findall(r"[a-z]+|.", text, re.DOTALL):
        tokens += [token] * (1 if token.isascii() else 2)
    return tokens


def parts(cut: str, side: TruncateSide) -> tuple[str, str]:
    """Head and tail around the mark."""
    head, _, tail = cut.partition(MARKS[side])
    return head, tail


@given(st.text("ab é", max_size=60), st.integers(1, 20), SIDES)
def test_characters_are_kept_from_the_sides_that_stay(text: str, limit: int, side: TruncateSide) -> None:
    """A short text stays; of a long one exactly the limit is kept, from its ends."""
    cut = truncate(text, limit, side)
    if len(text) <= limit:
        assert cut == text
        return
    head, tail = parts(cut, side)
    assert len(head) + len(tail) == limit
    assert text.startswith(head)
    assert text.endswith(tail)
    assert {"left": head == "", "right": tail == "", "middle": len(head) - len(tail) in (0, 1)}[side]


@given(st.text("ab é", max_size=80), st.integers(1, 12), SIDES)
def test_tokens_are_kept_within_the_limit(text: str, limit: int, side: TruncateSide) -> None:
    """What is kept is from the ends of the text, in whole characters, and has at most its share of the tokens."""
    cut = truncate_tokens(text, limit, side, words)
    if len(words(text)) <= limit:
        assert cut == text
        return
    head, tail = parts(cut, side)
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) + len(tail) <= len(text)
    assert len(words(head)) <= {"left": 0, "right": limit, "middle": limit - limit // 2}[side]
    assert len(words(tail)) <= {"left": limit, "right": 0, "middle": limit // 2}[side]


def test_as_much_is_kept_as_fits() -> None:
    """Of a text of equal words the limit is used up."""
    text = "word " * 1000
    assert truncate_tokens(text, 6, TruncateSide.RIGHT, words).startswith("word word word ...")
    assert truncate_tokens(text, 6, TruncateSide.MIDDLE, words) == "word word...(truncated)... word "


def test_a_text_with_fewer_tokens_than_its_parts_is_not_cut() -> None:
    """A text that fits stays, also where its first half alone would have more tokens than the whole."""

    def encode(text: str) -> list[int]:
        return [0] if text == "abcdefgh" else [0] * len(text)

    assert truncate_tokens("abcdefgh", 1, TruncateSide.RIGHT, encode) == "abcdefgh"


def test_the_work_does_not_grow_with_the_text() -> None:
    """Of a text that is much too long only a part like the limit is ever encoded."""
    seen = []

    def encode(text: str) -> str:
        seen.append(len(text))
        return text

    truncate_tokens("x" * 1_000_000, 10, TruncateSide.MIDDLE, encode)
    assert max(seen) <= 160
    assert len(seen) < 40


async def test_the_executor_cuts_by_tokens_if_asked() -> None:
    """With `truncate_unit="tokens"` and a way to encode, the limit counts tokens."""
    executor = ToolExecutor(
        fake_registry(), max_response_length=3, truncate_side="right", truncate_unit="tokens", encode=words
    )
    async with executor.open("t") as tools:
        long, short = await tools.run(
            [make_call("echo", {"text": "one two three four"}), make_call("echo", {"text": "one two"})]
        )
    assert long.message["content"] == "one two...(truncated)"
    assert short.message["content"] == "one two"


async def test_a_tokenizer_that_fails_costs_no_call() -> None:
    """Where encoding fails the text is cut by characters."""

    def encode(text: str) -> list[int]:
        raise RuntimeError("no vocabulary")

    executor = ToolExecutor(fake_registry(), max_response_length=3, truncate_unit=TruncateUnit.TOKENS, encode=encode)
    async with executor.open("t") as tools:
        (outcome,) = await tools.run([make_call("echo", {"text": "abcdef"})])
    assert (outcome.kind, outcome.message["content"]) == ("ok", "ab...(truncated)...f")


@pytest.mark.parametrize(
    "wrong",
    [
        {"truncate_unit": "tokens"},
        {"encode": words},
        {"truncate_unit": "words", "encode": words},
        {"truncate_unit": "tokens", "encode": "gpt2"},
    ],
)
def test_tokens_need_an_encoder(wrong: dict) -> None:
    """A limit in tokens without a way to count them, or the other way round, is refused."""
    with pytest.raises(ToolConfigError, match="encode"):
        ToolExecutor(fake_registry(), **wrong)
