"""Whether a model has an embedding for every token of a text, where its tokenizer has more tokens than it."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato_tokenization import ChatTokenizer

__all__ = ["token_beyond"]


def token_beyond(tokenizer: ChatTokenizer, token_ids: Sequence[int], vocab_size: int) -> str | None:
    """The first token that a vocabulary of `vocab_size` lacks, with its id, for an error message; None where it has all."""
    token_id = next((token_id for token_id in token_ids if token_id >= vocab_size), None)
    return None if token_id is None else f"{tokenizer.decode([token_id])!r}, which is {token_id}"
