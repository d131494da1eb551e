"""Scanning: tags in text, and the ends of JSON in text. Every scan knows where text that has yet to come could change it.

Nothing here backtracks: the regular expressions are possessive or plain alternatives of literals.
"""

import json
import re
from typing import NamedTuple

_decode_at = json.JSONDecoder().raw_decode
_RUN = re.compile(r'(?:[^"\\<]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
"""Text up to an unclosed string, or to a `<` or backslash outside of a string."""
_IN_STRING = re.compile(r"(?:[^\"\\]++|\\.)*+", re.DOTALL)
"""The rest of a string, up to its quote."""


class Tags:
    """A closed set of tags to look for. None may be part of another, so that the first one found is the one meant."""

    def __init__(self, *tags: str) -> None:
        tags = tuple(dict.fromkeys(tags))
        for tag in tags:
            if not tag or any(tag in other for other in tags if other != tag):
                raise ValueError(f"tags must not be empty or part of one another, got {tag!r} among {tags}; rename one")
        self.longest = max(map(len, tags))
        self._pattern = re.compile("|".join(map(re.escape, tags)))
        self._starts = frozenset(tag[:length] for tag in tags for length in range(1, len(tag)))
        self.search = self._pattern.search
        self.match = self._pattern.match

    def holds(self, text: str, start: int) -> int:
        """Return where, not before `start`, a tag may have begun that `text` does not yet hold whole; its end if none."""
        length = len(text)
        for at in range(max(start, length - self.longest + 1), length):
            if text[at:] in self._starts:
                return at
        return length


class JsonRun:
    """Finds where text stops that could be JSON inside of a tag: at a `<` or backslash outside of a string.

    Told to go on with more of the same text, it goes on where it was, so that all steps together cost one pass.
    """

    __slots__ = ("_in_string", "end")

    def __init__(self, start: int) -> None:
        self.end = start
        """How far it is certain; where a string is not closed, its quote."""
        self._in_string = 0  # where to go on in a string; 0 outside of one

    def advance(self, text: str) -> bool:
        """Go on as far as `text` goes, and tell whether the end is found."""
        while True:
            if self._in_string:
                at = _end_of(_IN_STRING, text, self._in_string)
                if at >= len(text) or text[at] != '"':  # a lone backslash waits for what it escapes
                    self._in_string = at
                    return False
                self._in_string, self.end = 0, at + 1
            self.end = _end_of(_RUN, text, self.end)
            if self.end >= len(text):
                return False
            if text[self.end] != '"':
                return True
            self._in_string = self.end + 1


class Dialect(NamedTuple):
    """How values are written, as far as finding their ends needs it."""

    flat: re.Pattern[str]
    """What may stand up to a bracket: whole strings, and anything else that does not break a value."""
    opening: re.Pattern[str]
    closing: re.Pattern[str]
    strings: dict[str, re.Pattern[str]]
    """By quote: the rest of a string up to its quote."""


JSON = Dialect(
    re.compile(r'(?:[^"\\\[\]{}<;/T]++|(?<!\[)[/T]|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL),
    re.compile(r"[\[{]++"),
    re.compile(r"[\]}]++"),
    {'"': _IN_STRING},
)
"""JSON. It is broken by a backslash, `<` or `;` outside of a string, and by `[T` and `[/`, with which tags begin."""
PYTHON = Dialect(
    re.compile(r"""(?:[^"'\\\[\](){}<]++|"(?:[^"\\]++|\\.)*+"|'(?:[^'\\]++|\\.)*+')*+""", re.DOTALL),
    re.compile(r"[\[{(]++"),
    re.compile(r"[\]})]++"),
    {'"': _IN_STRING, "'": re.compile(r"(?:[^'\\]++|\\.)*+", re.DOTALL)},
)
"""Python's literals. They are broken by a backslash or `<` outside of a string."""


class Bracketed:
    """Finds the end of what begins with a bracket at `start`, by its brackets.

    It stops, incomplete, at what breaks a value of this dialect. Kinds of brackets are not compared: decoding does. Like
    `JsonRun`, it goes on where it was.
    """

    __slots__ = ("_depth", "_dialect", "_in_string", "_quote", "complete", "end")

    def __init__(self, start: int, dialect: Dialect) -> None:
        self.end = start
        """The end of the value if `complete`, else how far it could be one (in an unclosed string: its quote)."""
        self.complete = False
        self._dialect = dialect
        self._depth = 0
        self._in_string = 0
        self._quote = ""

    def advance(self, text: str) -> bool:
        """Go on as far as `text` goes, and tell whether the end is found, one way or the other."""
        length, dialect = len(text), self._dialect
        while not self.complete:
            if self._in_string:
                at = _end_of(dialect.strings[self._quote], text, self._in_string)
                if at >= length or text[at] != self._quote:
                    self._in_string = at
                    return False
                self._in_string, self.end = 0, at + 1
            if self._depth:
                self.end = _end_of(dialect.flat, text, self.end)
            if self.end >= length:
                return False
            char = text[self.end]
            if opening := dialect.opening.match(text, self.end):
                self._depth += opening.end() - self.end
                self.end = opening.end()
            elif not self._depth:
                return True
            elif closing := dialect.closing.match(text, self.end):
                end = min(closing.end(), self.end + self._depth)
                self._depth -= end - self.end
                self.end = end
                self.complete = self._depth == 0
            elif char in dialect.strings:
                self._quote, self._in_string = char, self.end + 1
            else:
                return True
        return True


def json_end(text: str, start: int) -> int:
    """Return where the JSON object or array at `start` ends, as a decoder finds it; -1 if there is none that is whole.

    `Bracketed` ends at the same place, but takes longer. To refuse a text, the decoder counts its lines: time in proportion
    to the whole text, so this is to be asked again only while the answers are good.
    """
    if text[start : start + 1] not in ("{", "["):
        return -1
    try:
        return _decode_at(text, start)[1]
    except (ValueError, RecursionError):
        return -1


def _end_of(pattern: re.Pattern[str], text: str, start: int) -> int:
    match = pattern.match(text, start)
    return match.end() if match is not None else start
