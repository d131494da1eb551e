"""The splits that tokenizers make before they merge, as Python patterns.

Invariant: a pattern that cannot be translated with certainty is not translated. It knows no vocabulary.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from itertools import chain, pairwise
from typing import Any

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What the ByteLevel pre-tokenizer splits with."""
SINGLE_DIGITS_PATTERN = r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
"""The same behind a pre-tokenizer that puts every digit apart."""

_LOOKS_AHEAD = r"|\s+(?!\S)"
_SPACES = (*range(0x09, 0x0E), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000)
_PIECE = re.compile(r"\\[pP]\{(\^?)(\w+)\}|\\(.)|(\(\?\w+:|\(\?[:=!]|\(\?)|([\[\]^$.]|&&)|(.)", re.DOTALL)
_PLAIN_ESCAPES = frozenset("rntfv/\\'\"-+*?.()[]{}|^$# ")
_ALSO_FOLDED = {"s": "\u017f", "k": "\u212a"}
"""Characters beyond ASCII that are ASCII letters without regard to case."""
_MOST_UNICODE = 0x32400

Split = Callable[[str], list[str]]


@cache
def _codes_by_category() -> dict[str, list[int]]:
    """Code points of each general category; beyond these there are none but private and unassigned ones."""
    found: dict[str, list[int]] = {}
    for code in chain(range(_MOST_UNICODE), range(0xE0000, 0xE01F0)):
        found.setdefault(unicodedata.category(chr(code)), []).append(code)
    return found


@cache
def _codes_of(category: str) -> tuple[int, ...]:
    """Code points of a general category, or of all that begin with its letter; none for C, which is not known in full."""
    if category.startswith("C"):
        return ()
    codes = (codes for name, codes in _codes_by_category().items() if name.startswith(category))
    return tuple(sorted(chain.from_iterable(codes)))


def _ranges(codes: Sequence[int]) -> str:
    """The inside of a character class."""
    parts: list[str] = []
    start = previous = None
    for code in (*codes, None):
        if start is not None and previous is not None and code != previous + 1:
            parts.append(_escaped(start) if start == previous else f"{_escaped(start)}-{_escaped(previous)}")
            start = None
        start = code if start is None else start
        previous = code
    return "".join(parts)


def _escaped(code: int) -> str:
    return f"\\U{code:08x}"


_ASCII_BYTES = bytes(range(0x80))
_known_characters: set[str] = set()


def beyond_ascii(text: str) -> str:
    """The characters of a text that are not ASCII.

    Raises:
        UnicodeEncodeError: It holds unpaired surrogates.
    """
    return text.encode().translate(None, _ASCII_BYTES).decode()  # many times faster than a pattern


def is_known(characters: str) -> bool:
    """Whether this Python's Unicode tables know every one: how others class what they do not know is uncertain."""
    if _known_characters.issuperset(characters):
        return True
    new = set(characters) - _known_characters
    if any(unicodedata.category(char) == "Cn" for char in new):
        return False
    _known_characters.update(new)
    return True


def translate(pattern: str, *, limit: int) -> re.Pattern[str] | None:
    """A pattern of the tokenizers library for Python's `re`; None where that cannot be done with certainty.

    Args:
        pattern: Its syntax is Oniguruma's, of which the common part is understood.
        limit: The result is for text whose characters are below this.
    """

    def inside(codes: Sequence[int]) -> str:
        return _ranges([code for code in codes if code < limit])

    result: list[str] = []
    in_class = ignores_case = False
    for match in _PIECE.finditer(pattern):
        negated, category, escape, group, operator, plain = match.groups()
        if category is not None:
            codes = _codes_of(category) if len(category) <= 2 else ()
            chars = inside(codes)
            if not codes or negated or match.group().startswith("\\P"):
                return None
            chars = chars or _escaped(sys.maxunicode)  # which is not below the limit
            result.append(chars if in_class else f"[{chars}]")
        elif escape is not None:
            if escape in "sS":
                if in_class and escape == "S":
                    return None
                spaces = inside(_SPACES)
                result.append(spaces if in_class else f"[{'^' if escape == 'S' else ''}{spaces}]")
            elif escape in _PLAIN_ESCAPES:
                result.append(match.group())
            else:
                return None
        elif group is not None:
            if group not in ("(?i:", "(?:", "(?=", "(?!") or ignores_case:
                return None
            ignores_case = group == "(?i:"
            result.append("(?:" if ignores_case else group)
        elif operator is not None:
            if operator == "[":
                if in_class:
                    return None
                in_class = True
            elif operator == "]":
                in_class = False
            elif operator in ("$", ".", "&&") or (operator == "^" and result[-1:] != ["["]):
                return None
            result.append(operator)
        elif ignores_case and plain.isalpha():
            if in_class or not plain.isascii():
                return None
            others = "".join(char for char in _ALSO_FOLDED.get(plain.lower(), "") if ord(char) < limit)
            result.append(f"[{plain.lower()}{plain.upper()}{others}]")
        else:
            ignores_case = ignores_case and plain != ")"
            result.append(plain)
    try:
        return re.compile("".join(result))
    except re.error:
        return None


def regex_of(step: Mapping[str, Any]) -> str | None:
    """The pattern of one isolating step of a pre-tokenizer; None where it is another kind of step."""
    if step.get("type") == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        pattern = step.get("pattern", {})
        return pattern.get("Regex") if "Regex" in pattern else re.escape(pattern["String"])
    if step.get("type") == "Digits":
        return r"\p{N}" if step.get("individual_digits") else r"\p{N}+"
    return None


def byte_level_patterns(pre_tokenizer: Mapping[str, Any]) -> list[str] | None:
    """The patterns by which a byte-level pre-tokenizer splits, one after the other; None where it does other things."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space", True):
        return None
    patterns = [regex_of(step) for step in steps[:-1]]
    if steps[-1].get("use_regex", True):
        patterns.append(GPT2_PATTERN)
    known = [pattern for pattern in patterns if pattern is not None]
    return known if known and len(known) == len(patterns) else None


def one_pattern(patterns: Sequence[str]) -> str | None:
    """One pattern that splits like these; None where none is known."""
    if len(patterns) == 1:
        return patterns[0]
    return SINGLE_DIGITS_PATTERN if list(patterns) == [r"\p{N}", GPT2_PATTERN] else None


def without_lookahead_first(pattern: str) -> str:
    """The same pattern with its alternatives before the one that looks ahead in a group of their own.

    An engine that backtracks only where it must then tries them all at once, which makes it a quarter faster.
    """
    head, found, tail = pattern.partition(_LOOKS_AHEAD)
    return f"(?:{head}){found}{tail}" if found and "(?=" not in head and "(?!" not in head else pattern


def splitter(patterns: Sequence[str], *, limit: int) -> Split | None:
    """A function that splits text by these patterns; its words joined are the text, unless the last leaves gaps.

    Args:
        limit: The text's characters are below this: 0x80 makes it fastest, 0x10000 is fast.
    """
    single = one_pattern(patterns)
    compiled = [translate(pattern, limit=limit) for pattern in ([single] if single else patterns)]
    known = [pattern for pattern in compiled if pattern is not None]
    if len(known) != len(compiled) or any(pattern.groups for pattern in known):
        return None
    *outer, last = known
    if not outer:
        return last.findall
    separators = [re.compile(f"({pattern.pattern})") for pattern in outer]

    def split(text: str) -> list[str]:
        pieces = [text]
        for separator in separators:
            pieces = [part for piece in pieces for part in separator.split(piece) if part]
        return [word for piece in pieces for word in last.findall(piece)]

    return split


def word_start_splitters(vocabulary: Collection[str]) -> tuple[Split, Split] | None:
    """Functions that cut any text, and ASCII text, where no merge reaches across, whatever the order of merges.

    They cut before spaces, around ASCII characters that no longer token has, and before ASCII punctuation unless it follows
    a space, more punctuation, or one of the few characters that some token holds before punctuation. None where tokens
    reach across the start of a word.

    Args:
        vocabulary: Tokens that merges can make, and those of one character, with spaces for word-start marks.
    """
    pairs = {pair for token in vocabulary for pair in pairwise(token)}
    if any(right == " " != left for left, right in pairs):
        return None
    paired = {char for pair in pairs for char in pair}
    alone = {char for char in map(chr, range(128)) if char not in paired}
    left_of: dict[str, set[str]] = {}
    for left, right in pairs:
        left_of.setdefault(right, set()).add(left)
    punctuation = {char for char in map(chr, range(33, 127)) if not char.isalnum() and char in vocabulary} - alone
    punctuation -= {
        char for char in punctuation if any(left.isascii() and left.isalnum() for left in left_of.get(char, ()))
    }
    joined = {left for char in punctuation for left in left_of.get(char, ())} - punctuation - {" "}
    if any(left.isascii() for left in joined):
        punctuation, joined = set(), set()
    return _word_starts(alone, punctuation, joined).findall, _word_starts(alone, punctuation, set()).findall


def _word_starts(alone: Collection[str], punctuation: set[str], joined: set[str]) -> re.Pattern[str]:
    single, starts, joins = ("".join(map(re.escape, sorted(chars))) for chars in (alone, punctuation | joined, joined))
    rest = f"[^ {single}{starts}]"
    words = f" *{rest}+| *[{starts}]+{rest}*" if starts else f" *{rest}+"
    if joins:
        words = f"(?:{words})(?:[{joins}][{starts}]*{rest}*)*"
    return re.compile(f"{words}| +|[{single}]" if single else f"{words}| +")
