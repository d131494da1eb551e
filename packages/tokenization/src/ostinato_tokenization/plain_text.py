"""Encoding of text that must stay text: a tokenizer without its control tokens.

Invariant: no id of a control token leaves `encode`. It knows nothing of templates.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, NamedTuple

import tokenizers

from ostinato_tokenization.errors import TokenizerLoadError


class ControlToken(NamedTuple):
    """An added token that is not mere whitespace."""

    id: int
    content: str
    special: bool
    lstrip: bool
    rstrip: bool
    single_word: bool
    normalized: bool


def control_tokens(tokenizer: tokenizers.Tokenizer) -> list[ControlToken]:
    """The added tokens that text must not turn into, by id. Runs of whitespace are vocabulary, not control."""
    return [
        ControlToken(token_id, t.content, t.special, t.lstrip, t.rstrip, t.single_word, t.normalized)
        for token_id, t in sorted(tokenizer.get_added_tokens_decoder().items())
        if t.content.strip()
    ]


def _without_prefix(part: Any) -> Any:
    """The same normalizer or pre-tokenizer without the word-start mark that it puts before a text."""
    if isinstance(part, dict):
        if part.get("type") == "Prepend":
            return None
        if part.get("type") == "Metaspace":
            return {**part, "prepend_scheme": "never"}
        for key in ("normalizers", "pretokenizers"):
            if key in part:
                kept = [item for item in map(_without_prefix, part[key]) if item is not None]
                return {**part, key: kept} if kept else None
    return part


def _metaspace_first(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    if part.get("type") == "Metaspace":
        return part.get("prepend_scheme") == "first"
    return any(map(_metaspace_first, part.get("pretokenizers", ())))


def _prepends(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    return part.get("type") == "Prepend" or any(map(_prepends, part.get("normalizers", ())))


def marks_start(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether the tokenizer puts a word-start mark before a text, as SentencePiece does."""
    parts = (json.loads(part.__getstate__()) for part in (tokenizer.normalizer, tokenizer.pre_tokenizer) if part)
    return any(_prepends(part) or _metaspace_first(part) for part in parts)


class PlainEncoder:
    """A copy of a tokenizer that knows no control tokens.

    Args:
        tokenizer: The tokenizer; copied, not changed.
        controls: Its control tokens.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, controls: Collection[ControlToken]) -> None:
        document = json.loads(tokenizer.to_str())
        contents = {token.content for token in controls}
        document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] not in contents]
        document["post_processor"] = document["truncation"] = document["padding"] = None
        unknown = document["model"].get("unk_token")
        self._forbidden = frozenset(token.id for token in controls if token.content != unknown)
        self._contents = sorted(contents - {unknown}, key=len, reverse=True)
        self._outer = _load(document)
        self._inner = self._outer
        self.prefix_only_first = _metaspace_first(document["pre_tokenizer"])
        """Only the first text of a sequence gets a word-start mark."""
        self.prefix_by_normalizer = _prepends(document["normalizer"])
        """The mark comes with normalization: once for all text between two tokens that are matched before it."""
        if self.prefix_only_first or self.prefix_by_normalizer:
            document["normalizer"] = _without_prefix(document["normalizer"])
            document["pre_tokenizer"] = _without_prefix(document["pre_tokenizer"])
            self._inner = _load(document)

    def encode(self, text: str, *, with_prefix: bool = True) -> list[int]:
        """Ids of `text`, none of them a control token.

        Args:
            with_prefix: Whether the tokenizer's word-start mark, if it has one, is put before the text.
        """
        if not text:
            return []
        ids = (self._outer if with_prefix else self._inner).encode(text, add_special_tokens=False).ids
        if self._forbidden.isdisjoint(ids):
            return ids
        # The model's own vocabulary holds the string as a piece: encode it in two halves.
        for content in self._contents:
            at = text.find(content)
            if at >= 0 and len(content) > 1:
                head = self.encode(text[: at + 1], with_prefix=with_prefix)
                return head + self.encode(text[at + 1 :], with_prefix=False)
        return [token_id for part in text for token_id in self._one_character(part)]

    def _one_character(self, character: str) -> list[int]:
        ids = self._inner.encode(character, add_special_tokens=False).ids
        if self._forbidden.isdisjoint(ids):
            return ids
        raise TokenizerLoadError(
            f"vocabulary must have ordinary tokens for {character!r}, got a control token; it cannot be encoded as text"
        )


def _load(document: dict[str, Any]) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(document))
    except Exception as error:  # the Rust side raises bare Exception
        raise TokenizerLoadError(
            f"tokenizer must load without its control tokens, got {error}; it cannot encode untrusted text safely"
        ) from error
