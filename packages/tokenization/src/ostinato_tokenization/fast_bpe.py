"""Fast encoding of text by byte-pair merges, for the kinds of tokenizer where it is certain to give the same ids.

Where `tiktoken` is installed it encodes for byte-level tokenizers. Else text is split into words, and since merges never
cross the border of a word, a word's ids are computed once and kept. Either way is compared with the tokenizer itself on a
few thousand texts when it is made, and left out if one differs. Invariant: what is returned are the ids of the tokenizer
on text without control strings, or None: then the caller asks the tokenizer.
"""

from __future__ import annotations

import importlib
import json
import logging
import random
import re
import unicodedata
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import tokenizers

from ostinato_tokenization.word_split import (
    Split,
    beyond_ascii,
    byte_level_patterns,
    is_known,
    one_pattern,
    splitter,
    without_lookahead_first,
    word_start_splitters,
)

_logger = logging.getLogger(__name__)

WORD_START = "\u2581"
"""The mark that SentencePiece puts in place of a space."""
MAX_KEPT_WORDS = 1 << 16
MAX_KEPT_LENGTH = 64
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_LAST_OF_PLANE = "\uffff"
_MAX_TIKTOKEN_CHARS = 20_000
_NUM_CHECKS = 2500

Encode = Callable[[str], "array[int] | None"]
"""Text to ids, as array('i')."""


def _byte_characters() -> dict[int, int]:
    """The printable character that byte-level vocabularies write for each byte, as code points."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: byte for byte in printable}
    for number, byte in enumerate(byte for byte in range(256) if byte not in table):
        table[byte] = 256 + number
    return table


_TO_CHARACTERS = _byte_characters()
TO_BYTES = {character: byte for byte, character in _TO_CHARACTERS.items()}
"""The byte that a code point stands for in byte-level vocabularies."""


class _LeftToTokenizer(Exception):
    """A word is a token that text must not become, or too long."""


def id_array(ids: list[int]) -> array[int]:
    """The ids of an encoder as array('i')."""
    return array("i", array("I", ids).tobytes())  # several times faster than from a list to array("i")


class _Words(dict[str, bytes]):
    """The ids of words, packed, computed when first asked for; forgotten all at once when there are too many.

    Args:
        ids_of: The ids of a word.
        forbidden: Ids that must not come out.
    """

    def __init__(self, ids_of: Callable[[str], list[int]], forbidden: Collection[int]) -> None:
        super().__init__()
        self._ids_of = ids_of
        self._forbidden = frozenset(forbidden)

    def __missing__(self, word: str) -> bytes:
        ids = self._ids_of(word)
        if not self._forbidden.isdisjoint(ids):
            raise _LeftToTokenizer(word)
        packed = array("I", ids).tobytes()
        if len(word) <= MAX_KEPT_LENGTH:
            if len(self) >= MAX_KEPT_WORDS:
                self.clear()
            self[word] = packed
        return packed

    def ids_of(self, words: list[str]) -> array[int] | None:
        """The ids of words that follow each other; None where the tokenizer must be asked."""
        try:
            return array("i", b"".join(map(self.__getitem__, words)))
        except _LeftToTokenizer:
            return None


class WholeTextEncoder:
    """Encodes a text in one call; a very long one by its words.

    Args:
        encode: The ids of a text of at most `_MAX_TIKTOKEN_CHARS` characters.
        normalize: What the tokenizer makes of text that is not ASCII before it splits it.
        otherwise: Encodes longer texts.
    """

    def __init__(
        self, encode: Callable[[str], list[int]], normalize: Callable[[str], str] | None, otherwise: Encode
    ) -> None:
        self._encode = encode
        self._normalize = normalize
        self._otherwise = otherwise

    def __call__(self, text: str) -> array[int] | None:
        if len(text) > _MAX_TIKTOKEN_CHARS:
            return self._otherwise(text)
        if not text.isascii():
            if not is_known(beyond_ascii(text)):
                return None
            text = text if self._normalize is None else self._normalize(text)
        return id_array(self._encode(text))


class WordEncoder:
    """Encodes word by word.

    Args:
        split: Splits text of the basic plane into words: classes of other characters make patterns slow.
        split_ascii: The same for ASCII text.
        normalize: What the tokenizer makes of text that is not ASCII before it splits it.
        words: The ids of a word.
    """

    def __init__(
        self,
        split: Split,
        split_ascii: Split,
        normalize: Callable[[str], str] | None,
        words: _Words,
    ) -> None:
        self._split = split
        self._split_ascii = split_ascii
        self._normalize = normalize
        self._words = words

    def __call__(self, text: str) -> array[int] | None:
        split = self._split_ascii
        if not text.isascii():
            characters = beyond_ascii(text)
            if not is_known(characters) or max(characters) > _LAST_OF_PLANE:
                return None
            text = text if self._normalize is None else self._normalize(text)
            split = self._split
        words = split(text)
        if len("".join(words)) != len(text):  # patterns may leave gaps
            return None
        return self._words.ids_of(words)


class SentencePieceEncoder:
    """Encodes words that begin with a space, for which the vocabulary has a mark.

    Args:
        split: Splits text where words begin, leaving nothing out.
        split_ascii: The same for ASCII text.
        always: Whether a space is put before the text even where it begins with one; None: none is put before any.
        words: The ids of a word.
    """

    def __init__(self, split: Split, split_ascii: Split, always: bool | None, words: _Words) -> None:
        self._split = split
        self._split_ascii = split_ascii
        self._always = always
        self._words = words

    def __call__(self, text: str) -> array[int] | None:
        split = self._split_ascii
        if not text.isascii():
            text = text.replace(WORD_START, " ")
            split = self._split
        if self._always or (self._always is not None and not text.startswith(" ")):
            text = " " + text
        return self._words.ids_of(split(text))


def fast_encoder(
    tokenizer: tokenizers.Tokenizer,
    normalizer: Any,
    pre_tokenizer: Any,
    forbidden: Collection[int],
    reference: Callable[[str], list[int]],
    avoid: Collection[str],
) -> Encode | None:
    """The fastest encoder that gives the tokenizer's ids; None where there is none that certainly does.

    Args:
        tokenizer: Its model is used; normalizer and pre-tokenizer are given apart, as the library writes them as JSON.
        forbidden: Ids that must not come out.
        reference: What the ids must be.
        avoid: Texts that must not stand in what is compared with `reference`.
    """
    model = tokenizer.model
    if not isinstance(model, tokenizers.models.BPE) or model.dropout or model.continuing_subword_prefix:
        return None
    if model.end_of_word_suffix:
        return None
    for make in (_byte_level_with_tiktoken, _byte_level, _sentence_piece):
        encode = make(tokenizer, normalizer, pre_tokenizer or {}, forbidden)
        if encode is None:
            continue
        wrong = _first_difference(encode, reference, tokenizer, avoid)
        if wrong is None:
            return encode
        _logger.debug("%s is left out: it differs from the tokenizer on %r", make.__name__, wrong)
    return None


def _non_ascii_normalizer(tokenizer: tokenizers.Tokenizer, normalizer: Any) -> tuple[bool, Callable[[str], str] | None]:
    """Whether normalization leaves ASCII as it is, and what it does to other text."""
    if normalizer is None:
        return True, None
    steps = normalizer.get("normalizers", [normalizer])
    if any(step.get("type") not in ("NFC", "NFKC") for step in steps):
        return False, None
    part = tokenizer.normalizer
    if part is None:
        return False, None
    if any(step["type"] == "NFKC" for step in steps):
        return True, part.normalize_str
    return True, lambda text: text if unicodedata.is_normalized("NFC", text) else part.normalize_str(text)


def _byte_level_with_tiktoken(
    tokenizer: tokenizers.Tokenizer, normalizer: Any, pre_tokenizer: Mapping[str, Any], forbidden: Collection[int]
) -> Encode | None:
    encode = _tiktoken(tokenizer, pre_tokenizer, forbidden)
    by_words = _byte_level(tokenizer, normalizer, pre_tokenizer, forbidden)
    if encode is None or by_words is None:
        return None
    return WholeTextEncoder(encode, _non_ascii_normalizer(tokenizer, normalizer)[1], by_words)


def _tiktoken(
    tokenizer: tokenizers.Tokenizer, pre_tokenizer: Mapping[str, Any], forbidden: Collection[int]
) -> Callable[[str], list[int]] | None:
    """`encode_ordinary` of an encoding that is built from the tokenizer's vocabulary and pattern."""
    patterns = byte_level_patterns(pre_tokenizer)
    pattern = one_pattern(patterns) if patterns else None
    if pattern is None:
        return None
    try:
        tiktoken = importlib.import_module("tiktoken")
    except ImportError:
        return None
    ranks: dict[bytes, int] = {}
    try:
        for token, token_id in tokenizer.get_vocab(with_added_tokens=False).items():
            ranks[token.translate(TO_BYTES).encode("latin-1")] = token_id
    except UnicodeEncodeError:
        return None
    if any(bytes((byte,)) not in ranks for byte in range(256)) or not frozenset(forbidden).isdisjoint(ranks.values()):
        return None
    try:
        encoding = tiktoken.Encoding(
            name="tokenizer.json", pat_str=without_lookahead_first(pattern), mergeable_ranks=ranks, special_tokens={}
        )
    except Exception as error:  # its Rust side raises what it likes; the tokenizer itself is there
        _logger.debug("tiktoken is left out: it does not take the vocabulary: %s", error)
        return None
    return encoding.encode_ordinary


def _byte_level(
    tokenizer: tokenizers.Tokenizer, normalizer: Any, pre_tokenizer: Mapping[str, Any], forbidden: Collection[int]
) -> Encode | None:
    tokenize = tokenizer.model.tokenize

    def ids_of(word: str) -> list[int]:
        return [token.id for token in tokenize(word.encode().decode("latin-1").translate(_TO_CHARACTERS))]

    known, normalize = _non_ascii_normalizer(tokenizer, normalizer)
    patterns = byte_level_patterns(pre_tokenizer) if known else None
    if patterns is None:
        return None
    split, split_ascii = (splitter(patterns, limit=limit) for limit in (0x10000, 0x80))
    if split is None or split_ascii is None:
        return None
    return WordEncoder(split, split_ascii, normalize, _Words(ids_of, forbidden))


def _sentence_piece(
    tokenizer: tokenizers.Tokenizer, normalizer: Any, pre_tokenizer: Mapping[str, Any], forbidden: Collection[int]
) -> Encode | None:
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": WORD_START}
    prepends = {"type": "Prepend", "prepend": WORD_START}
    at_spaces = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    always, splits = None, False
    if steps and steps[-1] == replaces and steps[:-1] in ([], [prepends]) and pre_tokenizer in ({}, at_spaces):
        always = True if len(steps) == 2 else None
    elif not steps and pre_tokenizer.get("type") == "Metaspace" and pre_tokenizer.get("replacement") == WORD_START:
        always = None if pre_tokenizer.get("prepend_scheme") == "never" else False
        splits = bool(pre_tokenizer.get("split", True))
    else:
        return None
    tokenize = tokenizer.model.tokenize

    def ids_of(word: str) -> list[int]:
        return [token.id for token in tokenize(word.replace(" ", WORD_START))]

    if splits:
        split = split_ascii = re.compile(" ?[^ ]+| ").findall
    else:
        added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        vocabulary = tokenizer.get_vocab(with_added_tokens=False).keys() - added
        merged = {token.replace(WORD_START, " ") for token in vocabulary if not _BYTE_TOKEN.fullmatch(token)}
        splitters = word_start_splitters(merged)
        if splitters is None:
            return None
        split, split_ascii = splitters
    return SentencePieceEncoder(split, split_ascii, always, _Words(ids_of, forbidden))


def _first_difference(
    encode: Encode, reference: Callable[[str], list[int]], tokenizer: tokenizers.Tokenizer, avoid: Collection[str]
) -> str | None:
    """A text on which the two differ."""
    forbidden = re.compile("|".join(map(re.escape, avoid)) or r"(?!)")
    for text in _check_texts(tokenizer):
        if text and not forbidden.search(text):
            ids = encode(text)
            if ids is not None and ids.tolist() != reference(text):
                return text
    return None


def _check_texts(tokenizer: tokenizers.Tokenizer) -> Iterator[str]:
    """Texts of every kind, the same each time: prose, code, numbers, white space, scripts, and tokens of the vocabulary."""
    rng = random.Random(20_240)
    words = (
        "the", "And", "I'm", "WE'LL", "it's", "don't", "ſ'S", "naïve", "e\u0301té", "Straße", "привет", "мир", "日本語", "中文字符",
        "한국어", "עברית", "العربية", "हिन्दी", "ไทย", "Ωμέγα", "🙂", "👩‍👩‍👧", "🇫🇷", "x²", "½", "Ⅳ", "٣٤", "①", "𝔘𝔫𝔦", "ﬁ", "Å", "\u212b",
        "def", "return", "self.x", "__init__", "fooBar", "HTTPServer", "a_b", "</div>", "{'a':", "[0]", "==", "!=", "->", "//", "/*",
        "0", "42", "1234567", "3.14159", "1e-9", "0xFF", "2024-01-31", "$5", "100%", "...", "?!", "—", "“q”", "’", "\u200b", "\ufeff",
        "\u00ad", "\x00", "\x1c", "\x7f", "\x85", "\ufffd", "\U000f0000", "http://a.b/c?d=e&f", "a@b.c", "#tag", "`code`", "|", "\\n", "\\",
    )  # fmt: skip
    gaps = (
        "",
        "",
        " ",
        " ",
        " ",
        "  ",
        "    ",
        "\t",
        "\n",
        "\n\n",
        "\r\n",
        " \n",
        "\n  ",
        "\n\t\t",
        "\u00a0",
        "\u3000",
        "\u2028",
        "   \n\n ",
    )
    size = max(1, tokenizer.get_vocab_size(with_added_tokens=False))
    for number in range(_NUM_CHECKS):
        parts: list[str] = []
        for _ in range(rng.randint(1, 8)):
            parts.append(rng.choice(gaps))
            if number % 4 == 0:
                parts.append(tokenizer.decode([rng.randrange(size)], skip_special_tokens=False))
            elif number % 4 == 1:
                parts.append(chr(rng.choice((rng.randrange(0x20, 0xD800), rng.randrange(0xE000, 0x20000)))))
            else:
                parts.append(rng.choice(words))
        parts.append(rng.choice(gaps))
        yield "".join(parts)


def describe(part: Any) -> Any:
    """A normalizer or pre-tokenizer as the library writes it as JSON; None stays None."""
    return None if part is None else json.loads(part.__getstate__())
