"""Hypothesis strategies for conversations and for what a policy may sample."""

from __future__ import annotations

from typing import Any

from ostinato_tokenization.chat_tokenizer import ChatTokenizer
from ostinato_tokenization.testing.templates import SAMPLE_TEMPLATES, SAMPLE_TOKENS
from ostinato_tokenization.testing.tiny import (
    TINY_SPECIAL_TOKENS,
    TINY_TAG_TOKENS,
    TokenizerKind,
    sample_chat_tokenizer,
)

try:
    from hypothesis import strategies as st
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "hypothesis must be installed for strategies; run `pip install 'ostinato-tokenization[testing]'`",
        name=error.name,
    ) from error

_CONTROL = (*TINY_SPECIAL_TOKENS, *TINY_TAG_TOKENS, *SAMPLE_TOKENS)


def texts(*, max_size: int = 12) -> st.SearchStrategy[str]:
    """Short texts: letters, white space, marks of templates, and any character that can be encoded."""
    return st.text(st.sampled_from("abc <|>\n{}\"'é") | st.characters(exclude_categories=["Cs"]), max_size=max_size)


def hostile_texts() -> st.SearchStrategy[str]:
    """Texts with control strings in them, whole and in part."""
    parts = st.sampled_from([*_CONTROL, "<|im_", "end|>", "<thi", "nk>"])
    return st.tuples(texts(max_size=4), parts, texts(max_size=4)).map("".join) | texts()


def tokenizer_kinds() -> st.SearchStrategy[TokenizerKind]:
    """The kinds of tokenizers."""
    return st.sampled_from(TokenizerKind)


def chat_tokenizers() -> st.SearchStrategy[ChatTokenizer]:
    """Chat tokenizers of every kind with every sample template."""
    return st.builds(sample_chat_tokenizer, tokenizer_kinds(), st.sampled_from(sorted(SAMPLE_TEMPLATES)))


def context_messages(*, tools: bool = True) -> st.SearchStrategy[list[dict[str, Any]]]:
    """What may follow an assistant's turn: a question, or results of tools and perhaps a question."""
    user = hostile_texts().map(lambda text: {"role": "user", "content": text})
    if not tools:
        return user.map(lambda message: [message])
    tool = hostile_texts().map(lambda text: {"role": "tool", "content": text, "tool_call_id": "call00001", "name": "f"})
    results = st.lists(tool, min_size=1, max_size=3)
    return user.map(lambda message: [message]) | results | st.builds(lambda one, two: [*one, two], results, user)


def conversations() -> st.SearchStrategy[list[dict[str, Any]]]:
    """A question, then answers and what follows them in turn."""
    turn = st.tuples(texts().map(lambda text: {"role": "assistant", "content": "." + text}), context_messages())
    user = hostile_texts().map(lambda text: {"role": "user", "content": text})
    return st.builds(
        lambda first, turns: [first, *(message for said, new in turns for message in (said, *new))],
        user,
        st.lists(turn, max_size=4),
    )
