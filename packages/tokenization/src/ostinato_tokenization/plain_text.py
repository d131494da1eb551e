"""Encoding of text that must stay text: a tokenizer without its control tokens.

Invariant: no id of a control token leaves `encode`. It knows nothing of templates.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Collection, Iterable
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import tokenizers

from ostinato_tokenization.errors import TokenizerLoadError
from ostinato_tokenization.fast_bpe import Encode, describe, fast_encoder, id_array

_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_MAX_RECENT_BYTES = 1 << 22
_BYTES_OF_ENTRY = 200


class EncodePlain(Protocol):
    """Text to ids, none of them a control token.

    `with_prefix`: whether the tokenizer's word-start mark, if it has one, is put before the text.
    """

    def __call__(self, text: str, *, with_prefix: bool) -> array[int]: ...


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
    """The added tokens that text must not turn into, by id. Runs of whitespace are vocabulary, not control, and so are
    the single bytes into which a model takes unknown characters apart."""
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    takes_apart = any(_BYTE_TOKEN.fullmatch(t.content) for _, t in added) and _falls_back_to_bytes(tokenizer)
    return [
        ControlToken(token_id, t.content, t.special, t.lstrip, t.rstrip, t.single_word, t.normalized)
        for token_id, t in added
        if t.content.strip() and not (takes_apart and _BYTE_TOKEN.fullmatch(t.content))
    ]


def _falls_back_to_bytes(tokenizer: tokenizers.Tokenizer) -> bool:
    return bool(json.loads(tokenizer.to_str())["model"].get("byte_fallback"))


def _without_prefix(part: Any) -> Any:
    """The same normalizer or pre-tokenizer without what it does to the beginning of a text, such as a word-start mark."""
    if isinstance(part, dict):
        if part.get("type") == "Prepend":
            return None
        if part.get("type") == "Metaspace":
            return {**part, "prepend_scheme": "never"}
        if part.get("type") == "ByteLevel":
            return {**part, "add_prefix_space": False}
        if part.get("type") == "Strip":
            return {**part, "strip_left": False}
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
    """Whether the tokenizer treats the beginning of a text apart: a word-start mark, as in SentencePiece, or a space."""
    parts = (describe(part) for part in (tokenizer.normalizer, tokenizer.pre_tokenizer))
    return any(_without_prefix(part) != part for part in parts)


class _Recent:
    """The ids of texts met not long ago: a system prompt, what a template writes between turns, the answer of a tool that
    is compared with a fresh rendering at the end.

    Two generations of a few megabytes: where the younger one is full, the older one is forgotten, and what is asked for again moves up.
    """

    def __init__(self) -> None:
        self._young: dict[str, array[int]] = {}
        self._old: dict[str, array[int]] = {}
        self._num_bytes = 0

    def get(self, text: str) -> array[int] | None:
        """The ids of a text; None where they are not known."""
        ids = self._young.get(text)
        if ids is None and (ids := self._old.get(text)) is not None:
            self.keep(text, ids)
        return ids

    def keep(self, text: str, ids: array[int]) -> None:
        """Remember the ids of a text, unless it is a very long one."""
        num_bytes = _BYTES_OF_ENTRY + 2 * len(text)
        if num_bytes > _MAX_RECENT_BYTES // 16:
            return
        self._num_bytes += num_bytes
        if self._num_bytes > _MAX_RECENT_BYTES:
            self._old, self._young, self._num_bytes = self._young, {}, num_bytes
        self._young[text] = ids


class PlainEncoder:
    """A copy of a tokenizer that knows no control tokens.

    Args:
        tokenizer: The tokenizer; copied where it cannot be imitated faster, never changed.
        controls: Its control tokens.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, controls: Collection[ControlToken]) -> None:
        self._tokenizer = tokenizer
        self._controls = {token.content for token in controls}
        unknown = getattr(tokenizer.model, "unk_token", None)
        self._forbidden = frozenset(token.id for token in controls if token.content != unknown)
        self._contents = sorted(self._controls - {unknown}, key=len, reverse=True)
        normalizer, pre_tokenizer = describe(tokenizer.normalizer), describe(tokenizer.pre_tokenizer)
        self.prefix_only_first = _metaspace_first(pre_tokenizer)
        """Only the first text of a sequence gets a word-start mark."""
        self.prefix_by_normalizer = _prepends(normalizer)
        """The mark comes with normalization: once for all text between two tokens that are matched before it."""
        self._marks = marks_start(tokenizer)
        self._fast_outer: Encode | None = None
        self._fast_inner: Encode | None = None
        plain_matching = not any(token.normalized or token.single_word for token in controls)
        if plain_matching and len(tokenizer.get_added_tokens_decoder()) == len(controls):
            self._fast_outer = self._fast(normalizer, pre_tokenizer, self._slow_of_text)
            self._fast_inner = self._fast_outer
            if self._marks and self._fast_outer is not None:
                inner = _without_prefix(normalizer), _without_prefix(pre_tokenizer)
                self._fast_inner = self._fast(*inner, lambda text: self._ids(self._inner, text))
        self.is_fast = self._fast_outer is not None and self._fast_inner is not None
        """Whether text is encoded by something faster than the tokenizer."""
        self.is_local = self.is_fast and not self._marks and not any(token.lstrip or token.rstrip for token in controls)
        """Whether the ids of what stands between two control tokens depend on nothing else."""
        recent = _Recent()
        self._recent = {True: recent, False: _Recent() if self._marks else recent}

    def _fast(self, normalizer: Any, pre_tokenizer: Any, reference: Callable[[str], list[int]]) -> Encode | None:
        return fast_encoder(self._tokenizer, normalizer, pre_tokenizer, self._forbidden, reference, self._controls)

    def _slow_of_text(self, text: str) -> list[int]:
        return self._ids(self._tokenizer, text)

    @staticmethod
    def _ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    @cached_property
    def _document(self) -> dict[str, Any]:
        document = json.loads(self._tokenizer.to_str())
        document["added_tokens"] = [
            token for token in document["added_tokens"] if token["content"] not in self._controls
        ]
        document["post_processor"] = document["truncation"] = document["padding"] = None
        return document

    @cached_property
    def _outer(self) -> tokenizers.Tokenizer:
        return _load(self._document)

    @cached_property
    def _inner(self) -> tokenizers.Tokenizer:
        if not self._marks:
            return self._outer
        parts = {name: _without_prefix(self._document[name]) for name in ("normalizer", "pre_tokenizer")}
        return _load({**self._document, **parts})

    def encode(self, text: str, *, with_prefix: bool = True) -> list[int]:
        """Ids of `text`, none of them a control token.

        Args:
            with_prefix: Whether the tokenizer's word-start mark, if it has one, is put before the text.
        """
        return self.encode_array(text, with_prefix=with_prefix).tolist()

    def encode_array(self, text: str, *, with_prefix: bool) -> array[int]:
        """The same as array('i'), which is far cheaper to keep and to join, and not to be changed: it may be kept here, too."""
        recent = self._recent[with_prefix]
        ids = recent.get(text)
        if ids is None:
            ids = self._computed(text, with_prefix=with_prefix)
            recent.keep(text, ids)
        return ids

    def _computed(self, text: str, *, with_prefix: bool) -> array[int]:
        if not text:
            return array("i")
        fast = self._fast_outer if with_prefix else self._fast_inner
        if fast is not None and (found := fast(text)) is not None:
            return found
        return id_array(self._slow(text, with_prefix=with_prefix))

    def _slow(self, text: str, *, with_prefix: bool) -> list[int]:
        ids = self._ids(self._outer if with_prefix else self._inner, text)
        if self._forbidden.isdisjoint(ids):
            return ids
        # The model's own vocabulary holds the string as a piece: encode it in two halves.
        for content in self._contents:
            at = text.find(content)
            if at >= 0 and len(content) > 1:
                head = self.encode(text[: at + 1], with_prefix=with_prefix)
                return head + self.encode(text[at + 1 :], with_prefix=False)
        return [token_id for part in text for token_id in self._one_character(part)]

    def encode_around(
        self,
        text: str,
        found: Iterable[tuple[int, int, ControlToken]],
        restore: Callable[[str], str],
        *,
        with_prefix: bool,
    ) -> list[int]:
        """Ids of a text in which some strings are control tokens.

        Args:
            found: Start, end and token of each string that may be one, in order.
            restore: Puts back what is hidden in the text between them.
            with_prefix: As for `encode`, for the first text.
        """
        ids = array("i")
        start, strip_next = 0, False
        for at, end, token in found:
            if token.single_word and _touches_word(text, at, end):
                continue
            piece = text[start:at]
            piece = piece.lstrip() if strip_next else piece
            piece = piece.rstrip() if token.lstrip else piece
            ids += self.encode_array(restore(piece), with_prefix=with_prefix)
            ids.append(token.id)
            start, strip_next, with_prefix = end, token.rstrip, self.prefix_follows(token)
        piece = text[start:].lstrip() if strip_next else text[start:]
        ids += self.encode_array(restore(piece), with_prefix=with_prefix)
        return ids.tolist()

    def prefix_follows(self, token: ControlToken) -> bool:
        """Whether text behind this control token gets a word-start mark."""
        return not self.prefix_only_first and not (self.prefix_by_normalizer and token.normalized)

    def _one_character(self, character: str) -> list[int]:
        ids = self._ids(self._inner, character)
        if self._forbidden.isdisjoint(ids):
            return ids
        raise TokenizerLoadError(
            f"vocabulary must have ordinary tokens for {character!r}, got a control token; it cannot be encoded as text"
        )


def _touches_word(text: str, start: int, end: int) -> bool:
    before, after = text[start - 1 : start], text[end : end + 1]
    return any(char.isalnum() or char == "_" for char in (before + after))


def _load(document: dict[str, Any]) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(document))
    except Exception as error:  # the Rust side raises bare Exception
        raise TokenizerLoadError(
            f"tokenizer must load without its control tokens, got {error}; it cannot encode untrusted text safely"
        ) from error
